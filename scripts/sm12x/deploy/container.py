"""What a recipe needs from a container engine, independent of the engine's syntax."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered, arguments, render

# The image of a bundle. Its entry point takes a recipe's name; any other image is given a command.
BUNDLE = "vllm-sm12x"
_CACHE = "sm12x-cache:/cache"
# Variables that differ from machine to machine, and so are not in a recipe: adapters, addresses.
_MACHINE = (
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "VLLM_HOST_IP",
)
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container.

    ``words`` follow the image's name. ``gpus`` is a number, or 0 for all. ``ports`` is empty where
    the container takes the host's network. ``rank`` is the machine of a recipe for several.
    """

    name: str
    image: str
    words: tuple[str, ...]
    gpus: int
    host_network: bool
    port: str
    volumes: tuple[str, ...]
    env: Mapping[str, str]
    passed: tuple[str, ...]
    rdma: bool
    rank: int = 0


def containers(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    shipped: bool = False,
) -> tuple[Container, ...]:
    """The containers of a recipe: one, or one per machine where vLLM's processes find each other.

    Args:
        image: what to run instead of the recipe's `container`, "" for that.
        shipped: the image has this recipe, wherever the file lies here.

    Raises:
        UsageError: a setting that the recipe does not have, or it is for several machines and does
            not say how many.
        BadFileError: a recipe of the pair cannot be read.
    """
    block = recipe.sm12x
    require_known_cluster(recipe)
    if block and block.machines > 1 and "node_rank" in recipe.defaults:
        first = settings.get("master_addr", str(recipe.defaults.get("master_addr", "")))
        if not options.is_public(first):
            raise UsageError(
                f"{recipe.key} needs the first machine's address",
                next_step="give it: master_addr=ADDRESS",
            )
        return tuple(
            replace(
                _container(
                    recipe,
                    image=image,
                    settings={**settings, "node_rank": str(rank)},
                    # It has no server of its own.
                    extra=(*extra, *(("--headless",) if rank else ())),
                    shipped=shipped,
                ),
                name=f"{_name(recipe)}-{rank}",
                rank=rank,
            )
            for rank in range(block.machines)
        )
    return (_container(recipe, image=image, settings=settings, extra=extra, shipped=shipped),)


def require_known_cluster(recipe: Recipe) -> None:
    """Raise UsageError for a recipe for several machines that does not say how many.

    One container of it would wait for others that nothing starts.
    """
    if recipe.cluster_only and not (recipe.sm12x and recipe.sm12x.machines > 1):
        raise UsageError(
            f"{recipe.key} is for several machines (cluster_only), and no sm12x block says how "
            "many: what to run on the other machines is not known",
            next_step="start it with the runner of that cluster, or `sm12x recipe import "
            f"{shlex.quote(str(recipe.path))}` and fill in machines",
        )


def require_own_address(recipe: Recipe, extra: Sequence[str], target: str) -> None:
    """Raise UsageError where ``extra`` names the address that ``target`` gives to the server."""
    for name in ("host", "port"):
        if name in options.parse(extra):
            raise UsageError(
                f"{recipe.key} gets its {name} from {target}, and --{name} after -- overrides that",
                next_step="give the port as a setting, port=8001"
                if name == "port"
                else "leave it out",
            )


def _others(recipe: Recipe) -> list[str]:
    """Lines on what to run on the other machines of a recipe that is started on one machine.

    Empty for a recipe for one machine, and for one with a container of its own for each.
    """
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if machines == 1 or "node_rank" in recipe.defaults:
        return []
    rest = "the other machine" if machines == 2 else f"each of the {machines - 1} other machines"
    if uses_ray(recipe):
        return [
            f"This is for the first of {machines} machines. Before it, in containers of an image "
            "with Ray (the bundle's has none):",
            "  here: ray start --head --port 6379",
            f"  on {rest}: ray start --address FIRST:6379 --block",
        ]
    return [
        f"This is for the first of {machines} machines. The recipe does not say what to run on "
        f"{rest}: it has neither Ray nor a setting node_rank."
    ]


def uses_ray(recipe: Recipe) -> bool:
    """Whether the command has Ray as its executor, which finds the machines by itself."""
    given = options.parse(arguments(recipe))
    return given.get("distributed-executor-backend") == "ray"


def model_folder(recipe: Recipe, settings: Mapping[str, str]) -> str:
    """The folder of the machine that holds the model, "" if the Hub's cache or the image does."""
    model = settings.get("model", str(recipe.defaults.get("model", "")))
    folder = str(PurePosixPath(model).parent)
    inside = ("/tmp", "/cache")  # noqa: S108 - made there, or fetched into the cache
    return folder if model.startswith("/") and not folder.startswith(inside) else ""


def _container(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    shipped: bool,
) -> Container:
    block = recipe.sm12x
    rendered = live(recipe, settings=settings, extra=extra)
    image = image or recipe.container
    ours = PurePosixPath(image).name.partition(":")[0].partition("@")[0] == BUNDLE
    cluster = bool(block and block.machines > 1)
    volumes = [_CACHE] if ours else ["~/.cache/huggingface:/root/.cache/huggingface"]
    # The two of a pair are started with their own settings.
    pair = load.pair(recipe)
    served = pair or [recipe]
    for one in served:
        folder = model_folder(one, settings)
        mount = f"{folder}:{folder}:ro"
        if folder and mount not in volumes:
            volumes.append(mount)
    token = ("HF_TOKEN",) if any(one.model for one in served) else ()
    words: tuple[str, ...]
    env: Mapping[str, str]
    if ours:
        key = recipe.key
        if not shipped and recipe.path.resolve().parent != layout.recipes().resolve():
            key = f"/recipes/{recipe.path.name}"
            volumes.append(f"{recipe.path.resolve()}:{key}:ro")
        words = (key, *(f"{name}={value}" for name, value in settings.items()))
        words += ("--", *extra) if extra else ()
        env = {}
    elif any("$" in value for value in rendered.env.values()):
        # `$` is for the container's shell, not for ours.
        words, env = ("bash", "-c", script(rendered)), {}
    else:
        words, env = rendered.argv, rendered.env
    # Of two equal arguments vLLM takes the last one.
    last = {**recipe.defaults, **settings, **options.parse(extra)}
    host, port = str(last.get("host", "")), str(last.get("port", ""))
    if pair:
        port = ""
    return Container(
        name=_name(recipe),
        image=image,
        words=words,
        gpus=block.gpus if block else 0,
        # A port that is bound to the container's loopback cannot be published; NCCL between
        # machines needs the machine's own interfaces.
        host_network=cluster or not options.is_public(host) or not port,
        port=port,
        volumes=tuple(volumes),
        env=env,
        passed=(*token, *(_MACHINE if cluster else ())),
        rdma=cluster,
    )


def _name(recipe: Recipe) -> str:
    """The recipe's name as far as engines take it for a container."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.key).lstrip("_.-") or "recipe"


def live(recipe: Recipe, *, settings: Mapping[str, str], extra: Sequence[str]) -> Rendered:
    """The filled-in command, with `$NAME` in its env left to the shell that will see it."""
    # One that the recipe sets before is its own there; one that refers to itself is the shell's.
    names = {one or two for value in recipe.env.values() for one, two in _NAME.findall(value)}
    return render(
        recipe,
        settings=settings,
        extra=extra,
        environ={name: f"${{{name}}}" for name in names},
        # A file without our block was written for machines with one GPU each.
        solo=recipe.sm12x is None and not recipe.cluster_only,
    )


def script(rendered: Rendered) -> str:
    """The command as lines for a shell."""
    lines = [f"export {name}={quote_live(value)}" for name, value in rendered.env.items()]
    if rendered.argv[:2] == ("bash", "-c"):
        lines.append(rendered.argv[2])
    else:
        lines.append("exec " + _join(rendered.argv))
    return "\n".join(lines)


def quote_live(value: str) -> str:
    """Quote for a shell, which still expands `$NAME`."""
    if "$" not in value:
        return shlex.quote(value)
    return '"' + re.sub(r'(["\\`])', r"\\\1", value) + '"'


def _join(words: Sequence[str], indent: str = "  ") -> str:
    """A command line with each option and its values on a line of its own."""
    lines: list[str] = []
    for word in words:
        text = shlex.quote(word)
        if word.startswith("-") and len(lines) > 0:
            lines.append(text)
        elif lines:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return f" \\\n{indent}".join(lines)


def _command_line(
    recipe: Recipe, target: str, settings: Mapping[str, str], extra: Sequence[str]
) -> str:
    """The command that makes the text, for its first line."""
    words = ["sm12x", "recipe", "render", "--to", target, recipe.key]
    words += [f"{name}={value}" for name, value in settings.items()]
    return shlex.join([*words, *(("--", *extra) if extra else ())])


def header(
    recipe: Recipe, target: str, settings: Mapping[str, str], extra: Sequence[str]
) -> list[str]:
    """A text's first comment: the command that made it, the recipe, why it cannot serve yet."""
    lines = [
        f"# Made by `{_command_line(recipe, target, settings, extra)}`.",
        f"# {recipe.description or recipe.name}",
    ]
    if why := recipe.blocked_on(layout.release()):
        lines.append(f"# Cannot serve yet: {why}.")
    if recipe.mods:
        lines.append(f"# Asks for mods that are not applied: {', '.join(recipe.mods)}.")
    if why := live(recipe, settings=settings, extra=extra).unpinned:
        lines.append(f"# model_revision is not applied: {why}.")
    lines += [f"# {line}" for line in _others(recipe)]
    # A text of several lines would end its comment.
    return [" ".join(line.splitlines()) for line in lines]

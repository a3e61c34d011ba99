"""What a recipe needs from a container engine, independent of the engine's syntax."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.core.text import visible
from sm12x.deploy import mounts
from sm12x.deploy.mounts import Mount
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered, arguments, render

# The image of a bundle. Its entry point takes a recipe's name; any other image is given a command.
BUNDLE = "vllm-sm12x"
# Who writes to a cache can run code in each server that reads it: compiled kernels, models. So each
# level of trust has a volume of its own: recipes that ship; recipes from elsewhere and code of a
# model's repository; images that others made.
_CACHE, _CACHE_OTHER, _CACHE_FOREIGN = "sm12x-cache", "sm12x-cache-other", "sm12x-cache-foreign"
# Where each image keeps models and what it compiles; the second is that of images of others.
_CACHE_TARGET, _FOREIGN_TARGET = "/cache", "/root/.cache/huggingface"
NEEDED_KEY = "the key that clients of the server send"
_TOKEN = "HF_TOKEN"  # noqa: S105 - the variable's name
# Variables that differ from machine to machine, and so are not in a recipe. What machines say to
# each other is neither encrypted nor authenticated, and goes over the interface that is found first
# unless the first three name one.
_LINK = ("VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_ADAPTER = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX")
LOOPBACK = "127.0.0.1"
# Bytes that /dev/shm may take, a limit and no reservation; an engine gives 64 MiB. vLLM's message
# queues take 10 x 16 MiB and 10 x 24 MiB for each rank (shm_broadcast.py), 2.1 GiB with 8 ranks;
# NCCL a few MiB for each pair of ranks without a direct path. So no IPC namespace of the host's.
SHM_BYTES = 16 << 30
# Of every container of the image: rendered servers, commands that the bundle prints, tests.
# The image's user has no capability as it is. Dropped, no program of the image can get one; without
# this an image of others, which runs as root, has 14.
HARDENED = f"--shm-size {SHM_BYTES >> 30}g --cap-drop ALL --security-opt no-new-privileges"
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, kw_only=True)
class Grants:
    """What the user, and no recipe, gives a container beyond the defaults.

    ``publish`` is the address of the machine that the server is reached on, ``passed`` are names of
    further variables, ``cache`` is a volume or folder in place of that of the recipe's trust level.

    Raises:
        UsageError: one of them is none.
    """

    publish: str = LOOPBACK
    passed: tuple[str, ...] = ()
    cache: str = ""

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.publish)
        except ValueError:
            raise UsageError(
                f"{self.publish!r} is no address of a network interface",
                next_step="--publish 192.168.1.5, or 0.0.0.0 for all",
            ) from None
        for name in self.passed:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise UsageError(
                    f"{name!r} is no name of a variable",
                    next_step="give the name alone; its value is taken from the environment",
                )
        if self.cache and not re.fullmatch(r"(~?/)?[A-Za-z0-9_][\w./-]*", self.cache, re.ASCII):
            raise UsageError(
                f"{self.cache!r} is neither a volume nor a folder",
                next_step="--cache NAME, --cache /FOLDER or --cache '~/FOLDER'",
            )


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container.

    ``words`` follow the image's name. ``gpus`` is a number, or 0 for all. ``address`` and ``port``
    are where clients reach the server; a container on the host's network listens there itself.
    ``passed`` are names of variables of the user's environment, ``needed`` the same, which must be
    set, each with what it is. ``rank`` is the machine of a recipe for several.
    """

    name: str
    image: str
    words: tuple[str, ...]
    gpus: int
    host_network: bool
    address: str
    port: str
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    passed: tuple[str, ...]
    needed: Mapping[str, str]
    rdma: bool
    rank: int = 0
    remarks: tuple[str, ...] = ()


def containers(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    shipped: bool = False,
    grants: Grants | None = None,
) -> tuple[Container, ...]:
    """The containers of a recipe: one, or one per machine where vLLM's processes find each other.

    Args:
        image: what to run instead of the recipe's `container`, "" for that.
        shipped: the image has this recipe, wherever the file lies here.

    Raises:
        UsageError: a setting that the recipe does not have, or it is for several machines and does
            not say how many, or its model lies where no container may look.
        BadFileError: a recipe of the pool cannot be read.
    """
    block = recipe.sm12x
    grants = grants or Grants()
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
                    grants=grants,
                ),
                name=f"{_name(recipe)}-{rank}",
                rank=rank,
            )
            for rank in range(block.machines)
        )
    return (
        _container(
            recipe, image=image, settings=settings, extra=extra, shipped=shipped, grants=grants
        ),
    )


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


def model_path(recipe: Recipe, settings: Mapping[str, str]) -> str:
    """The model's path on the machine, "" if the Hub's cache or the image has it."""
    model = settings.get("model", str(recipe.defaults.get("model", "")))
    if not model.startswith("/"):
        return ""
    # Made there, or fetched into the cache.
    plain = PurePosixPath(os.path.normpath(model))
    inside = any(plain.is_relative_to(one) for one in ("/tmp", "/cache"))  # noqa: S108
    return "" if inside else model


def is_shipped(recipe: Recipe) -> bool:
    """Whether the recipe is one of the project's own, which every image of it has."""
    return recipe.path.resolve().parent == layout.recipes().resolve()


def cache_volume(recipe: Recipe, *, ours: bool, shipped: bool) -> str:
    """The volume of a recipe's level of trust."""
    if not ours:
        return _CACHE_FOREIGN
    trusted = shipped and not runs_remote_code(recipe)
    return _CACHE if trusted else _CACHE_OTHER


def runs_remote_code(recipe: Recipe) -> bool:
    """Whether a server of the recipe runs Python files of a model's repository."""
    return any(options.trusts_code(options.parse(arguments(one))) for one in served(recipe))


def served(recipe: Recipe) -> list[Recipe]:
    """The recipe, or those of a pool, which are started with their own settings."""
    return load.pool(recipe) or [recipe]


def sleeps(recipe: Recipe, extra: Sequence[str] = ()) -> bool:
    """Whether a server of the recipe has sleep routes."""
    given = [options.parse((*arguments(one), *extra)) for one in served(recipe)]
    return any(options.find(one, "enable-sleep-routes") is not None for one in given)


def steering(recipe: Recipe, extra: Sequence[str] = ()) -> list[str]:
    """The variable of the key that opens more than the models, where there is such a key.

    A pool makes the keys of its servers itself, and nobody else needs them.
    """
    if recipe.sm12x and recipe.sm12x.pool:
        return [options.POOL_KEY]
    return [options.SLEEP_KEY] if sleeps(recipe, extra) else []


def _container(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    shipped: bool,
    grants: Grants,
) -> Container:
    block = recipe.sm12x
    # The user may have the bundle's image in a registry; a recipe may name any registry.
    named = PurePosixPath(image).name if image else recipe.container
    ours = named.partition("@")[0].partition(":")[0] == BUNDLE
    image = image or recipe.container
    shipped = shipped or is_shipped(recipe)
    cluster = bool(block and block.machines > 1)
    host, port = listens(recipe, settings, extra)
    # A port bound to the container's loopback cannot be published; machines that work together
    # need the machine's own interfaces. What others wrote gets neither: it could reach what listens
    # on the machine's loopback, and open ports of its own.
    host_network = cluster or (ours and shipped and not (options.is_public(host) and port))
    chosen = "host" in settings or "host" in options.parse(extra)
    remarks: list[str] = []
    if "host" in recipe.defaults and not chosen:
        # On the machine itself the address is the server's own.
        everywhere = host if options.is_public(host) else "0.0.0.0"  # noqa: S104
        inside = grants.publish if host_network else everywhere
        settings = settings if host == inside else {**settings, "host": inside}
        host, port = listens(recipe, settings, extra)
    if not host_network and not (options.is_public(host) and port):
        remarks.append("Nothing reaches the server: its command has no settings host and port.")
    rendered = live(recipe, settings=settings, extra=extra)
    address = host if host_network else grants.publish
    cache = grants.cache or cache_volume(recipe, ours=ours, shipped=shipped)
    volumes = [Mount(source=cache, target=_CACHE_TARGET if ours else _FOREIGN_TARGET)]
    for one in served(recipe):
        if (path := model_path(one, settings)) and (mount := mounts.of_model(path)) not in volumes:
            volumes.append(mount)
    words: tuple[str, ...]
    env: Mapping[str, str]
    if ours:
        key = recipe.key
        if not shipped:
            key = f"/recipes/{recipe.path.name}"
            volumes.append(mounts.of_file(recipe.path.resolve(), key))
        words = (key, *(f"{name}={value}" for name, value in settings.items()))
        words += ("--", *extra) if extra else ()
        env = {}
    elif any("$" in value for value in rendered.env.values()):
        # `$` is for the container's shell, not for ours.
        words, env = ("bash", "-c", script(rendered)), {}
    else:
        words, env = rendered.argv, rendered.env
    keys = [options.KEY, *steering(recipe, extra)]
    token, why = _token(recipe, ours=ours, shipped=shipped, grants=grants)
    remarks += why
    needed = dict.fromkeys(_LINK[1:], "the interface to the isolated network") if cluster else {}
    if cluster:
        needed = {_LINK[0]: "the address of this machine in the isolated network", **needed}
    if options.is_public(address) or (sleeps(recipe, extra) and options.is_public(host)):
        needed = {options.KEY: NEEDED_KEY, **needed}
        keys.remove(options.KEY)
    passed = (*keys, *token, *(_ADAPTER if cluster else ()), *grants.passed)
    return Container(
        name=_name(recipe),
        image=image,
        words=words,
        gpus=block.gpus if block else 0,
        host_network=host_network,
        address=address,
        port=port,
        mounts=tuple(volumes),
        env=env,
        passed=tuple(dict.fromkeys(name for name in passed if name not in needed)),
        needed=needed,
        rdma=cluster,
        remarks=tuple(remarks),
    )


def listens(recipe: Recipe, settings: Mapping[str, str], extra: Sequence[str]) -> tuple[str, str]:
    """Address and port of the server by its command; by the settings where that is not known."""
    serve = live(recipe, settings=settings, extra=extra).serve
    if serve is None:
        last = {**recipe.defaults, **settings, **options.parse(extra)}
        return str(last.get("host", "")), str(last.get("port", ""))
    given = options.parse(serve)
    return options.find(given, "host") or "", options.find(given, "port") or "8000"


def _token(
    recipe: Recipe, *, ours: bool, shipped: bool, grants: Grants
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The Hub's token, where all that runs is the project's own, and a remark where it is not."""
    if not any(one.model for one in served(recipe)) or _TOKEN in grants.passed:
        return (), ()
    if ours and shipped and not runs_remote_code(recipe):
        return (_TOKEN,), ()
    why = "the image is not this project's" if not ours else "it runs code from elsewhere"
    return (), (f"{_TOKEN} is not passed, for {why}: --pass {_TOKEN} passes it.",)


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
    recipe: Recipe,
    target: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    grants: Grants | None,
) -> str:
    """The command that makes the text, for its first line."""
    words = ["sm12x", "recipe", "render", "--to", target, recipe.key]
    if grants and grants.publish != LOOPBACK:
        words += ["--publish", grants.publish]
    if grants and grants.cache:
        words += ["--cache", grants.cache]
    for name in grants.passed if grants else ():
        words += ["--pass", name]
    words += [f"{name}={value}" for name, value in settings.items()]
    return shlex.join([*words, *(("--", *extra) if extra else ())])


def header(
    recipe: Recipe,
    target: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    parts: Sequence[Container] = (),
    grants: Grants | None = None,
) -> list[str]:
    """A text's first comment: the command that made it, the recipe, why it cannot serve yet, and
    what the containers get of the machine.
    """
    lines = [
        f"# Made by `{_command_line(recipe, target, settings, extra, grants)}`.",
        f"# {recipe.description or recipe.name}",
    ]
    if why := recipe.blocked_on(layout.release()):
        lines.append(f"# Cannot serve yet: {why}.")
    if recipe.mods:
        lines.append(f"# Asks for mods that are not applied: {', '.join(recipe.mods)}.")
    if why := live(recipe, settings=settings, extra=extra).unpinned:
        lines.append(f"# model_revision is not applied: {why}.")
    lines += [f"# {line}" for line in _others(recipe)]
    lines += [f"# {line}" for line in dict.fromkeys(line for one in parts for line in facts(one))]
    # A text of several lines would end its comment, and a terminal obeys what is not printable.
    return [visible(" ".join(line.splitlines()).expandtabs(1)) for line in lines]


def facts(part: Container) -> list[str]:
    """Lines on what a container gets of the machine: folders, variables, an address."""
    places = [
        f"{one.source} ({'read only' if one.read_only else 'written'})" for one in part.mounts
    ]
    where, port = part.address or "every address", f", port {part.port}" if part.port else ""
    return [
        f"Mounts {', '.join(places)}.",
        f"Gets {', '.join((*part.needed, *part.passed))} of your environment.",
        f"Listens on {where}{port}{' on the network of the host' if part.host_network else ''}.",
        *part.remarks,
    ]

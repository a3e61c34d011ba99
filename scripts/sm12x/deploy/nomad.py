"""Renders recipes as Nomad job specifications: one server, several machines, or a pool.

The text is data/nomad.hcl.jinja; here are the values that it is filled with.

The same text runs on a machine with no GPU with `-var gpus=0 -var args=check`: the job is then a
batch job that asks for no device, and ends when the check of the image is done.

A pool is one task. Nomad gives a device to one task only, so neither two jobs nor two tasks of a
group can hold the same GPUs; one container with all servers can, and Nomad still knows which GPUs
are taken. Pinning by UUID does not help: with a constraint on `${device.ids}` Nomad 1.10 gives a
task fewer GPUs than it asks for, or none, when one of them is taken.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import jinja2

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import hcl, mounts
from sm12x.deploy.container import (
    SHM_BYTES,
    cache_volume,
    is_shipped,
    model_path,
    require_own_address,
    sleeps,
    steering,
    uses_ray,
)
from sm12x.recipes import options
from sm12x.recipes.model import Block, Recipe
from sm12x.recipes.render import render as rendered_command
from sm12x.recipes.render import require_settings

# The Nomad variables of keys that open more than the models.
_SECRETS = {options.SLEEP_KEY: "sleep_api_key", options.POOL_KEY: "pool_admin_key"}
# What NVIDIA's device plugin reports as `memory`, less what differs from card to card. GB10 is not
# here: NVML reports no memory for it, so a constraint on it would never be met.
_GPU_MEMORY = {"rtx-pro-6000": "95 GiB", "rtx-5090": "31 GiB"}
# A load takes up to 15 minutes; 10 GB of image come first where a client lacks it.
_MINUTES = {"pull": 20, "load": 15, "spare": 5}
# The user of the bundle's image.
_UID = 1000
# Where an image that others made, which runs as root, keeps what it compiles.
_ROOT_CACHE = "/root/.cache"
# Placeholder in a rendered command for the address that only Nomad knows.
_ADDRESS = "nomad-address"


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of a server: its Nomad label, the recipe's setting of it, the service it offers."""

    label: str
    setting: str
    service: str
    number: int


def unfit(recipe: Recipe) -> str:
    """Return the reason why Nomad cannot run a recipe, "" if it can."""
    if uses_ray(recipe):
        return "it is started on the head of a Ray cluster, and neither Nomad nor the image has Ray"
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if recipe.cluster_only and machines == 1:
        return "it is for several machines (cluster_only), and no sm12x block says how many"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", recipe.key):
        return f"a job cannot have the name {recipe.key!r}: it may have letters, digits, ., _, -"
    needs = ["host", "master_addr", "node_rank"] if machines > 1 else ["host"]
    port_keys = _port_settings(recipe)
    missing = [key for key in needs if key not in recipe.defaults]
    if len(port_keys) != 1:
        missing.append("port")
    if missing:
        return f"it has no setting {' and no '.join(missing)}"
    strange = [key for key in port_keys if not hcl.is_name(key)]
    return f"a variable cannot have the name {strange[0]!r}" if strange else ""


def _port_settings(recipe: Recipe) -> list[str]:
    return [key for key in recipe.defaults if key.endswith("port")]


def render(
    recipe: Recipe,
    *,
    peers: Sequence[Recipe] = (),
    image: str = "",
    settings: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> str:
    """The specification of a recipe for the bundle's image, as `nomad fmt` leaves it.

    Args:
        peers: the recipes that ``recipe.sm12x.pool`` names.
        image: the default of the variable; "" leaves it to `nomad job run -var`.
        settings: overrides, as `key=value` after the recipe's name.
        extra: vLLM's own arguments.

    Raises:
        UsageError: Nomad cannot run this recipe.
    """
    given = dict(settings or {})
    require_settings(recipe, given)
    require_own_address(recipe, extra, "Nomad")
    ports = _ports(recipe, given)
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    shipped = is_shipped(recipe)
    # The argument of the image's entry point: the recipe's name, or the file in the job.
    words = [recipe.key if shipped else f"/local/{recipe.path.name}"]
    words += [f"{key}={value}" for key, value in given.items()]
    text = "" if shipped else recipe.path.read_text(encoding="utf-8")
    # Longer than any in the text, which has braces of its own.
    left = "<" * max(4, 1 + max(map(len, re.findall("<+", text)), default=0))
    environment = _addresses(ports)
    if machines == 1:
        commands = {"serve": _with_rank(words, 0, extra)}
        loads = max(1, len(peers))
        groups = [_group("server", "serve", ports, environment, loads=loads)]
    else:
        commands = {f"rank_{rank}": _with_rank(words, rank, extra) for rank in range(machines)}
        environment = [*environment, ("SM12X_MASTER_ADDR", hcl.runtime("${NOMAD_IP_master}"))]
        groups = [_group("rank-0", "rank_0", ports, environment, link="master")]
        groups += [
            _group(f"rank-{rank}", f"rank_{rank}", (), (), link="link")
            for rank in range(1, machines)
        ]
    return _filled(
        recipe,
        given,
        extra,
        variant="nomad",
        cluster=machines > 1,
        image=image,
        host_mib=host_mib(recipe, peers),
        ports=ports,
        commands=commands,
        groups=groups,
        own_file={"name": recipe.path.name, "left": left, "text": text} if text else None,
        uid=_UID,
        cache="/cache",
    )


def render_overlay(
    recipe: Recipe,
    *,
    image: str = "",
    settings: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> str:
    """Return the job specification of an upstream image with patched Python files over its own.

    Raises:
        UsageError: Nomad cannot run this recipe, or it is not one `vllm serve` of one machine.
    """
    given = dict(settings or {})
    require_own_address(recipe, extra, "Nomad")
    ports = _ports(recipe, given)
    command = rendered_command(
        recipe, settings={**given, "host": _ADDRESS}, extra=extra, environ={}, solo=False
    )
    if command.argv[:2] != ("vllm", "serve") or (recipe.sm12x and recipe.sm12x.machines > 1):
        raise UsageError(
            f"{recipe.key} is not one `vllm serve` on one machine, as an overlay needs",
            next_step="take the bundle's image for it: --to nomad",
        )
    words = [
        hcl.Hcl(hcl.quoted(word).replace(_ADDRESS, "${NOMAD_IP_http}")) for word in command.argv
    ]
    # The port is a variable here: the command has it as text, and the last one counts.
    for at in range(len(words) - 1, 0, -1):
        if command.argv[at - 1] == "--port":
            if command.argv[at] == str(ports[0].number):
                words[at] = hcl.runtime("${NOMAD_PORT_http}")
            break
        if command.argv[at] == f"--port={ports[0].number}":
            words[at] = hcl.runtime("--port=${NOMAD_PORT_http}")
            break
    return _filled(
        recipe,
        given,
        extra,
        variant="nomad-overlay",
        image=image,
        host_mib=host_mib(recipe),
        ports=ports,
        commands={"serve": words},
        groups=[_group("server", "serve", ports, list(command.env.items()))],
        uid=0,
        cache=_ROOT_CACHE,
    )


def _filled(
    recipe: Recipe,
    settings: Mapping[str, str],
    extra: Sequence[str],
    *,
    variant: str,
    commands: Mapping[str, Sequence[str]],
    cache: str,
    **values: Any,
) -> str:
    block = recipe.sm12x
    words = ["--to", variant, recipe.key, *(f"{key}={value}" for key, value in settings.items())]
    status = block.status.state if block else ""
    if why := recipe.blocked_on(layout.release()):
        status += f"; it cannot serve yet: {why}"
    rows: list[tuple[str, object]] = []
    for name, command in commands.items():
        # `args` takes the place of the command.
        split = hcl.Hcl(f'var.args == "" ? local.{name}_words : split(" ", var.args)')
        rows += [(f"{name}_words", command), (name, split)]
    folder = _models(recipe, settings)
    asleep = sleeps(recipe, extra)
    # Of the image's name alone the variable knows whether it is the bundle's: the overlay's is not.
    ours = variant == "nomad"
    volume = cache_volume(recipe, ours=ours, shipped=is_shipped(recipe))
    return _template().render(
        command=shlex.join([*words, *(["--", *extra] if extra else [])]),
        description=recipe.description or recipe.name,
        status=status,
        overlay=variant == "nomad-overlay",
        job=job_name(recipe.key),
        gpus=block.gpus if block else 1,
        gpu_memory=_gpu_memory(block),
        unified=_unified(block),
        minutes=_MINUTES,
        locals=rows,
        cache=cache,
        cache_volume=volume,
        sleeps=asleep,
        # Nomad variable -> variable of the server.
        keys={
            "api_key": options.KEY,
            **{_SECRETS[name]: name for name in steering(recipe, extra)},
        },
        shm_bytes=SHM_BYTES,
        models=folder or f"{cache}/huggingface",
        models_read_only=bool(folder),
        **{"cluster": False, "own_file": None, **values},
    )


def _models(recipe: Recipe, settings: Mapping[str, str]) -> str:
    """Where the client's volume of models is mounted, "" for the Hub's cache.

    Raises:
        UsageError: the container has something else there.
    """
    path = model_path(recipe, settings)
    folder = str(PurePosixPath(path).parent) if path else ""
    if folder and (why := mounts.refused(folder)):
        raise UsageError(
            f"no volume of models can be mounted at {folder}, for {why}",
            next_step="name the model as /models/NAME",
        )
    return folder


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        block_start_string="[%",
        block_end_string="%]",
        variable_start_string="[[",
        variable_end_string="]]",
        comment_start_string="[#",
        comment_end_string="#]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        # In the place of HTML's escapes: whatever is put in is an expression of HCL.
        finalize=hcl.expression,
        autoescape=False,  # noqa: S701 - the text is HCL, not HTML; hcl.expression quotes it
    )
    environment.filters |= {
        "comment": hcl.comment,
        "heredoc": hcl.heredoc,
        "inside": hcl.inside,
        "name": hcl.name,
        "rows": hcl.rows,
    }
    return environment.from_string((layout.data() / "nomad.hcl.jinja").read_text(encoding="utf-8"))


def _group(
    name: str,
    command: str,
    ports: Sequence[Port],
    environment: Sequence[tuple[str, object]],
    *,
    link: str = "",
    loads: int = 1,
) -> dict[str, object]:
    """A group of the job; ``link`` labels the port that the machines of a cluster meet on.

    ``loads`` is how many servers load, one after another.
    """
    return {
        "name": name,
        "command": command,
        "ports": ports,
        "environment": environment,
        "link": link,
        "first": link == "master",
        "loads": loads,
        "deadline": _MINUTES["pull"] + loads * _MINUTES["load"] + _MINUTES["spare"],
    }


def job_name(key: str) -> str:
    """Nomad takes any printable name; variables and URLs are easier without dots."""
    return key.replace(".", "-")


def _ports(recipe: Recipe, settings: Mapping[str, str]) -> list[Port]:
    """Return the ports of a recipe: one, of its server or of its pool.

    Raises:
        UsageError: Nomad cannot run this recipe.
    """
    why = unfit(recipe)
    if why:
        raise UsageError(
            f"{recipe.key} cannot run under Nomad: {why}",
            next_step="correct that in the recipe file, or take another recipe",
        )
    ports = []
    for key in _port_settings(recipe):
        number = settings.get(key, str(recipe.defaults[key]))
        if not options.is_port(number):
            raise UsageError(
                f"{recipe.key} has {key} {number!r}, and Nomad's ports are numbers from 1 to 65535",
                next_step=f"give it one: {key}=8000",
            )
        ports.append(Port(label="http", setting=key, service=recipe.key, number=int(number)))
    return ports


def _addresses(ports: Sequence[Port]) -> list[tuple[str, object]]:
    """Return the variables that bind each port to the address Nomad has for it, never to all."""
    variables: list[tuple[str, object]] = [
        ("SM12X_HOST", hcl.runtime(f"${{NOMAD_IP_{ports[0].label}}}"))
    ]
    variables += [
        (f"SM12X_{port.setting.upper()}", hcl.runtime(f"${{NOMAD_PORT_{port.label}}}"))
        for port in ports
    ]
    return variables


def _gpu_memory(block: Block | None) -> str:
    """Return the memory constraint of the smallest GPU of the recipe, "" where there is none."""
    sizes = [_GPU_MEMORY.get(name, "") for name in block.hardware] if block else [""]
    return "" if "" in sizes else min(sizes, key=lambda text: int(text.split()[0]))


def _unified(block: Block | None) -> bool:
    """Whether GPU and host share their memory."""
    return block is not None and "gb10" in block.hardware


def host_mib(recipe: Recipe, peers: Sequence[Recipe] = ()) -> int:
    """Host memory in MiB, an estimate: 8 GiB for each GPU's process and 8 for the server.

    With sleep level 1 also a copy of the weights; on unified memory all that the GPU takes. A pool
    needs the sum of its peers.
    """
    if peers:
        return sum(host_mib(peer) for peer in peers)
    block = recipe.sm12x
    if block is None:
        return 16 * 1024
    terms = block.memory
    gib = 8.0 + 8.0 * block.gpus
    if _unified(block):
        gib += sum(term.gib for term in (terms.weights, terms.kv, terms.outside) if term)
    elif block.sleep.level == 1 and terms.weights:
        gib += block.gpus * terms.weights.gib
    return math.ceil(gib) * 1024


def _with_rank(words: Sequence[str], rank: int, extra: Sequence[str]) -> list[str]:
    more = [*(["--headless"] if rank else []), *extra]
    own = [f"node_rank={rank}"] if rank else []
    return [*words, *own, *(["--", *more] if more else [])]


SUFFIX = ".nomad.hcl"
# One of each kind: a first try, several GPUs, several machines, models that take turns, and an
# overlay, whose sleep was reported with exactly that recipe. `recipe render` makes the others.
_EXAMPLES = (
    "smoke",
    "deepseek-v4-flash-rtx-pro-6000-tp4",
    "deepseek-v4-flash-gb10-x2",
    "rotation-pair-rtx-pro-6000-tp4",
)
_OVERLAID = "qwen3.6-27b-nvfp4-rtx-pro-6000"


def examples(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return the text of each specification in nomad-examples/, by its file name."""
    texts = {
        key + SUFFIX: render(recipes[key], peers=[recipes[name] for name in pool_of(recipes[key])])
        for key in _EXAMPLES
    }
    return {**texts, f"{_OVERLAID}-overlay{SUFFIX}": render_overlay(recipes[_OVERLAID])}


def pool_of(recipe: Recipe) -> Sequence[str]:
    """Return the names of the recipes that take turns in a pool; none of any other recipe."""
    return recipe.sm12x.pool if recipe.sm12x else ()

"""The blocks that every rendered Nomad specification is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm12x.deploy import hcl
from sm12x.deploy.hcl import Writer
from sm12x.recipes.model import Block, Recipe

# What NVIDIA's device plugin reports as `memory`, less what differs from card to card. GB10 is not
# here: NVML reports no memory for it, so a constraint on it would never be met.
_GPU_MEMORY = {"rtx-pro-6000": "95 GiB", "rtx-5090": "31 GiB"}
# Minutes. A load takes up to 15; 10 GB of image come first where a client lacks it.
_PULL, _LOAD, _SPARE = 20, 15, 5
# The user of the bundle's image.
UID = 1000


@dataclass(frozen=True, kw_only=True)
class Variable:
    """``default`` is HCL text; None for one that has to be given."""

    name: str
    type: str
    description: str
    default: str | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of a server: its Nomad label, the recipe's setting of it, the service it offers."""

    label: str
    setting: str
    service: str


def job_name(key: str) -> str:
    """Nomad takes any printable name; variables and URLs are easier without dots."""
    return key.replace(".", "-")


def ports_of(recipe: Recipe) -> list[Port]:
    """The ports of a recipe: the one of its server, or one for each that takes turns."""
    pair = recipe.sm12x.pair if recipe.sm12x else ()
    if not pair:
        return [Port(label="http", setting="port", service=recipe.key)]
    settings = [key for key in recipe.defaults if key.endswith("_port")]
    return [
        Port(label=key.removesuffix("_port"), setting=key, service=member)
        for key, member in zip(settings, pair, strict=True)
    ]


def gpu_memory(block: Block | None) -> str:
    """The memory constraint of the smallest GPU the recipe is for, "" where there is none."""
    known = [_GPU_MEMORY.get(name, "") for name in block.hardware] if block else [""]
    return "" if "" in known else min(known, key=lambda text: int(text.split()[0]))


def unified(block: Block | None) -> bool:
    """Whether GPU and host share their memory."""
    return block is not None and "gb10" in block.hardware


def host_mib(recipe: Recipe, peers: Sequence[Recipe] = ()) -> int:
    """Host memory in MiB, an estimate: 8 GiB for each GPU's process and 8 for the server.

    With sleep level 1 also a copy of the weights; on unified memory all that the GPU takes. A pair
    needs the sum of its peers.
    """
    if peers:
        return sum(host_mib(peer) for peer in peers)
    block = recipe.sm12x
    if block is None:
        return 16 * 1024
    terms = block.memory
    gib = 8.0 + 8.0 * block.gpus
    if unified(block):
        gib += sum(term.gib for term in (terms.weights, terms.kv, terms.outside) if term)
    elif block.sleep.level == 1 and terms.weights:
        gib += block.gpus * terms.weights.gib
    return math.ceil(gib) * 1024


def variables(
    recipe: Recipe, settings: Mapping[str, str], *, image: str, memory: int
) -> list[Variable]:
    """The variables that every specification has. ``memory`` is in MiB."""

    def text(name: str, description: str, default: str) -> Variable:
        return Variable(
            name=name, type="string", description=description, default=hcl.quoted(default)
        )

    def number(name: str, description: str, default: object) -> Variable:
        return Variable(name=name, type="number", description=description, default=str(default))

    block = recipe.sm12x
    least = gpu_memory(block)
    return [
        Variable(
            name="image",
            type="string",
            description="The image with its full tag; `sm12x bundle` prints that of its own.",
            default=hcl.quoted(image) if image else None,
        ),
        number(
            "gpus",
            "GPUs to take on a machine; 0 runs `args` once on a machine without any.",
            block.gpus if block else 1,
        ),
        text("args", "What to run in place of the server, such as check; split at blanks.", ""),
        *(
            [text("gpu_memory", "The least memory of a GPU, as its plugin reports it.", least)]
            if least
            else []
        ),
        *(
            number(
                port.setting,
                f"The port of {port.service}.",
                settings.get(port.setting, recipe.defaults[port.setting]),
            )
            for port in ports_of(recipe)
        ),
        text(
            "host_network",
            "The client's host_network to bind to. Never a public one: the endpoints for sleep and "
            "RPC ask for no key.",
            "private",
        ),
        number(
            "memory", "Host memory in MiB, a hard limit; weights are copied there in sleep.", memory
        ),
        number(
            "cpu",
            "Its share of the CPUs in MHz, as Nomad counts them; a server may use more.",
            2000 * (block.gpus if block else 1),
        ),
        text("models_volume", "The client's host volume with the models.", "sm12x-models"),
        text(
            "cache_volume",
            "The client's host volume for what is compiled when a server starts.",
            "sm12x-cache",
        ),
        Variable(
            name="datacenters",
            type="list(string)",
            description="Where the job may run.",
            default='["*"]',
        ),
    ]


def declare(out: Writer, found: Sequence[Variable]) -> None:
    for variable in found:
        with out.block("variable", variable.name):
            out.attr("type", variable.type)
            out.text("description", variable.description)
            if variable.default is not None:
                out.attr("default", variable.default)
        out.blank()


def commands(out: Writer, named: Mapping[str, Sequence[str]]) -> None:
    """A local for each command, in HCL text, that `args` takes the place of."""
    with out.block("locals"):
        for name, words in named.items():
            out.attr(f"{name}_words", hcl.listed(words))
            out.attr(name, f'var.args == "" ? local.{name}_words : split(" ", var.args)')
    out.blank()


def job_head(out: Writer, recipe: Recipe) -> None:
    name = job_name(recipe.key)
    out.comment(
        "A check ends: it is a batch job, and no job of Nomad's changes from one to the other."
    )
    out.attr("id", f"var.gpus > 0 ? {hcl.quoted(name)} : {hcl.quoted(name + '-check')}")
    out.attr("type", 'var.gpus > 0 ? "service" : "batch"')
    out.attr("datacenters", "var.datacenters")
    out.blank()


def only_with_gpus(out: Writer, attribute: str, operator: str, value: str = "") -> None:
    """A constraint that a check on any machine is free of."""
    with out.block("dynamic", "constraint"):
        out.attr("for_each", "var.gpus > 0 ? [1] : []")
        with out.block("content"):
            if attribute:
                out.attr("attribute", hcl.runtime(attribute))
            out.text("operator", operator)
            if value:
                out.text("value", value)
    out.blank()


def group_head(out: Writer, *, loads: int = 1) -> None:
    """How long a start may take, ``loads`` loads one after another, and what a failure leads to."""
    deadline = _PULL + loads * _LOAD + _SPARE
    with out.block("dynamic", "update"):
        out.attr("for_each", "var.gpus > 0 ? [1] : []")
        with out.block("content"):
            out.comment(
                f"{_PULL} min to pull the image, {loads} x {_LOAD} to load, {_SPARE} to spare. "
                "Fetch the weights before."
            )
            out.text("health_check", "checks")
            out.text("min_healthy_time", "30s")
            out.text("healthy_deadline", f"{deadline}m")
            out.text("progress_deadline", f"{deadline + _SPARE}m")
            out.comment("The new server gets the GPUs of the old: there are none for a canary.")
            out.attr("max_parallel", "1")
            out.attr("auto_revert", "true")
    out.blank()
    with out.block("restart"):
        out.comment("Two more loads fit into the interval; then another machine is tried.")
        out.attr("attempts", "var.gpus > 0 ? 2 : 0")
        out.text("interval", f"{2 * (loads * _LOAD + _SPARE) + 30}m")
        out.text("delay", "30s")
        out.text("mode", "fail")
    out.blank()
    with out.block("dynamic", "reschedule"):
        out.comment("A check that fails is an answer: it is not tried elsewhere.")
        out.attr("for_each", "var.gpus > 0 ? [] : [1]")
        with out.block("content"):
            out.attr("attempts", "0")
            out.attr("unlimited", "false")
    out.blank()


def volumes(out: Writer) -> None:
    for name in ("models", "cache"):
        with out.block("volume", name):
            out.text("type", "host")
            out.attr("source", f"var.{name}_volume")
        out.blank()


def task_head(out: Writer) -> None:
    out.text("driver", "docker")
    out.comment("vLLM ends its requests; unpinning the host copy of the weights takes its time.")
    out.text("kill_signal", "SIGTERM")
    out.text("kill_timeout", "2m")
    out.blank()


def container(out: Writer) -> None:
    """The options of the docker driver that every server has."""
    out.text("image_pull_timeout", f"{_PULL}m")
    out.comment("The server binds to one private address of the machine, and NCCL to its links.")
    out.text("network_mode", "host")
    out.comment("Tensor-parallel workers talk through shared memory; docker's default is 64 MiB.")
    out.attr("shm_size", str(16 * 1024**3))
    with out.block("healthchecks"):
        out.comment("Nomad's own check, below, is the one that counts.")
        out.attr("disable", "true")


def secrets(out: Writer, *, uid: int = UID) -> None:
    """The token as a file, out of the environment that `docker inspect` shows, and vLLM's key."""
    for name, item, environment in (
        ("hf_token", "{{ with .hf_token }}{{ . }}{{ end }}", False),
        ("api_key", "{{ with .api_key }}VLLM_API_KEY={{ . }}{{ end }}", True),
    ):
        with out.block("template"):
            out.attr("destination", hcl.runtime(f"${{NOMAD_SECRETS_DIR}}/{name}"))
            if environment:
                out.attr("env", "true")
            out.attr("uid", str(uid))
            out.attr("gid", str(uid))
            out.text("perms", "0400")
            out.comment("A restart would cost a load; a new secret waits for the next one.")
            out.text("change_mode", "noop")
            out.heredoc(
                "data",
                '{{- $path := printf "nomad/jobs/%s" (env "NOMAD_JOB_ID") -}}\n'
                "{{- if nomadVarExists $path }}{{ with nomadVar $path -}}\n"
                f"{item}\n"
                "{{- end }}{{ end }}",
            )
        out.blank()


def mounts(out: Writer, *, models: str, only_read: bool, cache: str) -> None:
    for name, target in (("cache", cache), ("models", models)):
        with out.block("volume_mount"):
            out.text("volume", name)
            out.text("destination", target)
            if name == "models" and only_read:
                out.attr("read_only", "true")
        out.blank()


def service(out: Writer, port: Port) -> None:
    with out.block("dynamic", "service"):
        out.attr("for_each", "var.gpus > 0 ? [1] : []")
        with out.block("content"):
            out.text("name", job_name(port.service))
            out.text("provider", "nomad")
            out.text("port", port.label)
            with out.block("check"):
                out.comment(
                    "The API server answers /health, also while the engine sleeps; a "
                    "request to a sleeping model has no answer. No check_restart: when the engine "
                    "dies, vLLM ends by itself, and what is only slow is not dead.",
                )
                out.text("type", "http")
                out.text("path", "/health")
                out.text("interval", "10s")
                out.text("timeout", "5s")
    out.blank()


def resources(out: Writer, recipe: Recipe) -> None:
    with out.block("resources"):
        out.attr("cpu", "var.gpus > 0 ? var.cpu : 1000")
        out.comment("A check takes about 4 GiB.")
        out.attr("memory", "var.gpus > 0 ? var.memory : 6144")
        out.blank()
        with out.block("dynamic", "device"):
            out.attr("for_each", "var.gpus > 0 ? [var.gpus] : []")
            out.attr("labels", '["nvidia/gpu"]')
            out.comment("Its default name, `device`, would hide Nomad's own ${device...} below.")
            out.attr("iterator", "gpu")
            with out.block("content"):
                out.attr("count", "gpu.value")
                _device_constraints(out, recipe)


def _device_constraints(out: Writer, recipe: Recipe) -> None:
    if gpu_memory(recipe.sm12x):
        with out.block("constraint"):
            out.attr("attribute", hcl.runtime("${device.attr.memory}"))
            out.text("operator", ">=")
            out.attr("value", "var.gpu_memory")

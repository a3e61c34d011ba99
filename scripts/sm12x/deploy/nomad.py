"""Renders recipes as Nomad job specifications: one server, several machines, or a pair in turns.

The same text runs on a machine with no GPU with `-var gpus=0 -var args=check`: the job is then a
batch job that asks for no device, and ends when the image has proved itself.

A pair is one task. Nomad gives a device to one task only, so neither two jobs nor two tasks of a
group can hold the same GPUs; one container with both servers can, and Nomad still knows which GPUs
are taken. Pinning by UUID is no way out: with a constraint on `${device.ids}` Nomad 1.10 gives a
task fewer GPUs than it asks for, or none, when one of them is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import hcl, nomadheader
from sm12x.deploy import nomadparts as parts
from sm12x.deploy.container import uses_ray
from sm12x.deploy.hcl import Writer
from sm12x.deploy.nomadparts import Port, Variable
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render as rendered_command

# Stands in a rendered command for the address that only Nomad knows.
_ADDRESS = "nomad-address"
# What an image that others made runs as, and where it keeps what it compiles.
_ROOT_CACHE = "/root/.cache"
# Caches that do not follow XDG: without these they are written outside the mounted folder.
_ROOT_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "nv",
}


def unfit(recipe: Recipe) -> str:
    """Why Nomad cannot run a recipe, "" if it can."""
    if uses_ray(recipe):
        return "it is started on the head of a Ray cluster, and neither Nomad nor the image has Ray"
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if recipe.cluster_only and machines == 1:
        return "it is for several machines (cluster_only), and no sm12x block says how many"
    needs = ["host", "master_addr", "node_rank"] if machines > 1 else ["host"]
    pair = recipe.sm12x.pair if recipe.sm12x else ()
    found = [key for key in recipe.defaults if key.endswith("_port" if pair else "port")]
    missing = [key for key in needs if key not in recipe.defaults]
    if len(found) != max(1, len(pair)):
        missing.append("port")
    return f"it has no setting {' and no '.join(missing)}" if missing else ""


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
        peers: the recipes that ``recipe.sm12x.pair`` names.
        image: the default of the variable; "" makes whoever runs the job name one.
        settings: overrides, as `key=value` after the recipe's name.
        extra: vLLM's own arguments.

    Raises:
        UsageError: Nomad cannot run this recipe.
    """
    given = dict(settings or {})
    _require_fit(recipe)
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    out = Writer()
    nomadheader.write(out, recipe, given, extra, cluster=machines > 1)
    found = parts.variables(recipe, given, image=image, memory=parts.host_mib(recipe, peers))
    if machines > 1:
        found.append(
            Variable(
                name="fabric",
                type="string",
                description="The client's host_network of the link between the machines.",
                default='"fabric"',
            )
        )
    parts.declare(out, found)
    words = (_name(recipe), *(f"{key}={value}" for key, value in given.items()))
    ranks = range(machines)
    parts.commands(
        out,
        {
            ("serve" if machines == 1 else f"rank_{rank}"): [
                hcl.quoted(word) for word in _with_rank(words, rank, extra)
            ]
            for rank in ranks
        },
    )
    with out.block("job", parts.job_name(recipe.key)):
        parts.job_head(out, recipe)
        if parts.unified(recipe.sm12x):
            out.comment("GB10. Its plugin reports no memory to ask for; the host's is the same.")
            parts.only_with_gpus(out, "${attr.cpu.arch}", "=", "arm64")
        if machines > 1:
            parts.only_with_gpus(out, "", "distinct_hosts", "true")
            parts.only_with_gpus(out, "${meta.fabric_interface}", "is_set")
            parts.only_with_gpus(out, "${meta.fabric_hca}", "is_set")
            for rank in ranks:
                _rank(out, recipe, given, rank)
        else:
            _server(out, recipe, given)
    return str(out)


def _server(out: Writer, recipe: Recipe, settings: Mapping[str, str]) -> None:
    ports = parts.ports_of(recipe)
    with out.block("group", "server"):
        parts.group_head(out, loads=len(ports))
        with out.block("network"):
            for port in ports:
                _port(out, port)
        out.blank()
        parts.volumes(out)
        with out.block("task", "vllm"):
            parts.task_head(out)
            with out.block("config"):
                out.attr("image", "var.image")
                out.attr("args", "local.serve")
                parts.container(out)
            out.blank()
            with out.block("env"):
                _addresses(out, ports)
                _token(out)
            out.blank()
            _rest(out, recipe, settings, ports)


def _rank(out: Writer, recipe: Recipe, settings: Mapping[str, str], rank: int) -> None:
    """One machine of several: the first takes the requests, and the others find it by a service."""
    ports = parts.ports_of(recipe) if rank == 0 else []
    link = "master" if rank == 0 else "link"
    meeting = f"{parts.job_name(recipe.key)}-master"
    with out.block("group", f"rank-{rank}"):
        parts.group_head(out)
        with out.block("network"):
            for port in ports:
                _port(out, port)
            with out.block("port", link):
                if rank == 0:
                    out.comment("vLLM's default --master-port.")
                    out.attr("static", "29501")
                out.attr("host_network", "var.fabric")
        out.blank()
        parts.volumes(out)
        with out.block("task", "vllm"):
            parts.task_head(out)
            with out.block("config"):
                out.attr("image", "var.image")
                out.attr("args", f"local.rank_{rank}")
                parts.container(out)
                out.comment("RoCE, which pins what it sends.")
                out.attr(
                    "devices",
                    'var.gpus > 0 ? [{ host_path = "/dev/infiniband", '
                    'container_path = "/dev/infiniband" }] : []',
                )
                # As a value: in the driver's own block Nomad knows no `dynamic`.
                out.attr("ulimit", 'var.gpus > 0 ? [{ memlock = "-1" }] : []')
            out.blank()
            with out.block("env"):
                _addresses(out, ports)
                if rank == 0:
                    out.attr("SM12X_MASTER_ADDR", hcl.runtime("${NOMAD_IP_master}"))
                out.comment("These differ by machine: its `meta` in the client's configuration.")
                out.attr("VLLM_HOST_IP", hcl.runtime(f"${{NOMAD_IP_{link}}}"))
                for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                    out.attr(name, hcl.runtime("${meta.fabric_interface}"))
                out.attr("NCCL_IB_HCA", hcl.runtime("${meta.fabric_hca}"))
                _token(out)
            out.blank()
            if rank == 0:
                with out.block("service"):
                    out.text("name", meeting)
                    out.text("provider", "nomad")
                    out.text("port", link)
                out.blank()
            else:
                with out.block("template"):
                    out.attr("destination", hcl.runtime("${NOMAD_TASK_DIR}/master"))
                    out.attr("env", "true")
                    out.comment("Started before the first machine is known, it starts again.")
                    out.text("change_mode", "restart")
                    out.heredoc(
                        "data",
                        f'{{{{- range nomadService "{meeting}" -}}}}\n'
                        "SM12X_MASTER_ADDR={{ .Address }}\n"
                        "{{ end -}}",
                    )
                out.blank()
            _rest(out, recipe, settings, ports)


def render_overlay(
    recipe: Recipe,
    *,
    image: str = "",
    settings: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> str:
    """The specification for an image that others made, with patched Python files over its own.

    Raises:
        UsageError: Nomad cannot run this recipe, or it is not one `vllm serve` of one machine.
    """
    given = dict(settings or {})
    _require_fit(recipe)
    made = rendered_command(
        recipe, settings={**given, "host": _ADDRESS}, extra=extra, environ={}, solo=False
    )
    if made.argv[:2] != ("vllm", "serve") or (recipe.sm12x and recipe.sm12x.machines > 1):
        raise UsageError(
            f"{recipe.key} is not one `vllm serve` on one machine, as an overlay needs",
            next_step="take the bundle's image for it: --to nomad",
        )
    out = Writer()
    nomadheader.write(out, recipe, given, extra, overlay=True)
    found = parts.variables(recipe, given, image=image, memory=parts.host_mib(recipe))
    overlay = Variable(
        name="overlay",
        type="map(string)",
        description="Path in the image = patched file on the client, as `sm12x overlay IMAGE` "
        "prints it for this very image.",
    )
    parts.declare(out, [found[0], overlay, *found[1:]])
    words = [
        hcl.runtime("${NOMAD_IP_http}") if word == _ADDRESS else hcl.quoted(word)
        for word in made.argv
    ]
    # The port is a variable here: the command has it as text.
    port = given.get("port", str(recipe.defaults["port"]))
    at = max(index for index, word in enumerate(made.argv) if word == "--port") + 1
    if made.argv[at] == port:
        words[at] = hcl.runtime("${NOMAD_PORT_http}")
    parts.commands(out, {"serve": words})
    with out.block("job", parts.job_name(recipe.key)):
        parts.job_head(out, recipe)
        _overlaid(out, recipe, given, made.env)
    return str(out)


def _overlaid(
    out: Writer, recipe: Recipe, settings: Mapping[str, str], env: Mapping[str, str]
) -> None:
    ports = parts.ports_of(recipe)
    with out.block("group", "server"):
        parts.group_head(out)
        with out.block("network"):
            for port in ports:
                _port(out, port)
        out.blank()
        parts.volumes(out)
        with out.block("task", "vllm"):
            parts.task_head(out)
            with out.block("config"):
                out.attr("image", "var.image")
                out.comment("In place of the image's own, so that `args` can be any program.")
                out.attr("entrypoint", "slice(local.serve, 0, 1)")
                out.attr("args", "slice(local.serve, 1, length(local.serve))")
                out.comment("Nothing but the mounted folders can be written.")
                out.attr("readonly_rootfs", "true")
                out.attr("volumes", '[for path, file in var.overlay : "${file}:${path}:ro"]')
                with out.block("mount"):
                    out.text("type", "tmpfs")
                    out.text("target", "/tmp")  # noqa: S108 - of the container alone
                parts.container(out)
            out.blank()
            with out.block("env"):
                for name, value in env.items():
                    out.text(name, value)
                out.comment("What is compiled when the server starts goes to the cache volume.")
                for name, folder in _ROOT_CACHES.items():
                    out.text(name, f"{_ROOT_CACHE}/{folder}")
                _token(out)
            out.blank()
            _rest(out, recipe, settings, ports, root=True)


def _rest(
    out: Writer,
    recipe: Recipe,
    settings: Mapping[str, str],
    ports: Sequence[Port],
    *,
    root: bool = False,
) -> None:
    """What follows `config` and `env` in every task; ``root`` for an image that runs as root."""
    cache = _ROOT_CACHE if root else "/cache"
    if not root:
        _recipe_file(out, recipe)
    parts.secrets(out, uid=0 if root else parts.UID)
    models, only_read = _models(recipe, settings, cache)
    parts.mounts(out, models=models, only_read=only_read, cache=cache)
    for port in ports:
        parts.service(out, port)
    parts.resources(out, recipe)


def _own(recipe: Recipe) -> bool:
    """Whether the image has the recipe."""
    return recipe.path.resolve().parent == layout.recipes().resolve()


def _name(recipe: Recipe) -> str:
    """What the image's entry point is told: the recipe's name, or the file the job brings."""
    return recipe.key if _own(recipe) else f"/local/{recipe.path.name}"


def _recipe_file(out: Writer, recipe: Recipe) -> None:
    if _own(recipe):
        return
    with out.block("template"):
        out.attr("destination", hcl.runtime(f"${{NOMAD_TASK_DIR}}/{recipe.path.name}"))
        out.comment("The text has braces of its own.")
        out.text("left_delimiter", "<<<<")
        out.text("right_delimiter", ">>>>")
        out.text("change_mode", "noop")
        out.heredoc("data", recipe.path.read_text(encoding="utf-8"))
    out.blank()


def _models(recipe: Recipe, settings: Mapping[str, str], cache: str) -> tuple[str, bool]:
    """Where the models are mounted, and whether only for reading: a folder, or the Hub's cache."""
    model = settings.get("model", str(recipe.defaults.get("model", "")))
    folder = str(PurePosixPath(model).parent)
    if model.startswith("/") and not folder.startswith(("/tmp", "/cache")):  # noqa: S108
        return folder, True
    return f"{cache}/huggingface", False


def _require_fit(recipe: Recipe) -> None:
    why = unfit(recipe)
    if why:
        raise UsageError(
            f"{recipe.key} cannot run under Nomad: {why}",
            next_step="take another recipe, or give it that in its defaults and its command",
        )


def _with_rank(words: Sequence[str], rank: int, extra: Sequence[str]) -> list[str]:
    more = [*(["--headless"] if rank else []), *extra]
    own = [f"node_rank={rank}"] if rank else []
    return [*words, *own, *(["--", *more] if more else [])]


def _port(out: Writer, port: Port) -> None:
    with out.block("port", port.label):
        out.attr("static", f"var.{port.setting}")
        out.attr("host_network", "var.host_network")


def _addresses(out: Writer, ports: Sequence[Port]) -> None:
    """Where to listen: the address that Nomad has for the port, never all of the machine's."""
    if ports:
        out.attr("SM12X_HOST", hcl.runtime(f"${{NOMAD_IP_{ports[0].label}}}"))
    for port in ports:
        out.attr(f"SM12X_{port.setting.upper()}", hcl.runtime(f"${{NOMAD_PORT_{port.label}}}"))


def _token(out: Writer) -> None:
    out.comment("Written below; the Hugging Face client takes an empty file as no token.")
    out.attr("HF_TOKEN_PATH", hcl.runtime("${NOMAD_SECRETS_DIR}/hf_token"))

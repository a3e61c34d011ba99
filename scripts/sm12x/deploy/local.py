"""Recipes as texts for one's own machines: `docker run`, compose, llama-swap, a shell script.

podman takes the same words as docker. llama-swap stops one server before it starts the next and
does not put it to sleep: its wrapper for vLLM posts the sleep level as a JSON body, which vLLM
ignores. So no recipe's sleep is used there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from sm12x.core.errors import UsageError
from sm12x.core.yamltext import dump
from sm12x.deploy.container import (
    Container,
    containers,
    header,
    live,
    quote_live,
    require_known_cluster,
    require_own_address,
    script,
)
from sm12x.recipes import options
from sm12x.recipes.model import Recipe


def docker(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A text for a shell: one command, or one per machine, each under a comment that says which.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    lines = header(recipe, "docker", settings, extra)
    parts = containers(recipe, image=image, settings=settings, extra=extra)
    for part in parts:
        if len(parts) > 1:
            lines.append(f"# On machine {part.rank + 1} of {len(parts)}:")
        lines.append(docker_command(part))
    return "\n".join(lines) + "\n"


def docker_command(part: Container) -> str:
    """One `docker run`, one option group per line."""
    # TP workers share tensors through /dev/shm, where docker gives 64 MiB.
    lines = [f"docker run --rm --name {part.name} --gpus {part.gpus or 'all'} --ipc host"]
    if part.rdma:
        # RoCE registers memory with the adapter, which counts as locked.
        lines.append("--device /dev/infiniband --ulimit memlock=-1")
    lines.append(
        "--network host" if part.host_network else f"-p {shlex.quote(f'{part.port}:{part.port}')}"
    )
    lines += [f"-v {_quote_volume(volume)}" for volume in part.volumes]
    lines += [f"-e {name}" for name in part.passed]
    lines += [f"-e {name}={shlex.quote(value)}" for name, value in part.env.items()]
    lines.append(shlex.join([part.image, *part.words]))
    return " \\\n  ".join(lines)


def _quote_volume(volume: str) -> str:
    """Quote, but leave `~` at the start to the shell."""
    if volume.startswith("~/"):
        return quote_live("$HOME" + volume[1:])
    return shlex.quote(volume)


def shell(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A script that becomes the server; ``image`` is not used.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    require_known_cluster(recipe)
    rendered = live(recipe, settings=settings, extra=extra)
    lines = ["#!/usr/bin/env bash", *header(recipe, "shell", settings, extra)]
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if machines > 1 and "node_rank" in recipe.defaults:
        ranks = "1" if machines == 2 else f"1 to {machines - 1}"
        lines.append(
            f"# For the first of {machines} machines: render it for the others with node_rank="
            f"{ranks} and -- --headless."
        )
    if recipe.sm12x and recipe.sm12x.pair:
        lines.append("# Outside the image set SM12X_IMAGE_ROOT to the checkout, where recipes/ is.")
    return "\n".join([*lines, "set -eu", script(rendered)]) + "\n"


def compose(
    recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]
) -> str:
    """A compose file with a service, or with one per machine (`docker compose up NAME` on each).

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    parts = containers(recipe, image=image, settings=settings, extra=extra)
    lines = header(recipe, "compose", settings, extra)
    if len(parts) > 1:
        lines.append(
            "# One service per machine: "
            + ", ".join(f"docker compose up {part.name}" for part in parts)
        )
    named = {
        volume.partition(":")[0]: None
        for part in parts
        for volume in part.volumes
        if volume[0] not in "/~."
    }
    content: dict[str, object] = {"services": {part.name: _service(part) for part in parts}}
    if named:
        # A fixed name: the same caches as `docker run -v` uses, whatever the project is called.
        content["volumes"] = {name: {"name": name} for name in named}
    return "\n".join(lines) + "\n" + dump(content)


def _service(part: Container) -> dict[str, object]:
    """One service, as compose wants it."""
    found: dict[str, object] = {
        "image": _literal(part.image),
        "command": [_literal(word) for word in part.words],
        # TP workers share tensors through /dev/shm, where docker gives 64 MiB.
        "ipc": "host",
    }
    if part.host_network:
        found["network_mode"] = "host"
    else:
        found["ports"] = [_literal(f"{part.port}:{part.port}")]
    found["volumes"] = [_literal(volume) for volume in part.volumes]
    environment = [*part.passed, *(f"{name}={_literal(part.env[name])}" for name in part.env)]
    if environment:
        found["environment"] = environment
    if part.rdma:
        # RoCE registers memory with the adapter, which counts as locked.
        found["devices"] = ["/dev/infiniband"]
        found["ulimits"] = {"memlock": -1}
    found["deploy"] = {
        "resources": {
            "reservations": {
                "devices": [
                    {
                        "driver": "nvidia",
                        "count": part.gpus or "all",
                        "capabilities": ["gpu"],
                    }
                ]
            }
        }
    }
    # A server that ends gives its GPUs back worker by worker.
    found["stop_grace_period"] = "2m"
    found["restart"] = "unless-stopped"
    return found


def _literal(text: str) -> str:
    """Compose puts in `$NAME` by itself unless the `$` is doubled."""
    return text.replace("$", "$$")


# Seconds. 15 minutes are a long load; the first start on a cold cache compiles as well.
_LOAD_SECONDS = 3600
# Stands for llama-swap's ${PORT} until the text is whole, as `$` would call for a shell.
_PORT = "llama-swap-port"


def llama_swap(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    peers: Sequence[Recipe] = (),
) -> str:
    """A configuration with the recipe as a model, or the two of a pair (``peers``) as a group.

    Raises:
        UsageError: the recipe is for several machines, its port cannot be set, it has no setting
            of a name that was given, or settings were given for a pair.
    """
    if peers and (settings or extra):
        raise UsageError(
            f"{recipe.key} names two recipes, each with settings of its own",
            next_step="render without settings and edit the text",
        )
    models = {}
    for one in peers or (recipe,):
        name, model = _model(one, image=image, settings=settings, extra=extra)
        models[name] = model
    content: dict[str, object] = {"healthCheckTimeout": _LOAD_SECONDS, "models": models}
    if peers:
        # They need the same GPUs: one at a time.
        content["groups"] = {recipe.key: {"swap": True, "exclusive": True, "members": list(models)}}
    text = dump(content)
    return "\n".join(header(recipe, "llama-swap", settings, extra)) + "\n" + text


def _model(
    recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]
) -> tuple[str, dict[str, object]]:
    if recipe.cluster_only or (recipe.sm12x and recipe.sm12x.machines > 1):
        raise UsageError(
            f"{recipe.key} is for several machines, llama-swap starts programs on one",
            next_step="render it to docker, compose or nomad",
        )
    if "port" not in recipe.defaults:
        raise UsageError(
            f"{recipe.key} has no setting port, and llama-swap chooses the port",
            next_step="give port in the recipe's defaults and use {port} in its command",
        )
    require_own_address(recipe, extra, "llama-swap")
    given = {**settings, "port": _PORT}
    if "host" in recipe.defaults:
        # Only llama-swap is to reach it.
        given["host"] = "127.0.0.1"
    (part,) = containers(recipe, image=image, settings=given, extra=extra)
    # No shell reads the words: llama-swap puts in ${PORT} and ${env.NAME}, and refuses any other
    # ${NAME}, such as one that is for the shell inside the container.
    text = re.sub(r"\$\{(\w+)\}(?!\w)", r"$\1", docker_command(part))
    text = text.replace('-v "$HOME/', '-v "${env.HOME}/').replace(_PORT, "${PORT}")
    serve = live(recipe, settings=given, extra=extra).serve or ()
    # llama-swap sends requests on with the name as it is.
    name = options.parse(serve).get("served-model-name") or options.model(serve)
    return name or recipe.model or recipe.key, {
        "cmd": text + "\n",
        "cmdStop": f"docker stop --time 120 {part.name}",
        "proxy": "http://127.0.0.1:${PORT}",
        # Clients have to ask for the server's own name of the model.
        "checkEndpoint": "/health",
    }

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
    HARDENED,
    LOOPBACK,
    NEEDED_KEY,
    SHM_BYTES,
    Container,
    Grants,
    containers,
    header,
    listens,
    live,
    quote_live,
    require_known_cluster,
    require_own_address,
    script,
)
from sm12x.recipes import options
from sm12x.recipes.model import Recipe


def docker(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    grants: Grants | None = None,
) -> str:
    """A text for a shell: one command, or one per machine, each under a comment that says which.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    parts = containers(recipe, image=image, settings=settings, extra=extra, grants=grants)
    lines = header(recipe, "docker", settings, extra, parts, grants)
    for part in parts:
        if len(parts) > 1:
            lines.append(f"# On machine {part.rank + 1} of {len(parts)}:")
        lines.append(guarded_command(part))
    return "\n".join(lines) + "\n"


def docker_command(part: Container) -> str:
    """One `docker run`, one option group per line. It has no value of the user's variables, which
    others on the machine could read.
    """
    lines = [f"docker run --rm --name {part.name} --gpus {part.gpus or 'all'}", HARDENED]
    if part.rdma:
        # RoCE registers memory with the adapter, which counts as locked.
        lines.append("--device /dev/infiniband --ulimit memlock=-1")
    if part.host_network:
        lines.append("--network host")
    elif part.port:
        lines.append(f"-p {shlex.quote(_published(part))}")
    lines += [f"-v {_quote_volume(str(mount))}" for mount in part.mounts]
    lines += [f"-e {name}" for name in (*part.needed, *part.passed)]
    lines += [f"-e {name}={shlex.quote(value)}" for name, value in part.env.items()]
    lines.append(shlex.join([part.image, *part.words]))
    return " \\\n  ".join(lines)


def guarded_command(part: Container) -> str:
    """``docker_command`` behind what it needs. One list: a shell in which a line fails goes on."""
    return " &&\n".join((*guards(part.needed), docker_command(part)))


def guards(needed: Mapping[str, str]) -> list[str]:
    """Lines with which a shell ends where a variable is not set."""
    return [f'export {name}="${{{name}:?{what}}}"' for name, what in needed.items()]


def _published(part: Container) -> str:
    address = f"[{part.address}]" if ":" in part.address else part.address
    return f"{address}:{part.port}:{part.port}"


def _quote_volume(volume: str) -> str:
    """Quote, but leave `~` at the start to the shell."""
    if volume.startswith("~/"):
        return quote_live("$HOME" + volume[1:])
    return shlex.quote(volume)


def shell(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    grants: Grants | None = None,
) -> str:
    """A script that becomes the server; ``image`` is not used. It listens on ``grants.publish``.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    require_known_cluster(recipe)
    lines = ["#!/usr/bin/env bash", *header(recipe, "shell", settings, extra, grants=grants)]
    given = dict(settings)
    address = grants.publish if grants else LOOPBACK
    if "host" in recipe.defaults and "host" not in options.parse(extra):
        # A container's port is published on the machine's loopback: so is this server's.
        given.setdefault("host", address)
    host, _ = listens(recipe, given, extra)
    rendered = live(recipe, settings=given, extra=extra)
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if machines > 1 and "node_rank" in recipe.defaults:
        ranks = "1" if machines == 2 else f"1 to {machines - 1}"
        lines.append(
            f"# For the first of {machines} machines: render it for the others with node_rank="
            f"{ranks} and -- --headless."
        )
    if recipe.sm12x and recipe.sm12x.pool:
        lines.append("# Outside the image set SM12X_IMAGE_ROOT to the checkout, where recipes/ is.")
    needed = {options.KEY: NEEDED_KEY} if options.is_public(host) else {}
    return "\n".join([*lines, "set -eu", *guards(needed), script(rendered)]) + "\n"


def compose(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    grants: Grants | None = None,
) -> str:
    """A compose file with a service, or with one per machine (`docker compose up NAME` on each).

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    parts = containers(recipe, image=image, settings=settings, extra=extra, grants=grants)
    lines = header(recipe, "compose", settings, extra, parts, grants)
    if len(parts) > 1:
        lines.append(
            "# One service per machine: "
            + ", ".join(f"docker compose up {part.name}" for part in parts)
        )
    named = dict.fromkeys(
        mount.source for part in parts for mount in part.mounts if mount.source[0] not in "/~."
    )
    content: dict[str, object] = {"services": {part.name: _service(part) for part in parts}}
    if named:
        # A fixed name: the same caches as `docker run -v` uses, whatever the project is called.
        content["volumes"] = {name: {"name": name} for name in named}
    return "\n".join(lines) + "\n" + dump(content)


def _service(part: Container) -> dict[str, object]:
    """Return the compose service of a container."""
    service: dict[str, object] = {
        "image": _literal(part.image),
        "command": [_literal(word) for word in part.words],
        "shm_size": f"{SHM_BYTES >> 30}g",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    if part.host_network:
        service["network_mode"] = "host"
    elif part.port:
        service["ports"] = [_literal(_published(part))]
    service["volumes"] = [_literal(str(mount)) for mount in part.mounts]
    service["environment"] = [
        *(f"{name}=${{{name}:?{what}}}" for name, what in part.needed.items()),
        *part.passed,
        *(f"{name}={_literal(part.env[name])}" for name in part.env),
    ]
    if part.rdma:
        # RoCE registers memory with the adapter, which counts as locked.
        service["devices"] = ["/dev/infiniband"]
        service["ulimits"] = {"memlock": -1}
    service["deploy"] = {
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
    service["stop_grace_period"] = "2m"
    service["restart"] = "unless-stopped"
    return service


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
    grants: Grants | None = None,
) -> str:
    """A configuration with the recipe as a model, or those of a pool (``peers``) as a group.

    Raises:
        UsageError: the recipe is for several machines, its port cannot be set, it has no setting
            of a name that was given, or settings were given for a pool.
    """
    if peers and (settings or extra):
        raise UsageError(
            f"{recipe.key} names several recipes, each with settings of its own",
            next_step="render without settings and edit the text",
        )
    grants = grants or Grants()
    if grants.publish != LOOPBACK:
        raise UsageError(
            "llama-swap alone is to reach its servers, so nothing is published",
            next_step="leave --publish out, and give llama-swap an address of its own",
        )
    models, parts = {}, []
    for one in peers or (recipe,):
        name, model, part = _model(one, image=image, settings=settings, extra=extra, grants=grants)
        models[name] = model
        parts.append(part)
    content: dict[str, object] = {"healthCheckTimeout": _LOAD_SECONDS, "models": models}
    if peers:
        # They need the same GPUs: one at a time.
        content["groups"] = {recipe.key: {"swap": True, "exclusive": True, "members": list(models)}}
    text = dump(content)
    lines = header(recipe, "llama-swap", settings, extra, parts, grants)
    return "\n".join(lines).replace(_PORT, "${PORT}") + "\n" + text


def _model(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    grants: Grants,
) -> tuple[str, dict[str, object], Container]:
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
    (part,) = containers(recipe, image=image, settings=given, extra=extra, grants=grants)
    # No shell reads the words: llama-swap puts in ${PORT} and ${env.NAME}, and refuses any other
    # ${NAME}, such as one that is for the shell inside the container.
    text = re.sub(r"\$\{(\w+)\}(?!\w)", r"$\1", docker_command(part))
    text = text.replace('-v "$HOME/', '-v "${env.HOME}/').replace(_PORT, "${PORT}")
    serve = live(recipe, settings=given, extra=extra).serve or ()
    # llama-swap sends requests on with the name as it is.
    name = options.parse(serve).get("served-model-name") or options.model(serve)
    model: dict[str, object] = {
        "cmd": text + "\n",
        "cmdStop": f"docker stop --time 120 {part.name}",
        "proxy": "http://127.0.0.1:${PORT}",
        # Clients have to ask for the server's own name of the model.
        "checkEndpoint": "/health",
    }
    return name or recipe.model or recipe.key, model, part

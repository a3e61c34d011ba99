"""Recipes as compose files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sm12x.core.yamltext import dump
from sm12x.deploy.container import Container, containers, header
from sm12x.recipes.model import Recipe


def render(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A compose file with a service, or with one a machine (`docker compose up NAME` on each).

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    parts = containers(recipe, image=image, settings=settings, extra=extra)
    lines = header(recipe, "compose", settings, extra)
    if len(parts) > 1:
        lines.append(
            "# One service a machine: "
            + ", ".join(f"docker compose up {part.name}" for part in parts)
        )
    named = {
        volume.partition(":")[0]: None
        for part in parts
        for volume in part.volumes
        if volume[0] not in "/~."
    }
    content: dict[str, object] = {"services": {part.name: service(part) for part in parts}}
    if named:
        # A fixed name: the same caches as `docker run -v` uses, whatever the project is called.
        content["volumes"] = {name: {"name": name} for name in named}
    return "\n".join(lines) + "\n" + dump(content)


def service(part: Container) -> dict[str, object]:
    """One service, as compose wants it."""
    found: dict[str, object] = {
        "image": part.image,
        "command": [_literal(word) for word in part.words],
        # TP workers share tensors through /dev/shm, where docker gives 64 MiB.
        "ipc": "host",
    }
    if part.host_network:
        found["network_mode"] = "host"
    else:
        found["ports"] = [f"{part.port}:{part.port}"]
    found["volumes"] = list(part.volumes)
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

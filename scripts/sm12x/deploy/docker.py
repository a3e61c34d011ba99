"""Recipes as `docker run` command lines; podman takes the same words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from sm12x.deploy.container import Container, containers, header, quote_live
from sm12x.recipes.model import Recipe


def render(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A text for a shell: one command, or one a machine, each under a comment that says which.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    lines = header(recipe, "docker", settings, extra)
    parts = containers(recipe, image=image, settings=settings, extra=extra)
    for part in parts:
        if len(parts) > 1:
            lines.append(f"# On machine {part.rank + 1} of {len(parts)}:")
        lines.append(command(part))
    return "\n".join(lines) + "\n"


def command(part: Container) -> str:
    """One `docker run`, an option group a line."""
    # TP workers share tensors through /dev/shm, where docker gives 64 MiB.
    lines = [f"docker run --rm --name {part.name} --gpus {part.gpus or 'all'} --ipc host"]
    if part.rdma:
        # RoCE registers memory with the adapter, which counts as locked.
        lines.append("--device /dev/infiniband --ulimit memlock=-1")
    lines.append("--network host" if part.host_network else f"-p {part.port}:{part.port}")
    lines += [f"-v {quote_volume(volume)}" for volume in part.volumes]
    lines += [f"-e {name}" for name in part.passed]
    lines += [f"-e {name}={shlex.quote(value)}" for name, value in part.env.items()]
    lines.append(" ".join([part.image, *map(shlex.quote, part.words)]))
    return " \\\n  ".join(lines)


def quote_volume(volume: str) -> str:
    """Quote, but leave `~` at the start to the shell."""
    if volume.startswith("~/"):
        return quote_live("$HOME" + volume[1:])
    return shlex.quote(volume)

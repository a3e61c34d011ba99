"""The comment that a rendered Nomad specification starts with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from sm12x.deploy import nomadparts as parts
from sm12x.deploy.hcl import Writer
from sm12x.recipes.model import Recipe


def write(
    out: Writer,
    recipe: Recipe,
    settings: Mapping[str, str],
    extra: Sequence[str],
    *,
    cluster: bool = False,
    overlay: bool = False,
) -> None:
    """What the file is, how it is used, and what the client that runs it must have.

    ``cluster`` for several machines; ``overlay`` for an image that others made.
    """
    words = [recipe.key, *(f"{key}={value}" for key, value in settings.items())]
    words += ["--", *extra] if extra else []
    variant = "--to nomad-overlay" if overlay else "--to nomad"
    out.comment(
        f"Rendered by `sm12x recipe render {variant} {shlex.join(words)}`:",
        "edit the recipe, not this file.",
        "",
        recipe.description or recipe.name,
    )
    status = recipe.sm12x.status if recipe.sm12x else None
    if status:
        blocked = f"; it cannot serve yet: {status.blocked}" if status.blocked else ""
        out.comment(f"Status: {status.state}{blocked}.")
    uid = 0 if overlay else parts.UID
    more = " -var overlay=MAP" if overlay else ""
    out.comment("", f"  nomad job run -var image=IMAGE{more} FILE")
    if not overlay:
        out.comment("  nomad job run -var image=IMAGE -var gpus=0 -var args=check FILE")
        out.comment("", "The second needs no GPU: the image proves itself, and the job ends.")
    out.comment(
        "",
        "The client block of the agent has, with NVIDIA's device plugin:",
        '  host_network "private" { cidr = "10.0.0.0/8" }       what servers may bind to',
        f'  host_volume "sm12x-models" {{ path = "/srv/models" }}  of uid {uid}, like the next',
        '  host_volume "sm12x-cache" { path = "/srv/cache" }    emptied when the image changes',
        '  max_kill_timeout = "3m"                              or kill_timeout is cut to 30 s',
    )
    if cluster:
        out.comment(
            '  host_network "fabric" { cidr = "192.168.100.0/24" }  the link between the machines',
            '  meta { fabric_interface = "..." fabric_hca = "..." }  its names on this machine',
        )
    if overlay:
        out.comment(
            "and, to mount files of the client into containers,",
            '  plugin "docker" { config { volumes { enabled = true } } }',
        )
    out.comment(
        "Secrets are Nomad variables:",
        f"  nomad var put nomad/jobs/{parts.job_name(recipe.key)} hf_token=... api_key=...",
    )
    out.blank()

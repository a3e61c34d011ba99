"""`pair A [key=value ...] + B [key=value ...]`: two servers that take turns on the same GPUs.

The last is started first, loaded and put to sleep, and so on to the first, which stays awake: a
server that starts takes its memory while the others hold only their residue. When one ends, all
end: otherwise a proxy would go on waking the remaining servers of a broken pair.
"""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

import click

from sm12x.core import process
from sm12x.core.errors import ToolFailedError, UsageError
from sm12x.recipes import options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered
from sm12x.runtime import health, serve

# Seconds between two looks at a server.
_PAUSE = 2.0
# Seconds a server has to end by itself: vLLM stops its workers then.
_GRACE = 30.0
# Seconds a first sleep may take: pinning host memory is slow.
_SLEEP_SECONDS = 300.0
_USAGE = "pair [--load-seconds N] RECIPE [key=value ...] + RECIPE [key=value ...]"


@dataclass(frozen=True, kw_only=True)
class PairMember:
    """One server of the arrangement and the sleep level of its recipe."""

    key: str
    rendered: Rendered
    server: health.Listener
    level: int


class Stopped(Exception):  # noqa: N818 - not an error: someone asked for the end
    """SIGTERM or SIGINT has come."""


def members(
    words: Sequence[str], find: Callable[[str], Recipe | None], environ: Mapping[str, str]
) -> tuple[tuple[PairMember, ...], float]:
    """Return the servers that ``words`` name, and the seconds that each may take to load.

    Raises:
        UsageError: a name that is no recipe, one that cannot sleep, or two on one port.
    """
    rest, seconds = list(words), 3600.0
    if rest[:1] == ["--load-seconds"]:
        if len(rest) < 2 or not rest[1].isdecimal():
            raise UsageError("--load-seconds needs a number of seconds", next_step=_USAGE)
        seconds, rest = float(rest[1]), rest[2:]
    pair: list[PairMember] = []
    for group in _split(rest):
        recipe = find(group[0])
        if recipe is None:
            raise UsageError(f"there is no recipe {group[0]!r}", next_step="`recipes` lists them")
        level = recipe.sm12x.sleep.level if recipe.sm12x else 0
        if not level:
            raise UsageError(
                f"{recipe.key} never sleeps", next_step="name two recipes that sleep: `recipes`"
            )
        # SM12X_ variables of the pair do not apply to its members.
        own = {name: value for name, value in environ.items() if not name.startswith("SM12X_")}
        rendered, _ = serve.prepare(recipe, group[1:], own)
        arguments = rendered.serve
        server = health.find([("vllm", "serve", *arguments)]) if arguments is not None else None
        if server is None:
            raise UsageError(
                f"{recipe.key} does not run `vllm serve`", next_step="name recipes that do"
            )
        port = options.parse(arguments or ()).get("port", "")
        if port and not options.is_port(port):
            raise UsageError(
                f"{recipe.key} is to listen on port {port!r}, which is none",
                next_step="give port=N, from 1 to 65535",
            )
        pair.append(PairMember(key=recipe.key, rendered=rendered, server=server, level=level))
    ports = [member.server.port for member in pair]
    if len(pair) < 2 or len(set(ports)) < len(ports):
        raise UsageError(
            f"two recipes with ports of their own are expected, got {len(pair)} on {ports}",
            next_step=_USAGE,
        )
    return tuple(pair), seconds


def _split(words: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            groups.append([])
        else:
            groups[-1].append(word)
    if not all(groups):
        raise UsageError("a recipe's name is missing beside a +", next_step=_USAGE)
    return groups


def run(arrangement: Sequence[PairMember], *, load_seconds: float) -> int:
    """Start all, the last first, and wait; returns 0 when asked to stop.

    Raises:
        ToolFailedError: a server ended, did not load in time, or did not go to sleep.
    """
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    with ExitStack() as stack:
        running: list[tuple[PairMember, process.Background]] = []
        stack.callback(lambda: process.end_all([child for _, child in running], _GRACE))
        try:
            for member in reversed(arrangement):
                click.echo(f"pair: starting {member.key} on {member.server}", err=True)
                env = {**serve.identity(os.environ), **member.rendered.env}
                jobs = serve.compilers({**os.environ, **env})
                if jobs:
                    click.echo(f"pair: {serve.remark(jobs)}", err=True)
                running.append(
                    (
                        member,
                        process.Background(member.rendered.argv, log=None, env={**env, **jobs}),
                    )
                )
                _wait_awake(member, running, load_seconds)
                if member is not arrangement[0]:
                    _put_to_sleep(member)
            click.echo(f"pair: {arrangement[0].key} serves, the rest sleep", err=True)
            while True:
                _require_alive(running)
                time.sleep(_PAUSE)
        except Stopped:
            return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _require_alive(running: Sequence[tuple[PairMember, process.Background]]) -> None:
    for member, child in running:
        code = child.poll()
        if code is not None:
            raise ToolFailedError(
                f"{member.key} ended with {code}, so the others are stopped too",
                next_step="read its lines above",
            )


def _wait_awake(
    member: PairMember, running: Sequence[tuple[PairMember, process.Background]], seconds: float
) -> None:
    end = time.monotonic() + seconds
    while True:
        _require_alive(running)
        if _answers(member.server):
            return
        if time.monotonic() > end:
            raise ToolFailedError(
                f"{member.key} did not answer on {member.server} within {seconds:g} s",
                next_step="read its lines above, or give --load-seconds N after pair (of a recipe "
                "that is a pair, load_seconds=N)",
            )
        time.sleep(_PAUSE)


def _answers(server: health.Listener) -> bool:
    try:
        return health.get_http(server, "/health", health.HEALTH_SECONDS)[0] == http.client.OK
    except (OSError, http.client.HTTPException):
        return False


def _put_to_sleep(member: PairMember) -> None:
    """Put a server to sleep. Raises ToolFailedError unless it answers that it sleeps."""
    why, step = "", "its recipe needs --enable-sleep-mode and --enable-sleep-routes"
    try:
        status, body = health.request(
            member.server, "POST", f"/sleep?level={member.level}", _SLEEP_SECONDS
        )
        if status != http.client.OK:
            why = f"/sleep says {status}: {body[:200].decode(errors='replace')}"
            if status == http.client.UNAUTHORIZED:
                step = "set VLLM_SLEEP_API_KEY or VLLM_API_KEY to the key that its recipe gives it"
        else:
            asleep = health.is_sleeping(member.server, health.get_http, _SLEEP_SECONDS)
            if not asleep:
                state = "no true or false" if asleep is None else "false"
                why = f"/is_sleeping answers {state} after /sleep"
    except (OSError, http.client.HTTPException) as error:
        why = f"/sleep does not answer: {error!r}"
    if why:
        raise ToolFailedError(
            f"{member.key} did not go to sleep: {why}",
            next_step=step,
        )
    click.echo(f"pair: {member.key} sleeps", err=True)

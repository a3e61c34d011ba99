"""`pool`: read the configuration, check its budgets, and serve until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import click
from aiohttp import web

from sm12x import plan
from sm12x.core import text
from sm12x.core.errors import INTERRUPTED, Sm12xError, UsageError, of_system
from sm12x.core.text import GIB
from sm12x.plan import host as hosts
from sm12x.plan import server as planned
from sm12x.pool import config as configs
from sm12x.pool import ladder
from sm12x.pool.config import PoolConfig, Spec
from sm12x.pool.engines import RunFolder
from sm12x.pool.gateway import Gateway, Keys
from sm12x.pool.gpus import Gpus
from sm12x.pool.members import RefusalError
from sm12x.pool.metrics import Metrics
from sm12x.pool.rotation import Rotation
from sm12x.recipes import options
from sm12x.runtime import health, serve
from sm12x.runtime.places import Places

# Of the host's memory, what is left to everything but host copies.
_SPARE_SHARE = 0.1
# Seconds that requests in flight have at the end.
_LAST = 5.0
# Less than vLLM keeps an idle connection for, so that none is used just as the server closes it.
_KEEP_ALIVE = 3.0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration, how its models are run, and how each leaves its GPUs."""

    config: PoolConfig
    specs: Mapping[str, Spec]
    ladder: ladder.Ladder


def load(words: Sequence[str], places: Places, gpus: Gpus) -> Loaded:
    """Read `--config FILE`, or recipes. Raises Sm12xError for what cannot serve."""
    path = _option(words)
    config = configs.read(Path(path)) if path else configs.from_words(words)
    specs = configs.specs(config, configs.find_in(places.recipes))
    public = options.is_public(config.host)
    if public and Keys(config).open:
        raise UsageError(
            f"the pool listens on {config.host}, and no variable of {', '.join(config.keys.users)} "
            "has a key: any client there could use its models",
            next_step="set VLLM_API_KEY (docker run -e VLLM_API_KEY), or listen on 127.0.0.1",
        )
    gpu_gib = config.machine.gpu_gib
    every = sorted({gpu for spec in specs.values() for gpu in spec.gpus})
    if gpu_gib is None and (memory := gpus.memory(every)):
        gpu_gib = min(one.total for one in memory.values()) / GIB
    if gpu_gib is None:
        gpu_gib = _planned_gib(specs)
    ram = config.machine.ram_gib or hosts.ram() * (1 - _SPARE_SHARE)
    needs = [need(spec, gpu_gib) for spec in specs.values()]
    return Loaded(
        config=config, specs=specs, ladder=ladder.choose(needs, gpu_gib=gpu_gib, ram_gib=ram)
    )


def _option(words: Sequence[str]) -> str:
    """Return the file of --config; "" where recipes are named."""
    first = words[0] if words else ""
    if not first.startswith("--config"):
        return ""
    value = first.partition("=")[2] or (words[1] if len(words) > 1 else "")
    if not value or len(words) > (1 if "=" in first else 2):
        raise UsageError(
            f"--config takes one file, and {len(words) - 1} words follow it",
            next_step=configs.USAGE,
        )
    return value


def _planned_gib(specs: Mapping[str, Spec]) -> float | None:
    """Return the memory of the GPUs that all recipes are for; None where there is no such kind."""
    recipes = [spec.recipe for spec in specs.values() if spec.recipe]
    if len(recipes) < len(specs):
        return None
    try:
        return plan.hardware_of(recipes, hosts.kinds()).memory.low
    except UsageError:
        return None


def need(spec: Spec, gpu_gib: float | None) -> ladder.Need:
    """Return what a model takes, by its configuration, else by the plan of its recipe."""
    given = spec.config.memory
    awake, weights, residue = given.awake, given.weights, given.residue
    routes = True
    if spec.argv:
        routes = options.find(spec.arguments, "enable-sleep-routes") is not None
        if spec.recipe is not None and spec.recipe.sm12x:
            share = planned.share(spec.arguments.get("gpu-memory-utilization"), spec.key)
            one = planned.from_recipe(spec.recipe, utilization=share)
            if awake is None and gpu_gib is not None and one.outside:
                awake = share * gpu_gib + one.outside.amount.high
            if weights is None and one.weights:
                weights = one.weights.amount.high
            if residue is None and one.residue and not one.keeps_weights:
                residue = one.residue.amount.high
    rungs: tuple[str, ...] = ("kv_cache", "level_1") if routes else ()
    rungs += ("stop",) if spec.argv else ()
    if not spec.sleeps:
        rungs = ()
    one_need = ladder.Need(
        name=spec.key, gpus=spec.gpus, rungs=rungs, awake=awake, weights=weights, residue=residue
    )
    return ladder.narrowed(one_need, spec.config.sleep) if rungs else one_need


def summary(loaded: Loaded) -> str:
    """Return what `--check` prints."""
    rows = [
        (
            key,
            spec.url,
            ",".join(map(str, sorted(spec.gpus))),
            loaded.ladder.rungs.get(key, "never"),
            " ".join((*spec.served, *spec.config.aliases)) or "(asked of the server)",
        )
        for key, spec in loaded.specs.items()
    ]
    table = text.columns(rows, head=("model", "server", "GPUs", "sleep", "names"))
    lines = [f"http://{loaded.config.host}:{loaded.config.port}", "", table]
    lines += [f"note: {remark}" for remark in loaded.ladder.remarks]
    lines += [f"note: {key}: {one}" for key, spec in loaded.specs.items() for one in spec.remarks]
    return "\n".join(lines)


async def run(words: Sequence[str], places: Places) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the configuration again."""
    gpus = Gpus()
    loaded = load(words, places, gpus)
    config = loaded.config
    click.echo(summary(loaded), err=True)
    folder = RunFolder(Path(config.run_folder) if config.run_folder else _folder(config.port))
    timeout = aiohttp.ClientTimeout(total=None)
    asking = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=timeout,
    )
    passing = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=timeout,
        auto_decompress=False,
        read_bufsize=1 << 14,
    )
    async with asking, passing:
        rotation = Rotation(
            config, session=asking, folder=folder, gpus=gpus, metrics=Metrics(), tell=_tell
        )
        for key, spec in loaded.specs.items():
            rotation.add(spec, loaded.ladder.rungs.get(key, "never"))

        async def reload() -> dict[str, Any]:
            try:
                again = load(words, places, gpus)
            except Sm12xError as error:
                rotation.event("reload refused", why=str(error))
                raise RefusalError(422, "configuration", f"the old one stays: {error}") from None
            if (again.config.host, again.config.port) != (config.host, config.port):
                text = "the old one stays: another host or port takes a restart of the pool"
                raise RefusalError(422, "configuration", text)
            gateway.keys = Keys(again.config)
            return await rotation.reload(again.config, again.specs, again.ladder.rungs)

        gateway = Gateway(rotation, passing, Keys(config), reload)
        await _serve(gateway, rotation, folder)


async def _serve(gateway: Gateway, rotation: Rotation, folder: RunFolder) -> None:
    config = rotation.config
    kib = config.limits.header_kib << 10
    runner = web.AppRunner(
        gateway.app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_LAST,
        max_line_size=kib,
        max_field_size=kib,
    )
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    tasks: set[asyncio.Task[Any]] = set()

    async def reload() -> None:
        with suppress(RefusalError):
            await gateway._reload()

    def hang_up() -> None:
        task = loop.create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    await runner.setup()
    try:
        # Several sockets at a name that is IPv4 and IPv6; none is shared with another pool.
        await web.TCPSite(runner, config.host, config.port).start()
        health.write_pool(config.host, config.port)
        starting = loop.create_task(rotation.start())
        ending = loop.create_task(end.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await ending
        starting.cancel()
        rotation.closing = True
    finally:
        health.forget_pool()
        await runner.cleanup()
        await rotation.stop()


def _folder(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"sm12x-pool-{os.getuid()}-{port}"


def _tell(line: str) -> None:
    click.echo(line)
    with suppress(OSError):
        sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run `pool`; ends with the exit status of the error where there is one."""
    text.guard_streams()
    rest = list(sys.argv[1:] if words is None else words)
    code = 0
    try:
        places = Places.of_image()
        if "--check" in rest:
            rest.remove("--check")
            loaded = load(rest, places, Gpus())
            click.echo(summary(loaded))
        elif not rest or rest[0] in ("--help", "-h"):
            click.echo(configs.USAGE)
        else:
            for remark in serve.require_caches(places, os.environ):
                click.echo(f"warning: {remark}", err=True)
            with suppress(ImportError):
                import uvloop

                asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
            asyncio.run(run(rest, places))
    except Sm12xError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as refused:
        known = of_system(refused)
        why = known or UsageError(
            f"the pool cannot listen: {refused}", next_step="give another --host or --port"
        )
        click.echo(f"error: {why}", err=True)
        code = why.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()

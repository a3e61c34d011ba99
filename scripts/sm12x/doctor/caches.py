"""Caches of compiled code: place, time of writing, and whether another build wrote them."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sm12x.core.machine import compiler_gib, compilers
from sm12x.core.text import GIB, counted, size
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import (
    Cache,
    Engine,
    Facts,
    Finding,
    Image,
    check,
    info,
    ok,
    unknown,
    warn,
)

# Enough to find the oldest and the newest of a real cache; a folder of models is not walked whole.
_MOST_FILES = 50_000
# Folders below the image's /cache volume, as its environment names them.
_VOLUME = ("vllm", "triton", "inductor", "flashinfer", "deep_gemm", "tilelang")
_VOLUME_NAME = "sm12x-cache"
_FLASHINFER = re.compile(r"(?:^|/)flashinfer/(\d+\.\d+[^/]*)/")


def collect(
    host: Host, engines: Sequence[Engine], folders: Sequence[Path] = ()
) -> tuple[tuple[Cache, ...], tuple[Unseen, ...]]:
    """Collect each cache with a file: of this user, of the docker volume, and of ``folders``.

    The second value lists caches that exist, or may exist, and cannot be read.
    """
    caches: list[Cache] = []
    hidden: dict[str, Unseen] = {}
    for kind, path in dict.fromkeys(_places(host, engines, folders)):
        cache, faults = _read(kind, path)
        if cache is not None:
            caches.append(cache)
        hidden |= {fault.why: fault for fault in faults}
    return tuple(caches), tuple(hidden.values())


def _places(
    host: Host, engines: Sequence[Engine], folders: Sequence[Path]
) -> Iterator[tuple[str, Path]]:
    env, home = host.env, host.home
    general = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    base = env.get("FLASHINFER_WORKSPACE_BASE") or home
    for kind, place in (
        # models' files and assets are there as well, and never go stale
        ("vllm", (env.get("VLLM_CACHE_ROOT") or f"{general}/vllm") + "/torch_compile_cache"),
        ("triton", env.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache"),
        ("inductor", env.get("TORCHINDUCTOR_CACHE_DIR") or f"/tmp/torchinductor_{host.user}"),  # noqa: S108
        ("flashinfer", f"{base}/.cache/flashinfer"),
        ("deep_gemm", env.get("DG_JIT_CACHE_DIR") or f"{home}/.deep_gemm"),
        ("tilelang", env.get("TILELANG_CACHE_DIR") or f"{home}/.tilelang/cache"),
    ):
        yield kind, host.path(place)
    places = [*folders]
    if any(one.name == "docker" and not isinstance(one.answer, Unseen) for one in engines):
        words = ["docker", "volume", "inspect", "--format", "{{.Mountpoint}}", _VOLUME_NAME]
        done = host.ask(words)
        place = "" if isinstance(done, Unseen) else done.stdout.strip()
        if place.startswith("/") and "\0" not in place:
            places.append(host.path(place))
    for folder in places:
        yield from ((kind, folder / kind) for kind in _VOLUME)


def _read(kind: str, path: Path) -> tuple[Cache | None, list[Unseen]]:
    files, oldest, newest = 0, float("inf"), 0.0
    versions: dict[str, None] = {}
    faults: list[Unseen] = []

    def failed(error: OSError) -> None:
        # A cache that was never written is not a fault.
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            faults.append(Unseen(f"{error.filename}: {error.strerror}"))

    for folder, _, names in os.walk(path, onerror=failed):
        for name in names:
            try:
                at = (Path(folder) / name).lstat().st_mtime
            except OSError:
                # A running server replaces its files while we look.
                continue
            files, oldest, newest = files + 1, min(oldest, at), max(newest, at)
            release = _FLASHINFER.search(f"{folder}/")
            if release:
                versions[release[1]] = None
        if files >= _MOST_FILES:
            break
    if not files:
        return None, faults
    cache = Cache(
        kind=kind, path=path, files=files, oldest=oldest, newest=newest, versions=tuple(versions)
    )
    return cache, faults


@check("cache.stale")
def _stale(facts: Facts) -> Iterator[Finding]:
    for hidden in facts.hidden_caches:
        yield unknown(f"could not see a cache: {hidden.why}")
    if not facts.caches:
        if not facts.hidden_caches:
            yield ok("no cache of compiled code was found")
    elif isinstance(facts.image, Unseen) or facts.image.built is None:
        places = ", ".join(str(cache.path) for cache in facts.caches)
        seen = "the image's build time is unknown, so these caches may be of another build"
        yield unknown(f"{seen}: {places}", "remove", paths=_words(facts.caches))
    else:
        for cache in facts.caches:
            yield _compare(cache, facts.image, facts.image.built)


def _compare(cache: Cache, image: Image, built: float) -> Finding:
    about = f"{cache.kind}: {counted(cache.files, 'file')} in {cache.path}"
    paths = _words([cache])
    release = image.versions.get("flashinfer-python", "")
    if cache.kind == "flashinfer" and cache.versions and release:
        # FlashInfer keeps its releases apart, so those of another are dead weight, not a danger.
        if release in cache.versions:
            return ok(f"{about}, of the image's FlashInfer {release}")
        seen = f"{about}, of FlashInfer {', '.join(cache.versions)}; the image has {release}"
        return info(seen, "remove", paths=paths)
    if cache.newest < built:
        seen = f"{about}, all written before the image was built ({_day(built)}): another build's"
        return warn(seen, "remove", paths=paths)
    if cache.oldest < built:
        seen = f"{about}, in part from {_day(cache.oldest)}, before the image ({_day(built)})"
        return warn(seen, "remove", paths=paths)
    return ok(f"{about}, written since the image was built")


def _words(caches: Sequence[Cache]) -> str:
    return shlex.join(str(cache.path) for cache in caches)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


@check("cache.cold")
def _cold(facts: Facts) -> Iterator[Finding]:
    """Check that the compilers of the first start fit in the free memory."""
    release = facts.versions.get("flashinfer-python", "")
    if not release or "flashinfer-jit-cache" in facts.versions or not facts.sm12x:
        return
    if isinstance(facts.image, Image) and facts.image.precompiled:
        yield ok(f"the image has the modules of FlashInfer {release} that the recipes need")
        return
    warm = [cache for cache in facts.caches if cache.kind == "flashinfer"]
    if any(release in cache.versions or not cache.versions for cache in warm):
        yield ok(f"kernels of FlashInfer {release} are in {warm[0].path}")
        return
    cores = _cpus(facts.host)
    if isinstance(facts.meminfo, Unseen) or isinstance(cores, Unseen):
        why = getattr(facts.meminfo, "why", "") or getattr(cores, "why", "")
        yield unknown(f"could not see how many compilers fit: {why}")
        return
    each = compiler_gib(unified=facts.unified)
    block = facts.recipe.sm12x if facts.recipe else None
    # There the model is in the same memory before the compilers start.
    resident = block.memory.resident if block and facts.unified else 0.0
    free = max(0, facts.available - int(resident * GIB))
    fitting = compilers(cores=cores, available=free, unified=facts.unified)
    limit = facts.host.env.get("MAX_JOBS", "")
    # Where it is not given, the image's entry point sets it, by the same rule.
    jobs = (int(limit) if limit.isdecimal() and int(limit) else cores) if limit else fitting
    seen = (
        f"no kernels of FlashInfer {release} in a cache: the first start compiles them, {jobs} at "
        f"a time, each up to {each:g} GiB; {size(free)} are available"
        f"{' beside the model' if resident else ''}"
    )
    yield info(seen) if jobs <= fitting else warn(seen, "limit", jobs=fitting)


def _cpus(host: Host) -> int | Unseen:
    """How many processors are on: "0-15,32-47" has 32."""
    path = "/sys/devices/system/cpu/online"
    online = host.text(path)
    if isinstance(online, Unseen):
        return online
    total = 0
    for part in online.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return Unseen(f"{path} says {online!r}")
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total

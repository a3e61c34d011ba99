"""Caches of compiled code: place, time of writing, and whether another build wrote them."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sm12x.core.text import counted
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge, check
from sm12x.doctor.model import (
    INFO,
    OK,
    UNKNOWN,
    WARN,
    Cache,
    Containers,
    Finding,
    HostFacts,
    Image,
    Unseen,
)

# Enough to find the oldest and the newest of a real cache; a folder of models is not walked whole.
_MOST_FILES = 50_000
# Folders below the image's /cache volume, as its environment names them.
_VOLUME = ("vllm", "triton", "inductor", "flashinfer", "deep_gemm", "tilelang")
_VOLUME_NAME = "sm12x-cache"
_FLASHINFER = re.compile(r"(?:^|/)flashinfer/(\d+\.\d+[^/]*)/")


def collect(
    host: Host, containers: Containers, folders: Sequence[Path] = ()
) -> tuple[tuple[Cache, ...], tuple[Unseen, ...]]:
    """Collect each cache with a file: of this user, of the docker volume, and of ``folders``.

    The second value lists caches that exist, or may exist, and cannot be read.
    """
    caches: list[Cache] = []
    hidden: dict[str, Unseen] = {}
    for kind, path in dict.fromkeys(_places(host, containers, folders)):
        cache, faults = _read(kind, path)
        if cache is not None:
            caches.append(cache)
        hidden |= {fault.why: fault for fault in faults}
    return tuple(caches), tuple(hidden.values())


def _places(
    host: Host, containers: Containers, folders: Sequence[Path]
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
    for folder in (*folders, *_volumes(host, containers)):
        yield from ((kind, folder / kind) for kind in _VOLUME)


def _volumes(host: Host, containers: Containers) -> Iterator[Path]:
    for engine in containers.engines:
        if engine.name == "docker" and not isinstance(engine.answer, Unseen):
            words = [engine.name, "volume", "inspect", "--format", "{{.Mountpoint}}", _VOLUME_NAME]
            done = host.ask(words)
            place = "" if isinstance(done, Unseen) else done.stdout.strip()
            if place.startswith("/") and "\0" not in place:
                yield host.path(place)


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
def stale(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    for hidden in facts.hidden_caches:
        yield Finding(UNKNOWN, f"could not see a cache: {hidden.why}")
    image = facts.image
    built = None if isinstance(image, Unseen) else image.built
    if not facts.caches:
        if not facts.hidden_caches:
            yield Finding(OK, "no cache of compiled code was found")
    elif isinstance(image, Unseen) or built is None:
        places = ", ".join(str(cache.path) for cache in facts.caches)
        seen = "the image's build time is unknown, so these caches may be of another build"
        seen = f"{seen}: {places}"
        yield _stale(UNKNOWN, seen, facts.caches)
    else:
        yield from (_compare(cache, image, built) for cache in facts.caches)


def _compare(cache: Cache, image: Image, built: float) -> Finding:
    about = f"{cache.kind}: {counted(cache.files, 'file')} in {cache.path}"
    release = image.versions.get("flashinfer-python", "")
    if cache.kind == "flashinfer" and cache.versions and release:
        # FlashInfer keeps its releases apart, so those of another are dead weight, not a danger.
        if release in cache.versions:
            return Finding(OK, f"{about}, of the image's FlashInfer {release}")
        seen = f"{about}, of FlashInfer {', '.join(cache.versions)}; the image has {release}"
        return _stale(INFO, seen, (cache,))
    if cache.newest < built:
        seen = f"{about}, all written before the image was built ({_day(built)}): another build's"
        return _stale(WARN, seen, (cache,))
    if cache.oldest < built:
        seen = f"{about}, in part from {_day(cache.oldest)}, before the image ({_day(built)})"
        return _stale(WARN, seen, (cache,))
    return Finding(OK, f"{about}, written since the image was built")


def _stale(severity: str, seen: str, caches: tuple[Cache, ...]) -> Finding:
    paths = " ".join(shlex.quote(str(cache.path)) for cache in caches)
    return Finding(severity, seen, fix=("remove",), values={"paths": paths})


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))

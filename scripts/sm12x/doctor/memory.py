"""Checks of the machine's memory: amount, limits, and kernel settings.

For host copies of sleeping models, RDMA, workers' shared memory, and GB10's unified memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from sm12x.core.text import GIB, KIB, size
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge, check
from sm12x.doctor.model import INFO, OK, UNKNOWN, WARN, Finding, HostFacts, HostMemory, Unseen

_MEMLOCK = re.compile(r"^Max locked memory\s+(unlimited|\d{1,20})\b", re.MULTILINE | re.ASCII)
# cgroup version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 62


def collect(host: Host) -> HostMemory:
    limit, used = _cgroup(host)
    min_free = host.number("/proc/sys/vm/min_free_kbytes")
    return HostMemory(
        info=_meminfo(host.text("/proc/meminfo")),
        cgroup_limit=limit,
        cgroup_used=used,
        memlock=_memlock(host, "self"),
        daemon_memlock=_daemon_memlock(host),
        shm=_shm(host),
        huge_pages=_huge_pages(host),
        min_free=min_free if isinstance(min_free, Unseen) else min_free * KIB,
        swappiness=host.number("/proc/sys/vm/swappiness"),
    )


def _meminfo(text: str | Unseen) -> dict[str, int] | Unseen:
    """Parse /proc/meminfo into bytes; an entry without a unit is a count and stays as it is."""
    if isinstance(text, Unseen):
        return text
    entries: dict[str, int] = {}
    for name, number, unit in re.findall(r"(?m)^([\w()]+):\s+([0-9]{1,20})(?: (kB))?$", text):
        entries[name] = int(number) * (KIB if unit else 1)
    return entries if "MemTotal" in entries else Unseen("/proc/meminfo has no MemTotal")


def _cgroup(host: Host) -> tuple[int | Unseen | None, int]:
    """The tightest limit among our control group and those above it, and what is used there."""
    text = host.text("/proc/self/cgroup")
    if isinstance(text, Unseen):
        return text, 0
    tightest: int | None = None
    used = 0
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0":
            mount, names = PurePosixPath("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = PurePosixPath("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = PurePosixPath(group.lstrip("/"))
        for part in (inside, *inside.parents):
            # A missing file is the root group's, or a group outside our name space: no limit there.
            limit = host.number(str(mount / part / names[0]))
            if isinstance(limit, Unseen) or limit >= _NO_LIMIT:
                continue
            if tightest is None or limit < tightest:
                now = host.number(str(mount / part / names[1]))
                tightest, used = limit, 0 if isinstance(now, Unseen) else now
    return tightest, used


def _memlock(host: Host, process: str) -> int | Unseen | None:
    text = host.text(f"/proc/{process}/limits")
    if isinstance(text, Unseen):
        return text
    match = _MEMLOCK.search(text)
    if match is None:
        return Unseen(f"/proc/{process}/limits does not say")
    return None if match[1] == "unlimited" else int(match[1])


def _daemon_memlock(host: Host) -> int | Unseen | None:
    for path in ("/run/docker.pid", "/var/run/docker.pid"):
        pid = host.number(path)
        if not isinstance(pid, Unseen):
            return _memlock(host, str(pid))
    return Unseen("no docker daemon runs here, or its pid file is not at /run/docker.pid")


def _shm(host: Host) -> int | Unseen:
    try:
        return host.size_of(host.path("/dev/shm"))  # noqa: S108 - it is measured, not written to
    except OSError as error:
        return Unseen(str(error.strerror))


def _huge_pages(host: Host) -> str | Unseen:
    """Read the active mode, the one in brackets: "always", "madvise" or "never"."""
    text = host.text("/sys/kernel/mm/transparent_hugepage/enabled")
    if isinstance(text, Unseen):
        return text
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else Unseen(f"transparent_hugepage/enabled says {text!r}")


@check("memory.host")
def host_copies(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    info = facts.memory.info
    if isinstance(info, Unseen):
        return [Finding(UNKNOWN, f"could not see the memory: {info.why}")]
    parts = [f"{size(available(facts))} of {size(info['MemTotal'])} available"]
    limit = facts.memory.cgroup_limit
    if isinstance(limit, Unseen):
        parts.append(f"could not see the control group: {limit.why}")
    elif limit is not None and limit < info["MemTotal"]:
        used = facts.memory.cgroup_used
        parts.append(f"the control group allows {size(limit)}, {size(used)} of it used")
    swapped = info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    if swapped:
        parts.append(f"{size(swapped)} swapped out")
    gpus = len(facts.seen_gpus)
    if gpus and not facts.unified:
        parts.append(f"room for {size(available(facts) / gpus)} of weights per GPU at level 1")
    severity = UNKNOWN if isinstance(limit, Unseen) else INFO
    return [Finding(severity, "; ".join(parts), fix=("plan",))]


def available(facts: HostFacts) -> int:
    """Bytes a new process can have: of the machine, or of our control group if that is less."""
    info = facts.memory.info
    if isinstance(info, Unseen):
        return 0
    free = info.get("MemAvailable", info.get("MemFree", 0))
    limit = facts.memory.cgroup_limit
    if limit is None or isinstance(limit, Unseen):
        return free
    return max(min(free, limit - facts.memory.cgroup_used), 0)


@check("memory.huge-pages")
def huge_pages(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    mode = facts.memory.huge_pages
    if isinstance(mode, Unseen):
        return [Finding(UNKNOWN, f"could not see the mode: {mode.why}")]
    if mode == "never":
        return [Finding(WARN, "off: the first sleep pins page by page", fix=("on",))]
    return [Finding(OK, f"mode {mode}")]


@check("memory.memlock")
def locked(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    for who, limit, fix in (
        ("this shell", facts.memory.memlock, "shell"),
        ("the docker daemon", facts.memory.daemon_memlock, "daemon"),
    ):
        if isinstance(limit, Unseen):
            if facts.network.ports:
                seen = f"could not see the limit of {who}: {limit.why}"
                yield Finding(UNKNOWN, seen)
        elif limit is None:
            yield Finding(OK, f"{who}: unlimited")
        elif facts.network.ports:
            seen = f"{who} may lock {size(limit)} only, and there are RDMA ports"
            yield Finding(WARN, seen, fix=(fix,))
        else:
            seen = f"{who} may lock {size(limit)}: matters for RDMA only, and no port is here"
            yield Finding(INFO, seen)


@check("memory.shm")
def shared(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    capacity = facts.memory.shm
    if isinstance(capacity, Unseen):
        return [Finding(UNKNOWN, f"could not see the size of /dev/shm: {capacity.why}")]
    if capacity < knowledge.thresholds.shm_gib * GIB:
        seen = f"{size(capacity)} in all"
        return [Finding(WARN, seen, fix=("container" if facts.machine.container else "host",))]
    seen = f"{size(capacity)} in all, which --ipc=host gives to the server"
    return [Finding(OK, seen)]


@check("memory.page-cache")
def page_cache(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Check the page cache where the GPU shares the host's memory."""
    if not facts.unified:
        return []
    info = facts.memory.info
    if isinstance(info, Unseen):
        return [Finding(UNKNOWN, f"could not see the page cache: {info.why}")]
    cached = info.get("Cached", 0) + info.get("Buffers", 0) - info.get("Shmem", 0)
    parts = [f"page cache {size(cached)}, {size(info.get('MemFree', 0))} free"]
    reserve = facts.memory.min_free
    if isinstance(reserve, Unseen):
        parts.append(f"could not see vm.min_free_kbytes: {reserve.why}")
    else:
        parts.append(f"vm.min_free_kbytes keeps {size(reserve)}")
    if cached > knowledge.thresholds.unified_page_cache_gib * GIB:
        return [Finding(WARN, "; ".join(parts), fix=("drop",))]
    return [Finding(INFO, "; ".join(parts))]


@check("memory.reclaim")
def reclaim(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    """Check how the kernel reclaims memory, where the GPU shares the host's memory."""
    reserve, swappiness, info = facts.memory.min_free, facts.memory.swappiness, facts.memory.info
    if not facts.unified:
        return
    if isinstance(reserve, Unseen) or isinstance(swappiness, Unseen) or isinstance(info, Unseen):
        why = next(fact.why for fact in (reserve, swappiness, info) if isinstance(fact, Unseen))
        yield Finding(UNKNOWN, f"could not see how memory is kept: {why}")
        return
    raised = reserve > knowledge.thresholds.unified_min_free_gib * GIB
    swaps = bool(swappiness and info.get("SwapTotal", 0))
    if raised:
        seen = (
            f"vm.min_free_kbytes keeps {size(reserve)}, which vLLM's check at start does not count"
        )
        yield Finding(WARN, seen, fix=("reserve",))
    if swaps:
        seen = f"vm.swappiness is {swappiness}, with {size(info['SwapTotal'])} of swap"
        yield Finding(INFO, seen, fix=("swappiness",))
    if not raised and not swaps:
        yield Finding(OK, f"min_free_kbytes {size(reserve)}, swappiness {swappiness}")

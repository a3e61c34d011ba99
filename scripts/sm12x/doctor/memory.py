"""Checks of the machine's memory: amount, limits, and kernel settings.

For host copies of sleeping models, RDMA, workers' shared memory, and GB10's unified memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from sm12x.core.text import GIB, KIB, size
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import Facts, Finding, check, info, ok, unknown, warn

_MEMLOCK = re.compile(r"^Max locked memory\s+(unlimited|\d{1,20})\b", re.MULTILINE | re.ASCII)
# cgroup version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 62
# vm.overcommit_memory with which the kernel promises no more than CommitLimit.
_STRICT = 2


def meminfo(host: Host) -> dict[str, int] | Unseen:
    """Read /proc/meminfo in bytes; an entry without a unit is a count and stays as it is."""
    text = host.text("/proc/meminfo")
    if isinstance(text, Unseen):
        return text
    entries: dict[str, int] = {}
    for name, number, unit in re.findall(r"(?m)^([\w()]+):\s+([0-9]{1,20})(?: (kB))?$", text):
        entries[name] = int(number) * (KIB if unit else 1)
    return entries if "MemTotal" in entries else Unseen("/proc/meminfo has no MemTotal")


def cgroup(host: Host) -> tuple[int | Unseen | None, int]:
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


@check("memory.host")
def _host_copies(facts: Facts) -> Iterator[Finding]:
    entries = facts.meminfo
    if isinstance(entries, Unseen):
        yield unknown(f"could not see the memory: {entries.why}")
        return
    parts = [f"{size(facts.available)} of {size(entries['MemTotal'])} available"]
    limit, used = facts.cgroup
    if isinstance(limit, Unseen):
        parts.append(f"could not see the control group: {limit.why}")
    elif limit is not None and limit < entries["MemTotal"]:
        parts.append(f"the control group allows {size(limit)}, {size(used)} of it used")
    swapped = entries.get("SwapTotal", 0) - entries.get("SwapFree", 0)
    if swapped:
        parts.append(f"{size(swapped)} swapped out")
    gpus = len(facts.seen_gpus)
    if gpus and not facts.unified:
        parts.append(f"room for {size(facts.available / gpus)} of weights per GPU at level 1")
    found = unknown if isinstance(limit, Unseen) else info
    yield found("; ".join(parts), "plan")


@check("memory.huge-pages")
def _huge_pages(facts: Facts) -> Iterator[Finding]:
    text = facts.host.text("/sys/kernel/mm/transparent_hugepage/enabled")
    # The active mode is the one in brackets: "always", "madvise" or "never".
    mode = None if isinstance(text, Unseen) else re.search(r"\[(\w+)\]", text)
    if mode is None:
        why = f"transparent_hugepage/enabled says {text!r}"
        yield unknown(f"could not see the mode: {getattr(text, 'why', why)}")
    elif mode[1] == "never":
        yield warn("off: the first sleep pins page by page", "on")
    else:
        yield ok(f"mode {mode[1]}")


@check("memory.overcommit")
def _overcommit(facts: Facts) -> Iterator[Finding]:
    mode = facts.host.number("/proc/sys/vm/overcommit_memory")
    if isinstance(mode, Unseen):
        yield unknown(f"could not see vm.overcommit_memory: {mode.why}")
        return
    seen = f"vm.overcommit_memory is {mode}"
    if mode != _STRICT:
        yield ok(seen)
        return
    entries = {} if isinstance(facts.meminfo, Unseen) else facts.meminfo
    limit, committed = entries.get("CommitLimit"), entries.get("Committed_AS")
    if limit is not None and committed is not None:
        left = max(limit - committed, 0)
        seen += f": {size(left)} of {size(limit)} may still be promised to processes"
    yield warn(seen, "heuristic")


@check("memory.memlock")
def _locked(facts: Facts) -> Iterator[Finding]:
    daemon = map(facts.host.number, ("/run/docker.pid", "/var/run/docker.pid"))
    pid = next((str(one) for one in daemon if isinstance(one, int)), "")
    nobody = "no docker daemon runs here, or its pid file is not at /run/docker.pid"
    for who, process, fix in (
        ("this shell", "self", "shell"),
        # Its containers inherit its limit.
        ("the docker daemon", pid, "daemon"),
    ):
        path = f"/proc/{process}/limits"
        text = facts.host.text(path) if process else Unseen(nobody)
        match = None if isinstance(text, Unseen) else _MEMLOCK.search(text)
        if match is None:
            if facts.ports:
                why = getattr(text, "why", f"{path} does not say")
                yield unknown(f"could not see the limit of {who}: {why}")
        elif match[1] == "unlimited":
            yield ok(f"{who}: unlimited")
        else:
            limit = f"{who} may lock {size(int(match[1]))}"
            if facts.ports:
                yield warn(f"{limit} only, and there are RDMA ports", fix)
            else:
                yield info(f"{limit}: matters for RDMA only, and no port is here")


@check("memory.shm")
def _shared(facts: Facts) -> Iterator[Finding]:
    try:
        capacity = facts.host.size_of(facts.host.path("/dev/shm"))  # noqa: S108 - it is measured
    except OSError as error:
        yield unknown(f"could not see the size of /dev/shm: {error.strerror}")
        return
    if capacity < facts.known.thresholds.shm_gib * GIB:
        yield warn(f"{size(capacity)} in all", "container" if facts.machine.container else "host")
    else:
        yield ok(f"{size(capacity)} in all, which --ipc=host gives to the server")


@check("memory.page-cache")
def _page_cache(facts: Facts) -> Iterator[Finding]:
    """Check the page cache where the GPU shares the host's memory."""
    entries = facts.meminfo
    if not facts.unified:
        return
    if isinstance(entries, Unseen):
        yield unknown(f"could not see the page cache: {entries.why}")
        return
    cached = entries.get("Cached", 0) + entries.get("Buffers", 0) - entries.get("Shmem", 0)
    parts = [f"page cache {size(cached)}, {size(entries.get('MemFree', 0))} free"]
    reserve = _reserve(facts)
    if isinstance(reserve, Unseen):
        parts.append(f"could not see vm.min_free_kbytes: {reserve.why}")
    else:
        parts.append(f"vm.min_free_kbytes keeps {size(reserve)}")
    if cached > facts.known.thresholds.unified_page_cache_gib * GIB:
        yield warn("; ".join(parts), "drop")
    else:
        yield info("; ".join(parts))


@check("memory.reclaim")
def _reclaim(facts: Facts) -> Iterator[Finding]:
    """Check how the kernel reclaims memory, where the GPU shares the host's memory."""
    if not facts.unified:
        return
    reserve, entries = _reserve(facts), facts.meminfo
    swappiness = facts.host.number("/proc/sys/vm/swappiness")
    if isinstance(reserve, Unseen) or isinstance(swappiness, Unseen) or isinstance(entries, Unseen):
        faults = [one.why for one in (reserve, swappiness, entries) if isinstance(one, Unseen)]
        yield unknown(f"could not see how memory is kept: {faults[0]}")
        return
    swap = entries.get("SwapTotal", 0)
    raised = reserve > facts.known.thresholds.unified_min_free_gib * GIB
    if raised:
        kept = f"vm.min_free_kbytes keeps {size(reserve)}"
        yield warn(f"{kept}, which vLLM's check at start does not count", "reserve")
    if swappiness and swap:
        yield info(f"vm.swappiness is {swappiness}, with {size(swap)} of swap", "swappiness")
    elif not raised:
        yield ok(f"min_free_kbytes {size(reserve)}, swappiness {swappiness}")


def _reserve(facts: Facts) -> int | Unseen:
    """Return the bytes that the kernel keeps free."""
    kibibytes = facts.host.number("/proc/sys/vm/min_free_kbytes")
    return kibibytes if isinstance(kibibytes, Unseen) else kibibytes * KIB

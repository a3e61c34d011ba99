"""Host memory: for copies of sleeping models, for RDMA, for workers, and on GB10 for all."""

from __future__ import annotations

from sm12x.core.text import GIB, size
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import INFO, OK, UNKNOWN, WARN, Diagnosis, HostFacts, Unseen

_DROP = "sync && echo 3 | sudo tee /proc/sys/vm/drop_caches"
_COMPACT = "echo 1 | sudo tee /proc/sys/vm/compact_memory"


def host_copies(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "memory.host"
    info = facts.memory.info
    if isinstance(info, Unseen):
        return [known.finding(name, UNKNOWN, f"could not see the memory: {info.why}")]
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
        parts.append(f"room for {size(available(facts) / gpus)} of weights a GPU at level 1")
    severity = UNKNOWN if isinstance(limit, Unseen) else INFO
    return [known.finding(name, severity, "; ".join(parts), fix=("sm12x plan RECIPE",))]


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


def huge_pages(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "memory.huge-pages"
    mode = facts.memory.huge_pages
    if isinstance(mode, Unseen):
        return [known.finding(name, UNKNOWN, f"could not see the mode: {mode.why}")]
    if mode == "never":
        fix = ("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",)
        return [known.finding(name, WARN, "off: the first sleep pins page by page", fix=fix)]
    return [known.finding(name, OK, f"mode {mode}")]


def locked(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "memory.memlock"
    findings = []
    fixes = {
        "this shell": ("ulimit -l unlimited   # lasting: memlock in /etc/security/limits.conf",),
        "the docker daemon": (
            "sudo systemctl edit docker   # [Service] LimitMEMLOCK=infinity",
            "sudo systemctl daemon-reload && sudo systemctl restart docker",
        ),
    }
    limits = {"this shell": facts.memory.memlock, "the docker daemon": facts.memory.daemon_memlock}
    for who, limit in limits.items():
        if isinstance(limit, Unseen):
            if facts.network.ports:
                seen = f"could not see the limit of {who}: {limit.why}"
                findings.append(known.finding(name, UNKNOWN, seen))
        elif limit is None:
            findings.append(known.finding(name, OK, f"{who}: unlimited"))
        elif facts.network.ports:
            seen = f"{who} may lock {size(limit)} only, and there are RDMA ports"
            findings.append(known.finding(name, WARN, seen, fix=fixes[who]))
        else:
            seen = f"{who} may lock {size(limit)}: matters for RDMA only, and no port is here"
            findings.append(known.finding(name, INFO, seen))
    return findings


def shared(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "memory.shm"
    found = facts.memory.shm
    if isinstance(found, Unseen):
        return [known.finding(name, UNKNOWN, f"could not see the size of /dev/shm: {found.why}")]
    if found < known.thresholds.shm_gib * GIB:
        seen = f"{size(found)} in all"
        fix = ("docker run --ipc=host ...",)
        if not facts.machine.container:
            fix = ("sudo mount -o remount,size=16G /dev/shm",)
        return [known.finding(name, WARN, seen, fix=fix)]
    seen = f"{size(found)} in all, which --ipc=host gives to the server"
    return [known.finding(name, OK, seen)]


def page_cache(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Only where the GPU takes its memory from the same place."""
    name = "memory.page-cache"
    if not facts.unified:
        return []
    info = facts.memory.info
    if isinstance(info, Unseen):
        return [known.finding(name, UNKNOWN, f"could not see the page cache: {info.why}")]
    cached = info.get("Cached", 0) + info.get("Buffers", 0) - info.get("Shmem", 0)
    parts = [f"page cache {size(cached)}, {size(info.get('MemFree', 0))} free"]
    kept = facts.memory.min_free
    if isinstance(kept, Unseen):
        parts.append(f"could not see vm.min_free_kbytes: {kept.why}")
    else:
        parts.append(f"vm.min_free_kbytes keeps {size(kept)}")
    if cached > known.thresholds.unified_page_cache_gib * GIB:
        return [known.finding(name, WARN, "; ".join(parts), fix=(_DROP, _COMPACT))]
    return [known.finding(name, INFO, "; ".join(parts))]

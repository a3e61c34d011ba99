"""Memory of the machine: what is there, what limits it, how it is handed out."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from sm12x.doctor.host import Host
from sm12x.doctor.model import HostMemory, Unseen

KIB = 1024
_MEMLOCK = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)
# cgroup version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 62


def collect(host: Host) -> HostMemory:
    limit, used = _cgroup(host)
    min_free = host.number("/proc/sys/vm/min_free_kbytes")
    return HostMemory(
        info=meminfo(host.text("/proc/meminfo")),
        cgroup_limit=limit,
        cgroup_used=used,
        memlock=_memlock(host, "self"),
        daemon_memlock=_daemon_memlock(host),
        shm=_shm(host),
        huge_pages=_huge_pages(host),
        min_free=min_free if isinstance(min_free, Unseen) else min_free * KIB,
        swappiness=host.number("/proc/sys/vm/swappiness"),
    )


def meminfo(text: str | Unseen) -> dict[str, int] | Unseen:
    """/proc/meminfo in bytes; entries without a unit are counts and are left as they are."""
    if isinstance(text, Unseen):
        return text
    found: dict[str, int] = {}
    for name, number, unit in re.findall(r"(?m)^([\w()]+):\s+(\d+)(?: (kB))?$", text):
        found[name] = int(number) * (KIB if unit else 1)
    return found if "MemTotal" in found else Unseen("/proc/meminfo has no MemTotal")


def _cgroup(host: Host) -> tuple[int | Unseen | None, int]:
    """The tightest limit among our control group and those above it, and what is used there."""
    text = host.text("/proc/self/cgroup")
    if isinstance(text, Unseen):
        return text, 0
    tightest: int | None = None
    used = 0
    for line in text.splitlines():
        number, controllers, group = line.split(":", 2)
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
    found = _MEMLOCK.search(text)
    if found is None:
        return Unseen(f"/proc/{process}/limits does not say")
    return None if found[1] == "unlimited" else int(found[1])


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
    """The mode in brackets: "always", "madvise" or "never"."""
    text = host.text("/sys/kernel/mm/transparent_hugepage/enabled")
    if isinstance(text, Unseen):
        return text
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else Unseen(f"transparent_hugepage/enabled says {text!r}")

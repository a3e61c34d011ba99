"""GPU memory around a sleep: of all processes, and of a server's processes.

No interface tells which processes are a server's: they are those whose memory falls each time that
it goes to sleep, with their siblings (ranks have one parent). Where the driver lists no processes
(in most containers), memory of all counts.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from sm12x.core.errors import UnknownVerdictError, UsageError
from sm12x.core.text import MIB
from sm12x.doctor import gpus, knowledge
from sm12x.doctor.host import Host
from sm12x.doctor.model import Gpu, Unseen
from sm12x.verify.report import GpuUse

AUTO, _ALL, _NONE = "auto", "all", "none"
# A process that gives back less than this has not gone to sleep.
_FELL = 64 * MIB


def _parent(pid: int) -> int:
    """Return the parent of a process; the process itself where that cannot be read."""
    text = Host().text(f"/proc/{pid}/stat")
    # The name of the process is in brackets, and may have any character.
    state = "" if isinstance(text, Unseen) else text.rpartition(")")[2]
    match = re.match(r"\s*\S\s+(\d+)\s", state)
    return int(match[1]) if match else pid


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Bytes on each GPU: of all processes, and of each; None where the driver does not say."""

    used: Mapping[int, int | None]
    processes: Mapping[int, Mapping[int, int] | None]


class Watch:
    """Takes samples of the GPUs ``chosen`` (None: of all), or knows why there are none.

    ``unseen`` is the reason, "" where memory is seen.
    """

    def __init__(
        self,
        look: Callable[[], tuple[Gpu, ...] | Unseen],
        *,
        chosen: frozenset[int] | None = None,
        unseen: str = "",
        parent: Callable[[int], int] = _parent,
    ) -> None:
        self._look = look
        self._chosen = chosen
        # The parents of each server's processes.
        self._owners: dict[str, set[int]] = {}
        self._parent = functools.cache(parent)
        self.unseen = unseen

    def sample(self) -> Sample | None:
        """Sample the memory in use now; None from the first failure to read it on."""
        if self.unseen:
            return None
        all_gpus = self._look()
        if isinstance(all_gpus, Unseen):
            self.unseen = all_gpus.why
            return None
        mine = [gpu for gpu in all_gpus if self._chosen is None or gpu.index in self._chosen]
        sample = Sample(
            used={gpu.index: gpu.memory_used for gpu in mine},
            processes={gpu.index: _processes(gpu) for gpu in mine},
        )
        if not mine:
            self.unseen = "no GPU is here"
        elif all(used is None for used in sample.used.values()) and not any(
            sample.processes.values()
        ):
            self.unseen = "the driver gives neither the memory of a GPU nor that of its processes"
        return None if self.unseen else sample

    def slept(self, server: str, before: Sample | None, asleep: Sample | None) -> None:
        """Note the processes whose memory fell while ``server`` went to sleep: they are its own.

        Another server may have gone to sleep at the same time. It is told apart by the next sleep.
        """
        if before is None or asleep is None:
            return
        fell: set[int] = set()
        for gpu, processes in before.processes.items():
            later = asleep.processes.get(gpu)
            if processes is None or later is None:
                continue
            fell |= {
                self._parent(pid)
                for pid, size in processes.items()
                if size - later.get(pid, size) >= _FELL
            }
        owners = self._owners.get(server) or fell
        # A sleep that frees nothing tells nothing of whose they are.
        self._owners[server] = (owners & fell) or owners

    def of(self, server: str, sample: Sample | None) -> tuple[GpuUse, ...] | None:
        """The sample as it is reported, with what ``server`` holds.

        Where its processes are known, a GPU with none of them is not its own, and is left out.
        """
        if sample is None:
            return None
        uses = [
            GpuUse(gpu=gpu, used=used, held=self._held(server, sample.processes.get(gpu)))
            for gpu, used in sample.used.items()
        ]
        own = [use for use in uses if use.held is not None]
        return tuple(own or uses)

    def _held(self, server: str, processes: Mapping[int, int] | None) -> int | None:
        owners = self._owners.get(server, set())
        mine = [size for pid, size in (processes or {}).items() if self._parent(pid) in owners]
        return sum(mine) if mine else None


def watch(urls: Iterable[str], choice: str) -> Watch:
    """Return a watch of the GPUs in ``choice``: auto, all, none, or numbers such as 0,1.

    Raises:
        UsageError: ``choice`` is none of these.
        UnknownVerdictError: ``choice`` names GPUs that cannot be seen.
    """
    if choice == _NONE:
        return Watch(_look, unseen="--gpus none")
    if choice == AUTO:
        away = [host for host in (urlsplit(url).hostname or "" for url in urls) if not here(host)]
        if away:
            why = f"{away[0]} is not this machine; if its GPUs are seen here, give --gpus all"
            return Watch(_look, unseen=why)
        watcher = Watch(_look)
        watcher.sample()
        return watcher
    watcher = Watch(_look, chosen=None if choice == _ALL else _numbers(choice))
    seen = watcher.sample()
    missing = sorted((watcher._chosen or set()) - set(seen.used)) if seen else []
    if missing:
        raise UnknownVerdictError(
            f"--gpus {choice}: there is no GPU {missing[0]} here",
            next_step="nvidia-smi lists the GPUs; --gpus none verifies without their memory",
        )
    if seen is None:
        raise UnknownVerdictError(
            f"the memory of the GPUs cannot be seen: {watcher.unseen}",
            next_step="verify on the server's machine, or with --gpus none",
        )
    return watcher


def here(host: str) -> bool:
    """Tell whether ``host`` is an address of this machine."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_bindable(family, address) for family, _, _, _, address in addresses)


def _bindable(family: int, address: Sequence[object]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address[0], 0, *address[2:]))
            return True
    except OSError:
        return False


def _look() -> tuple[Gpu, ...] | Unseen:
    driver, seen_gpus = gpus.collect(Host(), knowledge.load())
    if isinstance(seen_gpus, Unseen):
        return seen_gpus
    by_nvml = tuple(gpu for gpu in seen_gpus if gpu.told_by == "nvml")
    if seen_gpus and not by_nvml:
        return Unseen(driver.fault or "NVML does not answer")
    return by_nvml


def _processes(gpu: Gpu) -> Mapping[int, int] | None:
    if isinstance(gpu.processes, Unseen) or not gpu.processes:
        # A container's driver lists none, although memory is in use.
        return None
    memory = {one.pid: one.memory for one in gpu.processes}
    if any(size is None for size in memory.values()):
        return None
    return {pid: size for pid, size in memory.items() if size is not None}


def _numbers(choice: str) -> frozenset[int]:
    words = choice.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(
            f"--gpus {choice!r} names no GPUs", next_step="give auto, all, none, or 0,1,..."
        )
    return frozenset(int(word) for word in words)

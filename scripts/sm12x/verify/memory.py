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
from urllib.parse import urlsplit

from sm12x.core.errors import UnknownVerdictError, UsageError
from sm12x.core.text import MIB
from sm12x.doctor import gpus, knowledge
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import Gpu
from sm12x.verify.report import GpuUse

AUTO, _ALL, _NONE = "auto", "all", "none"
# A process that gives back less than this has not gone to sleep.
_FELL = 64 * MIB
# The GPUs whose memory is watched, at one moment.
_Sample = tuple[Gpu, ...]


def _parent(pid: int) -> int:
    """Return the parent of a process; the process itself where that cannot be read."""
    text = Host().text(f"/proc/{pid}/stat")
    # The name of the process is in brackets, and may have any character.
    state = "" if isinstance(text, Unseen) else text.rpartition(")")[2]
    match = re.match(r"\s*\S\s+(\d+)\s", state)
    return int(match[1]) if match else pid


class Watch:
    """Takes samples of the GPUs ``chosen`` (None: of all), or knows why there are none.

    ``unseen`` is the reason, "" where memory is seen.
    """

    def __init__(
        self,
        look: Callable[[], _Sample | Unseen],
        *,
        chosen: frozenset[int] | None = None,
        unseen: str = "",
        parent: Callable[[int], int] = _parent,
    ) -> None:
        self._look = look
        self.chosen = chosen
        # The parents of each server's processes.
        self._owners: dict[str, set[int]] = {}
        self._parent = functools.cache(parent)
        self.unseen = unseen

    def sample(self) -> _Sample | None:
        """Sample the memory in use now; None from the first failure to read it on."""
        if self.unseen:
            return None
        gpus = self._look()
        if isinstance(gpus, Unseen):
            self.unseen = gpus.why
            return None
        mine = tuple(gpu for gpu in gpus if self.chosen is None or gpu.index in self.chosen)
        if not mine:
            self.unseen = "no GPU is here"
        elif all(gpu.memory_used is None and not _processes(gpu) for gpu in mine):
            self.unseen = "the driver gives neither the memory of a GPU nor that of its processes"
        return None if self.unseen else mine

    def slept(self, server: str, before: _Sample | None, asleep: _Sample | None) -> None:
        """Note the processes whose memory fell while ``server`` went to sleep: they are its own.

        Another server may have gone to sleep at the same time. It is told apart by the next sleep.
        """
        if before is None or asleep is None:
            return
        later = {gpu.index: _processes(gpu) for gpu in asleep}
        fell = {
            self._parent(pid)
            for gpu in before
            if later.get(gpu.index)
            for pid, size in _processes(gpu).items()
            if size - later[gpu.index].get(pid, size) >= _FELL
        }
        owners = self._owners.get(server) or fell
        # A sleep that frees nothing tells nothing of whose they are.
        self._owners[server] = (owners & fell) or owners

    def of(self, server: str, sample: _Sample | None) -> tuple[GpuUse, ...] | None:
        """The sample as it is reported, with what ``server`` holds.

        Where its processes are known, a GPU with none of them is not its own, and is left out.
        """
        if sample is None:
            return None
        owners = self._owners.get(server, set())
        uses = []
        for gpu in sample:
            mine = [size for pid, size in _processes(gpu).items() if self._parent(pid) in owners]
            held = sum(mine) if mine else None
            uses.append(GpuUse(gpu=gpu.index, used=gpu.memory_used, held=held))
        return tuple(use for use in uses if use.held is not None) or tuple(uses)


def watch(urls: Iterable[str], choice: str) -> Watch:
    """Return a watch of the GPUs in ``choice``: auto, all, none, or numbers such as 0,1.

    Raises:
        UsageError: ``choice`` is none of these.
        UnknownVerdictError: ``choice`` names GPUs that cannot be seen.
    """
    numbers = None
    if choice not in (AUTO, _ALL, _NONE):
        words = choice.split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise UsageError(
                f"--gpus {choice!r} names no GPUs", next_step="give auto, all, none, or 0,1,..."
            )
        numbers = frozenset(map(int, words))
    unseen = "--gpus none" if choice == _NONE else ""
    hosts = [urlsplit(url).hostname or "" for url in urls] if choice == AUTO else []
    if away := [host for host in hosts if not here(host)]:
        unseen = f"{away[0]} is not this machine; if its GPUs are seen here, give --gpus all"
    watcher = Watch(_look, chosen=numbers, unseen=unseen)
    sample = watcher.sample()
    if choice in (AUTO, _NONE):
        return watcher
    if sample is None:
        raise UnknownVerdictError(
            f"the memory of the GPUs cannot be seen: {watcher.unseen}",
            next_step="verify on the server's machine, or with --gpus none",
        )
    missing = sorted((numbers or set()) - {gpu.index for gpu in sample})
    if missing:
        raise UnknownVerdictError(
            f"--gpus {choice}: there is no GPU {missing[0]} here",
            next_step="nvidia-smi lists the GPUs; --gpus none verifies without their memory",
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


def _look() -> _Sample | Unseen:
    driver, seen_gpus = gpus.collect(Host(), knowledge.load())
    if isinstance(seen_gpus, Unseen):
        return seen_gpus
    by_nvml = tuple(gpu for gpu in seen_gpus if gpu.told_by == "nvml")
    if seen_gpus and not by_nvml:
        return Unseen(driver.fault or "NVML does not answer")
    return by_nvml


def _processes(gpu: Gpu) -> Mapping[int, int]:
    """Return the bytes of each process; none where the driver does not say of each.

    A container's driver lists none, although memory is in use.
    """
    processes = () if isinstance(gpu.processes, Unseen) else gpu.processes
    sizes = {one.pid: one.memory for one in processes if one.memory is not None}
    return sizes if len(sizes) == len(processes) else {}

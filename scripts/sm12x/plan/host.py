"""The machine around the GPUs: the known kinds, this machine, and the host memory for sleep."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic import BeforeValidator, Field

from sm12x import layout
from sm12x.core import declared
from sm12x.core.declared import Declared, NotNull, one_of, shown
from sm12x.core.errors import BadFileError, ToolMissingError, UsageError
from sm12x.core.text import GIB
from sm12x.plan.budget import (
    BASES,
    DOES_NOT_FIT,
    FITS,
    SYSTEM,
    UNKNOWN,
    Amount,
    Deployment,
    Hardware,
    Term,
)

# A cgroup without a limit says "max", or in version 1 the largest number of pages there can be.
_NO_LIMIT = 1 << 60
_UNIFIED_CAPABILITIES = ("12.1",)


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Pinned host memory of one machine for the level-1 copies of ``asleep``.

    ``copies`` is None where a sleeping server's weights are not known; ``ram`` is the smaller of
    the machine's memory and the cgroup's limit, None where not known. ``kept_kv`` are the most GiB
    of KV cache that sleeps keep beside the copies, where there is room: it is no need.
    """

    copies: Amount | None
    asleep: tuple[str, ...]
    ram: float | None
    kept_kv: float = 0.0

    @shown
    def verdict(self) -> str:
        if self.copies and self.copies.high == 0:
            return FITS
        if self.copies is None or self.ram is None:
            return UNKNOWN
        return FITS if self.copies.high <= self.ram else DOES_NOT_FIT

    @property
    def margin(self) -> float | None:
        """GiB left for the processes and the page cache, at the worst end."""
        if self.copies is None or self.ram is None:
            return None
        return self.ram - self.copies.high


def _ends(value: object) -> Amount:
    low, high = declared.ends(value)
    return Amount(low=low, high=high)


_Amount = Annotated[Amount, BeforeValidator(_ends)]


@dataclass(frozen=True, kw_only=True)
class _System(Declared):
    amount: _Amount
    basis: Annotated[str, one_of(*BASES)]
    source: str


@dataclass(frozen=True, kw_only=True)
class _Kind(Declared):
    name: str
    capability: str
    multiprocessors: Annotated[int, Field(gt=0)]
    memory: _Amount
    basis: Annotated[str, one_of(*BASES)]
    source: str
    unified: bool
    system: Annotated[_System | None, NotNull()] = None


def kinds(path: Path | None = None) -> dict[str, Hardware]:
    """The kinds of hardware by key. Raises BadFileError if the file is not as it must be."""
    path = path or layout.data() / "hardware.toml"
    found = declared.read_toml(dict[str, _Kind], path, next_step="restore it from the checkout")
    return {
        key: Hardware(
            key=key,
            **{
                **vars(kind),
                "system": kind.system and Term(name=SYSTEM, **vars(kind.system)),
            },
        )
        for key, kind in found.items()
    }


def here(
    *, nvml: ModuleType | None = None, proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> Hardware:
    """This machine: its GPUs as NVML has them, its memory as the kernel has it.

    Raises:
        ToolMissingError: NVML's bindings are not installed, or there is no driver.
        UsageError: there is no GPU, or GPUs of different kinds.
    """
    nvml = nvml or _nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ToolMissingError(
            f"the NVIDIA driver cannot be asked about GPUs ({error})",
            next_step="run this where the driver is loaded (nvidia-smi works; a container needs "
            "--gpus all), or name the hardware with --hardware",
        ) from None
    try:
        found = [_gpu(nvml, index, proc) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    if not found:
        raise UsageError(
            "the NVIDIA driver is there and shows no GPU",
            next_step="check CUDA_VISIBLE_DEVICES and --gpus, or name the hardware with --hardware",
        )
    names = {name for name, _, _ in found}
    if len(names) > 1:
        raise UsageError(
            f"the GPUs are of different kinds: {', '.join(sorted(names))}",
            next_step="plan for one kind with --hardware",
        )
    name, capability, memory = min(found, key=lambda gpu: gpu[2])
    unified = capability in _UNIFIED_CAPABILITIES
    known = [kind for kind in kinds().values() if kind.capability == capability and kind.unified]
    return Hardware(
        key="here",
        name=name,
        capability=capability,
        memory=Amount.of(memory),
        basis="measured",
        source="NVML on this machine" if not unified else "MemTotal of this machine",
        unified=unified,
        system=known[0].system if unified and known else None,
        gpus=len(found),
        ram=ram(proc=proc, sys=sys),
    )


def _nvml() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise ToolMissingError(
            "--here needs NVIDIA's bindings for Python, which are not installed",
            next_step="pip install nvidia-ml-py (the image has it), or name the hardware with "
            "--hardware",
        ) from None


def _gpu(nvml: ModuleType, index: int, proc: Path) -> tuple[str, str, float]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    try:
        # Version 2 tells apart what the driver keeps to itself; CUDA, and so vLLM, do not see that.
        info = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        memory = (info.total - info.reserved) / GIB
    except nvml.NVMLError:
        # GB10 has no memory of its own to report: it is the machine's.
        memory = _total(proc)
    return (name if isinstance(name, str) else name.decode()), f"{major}.{minor}", memory


def ram(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> float:
    """GiB that processes here may use: the machine's memory, or the cgroup's limit if smaller."""
    return min([_total(proc), *_limits(proc, sys / "fs/cgroup")])


def _total(proc: Path) -> float:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024 / GIB
    raise BadFileError(f"{proc}/meminfo has no MemTotal", next_step="give --ram")


def _limits(proc: Path, cgroup: Path) -> Iterable[float]:
    """Every limit on the way from this process's cgroup to the top, in GiB."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in ("0::/", *lines):
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        name = "memory.max" if number == "0" else "memory.limit_in_bytes"
        top = cgroup if number == "0" else cgroup / "memory"
        # In a container the path is the host's and is not there; its own limit is at the top.
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            try:
                text = (folder / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _NO_LIMIT:
                yield int(text) / GIB


def need(asleep: Sequence[Deployment], hardware: Hardware) -> HostNeed:
    """Host memory of one machine while ``asleep`` sleep: level 1 keeps all of their weights there.

    On unified memory this is 0: the copies are terms of the budget itself.
    """
    copying = [server for server in asleep if server.copies_weights and not hardware.unified]
    total: Amount | None = Amount.of(0.0)
    for server in copying:
        if server.weights is None or total is None:
            total = None
        else:
            total = total + server.weights.amount * server.gpus
    keeping = [server for server in asleep if server.keeps_kv and not hardware.unified]
    return HostNeed(
        copies=total,
        asleep=tuple(server.name for server in copying),
        ram=hardware.ram,
        kept_kv=sum(_most_kv(server, hardware) for server in keeping),
    )


def _most_kv(server: Deployment, hardware: Hardware) -> float:
    """GiB of KV cache on one machine: its budget, or all that the GPUs have room for."""
    weights = server.weights.amount.low if server.weights else 0.0
    most = max(0.0, server.utilization * hardware.memory.high - weights) * server.gpus
    return most if server.kv_budget is None else min(most, server.kv_budget)


def loading(server: Deployment, hardware: Hardware) -> str | None:
    """A warning about the page cache while ``server`` loads on unified memory, None if none is due.

    Every machine reads the whole checkpoint, and its pages compete with the KV cache for what the
    weights leave free.
    """
    if not hardware.unified or server.weights is None:
        return None
    checkpoint = server.weights.amount.low * server.gpus * server.machines
    system = hardware.system.amount.high if hardware.system else 0.0
    free = hardware.memory.low - server.weights.amount.high - system
    if checkpoint <= free:
        return None
    return (
        f"while {server.name} loads, about {checkpoint:.0f} GiB stream through the page cache and "
        f"{max(0.0, free):.0f} GiB are free of weights: boot clean, drop caches whenever MemFree "
        "falls below 8 GiB until the server is up, or load with --load-format instanttensor or "
        "--safetensors-load-strategy prefetch"
    )

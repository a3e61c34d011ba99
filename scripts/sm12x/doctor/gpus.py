"""Driver and GPUs: from NVML, else from the kernel. And the checks of GPUs and their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sm12x.audit.model import DEVICES, Device
from sm12x.core.text import GIB, counted, ranges, size
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import (
    Facts,
    Finding,
    Gpu,
    GpuDriver,
    GpuProcess,
    bad,
    check,
    info,
    ok,
    unknown,
    warn,
)

_NVIDIA = "0x10de"
_DRIVER = "/proc/driver/nvidia"
_PCI = "/sys/bus/pci/devices"
# PCI classes "VGA compatible" and "3D": a board has audio and USB functions too.
_DISPLAY = ("0x0300", "0x0302")
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
# Fields of /proc/meminfo that add up to Linux's own use; the rest of the total is a driver's.
_ACCOUNTED = (
    *("MemFree", "Buffers", "Cached", "SwapCached", "Slab", "AnonPages", "PageTables"),
    *("KernelStack", "Percpu", "VmallocUsed", "Hugetlb"),
)


def collect(host: Host, known: Knowledge) -> tuple[GpuDriver, tuple[Gpu, ...] | Unseen]:
    """Collect the driver and the GPUs from NVML, else from the kernel."""
    driver = _kernel_driver(host)
    try:
        nvml = host.nvml()
    except ImportError:
        fault, asked = "nvidia-ml-py is not installed", False
    else:
        answer = _by_nvml(nvml, known)
        if not isinstance(answer, str):
            version, gpus = answer
            driver = replace(driver, loaded=True, version=version)
            return driver, tuple(_with_iommu(host, gpu) for gpu in gpus)
        fault, asked = f"NVML: {answer}", True
    if driver.loaded:
        driver = replace(driver, fault=fault, asked=asked)
    if not host.path(_PCI).is_dir():
        return driver, Unseen(f"{fault}; /sys/bus/pci is not there either")
    return driver, tuple(_with_iommu(host, gpu) for gpu in _by_kernel(host, known))


def _kernel_driver(host: Host) -> GpuDriver:
    text = host.text(f"{_DRIVER}/version")
    if isinstance(text, Unseen):
        version = host.text("/sys/module/nvidia/version")
        return GpuDriver(loaded=not isinstance(version, Unseen), version=version)
    first = text.splitlines()[0] if text else ""
    match = _VERSION.search(first)
    return GpuDriver(
        loaded=True,
        version=match[1] if match else Unseen(f"{_DRIVER}/version says {first!r}"),
        open_modules="Open Kernel Module" in first,
    )


def _by_nvml(nvml: Any, known: Knowledge) -> tuple[str, list[Gpu]] | str:
    """Return the driver's version and the GPUs, or why the driver does not say."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return str(error)
    try:
        version = _decoded(nvml.nvmlSystemGetDriverVersion())
        return version, [_nvml_gpu(nvml, known, n) for n in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return str(error)
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, known: Knowledge, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def query(name: str, *more: object) -> Any:
        """Call a function of NVML; None where the driver or the module does not have it."""
        try:
            return getattr(nvml, name)(handle, *more)
        except (nvml.NVMLError, AttributeError, TypeError):
            return None

    name = _decoded(nvml.nvmlDeviceGetName(handle))
    model = known.model_of_name(name)
    # Version 2 of the struct counts the driver's own reserve apart from used memory.
    memory = query("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", 0))
    memory = memory or query("nvmlDeviceGetMemoryInfo")
    load, milliwatts = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetPowerUsage")
    mode = query("nvmlDeviceGetMigMode")
    return Gpu(
        index=index,
        name=name,
        bus=_short(_decoded(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        capability=Device(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        unified=bool(model and model.unified),
        hardware=model.hardware if model else "",
        told_by="nvml",
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        processes=_nvml_processes(nvml, handle),
        busy=int(load.gpu) if load else None,
        watts=None if milliwatts is None else milliwatts / 1000,
        split=bool(mode[0]) if mode else None,
    )


def _nvml_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | Unseen:
    try:
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    except nvml.NVMLError as error:
        return Unseen(f"NVML does not list processes: {error}")
    listed = {one.pid: one.usedGpuMemory for one in (*compute, *graphics)}
    return tuple(GpuProcess(pid=pid, memory=used) for pid, used in listed.items())


def _by_kernel(host: Host, known: Knowledge) -> Iterator[Gpu]:
    """List the GPUs on the PCI bus, with the names that a loaded driver has for them."""
    index = 0
    for bus in host.names(_PCI):
        folder = f"{_PCI}/{bus}"
        if host.word(f"{folder}/vendor") != _NVIDIA:
            continue
        if not host.word(f"{folder}/class").startswith(_DISPLAY):
            continue
        number = host.word(f"{folder}/device").removeprefix("0x").lower()
        model = next((one for one in known.models if number in one.pci), None)
        name = model.name if model else f"NVIDIA device 10de:{number or '?'}"
        named = re.search(r"Model:\s*(.+)", host.word(f"{_DRIVER}/gpus/{bus}/information"))
        name = named[1] if named else name
        model = model or known.model_of_name(name)
        yield Gpu(
            index=index,
            name=name,
            bus=_short(bus),
            capability=model.capability if model else None,
            unified=bool(model and model.unified),
            hardware=model.hardware if model else "",
            told_by="pci",
        )
        index += 1


def _with_iommu(host: Host, gpu: Gpu) -> Gpu:
    return replace(gpu, iommu=host.word(f"{_PCI}/{gpu.bus}/iommu_group/type"))


def _short(bus: str) -> str:
    """NVML writes the PCI domain with eight digits, sysfs with four."""
    domain, _, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch(r"[0-9a-f]{4,8}", domain) else bus


def _decoded(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def alike(facts: Facts) -> list[list[Gpu]]:
    """GPUs of one kind together, in the order of their first."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in facts.seen_gpus:
        groups.setdefault(gpu.kind, []).append(gpu)
    return [*groups.values()]


@check("gpu.present")
def _present(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.gpus, Unseen):
        yield unknown(f"could not see GPUs: {facts.gpus.why}")
    elif not facts.gpus:
        yield info("no NVIDIA GPU on the PCI bus: the image's `check` runs here, a server does not")
    for group in alike(facts):
        first = group[0]
        memory = f", {size(first.memory_total)} each" if first.memory_total else ""
        seen = f"{len(group)} x {first.kind}{memory} (told by {first.told_by})"
        if first.capability is None:
            yield unknown(f"could not see the compute capability of {seen}")
        elif first.capability in DEVICES:
            yield ok(seen)
        else:
            yield warn(f"{seen}: the stack is not for this GPU")


@check("gpu.split")
def _split(facts: Facts) -> Iterator[Finding]:
    """Report cards in MIG mode: a server gets a slice, and names and counts are of the card."""
    for gpu in facts.seen_gpus:
        by_nvml = gpu.told_by == "nvml"
        if gpu.split:
            seen = f"{gpu} is split (MIG mode): a server gets one slice and its memory"
            yield warn(seen, "slices", "whole", index=gpu.index)
        elif gpu.split is None and by_nvml and gpu.memory_total is None and not gpu.unified:
            seen = f"the driver gives no memory of {gpu}, as of a card that is split (MIG mode)"
            yield unknown(seen, "slices")


@check("gpu.leftover")
def _leftover(facts: Facts) -> Iterator[Finding]:
    """Check each GPU for memory in use that no process owns."""
    empty: dict[int, int] = {}
    for gpu in facts.seen_gpus:
        if gpu.unified:
            yield _unified_leftover(facts, gpu)
        elif gpu.memory_used is None:
            why = "the driver was not asked, or gives none"
            yield unknown(f"could not see the memory used on {gpu}: {why}")
        elif gpu.memory_used <= facts.known.thresholds.leftover_gib * GIB:
            empty[gpu.index] = gpu.memory_used
        else:
            yield _used(facts, gpu, gpu.memory_used)
    if empty:
        yield ok(f"GPU {ranges(empty)}: empty ({size(max(empty.values()))} in use at most)")


def _used(facts: Facts, gpu: Gpu, used: int) -> Finding:
    if isinstance(gpu.processes, Unseen):
        seen = f"could not see who holds {size(used)} of {gpu}: {gpu.processes.why}"
        return unknown(seen, "holders")
    owned = [process.memory for process in gpu.processes]
    who = counted(len(owned), "process", "processes")
    rest = used - sum(filter(None, owned))
    if owned and (None in owned or rest <= facts.known.thresholds.leftover_gib * GIB):
        return info(f"{gpu}: {size(used)} in use by {who}", "holders")
    # Where the driver may not list every process.
    why, where = "", ""
    if container := facts.machine.container:
        why, where = f"inside a container ({container}) other processes are hidden", "host"
    elif facts.machine.wsl:
        why, where = "the processes of Windows are not listed in WSL2", "windows"
    elif gpu.split:
        why, where = "those in slices of a split card are listed to root alone", "root"
    if why:
        return unknown(f"could not see who holds {size(rest)} of {gpu}: {why}", where)
    if owned:
        seen = f"{gpu}: {who} own {size(used - rest)}, {size(rest)} more belong to no process"
        return warn(seen, "holders")
    return bad(f"{gpu}: {size(used)} in use and no process owns it", "holders", "reboot")


def _unified_leftover(facts: Facts, gpu: Gpu) -> Finding:
    entries = facts.meminfo
    if isinstance(entries, Unseen):
        return unknown(f"could not see the memory used on {gpu}: {entries.why}")
    driver = entries["MemTotal"] - sum(entries.get(entry, 0) for entry in _ACCOUNTED)
    processes = () if isinstance(gpu.processes, Unseen) else gpu.processes
    owned = sum(process.memory or 0 for process in processes)
    rest = max(driver - owned, 0)
    usage = f"{gpu}: the driver holds about {size(max(driver, 0))}"
    if rest <= facts.known.thresholds.unified_leftover_gib * GIB:
        return ok(f"{usage}, {size(owned)} of it for processes")
    if any(process.memory is None for process in processes):
        who = counted(len(processes), "process", "processes")
        return info(f"{usage}, for {who} of unknown size")
    if isinstance(gpu.processes, Unseen) or facts.machine.container:
        return unknown(f"{usage}; could not see whether a process owns it", "holders")
    return bad(f"{usage}, and {size(rest)} of it belong to no process", "holders", "reboot")


@check("gpu.unified")
def _unified(facts: Facts) -> Iterator[Finding]:
    if facts.unified:
        entries = facts.meminfo
        total = "" if isinstance(entries, Unseen) else f", {size(entries['MemTotal'])} in all"
        yield info(
            f"CPU and GPU share one memory{total}: keep one model awake rather than sleeping at "
            "level 1, and count every other program against the GPU",
            "plan",
        )


@check("gpu.stuck")
def _stuck(facts: Facts) -> Iterator[Finding]:
    """Report GPUs that are busy at almost no power: a kernel waits for data that never arrives."""
    for gpu in facts.seen_gpus:
        model = facts.known.model_of_name(gpu.name)
        if model is None or not model.stuck_watts or gpu.busy is None or gpu.watts is None:
            continue
        if gpu.busy >= facts.known.thresholds.stuck_percent and gpu.watts <= model.stuck_watts:
            seen = f"{gpu}: {gpu.busy} % busy at {gpu.watts:.0f} W: its kernel waits, without work"
            yield warn(seen, "ask")

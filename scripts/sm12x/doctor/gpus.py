"""Driver and GPUs: from NVML, else from the kernel.

And the checks of them: whether the image runs on them, and the memory they still hold.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sm12x.audit.model import DEVICES, HOST, NATIVE, NONE, PTX, Device, compiles_on
from sm12x.audit.model import UNKNOWN as UNREADABLE
from sm12x.core.text import GIB, counted, ranges, size
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import GpuModel, Knowledge, check
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    WARN,
    Finding,
    Gpu,
    GpuDriver,
    GpuProcess,
    HostFacts,
    Image,
    ImageLibrary,
    Unseen,
)

_NVIDIA = "0x10de"
_DRIVER = "/proc/driver/nvidia"
# PCI classes "VGA compatible" and "3D": a board has audio and USB functions too.
_DISPLAY = ("0x0300", "0x0302")
_MISSING = "is not installed"
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
# Kernel messages about faults of the driver or its firmware.
_TROUBLE = re.compile(r"NVRM:.*(Xid|NV_ERR_NO_MEMORY|heartbeat timed out|GPU is probably locked)")


def collect(host: Host, knowledge: Knowledge) -> tuple[GpuDriver, tuple[Gpu, ...] | Unseen]:
    """Collect the driver and the GPUs from NVML, else from the kernel."""
    driver = _kernel_driver(host)
    answer = _by_nvml(host, knowledge)
    if not isinstance(answer, Unseen):
        version, gpus = answer
        driver = replace(driver, loaded=True, version=version)
        return driver, tuple(_with_iommu(host, gpu) for gpu in gpus)
    if driver.loaded:
        driver = replace(driver, fault=answer.why, asked=not answer.why.endswith(_MISSING))
    if not host.path("/sys/bus/pci/devices").is_dir():
        return driver, Unseen(f"{answer.why}; /sys/bus/pci is not there either")
    return driver, tuple(_with_iommu(host, gpu) for gpu in _by_kernel(host, knowledge))


def log(host: Host) -> tuple[str, ...] | Unseen:
    """Lines of the kernel log in which the driver reports trouble, without their time stamps."""
    done = host.ask(["dmesg"])
    if isinstance(done, Unseen):
        return done
    lines = (re.sub(r"^\[[^\]]*\]\s*", "", line) for line in done.stdout.splitlines())
    return tuple(line for line in lines if _TROUBLE.search(line))


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


def _by_nvml(host: Host, knowledge: Knowledge) -> tuple[str, list[Gpu]] | Unseen:
    try:
        nvml = host.nvml()
    except ImportError:
        return Unseen(f"nvidia-ml-py {_MISSING}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Unseen(f"NVML: {error}")
    try:
        version = _decoded(nvml.nvmlSystemGetDriverVersion())
        gpus = [_nvml_gpu(nvml, knowledge, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return Unseen(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    return version, gpus


def _nvml_gpu(nvml: Any, knowledge: Knowledge, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    gpu = _gpu(
        knowledge,
        index=index,
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        bus=_decoded(nvml.nvmlDeviceGetPciInfo(handle).busId),
        capability=Device(major, minor),
        told_by="nvml",
    )

    def query(name: str, *more: object) -> Any:
        """Call a function of NVML; None where the driver or the module does not have it."""
        try:
            return getattr(nvml, name)(handle, *more)
        except (nvml.NVMLError, AttributeError, TypeError):
            return None

    # Version 2 of the struct counts the driver's own reserve apart from used memory.
    memory = query("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", 0))
    memory = memory or query("nvmlDeviceGetMemoryInfo")
    load, milliwatts = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetPowerUsage")
    mode = query("nvmlDeviceGetMigMode")
    return replace(
        gpu,
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


def _by_kernel(host: Host, knowledge: Knowledge) -> list[Gpu]:
    """List the GPUs on the PCI bus, with the names that a loaded driver has for them."""
    gpus: list[Gpu] = []
    for bus in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{bus}"
        kind, device = host.text(f"{folder}/class"), host.text(f"{folder}/device")
        if host.text(f"{folder}/vendor") != _NVIDIA or not str(kind).startswith(_DISPLAY):
            continue
        number = "" if isinstance(device, Unseen) else device.removeprefix("0x").lower()
        model = knowledge.model_of_pci(number)
        name = model.name if model else f"NVIDIA device 10de:{number or '?'}"
        named = re.search(r"Model:\s*(.+)", str(host.text(f"{_DRIVER}/gpus/{bus}/information")))
        name = named[1] if named else name
        gpus.append(
            _gpu(knowledge, index=len(gpus), name=name, bus=bus, told_by="pci", model=model)
        )
    return gpus


def _gpu(
    knowledge: Knowledge,
    *,
    index: int,
    name: str,
    bus: str,
    told_by: str,
    capability: Device | None = None,
    model: GpuModel | None = None,
) -> Gpu:
    model = model or knowledge.model_of_name(name)
    return Gpu(
        index=index,
        name=name,
        bus=_short(bus),
        capability=capability or (model.capability if model else None),
        unified=bool(model and model.unified),
        hardware=model.hardware if model else "",
        told_by=told_by,
    )


def _with_iommu(host: Host, gpu: Gpu) -> Gpu:
    kind = host.text(f"/sys/bus/pci/devices/{gpu.bus}/iommu_group/type")
    return gpu if isinstance(kind, Unseen) else replace(gpu, iommu=kind)


def _short(bus: str) -> str:
    """NVML writes the PCI domain with eight digits, sysfs with four."""
    domain, _, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch(r"[0-9a-f]{4,8}", domain) else bus


def _decoded(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


# Fields of /proc/meminfo that add up to Linux's own use; the rest of the total is a driver's.
_ACCOUNTED = (
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "Slab",
    "AnonPages",
    "PageTables",
    "KernelStack",
    "Percpu",
    "VmallocUsed",
    "Hugetlb",
)


@check("gpu.present")
def present(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    if isinstance(facts.gpus, Unseen):
        return [Finding(UNKNOWN, f"could not see GPUs: {facts.gpus.why}")]
    if not facts.gpus:
        seen = "no NVIDIA GPU on the PCI bus: the image's `check` runs here, a server does not"
        return [Finding(INFO, seen)]
    findings = []
    for title, group in _alike(facts.gpus):
        first = group[0]
        memory = f", {size(first.memory_total)} each" if first.memory_total else ""
        seen = f"{len(group)} x {title}{memory} (told by {first.told_by})"
        if first.capability is None:
            seen = f"could not see the compute capability of {seen}"
            findings.append(Finding(UNKNOWN, seen))
        elif first.capability in DEVICES:
            findings.append(Finding(OK, seen))
        else:
            seen += ": the stack is not for this GPU"
            findings.append(Finding(WARN, seen))
    return findings


@check("image.audit")
def image_known(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    image = facts.image
    if isinstance(image, Unseen):
        seen = f"could not see how the image was compiled: {image.why}"
        return [Finding(UNKNOWN, seen, fix=("build", "audit"))]
    stack = f", stack {image.stack_id}" if image.stack_id else ""
    about = f"{image.name}{stack}, for {image.machine or 'an unknown architecture'}"
    if image.machine and image.machine != facts.machine.name:
        seen = f"{about}, but this is {facts.machine.name}: it does not start here"
        return [Finding(BAD, seen, fix=("build",))]
    return [Finding(OK, about)]


@check("gpu.code")
def code(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    """Check how each kind of GPU runs the image: natively, through PTX, or not at all."""
    if isinstance(facts.image, Unseen):
        return
    for title, group in _alike(facts.seen_gpus):
        device = group[0].capability
        if device is None:
            seen = f"could not see how {title} runs the image: its compute capability is not known"
            yield Finding(UNKNOWN, seen)
        else:
            which = f"GPU {ranges(gpu.index for gpu in group)} {title}"
            yield _code(facts.image, device, which)


@check("gpu.leftover")
def leftover(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    """Check each GPU for memory in use that no process owns."""
    empty: list[Gpu] = []
    for gpu in facts.seen_gpus:
        if gpu.unified:
            yield _unified_leftover(facts, gpu, knowledge)
        elif gpu.memory_used is None:
            why = "the driver was not asked, or gives none"
            seen = f"could not see the memory used on {gpu}: {why}"
            yield Finding(UNKNOWN, seen)
        elif gpu.memory_used <= knowledge.thresholds.leftover_gib * GIB:
            empty.append(gpu)
        else:
            yield _leftover(facts, gpu, gpu.memory_used, knowledge)
    if empty:
        most = max(gpu.memory_used or 0 for gpu in empty)
        seen = f"GPU {ranges(gpu.index for gpu in empty)}: empty ({size(most)} in use at most)"
        yield Finding(OK, seen)


@check("gpu.unified")
def unified(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    if not facts.unified:
        return []
    info = facts.memory.info
    total = "" if isinstance(info, Unseen) else f", {size(info['MemTotal'])} in all"
    seen = (
        f"CPU and GPU share one memory{total}: keep one model awake rather than sleeping at "
        "level 1, and count every other program against the GPU"
    )
    return [Finding(INFO, seen, fix=("plan",))]


def _code(image: Image, device: Device, which: str) -> Finding:
    counted: Counter[str] = Counter()
    for library in image.libraries:
        counted.update(_units(library, device))
    counts = f"{counted[NATIVE]} native, {counted[PTX]} through PTX, {counted[NONE]} not at all"
    by_unit = device in DEVICES and not image.by_library
    unit = "translation units" if by_unit else "libraries"
    # The wheel that an audit of dist/ names lies beside it.
    is_wheel = image.name.endswith(".whl")
    subject = str(image.audit.with_name(image.name)) if is_wheel else image.name
    audit = partial(
        Finding, fix=("audit",), values={"subject": shlex.quote(subject), "device": device}
    )
    if counted[NATIVE] + counted[PTX] == 0:
        return audit(BAD, f"{which} cannot run the image: {unit} {counts}")
    if image.offenders.get(device):
        first = image.offenders[device][0]
        seen = f"{which}: {unit} {counts}; against the policy: {first}"
        return audit(BAD, seen)
    if counted[UNREADABLE]:
        seen = f"{which}: {unit} {counts}, {counted[UNREADABLE]} that could not be read"
        return audit(WARN, seen)
    if device not in DEVICES:
        seen = f"{which}: {unit} {counts}; the image was compiled and judged for 12.x only"
        return audit(WARN, seen)
    if counted[NATIVE] == 0:
        return audit(WARN, f"{which}: {unit} {counts}")
    accepted = "; units without code are for other GPUs" if counted[NONE] and image.passed else ""
    seen = f"{which}: {unit} {counts}{accepted}"
    return Finding(INFO if counted[PTX] else OK, seen)


def _units(library: ImageLibrary, device: Device) -> Counter[str]:
    """Translation units by verdict, or the library as one where the audit did not ask for it."""
    if device in library.units:
        return Counter(library.units[device])
    if not library.readable:
        return Counter({UNREADABLE: 1})
    if not library.cubins and not library.ptx:
        return Counter({HOST: 1})
    if any(arch.runs_on(device.major, device.minor) for arch in library.cubins):
        return Counter({NATIVE: 1})
    return Counter({PTX if any(compiles_on(arch, device) for arch in library.ptx) else NONE: 1})


@check("gpu.split")
def split(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    """Report cards in MIG mode: a server gets a slice, and names and counts are of the card."""
    for gpu in facts.seen_gpus:
        by_nvml = gpu.told_by == "nvml"
        if gpu.split:
            seen = f"{gpu} is split (MIG mode): a server gets one slice and its memory"
            yield Finding(WARN, seen, fix=("slices", "whole"), values={"index": gpu.index})
        elif gpu.split is None and by_nvml and gpu.memory_total is None and not gpu.unified:
            seen = f"the driver gives no memory of {gpu}, as of a card that is split (MIG mode)"
            yield Finding(UNKNOWN, seen, fix=("slices",))


def _hidden(facts: HostFacts, gpu: Gpu) -> tuple[str, tuple[str, ...]]:
    """Why the driver may not list every process, and where they are seen; "" if it does."""
    container = facts.machine.container
    if container:
        why = f"inside a container ({container}) other processes are hidden"
        return why, ("host",)
    if facts.machine.wsl:
        return "the processes of Windows are not listed in WSL2", ("windows",)
    if gpu.split:
        return "those in slices of a split card are listed to root alone", ("root",)
    return "", ()


def _leftover(facts: HostFacts, gpu: Gpu, used: int, knowledge: Knowledge) -> Finding:
    holders = ("holders",)
    if isinstance(gpu.processes, Unseen):
        seen = f"could not see who holds {size(used)} of {gpu}: {gpu.processes.why}"
        return Finding(UNKNOWN, seen, fix=holders)
    owned = [process.memory for process in gpu.processes]
    who = counted(len(owned), "process", "processes")
    rest = used - sum(filter(None, owned))
    if owned and (None in owned or rest <= knowledge.thresholds.leftover_gib * GIB):
        return Finding(INFO, f"{gpu}: {size(used)} in use by {who}", fix=holders)
    why, where = _hidden(facts, gpu)
    if why:
        seen = f"could not see who holds {size(rest)} of {gpu}: {why}"
        return Finding(UNKNOWN, seen, fix=where)
    if owned:
        seen = f"{gpu}: {who} own {size(used - rest)}, {size(rest)} more belong to no process"
        return Finding(WARN, seen, fix=holders)
    seen = f"{gpu}: {size(used)} in use and no process owns it"
    return Finding(BAD, seen, fix=("holders", "reboot"))


def _unified_leftover(facts: HostFacts, gpu: Gpu, knowledge: Knowledge) -> Finding:
    info = facts.memory.info
    if isinstance(info, Unseen):
        return Finding(UNKNOWN, f"could not see the memory used on {gpu}: {info.why}")
    driver = info["MemTotal"] - sum(info.get(entry, 0) for entry in _ACCOUNTED)
    processes = () if isinstance(gpu.processes, Unseen) else gpu.processes
    owned = sum(process.memory or 0 for process in processes)
    rest = max(driver - owned, 0)
    usage = f"{gpu}: the driver holds about {size(max(driver, 0))}"
    if rest <= knowledge.thresholds.unified_leftover_gib * GIB:
        return Finding(OK, f"{usage}, {size(owned)} of it for processes")
    if processes and any(process.memory is None for process in processes):
        seen = f"{usage}, for {counted(len(processes), 'process', 'processes')} of unknown size"
        return Finding(INFO, seen)
    if isinstance(gpu.processes, Unseen) or facts.machine.container:
        seen = f"{usage}; could not see whether a process owns it"
        return Finding(UNKNOWN, seen, fix=("holders",))
    seen = f"{usage}, and {size(rest)} of it belong to no process"
    return Finding(BAD, seen, fix=("holders", "reboot"))


@check("gpu.stuck")
def stuck(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    """Report GPUs that are busy at almost no power: a kernel waits for data that never arrives."""
    for gpu in facts.seen_gpus:
        model = knowledge.model_of_name(gpu.name)
        if model is None or not model.stuck_watts or gpu.busy is None or gpu.watts is None:
            continue
        if gpu.busy >= knowledge.thresholds.stuck_percent and gpu.watts <= model.stuck_watts:
            seen = f"{gpu}: {gpu.busy} % busy at {gpu.watts:.0f} W: its kernel waits, without work"
            yield Finding(WARN, seen, fix=("ask",))


def _alike(gpus: Iterable[Gpu]) -> list[tuple[str, list[Gpu]]]:
    """GPUs of one kind together, in the order of their first."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        capability = f" ({gpu.capability})" if gpu.capability else ""
        groups.setdefault(f"{gpu.name}{capability}", []).append(gpu)
    return list(groups.items())

"""Driver and GPUs: NVML first, then nvidia-smi, then what the kernel shows without either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sm12x.audit.model import Device
from sm12x.core.text import MIB
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import GpuModel, Knowledge
from sm12x.doctor.model import Gpu, GpuDriver, GpuProcess, Unseen

_NVIDIA = "0x10de"
# PCI classes "VGA compatible" and "3D": a board has audio and USB functions too.
_DISPLAY = ("0x0300", "0x0302")
# Never ask for the supported clocks: that query alone hangs some boards (see doctor.toml).
_QUERY = "index,name,pci.bus_id,compute_cap,memory.total,memory.used,driver_version"
_LOAD = "index,utilization.gpu,power.draw"
_MISSING = "is not installed"
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
# What the kernel says when the driver or its firmware is in trouble.
_TROUBLE = re.compile(r"NVRM:.*(Xid|NV_ERR_NO_MEMORY|heartbeat timed out|GPU is probably locked)")


def collect(host: Host, known: Knowledge) -> tuple[GpuDriver, tuple[Gpu, ...] | Unseen]:
    """The driver and the GPUs, from the first of the ways that works."""
    driver = _kernel_driver(host)
    faults = []
    for way in (_by_nvml, _by_smi):
        found = way(host, known)
        if not isinstance(found, Unseen):
            version, gpus = found
            driver = replace(driver, loaded=True, version=version)
            return driver, tuple(_with_iommu(host, gpu) for gpu in gpus)
        faults.append(found.why)
    if driver.loaded:
        asked = not all(fault.endswith(_MISSING) for fault in faults)
        driver = replace(driver, fault="; ".join(faults), asked=asked)
    gpus = _by_procfs(host, known) or _by_pci(host, known)
    if not gpus and not host.path("/sys/bus/pci/devices").is_dir():
        return driver, Unseen(f"{'; '.join(faults)}; /sys/bus/pci is not there either")
    return driver, tuple(_with_iommu(host, gpu) for gpu in gpus)


def log(host: Host) -> tuple[str, ...] | Unseen:
    """Lines of the kernel log in which the driver reports trouble, without their time stamps."""
    done = host.ask(["dmesg"])
    if isinstance(done, Unseen):
        return done
    lines = (re.sub(r"^\[[^\]]*\]\s*", "", line) for line in done.stdout.splitlines())
    return tuple(line for line in lines if _TROUBLE.search(line))


def _kernel_driver(host: Host) -> GpuDriver:
    text = host.text("/proc/driver/nvidia/version")
    if isinstance(text, Unseen):
        version = host.text("/sys/module/nvidia/version")
        return GpuDriver(loaded=not isinstance(version, Unseen), version=version)
    first = text.splitlines()[0] if text else ""
    found = _VERSION.search(first)
    return GpuDriver(
        loaded=True,
        version=found[1] if found else Unseen(f"/proc/driver/nvidia/version says {first!r}"),
        open_modules="Open Kernel Module" in first,
    )


def _by_nvml(host: Host, known: Knowledge) -> tuple[str, list[Gpu]] | Unseen:
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
        gpus = [_nvml_gpu(nvml, known, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return Unseen(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    return version, gpus


def _nvml_gpu(nvml: Any, known: Knowledge, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    gpu = _gpu(
        known,
        index=index,
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        bus=_decoded(nvml.nvmlDeviceGetPciInfo(handle).busId),
        capability=Device(major, minor),
        told_by="nvml",
    )
    total, used = _nvml_memory(nvml, handle)
    busy, watts = _nvml_load(nvml, handle)
    return replace(
        gpu,
        memory_total=total,
        memory_used=used,
        processes=_nvml_processes(nvml, handle),
        busy=busy,
        watts=watts,
    )


def _nvml_load(nvml: Any, handle: Any) -> tuple[int | None, float | None]:
    """Percent of the time and watts; None where the driver does not say."""
    try:
        # NVML counts power in milliwatts.
        return (
            int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        )
    except nvml.NVMLError:
        return None, None


def _nvml_memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    # The second version counts what the driver reserves for itself apart from what is used.
    for arguments in ((handle, getattr(nvml, "nvmlMemory_v2", 0)), (handle,)):
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(*arguments)
        except (nvml.NVMLError, TypeError):
            continue
        return int(found.total), int(found.used)
    return None, None


def _nvml_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | Unseen:
    found: dict[int, GpuProcess] = {}
    try:
        for each in (
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ):
            found[each.pid] = GpuProcess(pid=each.pid, memory=each.usedGpuMemory)
    except nvml.NVMLError as error:
        return Unseen(f"NVML does not list processes: {error}")
    return tuple(found.values())


def _by_smi(host: Host, known: Knowledge) -> tuple[str, list[Gpu]] | Unseen:
    if host.which("nvidia-smi") is None:
        return Unseen(f"nvidia-smi {_MISSING}")
    done = host.ask(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if isinstance(done, Unseen):
        return done
    gpus = []
    version = ""
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY.split(",")):
            return Unseen(f"nvidia-smi answers {line!r}")
        version = cells[6]
        gpu = _gpu(
            known,
            index=int(cells[0]),
            name=cells[1],
            bus=cells[2],
            capability=_capability(cells[3]),
            told_by="nvidia-smi",
        )
        gpus.append(replace(gpu, memory_total=_mib(cells[4]), memory_used=_mib(cells[5])))
    if not gpus:
        return Unseen("nvidia-smi lists no GPU")
    return version, _smi_load(host, _smi_processes(host, gpus))


def _smi_load(host: Host, gpus: Sequence[Gpu]) -> list[Gpu]:
    words = f"--query-gpu={_LOAD}"
    done = host.ask(["nvidia-smi", words, "--format=csv,noheader,nounits"])
    lines = [] if isinstance(done, Unseen) else done.stdout.splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    load = {
        row[0]: (int(row[1]), float(row[2]))
        for row in rows
        if len(row) == 3 and row[1].isdecimal() and re.fullmatch(r"\d+(\.\d+)?", row[2])
    }
    return [
        replace(gpu, busy=load[key][0], watts=load[key][1])
        if (key := str(gpu.index)) in load
        else gpu
        for gpu in gpus
    ]


def _smi_processes(host: Host, gpus: Sequence[Gpu]) -> list[Gpu]:
    words = "--query-compute-apps=gpu_bus_id,pid,used_gpu_memory"
    done = host.ask(["nvidia-smi", words, "--format=csv,noheader,nounits"])
    if isinstance(done, Unseen):
        return [replace(gpu, processes=done) for gpu in gpus]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[1].isdecimal()]
    return [
        replace(
            gpu,
            processes=tuple(
                GpuProcess(pid=int(pid), memory=_mib(used))
                for bus, pid, used in rows
                if _short(bus) == gpu.bus
            ),
        )
        for gpu in gpus
    ]


def _by_procfs(host: Host, known: Knowledge) -> list[Gpu]:
    gpus = []
    for index, folder in enumerate(host.names("/proc/driver/nvidia/gpus")):
        text = host.text(f"/proc/driver/nvidia/gpus/{folder}/information")
        lines = () if isinstance(text, Unseen) else text.splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        name = fields.get("Model", "an NVIDIA GPU").strip()
        gpus.append(
            _gpu(known, index=index, name=name, bus=folder, capability=None, told_by="procfs")
        )
    return gpus


def _by_pci(host: Host, known: Knowledge) -> list[Gpu]:
    gpus: list[Gpu] = []
    for bus in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{bus}"
        kind = host.text(f"{folder}/class")
        if host.text(f"{folder}/vendor") != _NVIDIA or isinstance(kind, Unseen):
            continue
        if not kind.startswith(_DISPLAY):
            continue
        device = host.text(f"{folder}/device")
        number = "" if isinstance(device, Unseen) else device.removeprefix("0x").lower()
        model = known.model_of_pci(number)
        gpus.append(
            _gpu(
                known,
                index=len(gpus),
                name=model.name if model else f"NVIDIA device 10de:{number or '?'}",
                bus=bus,
                capability=None,
                told_by="pci",
                model=model,
            )
        )
    return gpus


def _gpu(
    known: Knowledge,
    *,
    index: int,
    name: str,
    bus: str,
    capability: Device | None,
    told_by: str,
    model: GpuModel | None = None,
) -> Gpu:
    model = model or known.model_of_name(name)
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
    found = host.text(f"/sys/bus/pci/devices/{gpu.bus}/iommu_group/type")
    return gpu if isinstance(found, Unseen) else replace(gpu, iommu=found)


def _short(bus: str) -> str:
    """NVML writes the PCI domain with eight digits, sysfs with four."""
    domain, _, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch(r"[0-9a-f]{4,8}", domain) else bus


def _capability(text: str) -> Device | None:
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    return Device(int(found[1]), int(found[2])) if found else None


def _mib(text: str) -> int | None:
    """Bytes; None for "[N/A]", which is what GB10 answers."""
    return int(text) * MIB if text.isdecimal() else None


def _decoded(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text

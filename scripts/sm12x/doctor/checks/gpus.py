"""The GPUs: which there are, whether the image runs on them, what they still hold."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable

from sm12x.audit.model import DEVICES, HOST, NATIVE, NONE, PTX, Device, compiles_on
from sm12x.audit.model import UNKNOWN as UNREADABLE
from sm12x.core.text import GIB, counted, ranges, size
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    WARN,
    Diagnosis,
    Gpu,
    HostFacts,
    Image,
    ImageLibrary,
    Unseen,
)

# What Linux itself accounts for in /proc/meminfo; what is missing from the total is a driver's.
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


def present(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "gpu.present"
    if isinstance(facts.gpus, Unseen):
        return [known.finding(name, UNKNOWN, f"could not see GPUs: {facts.gpus.why}")]
    if not facts.gpus:
        seen = "no NVIDIA GPU on the PCI bus: the image's `check` runs here, a server does not"
        return [known.finding(name, INFO, seen)]
    findings = []
    for told, group in _alike(facts.gpus):
        first = group[0]
        memory = f", {size(first.memory_total)} each" if first.memory_total else ""
        seen = f"{len(group)} x {told}{memory} (told by {first.told_by})"
        if first.capability is None:
            seen = f"could not see the compute capability of {seen}"
            findings.append(known.finding(name, UNKNOWN, seen))
        elif first.capability in DEVICES:
            findings.append(known.finding(name, OK, seen))
        else:
            seen += ": not one of the GPUs the stack is for"
            findings.append(known.finding(name, WARN, seen))
    return findings


def image_known(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "image.audit"
    image = facts.image
    if isinstance(image, Unseen):
        fix = (
            "sm12x bundle",
            "sm12x audit IMAGE --json --output audit.json && sm12x doctor --audit audit.json",
        )
        seen = f"could not see how the image was compiled: {image.why}"
        return [known.finding(name, UNKNOWN, seen, fix=fix)]
    stack = f", stack {image.stack_id}" if image.stack_id else ""
    about = f"{image.name}{stack}, for {image.machine or 'an unknown architecture'}"
    if image.machine and image.machine != facts.machine.name:
        seen = f"{about}, but this is {facts.machine.name}: it does not start here"
        return [known.finding(name, BAD, seen, fix=("sm12x bundle",))]
    return [known.finding(name, OK, about)]


def code(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """How each kind of GPU will run the image: natively, through PTX, or not at all."""
    if isinstance(facts.image, Unseen):
        return []
    findings = []
    for told, group in _alike(facts.seen_gpus):
        device = group[0].capability
        if device is None:
            seen = f"could not see how {told} runs the image: its compute capability is not known"
            findings.append(known.finding("gpu.code", UNKNOWN, seen))
        else:
            which = f"GPU {ranges(gpu.index for gpu in group)} {told}"
            findings.append(_code(facts.image, device, which, known))
    return findings


def leftover(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Memory in use on a GPU that no process owns."""
    findings = []
    empty: list[Gpu] = []
    for gpu in facts.seen_gpus:
        if gpu.unified:
            findings.append(_unified_leftover(facts, gpu, known))
        elif gpu.memory_used is None:
            seen = f"could not see what {gpu} holds: the driver was not asked or does not say"
            findings.append(known.finding("gpu.leftover", UNKNOWN, seen))
        elif gpu.memory_used <= known.thresholds.leftover_gib * GIB:
            empty.append(gpu)
        else:
            findings.append(_leftover(facts, gpu, gpu.memory_used, known))
    if empty:
        most = max(gpu.memory_used or 0 for gpu in empty)
        seen = f"GPU {ranges(gpu.index for gpu in empty)}: empty ({size(most)} in use at most)"
        findings.append(known.finding("gpu.leftover", OK, seen))
    return findings


def unified(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    if not facts.unified:
        return []
    info = facts.memory.info
    total = "" if isinstance(info, Unseen) else f", {size(info['MemTotal'])} in all"
    seen = (
        f"CPU and GPU share one memory{total}: keep one model awake rather than sleeping at "
        "level 1, and count every other program against the GPU"
    )
    return [known.finding("gpu.unified", INFO, seen, fix=("sm12x plan RECIPE",))]


def _code(image: Image, device: Device, which: str, known: Knowledge) -> Diagnosis:
    name = "gpu.code"
    counted: Counter[str] = Counter()
    for library in image.libraries:
        counted.update(_units(library, device))
    told = f"{counted[NATIVE]} native, {counted[PTX]} through PTX, {counted[NONE]} not at all"
    by_unit = device in DEVICES and not image.by_library
    unit = "translation units" if by_unit else "libraries"
    audit = (f"sm12x audit {shlex.quote(image.name)} --arch {device}",)
    if counted[NATIVE] + counted[PTX] == 0:
        return known.finding(name, BAD, f"{which} cannot run the image: {unit} {told}", fix=audit)
    if image.offenders.get(device):
        first = image.offenders[device][0]
        seen = f"{which}: {unit} {told}; against the policy: {first}"
        return known.finding(name, BAD, seen, fix=audit)
    if counted[UNREADABLE]:
        seen = f"{which}: {unit} {told}, {counted[UNREADABLE]} that could not be read"
        return known.finding(name, WARN, seen, fix=audit)
    if device not in DEVICES:
        seen = f"{which}: {unit} {told}; the image was compiled and judged for 12.x only"
        return known.finding(name, WARN, seen, fix=audit)
    if counted[NATIVE] == 0:
        return known.finding(name, WARN, f"{which}: {unit} {told}", fix=audit)
    accepted = "; what cannot run is for other GPUs" if counted[NONE] and image.passed else ""
    seen = f"{which}: {unit} {told}{accepted}"
    return known.finding(name, INFO if counted[PTX] else OK, seen)


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


def _leftover(facts: HostFacts, gpu: Gpu, used: int, known: Knowledge) -> Diagnosis:
    name = "gpu.leftover"
    holders = ("sudo fuser -v /dev/nvidia*",)
    if isinstance(gpu.processes, Unseen):
        seen = f"could not see who holds {size(used)} of {gpu}: {gpu.processes.why}"
        return known.finding(name, UNKNOWN, seen, fix=holders)
    if gpu.processes:
        owned = [process.memory for process in gpu.processes]
        who = counted(len(gpu.processes), "process", "processes")
        if None in owned:
            seen = f"{gpu}: {size(used)} in use by {who}"
            return known.finding(name, INFO, seen, fix=holders)
        rest = used - sum(filter(None, owned))
        if rest <= known.thresholds.leftover_gib * GIB:
            return known.finding(name, INFO, f"{gpu}: {size(used)} in use by {who}", fix=holders)
        seen = f"{gpu}: {who} own {size(used - rest)}, {size(rest)} more belong to none"
        return known.finding(name, WARN, seen, fix=holders)
    if facts.machine.container:
        seen = (
            f"could not see who holds {size(used)} of {gpu}: "
            f"inside a container ({facts.machine.container}) other processes are hidden"
        )
        return known.finding(name, UNKNOWN, seen, fix=("sm12x doctor   # on the host",))
    seen = f"{gpu}: {size(used)} in use and no process owns it"
    return known.finding(name, BAD, seen, fix=(*holders, "sudo reboot"))


def _unified_leftover(facts: HostFacts, gpu: Gpu, known: Knowledge) -> Diagnosis:
    name = "gpu.leftover"
    info = facts.memory.info
    if isinstance(info, Unseen):
        return known.finding(name, UNKNOWN, f"could not see what {gpu} holds: {info.why}")
    driver = info["MemTotal"] - sum(info.get(entry, 0) for entry in _ACCOUNTED)
    processes = () if isinstance(gpu.processes, Unseen) else gpu.processes
    owned = sum(process.memory or 0 for process in processes)
    rest = max(driver - owned, 0)
    told = f"{gpu}: the driver holds about {size(max(driver, 0))}"
    if rest <= known.thresholds.unified_leftover_gib * GIB:
        return known.finding(name, OK, f"{told}, {size(owned)} of it for processes")
    if processes and any(process.memory is None for process in processes):
        seen = f"{told}, for {counted(len(processes), 'process', 'processes')} of unknown size"
        return known.finding(name, INFO, seen)
    if isinstance(gpu.processes, Unseen) or facts.machine.container:
        seen = f"{told}; could not see whether a process owns it"
        return known.finding(name, UNKNOWN, seen, fix=("sudo fuser -v /dev/nvidia*",))
    seen = f"{told}, and {size(rest)} of it belong to no process"
    return known.finding(name, BAD, seen, fix=("sudo fuser -v /dev/nvidia*", "sudo reboot"))


def _alike(gpus: Iterable[Gpu]) -> list[tuple[str, list[Gpu]]]:
    """GPUs of one kind together, in the order of their first."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        capability = f" ({gpu.capability})" if gpu.capability else ""
        groups.setdefault(f"{gpu.name}{capability}", []).append(gpu)
    return list(groups.items())

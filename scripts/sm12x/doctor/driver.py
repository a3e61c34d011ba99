"""Checks of the driver: does it answer, is it new enough, are there errors or known faults.

And the kernel: settings that stop GPUs or RDMA from reaching memory.
"""

from __future__ import annotations

from sm12x.core.text import counted, ranges, size
from sm12x.doctor.knowledge import Knowledge, check, numbers
from sm12x.doctor.model import BAD, INFO, OK, UNKNOWN, WARN, Finding, HostFacts, Unseen

# The image's CUDA version where no ledger has it.
_TOOLKIT = "13"
_LINES = 3


@check("driver.loaded")
def answers(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    driver = facts.driver
    branch = next((entry.driver for entry in knowledge.requirements), "")
    if driver.loaded and not driver.fault:
        flavour = {True: ", open kernel modules", False: ", proprietary modules", None: ""}
        return [Finding(OK, f"driver {_version(facts)}{flavour[driver.open_modules]}")]
    if driver.loaded:
        if "mismatch" in driver.fault:
            seen = f"the driver's library and its loaded module differ: {driver.fault}"
            return [Finding(BAD, seen, fix=("reboot",))]
        seen = f"driver {_version(facts)} is loaded, but could not be asked: {driver.fault}"
        if driver.asked:
            return [Finding(BAD, seen, fix=("ask",))]
        return [Finding(UNKNOWN, seen, fix=("nvml",))]
    if facts.seen_gpus:
        seen = (
            f"{counted(len(facts.seen_gpus), 'NVIDIA GPU')} on the PCI bus, but no driver is loaded"
        )
        return [Finding(BAD, seen, fix=_install(facts), values={"branch": branch})]
    why = driver.version.why if isinstance(driver.version, Unseen) else "it is not loaded"
    fix = _install(facts) if facts.machine.wsl else ()
    seen = f"could not see a driver: {why}"
    return [Finding(UNKNOWN, seen, fix=fix, values={"branch": branch})]


@check("driver.version")
def version(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    versions = {} if isinstance(facts.image, Unseen) else facts.image.versions
    toolkit = versions.get("cuda-toolkit", "")
    major = (toolkit or _TOOLKIT).partition(".")[0]
    needed = next((entry for entry in knowledge.requirements if entry.toolkit == major), None)
    whose = f"the image's CUDA {toolkit}" if toolkit else f"CUDA {major} (assumed)"
    if needed is None:
        seen = f"could not tell which driver {whose} needs: not in the data"
        return [Finding(UNKNOWN, seen)]
    driver = facts.driver.version
    if isinstance(driver, Unseen):
        seen = f"could not see the driver's version: {driver.why}; {whose} needs {needed.driver}"
        return [Finding(UNKNOWN, seen, sources=(needed.source,))]
    if numbers(driver) < numbers(needed.driver):
        seen = f"driver {driver} is older than {needed.driver}, which {whose} needs"
        values = {"branch": needed.driver}
        return [Finding(BAD, seen, fix=_install(facts), values=values, sources=(needed.source,))]
    seen = f"driver {driver} runs {whose}, which needs {needed.driver} or newer"
    return [Finding(OK, seen, sources=(needed.source,))]


@check("driver.trouble")
def trouble(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    driver = facts.driver.version
    if isinstance(driver, Unseen):
        seen = "could not compare with reported faults: the driver's version is not known"
        return [Finding(UNKNOWN, seen)]
    kernel = facts.machine.kernel
    about = [
        entry
        for entry in knowledge.troubles
        if any(entry.concerns(gpu.name) for gpu in facts.seen_gpus)
    ]
    if not about:
        seen = "no report in the data is about this machine's GPUs"
        return [Finding(INFO, seen if facts.seen_gpus else "no GPU to compare with")]
    findings = [
        Finding(
            WARN,
            f"driver {driver}, kernel {kernel}: {entry.seen}",
            commands=entry.fix,
            why=entry.advice,
            sources=entry.sources,
        )
        for entry in about
        if entry.matches(driver, kernel)
    ]
    if findings:
        return findings
    seen = (
        f"driver {driver}, kernel {kernel}: in none of the {counted(len(about), 'report')} about it"
    )
    return [Finding(OK, seen)]


@check("driver.log")
def log(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    if facts.machine.wsl:
        seen = "could not see the driver's log: in WSL2 it is the event log of Windows"
        return [Finding(UNKNOWN, seen)]
    if isinstance(facts.log, Unseen):
        seen = f"could not see the kernel log: {facts.log.why}"
        return [Finding(UNKNOWN, seen, fix=("log",))]
    if facts.log:
        last = "; ".join(facts.log[-_LINES:])
        seen = f"{counted(len(facts.log), 'line')} about driver faults since boot, the last: {last}"
        return [Finding(WARN, seen, fix=("log", "reboot"))]
    if not facts.seen_gpus:
        return []
    return [Finding(OK, "no driver faults since boot")]


def _install(facts: HostFacts) -> tuple[str, ...]:
    """The way to the driver: WSL2 has that of Windows, and one of Linux there breaks it."""
    return ("windows",) if facts.machine.wsl else ("install",)


def _version(facts: HostFacts) -> str:
    version = facts.driver.version
    return "of unknown version" if isinstance(version, Unseen) else version


_TRANSLATES = ("DMA", "DMA-FQ")


@check("kernel.iommu")
def iommu(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Check the IOMMU where several GPUs of 12.x, which have no NVLink, talk over PCIe."""
    gpus = [gpu for gpu in facts.seen_gpus if gpu.capability and gpu.capability.major == 12]
    if len(gpus) < 2:
        return []
    caught = [gpu for gpu in gpus if gpu.iommu in _TRANSLATES]
    if not caught:
        kinds = {gpu.iommu or "none" for gpu in gpus}
        return [Finding(OK, f"no translating IOMMU ({', '.join(sorted(kinds))})")]
    line = "" if isinstance(facts.machine.cmdline, Unseen) else facts.machine.cmdline
    options = [word for word in line.split() if "iommu" in word]
    seen = (
        f"GPU {ranges(gpu.index for gpu in caught)} behind a translating IOMMU "
        f"({caught[0].iommu}; kernel command line: {' '.join(options) or 'nothing about it'})"
    )
    return [Finding(WARN, seen, fix=("pass",))]


@check("kernel.kho")
def handover(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    info = facts.memory.info
    if isinstance(info, Unseen) or info.get("CmaFree", 0) <= info.get("CmaTotal", 0):
        return []
    held = info["CmaFree"] - info.get("CmaTotal", 0)
    seen = f"CmaFree is {size(held)} above CmaTotal: kexec handover keeps that from being pinned"
    return [Finding(WARN if facts.unified else INFO, seen, fix=("off",))]

"""Checks of the driver: does it answer, is it new enough, are there errors or known faults.

And the kernel: settings that stop GPUs or RDMA from reaching memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from sm12x.core.text import counted, ranges, size
from sm12x.doctor.host import Unseen
from sm12x.doctor.knowledge import numbers
from sm12x.doctor.model import Facts, Finding, bad, check, info, ok, unknown, warn

# The image's CUDA version where no ledger has it.
_TOOLKIT = "13"
_LINES = 3
# Kernel messages about faults of the driver or its firmware.
_TROUBLE = re.compile(r"NVRM:.*(Xid|NV_ERR_NO_MEMORY|heartbeat timed out|GPU is probably locked)")
_TRANSLATES = ("DMA", "DMA-FQ")


@check("driver.loaded")
def _loaded(facts: Facts) -> Iterator[Finding]:
    driver, gpus = facts.driver, facts.seen_gpus
    version = driver.version
    named = f"driver {'of unknown version' if isinstance(version, Unseen) else version}"
    branch = next((entry.driver for entry in facts.known.requirements), "")
    if driver.loaded and not driver.fault:
        flavour = {True: ", open kernel modules", False: ", proprietary modules", None: ""}
        yield ok(f"{named}{flavour[driver.open_modules]}")
    elif driver.loaded and "mismatch" in driver.fault:
        yield bad(f"the driver's library and its loaded module differ: {driver.fault}", "reboot")
    elif driver.loaded:
        seen = f"{named} is loaded, but could not be asked: {driver.fault}"
        yield bad(seen, "ask") if driver.asked else unknown(seen, "nvml")
    elif gpus:
        seen = f"{counted(len(gpus), 'NVIDIA GPU')} on the PCI bus, but no driver is loaded"
        yield bad(seen, _install(facts), branch=branch)
    else:
        why = version.why if isinstance(version, Unseen) else "it is not loaded"
        fix = (_install(facts),) if facts.machine.wsl else ()
        yield unknown(f"could not see a driver: {why}", *fix, branch=branch)


@check("driver.version")
def _version(facts: Facts) -> Iterator[Finding]:
    toolkit = facts.versions.get("cuda-toolkit", "")
    major = (toolkit or _TOOLKIT).partition(".")[0]
    need = next((entry for entry in facts.known.requirements if entry.toolkit == major), None)
    whose = f"the image's CUDA {toolkit}" if toolkit else f"CUDA {major} (assumed)"
    if need is None:
        yield unknown(f"could not tell which driver {whose} needs: not in the data")
        return
    driver = facts.driver.version
    if isinstance(driver, Unseen):
        why = f"{driver.why}; {whose} needs {need.driver}"
        finding = unknown(f"could not see the driver's version: {why}")
    elif numbers(driver) < numbers(need.driver):
        seen = f"driver {driver} is older than {need.driver}, which {whose} needs"
        finding = bad(seen, _install(facts), branch=need.driver)
    else:
        finding = ok(f"driver {driver} runs {whose}, which needs {need.driver} or newer")
    yield replace(finding, sources=(need.source,))


def _install(facts: Facts) -> str:
    """The way to the driver: WSL2 has that of Windows, and one of Linux there breaks it."""
    return "windows" if facts.machine.wsl else "install"


@check("driver.trouble")
def _trouble(facts: Facts) -> Iterator[Finding]:
    driver, kernel = facts.driver.version, facts.machine.kernel
    if isinstance(driver, Unseen):
        yield unknown("could not compare with reported faults: the driver's version is not known")
        return
    names = [gpu.name for gpu in facts.seen_gpus]
    about = [
        entry
        for entry in facts.known.troubles
        if any(part in name for part in entry.gpus for name in names)
    ]
    matching = [entry for entry in about if entry.matches(driver, kernel)]
    for entry in matching:
        yield replace(
            warn(f"driver {driver}, kernel {kernel}: {entry.seen}"),
            commands=entry.fix,
            why=entry.advice,
            sources=entry.sources,
        )
    if not about:
        seen = "no report in the data is about this machine's GPUs"
        yield info(seen if names else "no GPU to compare with")
    elif not matching:
        reports = counted(len(about), "report")
        yield ok(f"driver {driver}, kernel {kernel}: in none of the {reports} about it")


@check("driver.log")
def _log(facts: Facts) -> Iterator[Finding]:
    if facts.machine.wsl:
        yield unknown("could not see the driver's log: in WSL2 it is the event log of Windows")
        return
    done = facts.host.ask(["dmesg"])
    if isinstance(done, Unseen):
        yield unknown(f"could not see the kernel log: {done.why}", "log")
        return
    # Without their time stamps.
    lines = [re.sub(r"^\[[^\]]*\]\s*", "", line) for line in done.stdout.splitlines()]
    lines = [line for line in lines if _TROUBLE.search(line)]
    if lines:
        last = "; ".join(lines[-_LINES:])
        seen = f"{counted(len(lines), 'line')} about driver faults since boot, the last: {last}"
        yield warn(seen, "log", "reboot")
    elif facts.seen_gpus:
        yield ok("no driver faults since boot")


@check("kernel.iommu")
def _iommu(facts: Facts) -> Iterator[Finding]:
    """Check the IOMMU where several GPUs of 12.x, which have no NVLink, talk over PCIe."""
    if len(facts.sm12x) < 2:
        return
    caught = [gpu for gpu in facts.sm12x if gpu.iommu in _TRANSLATES]
    if not caught:
        kinds = {gpu.iommu or "none" for gpu in facts.sm12x}
        yield ok(f"no translating IOMMU ({', '.join(sorted(kinds))})")
        return
    options = [word for word in facts.host.word("/proc/cmdline").split() if "iommu" in word]
    seen = (
        f"GPU {ranges(gpu.index for gpu in caught)} behind a translating IOMMU "
        f"({caught[0].iommu}; kernel command line: {' '.join(options) or 'nothing about it'})"
    )
    yield warn(seen, "pass")


@check("kernel.kho")
def _handover(facts: Facts) -> Iterator[Finding]:
    entries = {} if isinstance(facts.meminfo, Unseen) else facts.meminfo
    held = entries.get("CmaFree", 0) - entries.get("CmaTotal", 0)
    if held > 0:
        found = warn if facts.unified else info
        above = f"CmaFree is {size(held)} above CmaTotal"
        yield found(f"{above}: kexec handover keeps that from being pinned", "off")

"""Kernel settings that stop GPUs or RDMA from reaching memory."""

from __future__ import annotations

from sm12x.core.text import ranges, size
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import INFO, OK, WARN, Diagnosis, HostFacts, Unseen

_TRANSLATES = ("DMA", "DMA-FQ")


def iommu(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Only where several GPUs of 12.x, which have no NVLink, talk over PCIe."""
    name = "kernel.iommu"
    gpus = [gpu for gpu in facts.seen_gpus if gpu.capability and gpu.capability.major == 12]
    if len(gpus) < 2:
        return []
    caught = [gpu for gpu in gpus if gpu.iommu in _TRANSLATES]
    if not caught:
        kinds = {gpu.iommu or "none" for gpu in gpus}
        return [known.finding(name, OK, f"no translating IOMMU ({', '.join(sorted(kinds))})")]
    line = "" if isinstance(facts.machine.cmdline, Unseen) else facts.machine.cmdline
    asked = [word for word in line.split() if "iommu" in word]
    seen = (
        f"GPU {ranges(gpu.index for gpu in caught)} behind a translating IOMMU "
        f"({caught[0].iommu}; kernel command line: {' '.join(asked) or 'nothing about it'})"
    )
    fix = (
        "sudoedit /etc/default/grub   # add iommu=pt to GRUB_CMDLINE_LINUX",
        "sudo update-grub && sudo reboot",
        "docker run -e NCCL_P2P_DISABLE=1 ...   # instead, with --disable-custom-all-reduce",
    )
    return [known.finding(name, WARN, seen, fix=fix)]


def handover(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "kernel.kho"
    info = facts.memory.info
    if isinstance(info, Unseen) or info.get("CmaFree", 0) <= info.get("CmaTotal", 0):
        return []
    held = info["CmaFree"] - info.get("CmaTotal", 0)
    fix = (
        "sudoedit /etc/default/grub   # add kho=off to GRUB_CMDLINE_LINUX",
        "sudo update-grub && sudo reboot",
    )
    seen = f"CmaFree is {size(held)} above CmaTotal: kexec handover keeps that from being pinned"
    return [known.finding(name, WARN if facts.unified else INFO, seen, fix=fix)]

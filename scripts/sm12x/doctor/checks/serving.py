"""What goes wrong once a server runs: hangs, crashes at start, kernels that are not used."""

from __future__ import annotations

import re

from sm12x.core.text import GIB, first_of, size
from sm12x.doctor.checks.memory import available
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    WARN,
    Diagnosis,
    HostFacts,
    Image,
    NcclLibrary,
    Unseen,
)
from sm12x.doctor.serving import expandable

_AARCH64 = "aarch64"
_NCCL_PACKAGE = "nvidia-nccl-cu13"
_TRUE = ("1", "true", "yes")
_FAMILY = 12
# Addresses of one library that are named.
_FEW = 3


def nccl(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """NCCL's own code, and where there is none what the image's ledger names."""
    name = "net.nccl"
    if facts.machine.name != _AARCH64:
        return []
    if facts.nccl:
        return [_library(facts, each, known) for each in facts.nccl]
    version = _versions(facts).get(_NCCL_PACKAGE, "")
    if not version:
        return []
    sound = _numbers(version) >= _numbers(known.thresholds.nccl_aarch64)
    seen = f"the image has NCCL {version} by its ledger"
    if sound:
        return [known.finding(name, OK, seen)]
    seen += f", older than {known.thresholds.nccl_aarch64}"
    return [known.finding(name, _severity(facts), seen, fix=("sm12x audit IMAGE",))]


def _library(facts: HostFacts, library: NcclLibrary, known: Knowledge) -> Diagnosis:
    name = "net.nccl"
    about = f"NCCL {library.version or 'of unknown version'} in {library.path}"
    stores = library.stores
    if isinstance(stores, Unseen):
        return known.finding(name, UNKNOWN, f"could not see the code of {about}: {stores.why}")
    if not stores.untested:
        return known.finding(
            name, OK, f"{about}: each of {stores.total} store-exclusives is tested"
        )
    where = first_of(stores.untested, _FEW)
    seen = f"{about} does not retry a failed store ({where}), so that two machines deadlock"
    newer = f"pip install 'nvidia-nccl-cu13>={known.thresholds.nccl_aarch64}'   # or a newer image"
    return known.finding(name, _severity(facts), seen, fix=(newer,))


def _severity(facts: HostFacts) -> str:
    """Bad where NCCL is used at all: ranks on other machines, or several GPUs here."""
    talks = any(port.active for port in facts.network.ports) or len(facts.seen_gpus) > 1
    return BAD if talks else WARN


def segments(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "env.expandable-segments"
    told = expandable(facts.environment)
    if not told or cured(facts, name, known):
        return []
    variable = told.partition("=")[0]
    many = len(facts.seen_gpus) > 1
    seen = f"{told} in this shell" + (f", and {len(facts.seen_gpus)} GPUs" if many else "")
    fix = (f"unset {variable}", "vllm serve ... --disable-custom-all-reduce   # instead")
    return [known.finding(name, WARN if many else INFO, seen, fix=fix)]


def offline(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Whether the kernels for decoding depend on an HTTP server that cannot be reached."""
    name = "image.offline"
    versions = _versions(facts)
    if "flashinfer-python" not in versions or "flashinfer-cubin" in versions:
        return []
    if not _has_family(facts) or cured(facts, name, known):
        return []
    if _is_true(facts.environment.get("VLLM_HAS_FLASHINFER_CUBIN", "")):
        return [known.finding(name, OK, "VLLM_HAS_FLASHINFER_CUBIN is set: no server is asked")]
    fix = ("docker run -e VLLM_HAS_FLASHINFER_CUBIN=1 ...",)
    signs = [
        f"{variable}={facts.environment[variable]}"
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if _is_true(facts.environment.get(variable, ""))
    ]
    if facts.routed is False:
        signs.append("no default route")
    seen = "the image has no flashinfer-cubin, so vLLM asks NVIDIA's artifact server at start"
    if signs:
        return [known.finding(name, WARN, f"{seen}; offline: {', '.join(signs)}", fix=fix)]
    return [known.finding(name, INFO, seen, fix=fix)]


def compiling(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Whether the first start's compilers fit in the memory that is free."""
    name = "cache.cold"
    release = _versions(facts).get("flashinfer-python", "")
    info, cores = facts.memory.info, facts.machine.cpus
    if not release or "flashinfer-jit-cache" in _versions(facts) or not _has_family(facts):
        return []
    warm = [cache for cache in facts.caches if cache.kind == "flashinfer"]
    if any(release in cache.versions or not cache.versions for cache in warm):
        return [known.finding(name, OK, f"kernels of FlashInfer {release} are in {warm[0].path}")]
    if isinstance(info, Unseen) or isinstance(cores, Unseen):
        why = info.why if isinstance(info, Unseen) else getattr(cores, "why", "")
        return [known.finding(name, UNKNOWN, f"could not see how many compilers fit: {why}")]
    limits = known.thresholds
    each = limits.unified_compiler_gib if facts.unified else limits.compiler_gib
    fitting = max(1, min(cores, int(available(facts) / GIB / each)))
    given = facts.environment.get("MAX_JOBS", "")
    jobs = int(given) if given.isdecimal() and int(given) else cores
    seen = (
        f"no kernels of FlashInfer {release} in a cache: the first start compiles them, {jobs} at "
        f"a time, each up to {each:g} GiB; {size(available(facts))} are available"
    )
    if jobs <= fitting:
        return [known.finding(name, INFO, seen)]
    fix = (f"docker run -e MAX_JOBS={fitting} -v sm12x-cache:/cache ...",)
    return [known.finding(name, WARN, seen, fix=fix)]


def stuck(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """GPUs that are busy and draw next to nothing: a kernel that waits for what does not come."""
    findings = []
    for gpu in facts.seen_gpus:
        model = known.model_of_name(gpu.name)
        if model is None or not model.stuck_watts or gpu.busy is None or gpu.watts is None:
            continue
        if gpu.busy < known.thresholds.stuck_percent or gpu.watts > model.stuck_watts:
            continue
        seen = f"{gpu}: {gpu.busy} % busy at {gpu.watts:.0f} W: its kernel waits and does no work"
        fix = (
            "ncclras -f json -vv   # with requests running, and again 95 s later",
            "sudo dmesg | grep 'NVRM: Xid'",
        )
        findings.append(known.finding("gpu.stuck", WARN, seen, fix=fix))
    return findings


def reclaim(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """How the kernel gives memory back; only where the GPU takes its own from the same place."""
    name = "memory.reclaim"
    if not facts.unified:
        return []
    kept, swappiness, info = facts.memory.min_free, facts.memory.swappiness, facts.memory.info
    if isinstance(kept, Unseen) or isinstance(swappiness, Unseen) or isinstance(info, Unseen):
        why = next(fact.why for fact in (kept, swappiness, info) if isinstance(fact, Unseen))
        return [known.finding(name, UNKNOWN, f"could not see how memory is kept: {why}")]
    findings = []
    most = known.thresholds.unified_min_free_gib * GIB
    if kept > most:
        seen = f"vm.min_free_kbytes keeps {size(kept)}, which vLLM's check at start does not count"
        fix = (
            "grep -rn min_free_kbytes /etc/sysctl.conf /etc/sysctl.d   # take the line out",
            "sudo reboot",
        )
        findings.append(known.finding(name, WARN, seen, fix=fix))
    if swappiness and info.get("SwapTotal", 0):
        seen = f"vm.swappiness is {swappiness}, with {size(info['SwapTotal'])} of swap"
        zero = "sudo sysctl vm.swappiness=0   # rather than swapoff"
        findings.append(known.finding(name, INFO, seen, fix=(zero,)))
    if findings:
        return findings
    return [known.finding(name, OK, f"min_free_kbytes {size(kept)}, swappiness {swappiness}")]


def _versions(facts: HostFacts) -> dict[str, str]:
    return {} if isinstance(facts.image, Unseen) else dict(facts.image.versions)


def _has_family(facts: HostFacts) -> bool:
    return any(gpu.capability and gpu.capability.major == _FAMILY for gpu in facts.seen_gpus)


def cured(facts: HostFacts, check: str, known: Knowledge) -> bool:
    """Whether the image has a patch that makes the check needless."""
    image = facts.image
    patches = image.patches if isinstance(image, Image) else ()
    return bool(set(patches) & set(known.checks[check].cured_by))


def _is_true(text: str) -> bool:
    return text.strip().lower() in _TRUE


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

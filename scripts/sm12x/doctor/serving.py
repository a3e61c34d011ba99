"""How a server will start and run here: variables of this shell, NCCL's library, the image.

Their faults are hangs, crashes at start, and kernels that are not used.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm12x.core.machine import compiler_gib, compilers
from sm12x.core.text import size
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge, check, numbers
from sm12x.doctor.memory import available
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    WARN,
    Finding,
    HostFacts,
    Image,
    NcclLibrary,
    Unseen,
)
from sm12x.recipes.options import is_true

# Variables of PyTorch, FlashInfer's compiler and vLLM; each affects a check.
_VARIABLES = (
    "FLASHINFER_CUBIN_DIR",
    "HF_HUB_OFFLINE",
    "MAX_JOBS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRANSFORMERS_OFFLINE",
    "VLLM_HAS_FLASHINFER_CUBIN",
)
_NCCL = "libnccl.so.2"
# The image's environment, then what a system package installs.
_SITES = ("/opt/venv/lib", "/usr/local/lib", "/usr/lib")
_SYSTEM = ("/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_IN_SITE = "nvidia/nccl/lib"
# The text that the library prints at start with NCCL_DEBUG=VERSION.
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_EM_AARCH64 = (183).to_bytes(2, "little")
_MACHINE = slice(18, 20)
# Of /proc/net/route: the destination of a default route, and the flag of one that is up.
_EVERYWHERE, _UP = "00000000", 1
_IPV6_EVERYWHERE = ["0" * 32, "00"]
_NCCL_PACKAGE = "nvidia-nccl-cu13"
_FAMILY = 12


def variables(host: Host) -> dict[str, str]:
    return {name: host.env[name] for name in _VARIABLES if name in host.env}


def routed(host: Host) -> bool | Unseen:
    """Whether the kernel has a way to other networks: a default route of IPv4 or IPv6."""
    four = host.text("/proc/net/route")
    if isinstance(four, Unseen):
        return four
    for cells in map(str.split, four.splitlines()[1:]):
        if len(cells) > 3 and cells[1] == _EVERYWHERE and _is_up(cells[3]):
            return True
    six = host.text("/proc/net/ipv6_route")
    # Destination, its length, ..., flags, device; the device `lo` rejects.
    return any(
        len(cells) > 9 and cells[:2] == _IPV6_EVERYWHERE and cells[9] != "lo" and _is_up(cells[8])
        for cells in map(str.split, () if isinstance(six, Unseen) else six.splitlines())
    )


def _is_up(flags: str) -> bool:
    return bool(re.fullmatch(r"[0-9A-Fa-f]{1,8}", flags)) and bool(int(flags, 16) & _UP)


def cpus(host: Host) -> int | Unseen:
    """How many processors are on."""
    text = host.text("/sys/devices/system/cpu/online")
    return text if isinstance(text, Unseen) else count(text)


def count(online: str) -> int | Unseen:
    """Count the numbers in a list of ranges: "0-15,32-47" has 32."""
    total = 0
    for part in online.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return Unseen(f"/sys/devices/system/cpu/online says {online!r}")
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def nccl(host: Host) -> tuple[NcclLibrary, ...]:
    """List the NCCL libraries here for AArch64, each with the version in its code."""
    libraries: dict[Path, NcclLibrary] = {}
    for path in _places(host):
        if path.is_file() and path.resolve() not in libraries:
            library = _read(path)
            if library is not None:
                libraries[path.resolve()] = library
    return tuple(libraries.values())


def _places(host: Host) -> Iterator[Path]:
    chosen = host.env.get("VLLM_NCCL_SO_PATH")
    if chosen:
        yield host.path(chosen)
    for site in _SITES:
        for name in host.names(site):
            if name.startswith("python3"):
                for packages in ("site-packages", "dist-packages"):
                    yield host.path(f"{site}/{name}/{packages}/{_IN_SITE}/{_NCCL}")
    for folder in _SYSTEM:
        yield host.path(f"{folder}/{_NCCL}")


def _read(path: Path) -> NcclLibrary | None:
    """The library; None for one of another machine."""
    try:
        with (
            path.open("rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data[_MACHINE] != _EM_AARCH64:
                return None
            version = _VERSION.search(data)
            unnamed = Unseen("no version is in it")
            return NcclLibrary(path=path, version=version[1].decode() if version else unnamed)
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped.
        return NcclLibrary(path=path, version=Unseen(str(error)))


def expandable(environment: Mapping[str, str]) -> str:
    """The variable that turns expandable segments on, with its value; "" without one."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(name, "")
        settings = {
            key.strip(): word.strip().lower()
            for key, _, word in (part.partition(":") for part in value.split(","))
        }
        if settings.get("expandable_segments") == "true":
            return f"{name}={value}"
    return ""


@check("net.nccl")
def nccl_sound(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Judge NCCL by the version that its library prints, else by that in the image's ledger."""
    if facts.machine.name != "aarch64":
        return []
    if facts.nccl:
        return [_library(facts, each, knowledge) for each in facts.nccl]
    version = _versions(facts).get(_NCCL_PACKAGE, "")
    if not version:
        return []
    sound = numbers(version) >= numbers(knowledge.thresholds.nccl_aarch64)
    seen = f"the image has NCCL {version} by its ledger"
    if sound:
        return [Finding(OK, seen)]
    seen += f", older than {knowledge.thresholds.nccl_aarch64}"
    return [Finding(_severity(facts), seen, fix=("audit",))]


def _library(facts: HostFacts, library: NcclLibrary, knowledge: Knowledge) -> Finding:
    version, least = library.version, knowledge.thresholds.nccl_aarch64
    if isinstance(version, Unseen):
        return Finding(
            UNKNOWN, f"could not see the version of NCCL in {library.path}: {version.why}"
        )
    seen = f"NCCL {version} in {library.path}"
    if numbers(version) >= numbers(least):
        return Finding(OK, seen)
    seen += f", older than {least}"
    return Finding(_severity(facts), seen, fix=("newer",), values={"least": least})


def _severity(facts: HostFacts) -> str:
    """Bad where NCCL is used at all: ranks on other machines, or several GPUs here."""
    talks = any(port.active for port in facts.network.ports) or len(facts.seen_gpus) > 1
    return BAD if talks else WARN


@check("env.expandable-segments")
def segments(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    setting = expandable(facts.environment)
    if not setting:
        return []
    variable = setting.partition("=")[0]
    many = len(facts.seen_gpus) > 1
    seen = f"{setting} in this shell" + (f", and {len(facts.seen_gpus)} GPUs" if many else "")
    return [
        Finding(
            WARN if many else INFO, seen, fix=("unset", "instead"), values={"variable": variable}
        )
    ]


@check("image.offline")
def offline(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Check that the kernels for decoding do not depend on an HTTP server out of reach."""
    versions = _versions(facts)
    asks = "flashinfer-python" in versions and "flashinfer-cubin" not in versions
    if not asks or not _has_family(facts):
        return []
    if is_true(facts.environment.get("VLLM_HAS_FLASHINFER_CUBIN", "")):
        return [Finding(OK, "VLLM_HAS_FLASHINFER_CUBIN is set: no server is asked")]
    fix = ("skip",)
    signs = [
        f"{variable}={facts.environment[variable]}"
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if is_true(facts.environment.get(variable, ""))
    ]
    if facts.routed is False:
        signs.append("no default route")
    seen = "the image has no flashinfer-cubin, so vLLM asks NVIDIA's artifact server at start"
    if signs:
        return [Finding(WARN, f"{seen}; offline: {', '.join(signs)}", fix=fix)]
    return [Finding(INFO, seen, fix=fix)]


@check("cache.cold")
def compiling(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Check that the compilers of the first start fit in the free memory."""
    release = _versions(facts).get("flashinfer-python", "")
    info, cores = facts.memory.info, facts.machine.cpus
    if not release or "flashinfer-jit-cache" in _versions(facts) or not _has_family(facts):
        return []
    if not isinstance(facts.image, Unseen) and facts.image.precompiled:
        seen = f"the image has the modules of FlashInfer {release} that the recipes need"
        return [Finding(OK, seen)]
    warm = [cache for cache in facts.caches if cache.kind == "flashinfer"]
    if any(release in cache.versions or not cache.versions for cache in warm):
        return [Finding(OK, f"kernels of FlashInfer {release} are in {warm[0].path}")]
    if isinstance(info, Unseen) or isinstance(cores, Unseen):
        why = info.why if isinstance(info, Unseen) else getattr(cores, "why", "")
        return [Finding(UNKNOWN, f"could not see how many compilers fit: {why}")]
    each = compiler_gib(unified=facts.unified)
    fitting = compilers(cores=cores, available=available(facts), unified=facts.unified)
    limit = facts.environment.get("MAX_JOBS", "")
    # Where it is not given, the image's entry point sets it, by the same rule.
    jobs = (int(limit) if limit.isdecimal() and int(limit) else cores) if limit else fitting
    seen = (
        f"no kernels of FlashInfer {release} in a cache: the first start compiles them, {jobs} at "
        f"a time, each up to {each:g} GiB; {size(available(facts))} are available"
    )
    if jobs <= fitting:
        return [Finding(INFO, seen)]
    return [Finding(WARN, seen, fix=("limit",), values={"jobs": fitting})]


def _versions(facts: HostFacts) -> dict[str, str]:
    return {} if isinstance(facts.image, Unseen) else dict(facts.image.versions)


def _has_family(facts: HostFacts) -> bool:
    return any(gpu.capability and gpu.capability.major == _FAMILY for gpu in facts.seen_gpus)


def cured(facts: HostFacts, check: str, knowledge: Knowledge) -> bool:
    """Tell whether the image has a patch that makes the check needless."""
    image = facts.image
    patches = image.patches if isinstance(image, Image) else ()
    return bool(set(patches) & set(knowledge.checks[check].cured_by))

"""What decides how a server will start here: variables of this shell, and NCCL's library."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm12x.audit import exclusives, sections
from sm12x.audit.exclusives import ExclusiveStores
from sm12x.doctor.host import Host
from sm12x.doctor.model import NcclLibrary, Unseen

# Read by PyTorch, FlashInfer's compiler and vLLM; each decides about a check.
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
# What the library itself prints at start with NCCL_DEBUG=VERSION.
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_AARCH64 = (183).to_bytes(2, "little")
_MACHINE = slice(18, 20)
# Of /proc/net/route: the destination of a default route, and the flag of one that is up.
_EVERYWHERE, _UP = "00000000", 1
_IPV6_EVERYWHERE = "0" * 32


def variables(host: Host) -> dict[str, str]:
    return {name: host.env[name] for name in _VARIABLES if name in host.env}


def routed(host: Host) -> bool | Unseen:
    """Whether the kernel has a way to other networks: a default route of IPv4 or IPv6."""
    four = host.text("/proc/net/route")
    if isinstance(four, Unseen):
        return four
    for line in four.splitlines()[1:]:
        cells = line.split()
        if len(cells) > 3 and cells[1] == _EVERYWHERE and _flags(cells[3]) & _UP:
            return True
    six = host.text("/proc/net/ipv6_route")
    lines = () if isinstance(six, Unseen) else six.splitlines()
    return any(_is_default(line.split()) for line in lines)


def _is_default(cells: list[str]) -> bool:
    """Of /proc/net/ipv6_route: destination, its length, ..., flags, device. `lo` rejects."""
    return (
        len(cells) > 9
        and (cells[0], cells[1]) == (_IPV6_EVERYWHERE, "00")
        and cells[9] != "lo"
        and bool(_flags(cells[8]) & _UP)
    )


def _flags(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def cpus(host: Host) -> int | Unseen:
    """How many processors are on."""
    text = host.text("/sys/devices/system/cpu/online")
    return text if isinstance(text, Unseen) else count(text)


def count(online: str) -> int | Unseen:
    """How many a list of ranges names: "0-15,32-47" is 32."""
    total = 0
    for part in online.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return Unseen(f"/sys/devices/system/cpu/online says {online!r}")
        total += int(last or first) - int(first) + 1
    return total


def nccl(host: Host) -> tuple[NcclLibrary, ...]:
    """NCCL's libraries here that are for AArch64: the code of each, whatever package names it."""
    found: dict[Path, NcclLibrary] = {}
    for path in _places(host):
        if path.is_file() and path.resolve() not in found:
            library = _read(path)
            if library is not None:
                found[path.resolve()] = library
    return tuple(found.values())


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
            if data[_MACHINE] != _AARCH64:
                return None
            version = _VERSION.search(data)
            return NcclLibrary(
                path=path, version=version[1].decode() if version else "", stores=_stores(data)
            )
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped.
        return NcclLibrary(path=path, version="", stores=Unseen(f"{path}: {error}"))


def _stores(data: mmap.mmap) -> ExclusiveStores | Unseen:
    try:
        return exclusives.scan(data, sections.instructions(sections.sections(data)))
    except (ValueError, struct.error) as error:
        return Unseen(str(error))


def expandable(environment: Mapping[str, str]) -> str:
    """The variable that turns expandable segments on, as it is set; "" where none does."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(name, "")
        settings = {
            key.strip(): word.strip().lower()
            for key, _, word in (part.partition(":") for part in value.split(","))
        }
        if settings.get("expandable_segments") == "true":
            return f"{name}={value}"
    return ""

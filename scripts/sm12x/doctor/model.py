"""Facts about a host, and findings about the facts. Nothing here reads the host.

A fact that could not be read is an ``Unseen``, never an empty value: "no process uses the GPU" and
"the processes cannot be listed" lead to opposite advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sm12x.audit.model import Device
from sm12x.core.cudaarch import CudaArch
from sm12x.core.declared import one_of

OK, INFO, WARN, BAD, UNKNOWN = "ok", "info", "warn", "bad", "unknown"
# In the order in which a person should read them.
SEVERITIES = (BAD, WARN, UNKNOWN, INFO, OK)


# Characters of what was seen.
_MOST_SEEN = 2000


@dataclass(frozen=True)
class Unseen:
    """Could not be read; ``why`` in words, without a final period."""

    why: str


@dataclass(frozen=True, kw_only=True)
class HostMachine:
    """``name`` is the architecture as the kernel has it: "x86_64" or "aarch64".

    ``container`` is "" on a host, else what says that this is inside one. ``cpus`` are those that
    are on.
    """

    name: str
    kernel: str
    container: str
    cmdline: str | Unseen
    cpus: int | Unseen

    @property
    def wsl(self) -> bool:
        """Whether this is WSL2, where driver, log and desktop are those of Windows."""
        return "microsoft" in self.kernel.lower()


@dataclass(frozen=True, kw_only=True)
class GpuDriver:
    """``version`` such as "580.173.02". ``open_modules`` is None where the flavour is not known.

    ``fault`` is "" or why it could not be asked; ``asked`` is False when there was nothing here to
    ask it with, so that it may well be sound.
    """

    loaded: bool
    version: str | Unseen
    open_modules: bool | None = None
    fault: str = ""
    asked: bool = True


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """``memory`` is in bytes on the GPU, None where the driver does not say."""

    pid: int
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Sizes are in bytes, None where the driver does not say (GB10) or is not asked.

    ``hardware`` is the name recipes use ("rtx-pro-6000"), "" for any other. ``told_by`` is "nvml"
    or "pci". ``iommu`` is the type of its IOMMU group ("DMA", "DMA-FQ",
    "identity"), "" without one. ``busy`` is the share of time in which a kernel ran, in percent,
    ``watts`` what the GPU draws, ``split`` whether it is in MIG mode; None where the driver does
    not say.
    """

    index: int
    name: str
    bus: str
    capability: Device | None
    unified: bool
    hardware: str
    told_by: str
    memory_total: int | None = None
    memory_used: int | None = None
    processes: tuple[GpuProcess, ...] | Unseen = Unseen("the driver was not asked")
    iommu: str = ""
    busy: int | None = None
    watts: float | None = None
    split: bool | None = None

    def __str__(self) -> str:
        capability = f" ({self.capability})" if self.capability else ""
        return f"GPU {self.index} {self.name}{capability}"


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """``info`` is /proc/meminfo in bytes. Of the others, also in bytes, None stands for no limit.

    ``cgroup_limit`` and ``cgroup_used`` are of the tightest group this process is in; ``memlock``
    is of this shell, ``daemon_memlock`` of the docker daemon, whose containers inherit it.
    """

    info: Mapping[str, int] | Unseen
    cgroup_limit: int | Unseen | None
    cgroup_used: int
    memlock: int | Unseen | None
    daemon_memlock: int | Unseen | None
    shm: int | Unseen
    huge_pages: str | Unseen
    min_free: int | Unseen
    swappiness: int | Unseen


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """``answer`` is the engine's description of itself, or why it does not answer.

    The engine behind a program ``docker`` may be podman (package podman-docker).
    """

    name: str
    program: Path
    answer: Mapping[str, object] | Unseen


@dataclass(frozen=True, kw_only=True)
class CdiSpec:
    """A file that tells engines how to hand out GPUs; ``drivers`` are the versions it names."""

    path: Path
    drivers: tuple[str, ...] | Unseen


@dataclass(frozen=True, kw_only=True)
class Containers:
    """``runtimes`` are those of /etc/docker/daemon.json, ``tools`` the toolkit's on PATH.

    ``no_cgroups``: the toolkit leaves device cgroups alone, which a rootless daemon cannot change.
    """

    engines: tuple[EngineAnswer, ...]
    no_cgroups: bool
    runtimes: tuple[str, ...] | Unseen
    tools: tuple[str, ...]
    specs: tuple[CdiSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Compiled artefacts in one folder. Times are seconds since the epoch.

    ``versions`` are releases of the compiling library that folder names give away.
    """

    kind: str
    path: Path
    files: int
    oldest: float
    newest: float
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One entry of a port's GID table, such as index 3, "RoCE v2", an IPv4-mapped address."""

    index: int
    kind: str
    address: str

    @property
    def routable(self) -> bool:
        """RoCE v2 over IPv4, which is what NCCL needs between two machines."""
        return self.kind == "RoCE v2" and self.address.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """``rate`` as the kernel writes it: "200 Gb/sec (4X HDR)"."""

    device: str
    port: int
    active: bool
    ethernet: bool
    rate: str
    interfaces: tuple[str, ...]
    gids: tuple[Gid, ...]


@dataclass(frozen=True, kw_only=True)
class Network:
    """``variables`` are those NCCL and Gloo read, as set in this shell; ``mtu`` by interface."""

    ports: tuple[RdmaPort, ...]
    mtu: Mapping[str, int]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ImageLibrary:
    """A library of the image: its targets, and its translation units by device."""

    path: str
    machine: str
    cubins: tuple[CudaArch, ...]
    ptx: tuple[CudaArch, ...]
    readable: bool
    units: Mapping[Device, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image that the host is compared with. ``built`` is seconds since the epoch, None if not
    known.

    ``offenders`` are the sentences of the audit's policy; ``passed`` is None where none judged.
    ``versions`` are those of its dependencies ("cuda-toolkit" -> "13.0.2"), ``patches`` the
    subjects of the patches in it. With ``by_library`` the numbers of its libraries count each
    library as one. ``precompiled``: it has FlashInfer's modules that the recipes need.
    """

    name: str
    audit: Path
    stack_id: str
    machine: str
    built: float | None
    libraries: tuple[ImageLibrary, ...]
    passed: bool | None
    offenders: Mapping[Device, tuple[str, ...]]
    versions: Mapping[str, str]
    by_library: bool = False
    patches: tuple[str, ...] = ()
    precompiled: bool = False


@dataclass(frozen=True, kw_only=True)
class NcclLibrary:
    """A libnccl.so.2 for AArch64; ``version`` is the one that it prints, or why it is not known."""

    path: Path
    version: str | Unseen


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """``log`` are the lines of the kernel log in which the driver reports trouble.

    ``hidden_caches`` are folders of caches that may not be read. ``environment`` are variables of
    this shell that decide how a server starts; ``routed`` is whether there is a default route.
    """

    machine: HostMachine
    driver: GpuDriver
    gpus: tuple[Gpu, ...] | Unseen
    log: tuple[str, ...] | Unseen
    memory: HostMemory
    containers: Containers
    caches: tuple[Cache, ...]
    hidden_caches: tuple[Unseen, ...]
    network: Network
    image: Image | Unseen
    environment: Mapping[str, str]
    routed: bool | Unseen
    nccl: tuple[NcclLibrary, ...]

    @property
    def seen_gpus(self) -> tuple[Gpu, ...]:
        return () if isinstance(self.gpus, Unseen) else self.gpus

    @property
    def unified(self) -> bool:
        """Whether GPU and CPU share one memory, as on GB10."""
        return any(gpu.unified for gpu in self.seen_gpus)


@dataclass(frozen=True)
class Finding:
    """What a check has seen; ``why`` and ``sources`` are those of the check unless given.

    ``fix`` names remedies of the check in doctor.toml; ``values`` are for the braces in these.
    ``commands`` stand for them where the check is about several reports with remedies of their own.
    """

    severity: str
    seen: str
    fix: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    why: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One sentence about the host, with the reason it matters and the way to correct it.

    ``fix`` are commands for a person to run; nothing here runs them. ``sources`` say where the
    claim is from: a measurement, a document, or repository#number.
    """

    id: Annotated[str, Field(pattern=r"^[a-z]+\.[a-z-]+$")]
    severity: Annotated[str, one_of(*SEVERITIES)]
    seen: Annotated[str, Field(min_length=1)]
    why: Annotated[str, Field(min_length=1)]
    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    fix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # What a tool or a file said may be of any length; a word of megabytes is wrapped for hours.
        if len(self.seen) > _MOST_SEEN:
            object.__setattr__(self, "seen", f"{self.seen[:_MOST_SEEN]}...")

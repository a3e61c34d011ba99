"""What checks are about: the facts that several of them need, and their findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_args

from pydantic import Field

from sm12x.audit.model import Device
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.knowledge import Knowledge
from sm12x.recipes.model import Recipe

# In the order in which a person should read them.
Severity = Literal["bad", "warn", "unknown", "info", "ok"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

# Characters of what was seen.
_MOST_SEEN = 2000
_NOT_ASKED = Unseen("the driver was not asked")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``name`` is the architecture as the kernel has it: "x86_64" or "aarch64".

    ``container`` is "" on a host, else what says that this is inside one.
    """

    name: str
    kernel: str
    container: str

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
    told_by: Literal["nvml", "pci"]
    memory_total: int | None = None
    memory_used: int | None = None
    processes: tuple[GpuProcess, ...] | Unseen = _NOT_ASKED
    iommu: str = ""
    busy: int | None = None
    watts: float | None = None
    split: bool | None = None

    @property
    def kind(self) -> str:
        """Name and compute capability, such as "NVIDIA GB10 (12.1)"."""
        return f"{self.name} ({self.capability})" if self.capability else self.name

    def __str__(self) -> str:
        return f"GPU {self.index} {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``answer`` is the engine's description of itself, or why it does not answer.

    The engine behind a program ``docker`` may be podman (package podman-docker).
    """

    name: str
    program: Path
    answer: Mapping[str, object] | Unseen


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
class RdmaPort:
    """``rate`` as the kernel writes it: "200 Gb/sec (4X HDR)".

    ``gids`` is its GID table: index -> kind, such as "RoCE v2", and address.
    """

    device: str
    active: bool
    ethernet: bool
    rate: str
    interfaces: tuple[str, ...]
    gids: Mapping[int, tuple[str, str]]

    def routable(self, index: int) -> bool:
        """Whether that GID is RoCE v2 over IPv4, which is what NCCL needs between two machines."""
        kind, address = self.gids.get(index, ("", ""))
        return kind == "RoCE v2" and address.startswith("0000:0000:0000:0000:0000:ffff:")

    @property
    def gid(self) -> int | None:
        """The index of its first GID that is ``routable``."""
        return next(filter(self.routable, self.gids), None)


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image that the host is compared with. ``built`` is seconds since the epoch, None if not
    known.

    ``units`` counts its translation units by verdict for each device, or its libraries where
    ``by_library``; ``offenders`` are the sentences of the audit's policy, and ``passed`` is None
    where none judged. ``versions`` are those of its dependencies ("cuda-toolkit" -> "13.0.2"),
    ``patches`` the subjects of the patches in it. ``precompiled``: it has FlashInfer's modules that
    the recipes need.
    """

    name: str
    audit: Path
    stack_id: str
    machine: str
    built: float | None
    units: Mapping[Device, Counter[str]]
    passed: bool | None
    offenders: Mapping[Device, tuple[str, ...]]
    versions: Mapping[str, str]
    by_library: bool = False
    patches: tuple[str, ...] = ()
    precompiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The host, and what several checks need of it; the rest a check reads from ``host``.

    ``meminfo`` is /proc/meminfo in bytes; ``cgroup`` the limit of the tightest control group that
    this process is in, None for no limit, and the bytes in use there. ``hidden_caches`` are folders
    of caches that may not be read. ``options`` are those of the recipe's server, without dashes.
    """

    host: Host
    known: Knowledge
    machine: Machine
    driver: GpuDriver
    gpus: tuple[Gpu, ...] | Unseen
    meminfo: Mapping[str, int] | Unseen
    cgroup: tuple[int | Unseen | None, int]
    engines: tuple[Engine, ...]
    caches: tuple[Cache, ...]
    hidden_caches: tuple[Unseen, ...]
    ports: tuple[RdmaPort, ...]
    image: Image | Unseen
    recipe: Recipe | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def seen_gpus(self) -> tuple[Gpu, ...]:
        return () if isinstance(self.gpus, Unseen) else self.gpus

    @property
    def unified(self) -> bool:
        """Whether GPU and CPU share one memory, as on GB10."""
        return any(gpu.unified for gpu in self.seen_gpus)

    @property
    def sm12x(self) -> tuple[Gpu, ...]:
        """The GPUs that the stack is for, and others of their family."""
        return tuple(g for g in self.seen_gpus if g.capability and g.capability.major == 12)

    @property
    def available(self) -> int:
        """Bytes a new process can have: of the machine, or of our control group if less."""
        if isinstance(self.meminfo, Unseen):
            return 0
        free = self.meminfo.get("MemAvailable", self.meminfo.get("MemFree", 0))
        limit, used = self.cgroup
        return max(min(free, limit - used), 0) if isinstance(limit, int) else free

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the image's dependencies; none where no ledger has them."""
        return {} if isinstance(self.image, Unseen) else self.image.versions


@dataclass(frozen=True)
class Finding:
    """What a check has seen; ``why`` and ``sources`` are those of the check unless given.

    ``fix`` names remedies of the check in doctor.toml; ``values`` are for the braces in these.
    ``commands`` stand for them where the check is about several reports with remedies of their own.
    """

    severity: Severity
    seen: str
    fix: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    why: str = ""
    sources: tuple[str, ...] = ()


class _Finder(Protocol):
    def __call__(self, seen: str, *fix: str, **values: object) -> Finding: ...


def _finder(severity: Severity) -> _Finder:
    def find(seen: str, *fix: str, **values: object) -> Finding:
        return Finding(severity, seen, fix, values)

    return find


# bad("seen", "remedy", value=1) is a finding of that severity.
bad, warn, unknown, info, ok = map(_finder, SEVERITIES)

_Check = Callable[[Facts], Iterable[Finding]]
# Every check by its name in doctor.toml, whose order is that of the report.
CHECKS: dict[str, _Check] = {}


def check(name: str) -> Callable[[_Check], _Check]:
    """Register a function as the check ``name``: it and its entry in doctor.toml are all of it."""

    def register(function: _Check) -> _Check:
        CHECKS[name] = function
        return function

    return register


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One sentence about the host, with the reason it matters and the way to correct it.

    ``fix`` are commands for a person to run; nothing here runs them. ``sources`` say where the
    claim is from: a measurement, a document, or repository#number.
    """

    id: Annotated[str, Field(pattern=r"^[a-z]+\.[a-z-]+$")]
    severity: Severity
    seen: Annotated[str, Field(min_length=1)]
    why: Annotated[str, Field(min_length=1)]
    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    fix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # What a tool or a file said may be of any length; a word of megabytes is wrapped for hours.
        if len(self.seen) > _MOST_SEEN:
            object.__setattr__(self, "seen", f"{self.seen[:_MOST_SEEN]}...")

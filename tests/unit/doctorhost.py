"""Machines for the tests of `doctor`: a folder, programs that answer, an NVML library."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sm12x.audit.policy import Judgement
from sm12x.audit.report import AuditReport, LibraryReport, RunsReport
from sm12x.core import declared
from sm12x.core.process import Completed
from sm12x.doctor import examine, knowledge
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import Diagnosis, Facts
from sm12x.recipes import options, render
from sm12x.recipes.model import Recipe
from sm12x.wheel.ledger import Ledger

GIB = 1024**3
MIB = 1024**2
BUILT = 1_800_000_000.0
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"
OPEN_595 = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build\n"
    "GCC version:  gcc version 13.3.0"
)


class NVMLError(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """``memory`` is (total, used) in bytes; None is what GB10 answers: not supported.

    ``load`` is (percent, watts), None where the driver does not say. ``mig`` is its MIG mode, None
    for a GPU that has none.
    """

    name: str
    capability: tuple[int, int]
    bus: str
    memory: tuple[int, int] | None
    processes: Sequence[tuple[int, int | None]] = ()
    load: tuple[int, int] | None = None
    mig: bool | None = None


def nvml(version: str, gpus: Sequence[FakeGpu], *, fault: str = "") -> Callable[[], Any]:
    """An importer of a library that has these GPUs, or fails to start with ``fault``."""

    def start() -> None:
        if fault:
            raise NVMLError(fault)

    def memory(gpu: FakeGpu, *_: object) -> SimpleNamespace:
        if gpu.memory is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=gpu.memory[0], used=gpu.memory[1])

    def processes(gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def utilization(gpu: FakeGpu) -> SimpleNamespace:
        if gpu.load is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=gpu.load[0], memory=0)

    def mig(gpu: FakeGpu) -> list[int]:
        if gpu.mig is None:
            raise NVMLError("Not Supported")
        return [int(gpu.mig), int(gpu.mig)]

    module = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlMemory_v2=2,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: version,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=gpu.bus),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.capability,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetGraphicsRunningProcesses=lambda gpu: [],
        nvmlDeviceGetMigMode=mig,
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetPowerUsage=lambda gpu: gpu.load[1] * 1000,
    )
    return lambda: module


def no_nvml() -> Any:
    raise ImportError("No module named 'pynvml'")


def meminfo(**gib: float) -> str:
    """/proc/meminfo with these entries in GiB."""
    return "\n".join(f"{name}:  {int(value * MIB)} kB" for name, value in gib.items())


@dataclass(kw_only=True)
class Machine:
    """Builds a host below ``root``; ``answers`` maps the first words of a command to its output."""

    root: Path
    files: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    library: Callable[[], Any] = no_nvml
    shm: int = 64 * GIB

    def __post_init__(self) -> None:
        self.files = {
            "/proc/sys/kernel/osrelease": "6.17.0-1032-nvidia",
            "/proc/sys/kernel/arch": "x86_64",
            "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro quiet",
            "/proc/meminfo": meminfo(MemTotal=503, MemFree=400, MemAvailable=480, Cached=80),
            "/proc/self/cgroup": "0::/user.slice",
            "/proc/self/limits": f"{LIMITS}Max locked memory         8388608  8388608  bytes",
            "/proc/sys/vm/min_free_kbytes": "67584",
            "/proc/sys/vm/overcommit_memory": "0",
            "/proc/sys/vm/swappiness": "0",
            "/sys/devices/system/cpu/online": "0-15",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            **self.files,
        }
        self.answers = {"dmesg": "[    1.0] Linux version 6.17\n", **self.answers}

    def host(self) -> Host:
        for name, text in self.files.items():
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self.root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        return Host(
            root=self.root,
            home="/home/me",
            env=self.env,
            user="me",
            ask=self._ask,
            which=self._which,
            nvml=self.library,
            size_of=lambda path: self.shm,
        )

    def _ask(self, argv: Sequence[str]) -> Completed | Unseen:
        command = " ".join(argv)
        for words, output in self.answers.items():
            if command.startswith(words):
                return Completed(argv=tuple(argv), returncode=0, stdout=output, stderr="")
        return Unseen(f"`{argv[0]}` is not installed or not on PATH")

    def _which(self, name: str) -> Path | None:
        known = {words.split()[0] for words in self.answers}
        return Path("/usr/bin") / name if name in known else None


def docker(**more: object) -> dict[str, str]:
    answer = {"ServerVersion": "29.7.2", "Runtimes": {"runc": {}}, **more}
    return {"docker info": json.dumps(answer)}


def facts(
    machine: Machine,
    audit: Path | None = None,
    caches: Sequence[Path] = (),
    recipe: Recipe | None = None,
) -> Facts:
    return examine.facts(
        machine.host(),
        knowledge.load(),
        audit=audit,
        cache_folders=caches,
        # Not the checkout's: what a user has built there says nothing of the made-up host.
        dist=machine.root / "dist",
        recipe=recipe,
        options=options.parse(render.arguments(recipe)) if recipe else {},
    )


def findings(
    machine: Machine,
    audit: Path | None = None,
    caches: Sequence[Path] = (),
    recipe: Recipe | None = None,
) -> dict[str, list[Diagnosis]]:
    """What was found, by check."""
    found: dict[str, list[Diagnosis]] = {}
    for finding in examine.run(facts(machine, audit, caches, recipe)):
        found.setdefault(finding.id, []).append(finding)
    return found


def severity(found: Mapping[str, Sequence[Diagnosis]], check: str) -> str:
    """The worst severity of a check."""
    return found[check][0].severity


def ledger(**fields: Any) -> Ledger:
    """A ledger in which all that is not given is empty."""
    made: dict[str, Any] = {one.name: "" for one in dataclasses.fields(Ledger)}
    empty = ("patches", "files", "libraries", "allowed_missing", "overrides", "extras", "sources")
    made |= dict.fromkeys(empty, ())
    return Ledger(**{**made, "schema": 2, **fields})


def bundle(folder: Path, *, machine: str = "x86_64", **units: int) -> Path:
    """dist/<version>/ with an audit and a ledger; ``units`` are those of its one library."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"native": 40, "ptx": 20, "none": 2, "unknown": 0, **units}
    runs = RunsReport(verdict="mixed", units=counts)
    library = LibraryReport(
        path="vllm/_C.abi3.so",
        sha256="",
        size=1,
        machine=machine,
        cubins={"9.0": 3, "12.0": 40},
        ptx={"8.0": 20},
        unknown=(),
        runs={"12.0": runs, "12.1": runs},
    )
    audit = AuditReport(
        subject="vllm-0.33.0+sm12x.0123abcd.whl",
        kind="wheel",
        devices=("12.0", "12.1"),
        libraries=(library,),
        policy=Judgement(name="default", passed=True, offenders=(), accepted=()),
    )
    declared.write_json(folder / "audit.json", audit)
    versions = {"cuda-toolkit": "13.0.2", "flashinfer-python": "0.6.8.post1"}
    declared.write_json(
        folder / "ledger.json", ledger(machine=machine, stack_id="0123abcd", dependencies=versions)
    )
    os.utime(folder / "ledger.json", (BUILT, BUILT))
    return folder / "audit.json"


def rtx_pro(
    index: int,
    used: int = 600 * MIB,
    processes: Any = (),
    load: tuple[int, int] | None = None,
) -> FakeGpu:
    return FakeGpu(
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        capability=(12, 0),
        bus=f"00000000:0{index + 1}:00.0",
        memory=(95 * GIB, used),
        processes=processes,
        load=load,
    )


def gb10(**more: Any) -> FakeGpu:
    return FakeGpu(
        name="NVIDIA GB10", capability=(12, 1), bus="0000000f:01:00.0", memory=None, **more
    )


def workstation(root: Path, **more: object) -> Machine:
    """Four RTX PRO 6000, docker with the NVIDIA runtime, an IOMMU that passes through."""
    settings: dict[str, object] = {
        "root": root,
        "files": {
            "/proc/driver/nvidia/version": OPEN_595.replace("595.71.05", "590.48.01"),
            **{
                f"/sys/bus/pci/devices/0000:0{n}:00.0/iommu_group/type": "identity"
                for n in range(1, 5)
            },
        },
        "answers": {**docker(Runtimes={"runc": {}, "nvidia": {}}), "nvidia-ctk": ""},
        "library": nvml("590.48.01", [rtx_pro(index) for index in range(4)]),
    }
    files = more.pop("files", {})
    assert isinstance(files, dict)
    machine = Machine(**{**settings, **more})  # type: ignore[arg-type]
    machine.files.update(files)
    return machine


def spark(root: Path, **more: object) -> Machine:
    """One GB10 of a pair, with one of its two RoCE ports connected."""
    port = "/sys/class/infiniband/rocep1s0f1/ports/1"
    settings: dict[str, object] = {
        "root": root,
        "files": {
            "/proc/driver/nvidia/version": OPEN_595.replace("595.71.05", "580.142"),
            "/proc/sys/kernel/arch": "aarch64",
            "/proc/meminfo": meminfo(
                MemTotal=121, MemFree=100, MemAvailable=110, Cached=10, AnonPages=4
            ),
            f"{port}/state": "4: ACTIVE",
            f"{port}/link_layer": "Ethernet",
            f"{port}/rate": "200 Gb/sec (4X HDR)",
            f"{port}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
            f"{port}/gid_attrs/types/0": "IB/RoCE v1",
            f"{port}/gids/3": "0000:0000:0000:0000:0000:ffff:c0a8:0001",
            f"{port}/gid_attrs/types/3": "RoCE v2",
            "/sys/class/infiniband/rocep1s0f1/device/net/enp1s0f1np1/x": "",
            "/sys/class/net/enp1s0f1np1/mtu": "9000",
        },
        "answers": {**docker(Runtimes={"nvidia": {}})},
        "library": nvml("580.142", [gb10()]),
    }
    files = more.pop("files", {})
    assert isinstance(files, dict)
    machine = Machine(**{**settings, **more})  # type: ignore[arg-type]
    machine.files.update(files)
    return machine

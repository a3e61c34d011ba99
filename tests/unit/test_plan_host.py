"""This machine's GPUs and memory, from a stand-in for NVML and folders that stand for /proc."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sm12x.core.errors import ToolMissingError, UsageError
from sm12x.core.text import GIB
from sm12x.plan import host


class NVMLError(Exception):
    pass


def nvml(
    *gpus: tuple[str, tuple[int, int], float | None], driver: bool = True
) -> tuple[ModuleType, list[str]]:
    """NVML with GPUs of a name, a capability and GiB of memory (None: not supported)."""
    module, calls = ModuleType("pynvml"), []

    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")
        calls.append("init")

    def memory(gpu: tuple[str, tuple[int, int], float | None], version: int) -> SimpleNamespace:
        if gpu[2] is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=int((gpu[2] + 0.5) * GIB), reserved=GIB // 2)

    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlMemory_v2=2,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda gpu: gpu[0],
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu[1],
        nvmlDeviceGetMemoryInfo=memory,
    )
    return module, calls


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {121 * 1024**2} kB\nMemFree: 1 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def test_gpus_and_memory_of_this_machine(machine: Path) -> None:
    module, calls = nvml(*[("NVIDIA RTX PRO 6000", (12, 0), 95.0)] * 4)

    found = host.here(nvml=module, proc=machine / "proc", sys=machine / "sys")

    assert (found.name, found.capability, found.gpus) == ("NVIDIA RTX PRO 6000", "12.0", 4)
    assert (found.memory.low, found.memory.high, found.basis) == (95.0, 95.0, "measured")
    assert not found.unified
    assert found.ram == 121
    assert calls == ["init", "shutdown"]


def test_a_gb10_has_the_machine_s_memory(machine: Path) -> None:
    module, _ = nvml(("NVIDIA GB10", (12, 1), None))

    found = host.here(nvml=module, proc=machine / "proc", sys=machine / "sys")

    assert found.unified
    assert found.memory.low == 121
    assert found.system is not None


def test_the_least_memory_of_equal_gpus_counts(machine: Path) -> None:
    module, _ = nvml(("GPU", (12, 0), 95.0), ("GPU", (12, 0), 94.5))

    found = host.here(nvml=module, proc=machine / "proc", sys=machine / "sys")

    assert found.memory.low == 94.5


@pytest.mark.parametrize(
    ("gpus", "driver", "error", "said"),
    [
        ((), False, ToolMissingError, "Driver Not Loaded"),
        ((), True, UsageError, "shows no GPU"),
        ((("a", (12, 0), 1.0), ("b", (9, 0), 1.0)), True, UsageError, "different kinds: a, b"),
    ],
)
def test_what_keeps_from_asking_is_said(
    machine: Path,
    gpus: tuple[tuple[str, tuple[int, int], float | None], ...],
    driver: bool,
    error: type[Exception],
    said: str,
) -> None:
    module, _ = nvml(*gpus, driver=driver)

    with pytest.raises(error, match=said):
        host.here(nvml=module, proc=machine / "proc", sys=machine / "sys")


def test_without_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)

    with pytest.raises(ToolMissingError, match="not installed") as caught:
        host.here()
    assert "nvidia-ml-py" in caught.value.next_step


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("", {}, 121),
        ("0::/a/b\n", {"memory.max": "max"}, 121),
        # A container sees its own group at the top, under a path of the host's.
        ("0::/docker/x\n", {"memory.max": str(64 * GIB)}, 64),
        # systemd: a limit of a group above one's own.
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(32 * GIB)}, 32),
        ("5:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": str(16 * GIB)}, 16),
        ("5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, 121),
    ],
)
def test_the_smallest_limit_of_the_cgroups_counts(
    machine: Path, own: str, files: dict[str, str], gib: float
) -> None:
    (machine / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = machine / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert host.ram(proc=machine / "proc", sys=machine / "sys") == gib

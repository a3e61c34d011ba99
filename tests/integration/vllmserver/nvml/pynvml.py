"""Stands in for NVML: one GPU, whose processes are those of the files in FAKE_GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

nvmlMemory_v2 = 2  # noqa: N816 - as in NVIDIA's library
# The desktop that has a little of every GPU.
OTHERS = 300 << 20


class NVMLError(Exception):
    pass


def _processes() -> list[Any]:
    found = [json.loads(path.read_text()) for path in Path(os.environ["FAKE_GPU"]).glob("*.json")]
    return [SimpleNamespace(pid=one["pid"], usedGpuMemory=one["bytes"]) for one in found]


def nvmlInit() -> None:  # noqa: N802
    pass


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "580.1"


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    return "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def nvmlDeviceGetPciInfo(handle: int) -> Any:  # noqa: N802
    return SimpleNamespace(busId="00000000:01:00.0")


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:  # noqa: N802
    return 12, 0


def nvmlDeviceGetMemoryInfo(handle: int, version: int = 1) -> Any:  # noqa: N802
    used = OTHERS + sum(one.usedGpuMemory for one in _processes())
    return SimpleNamespace(total=95 << 30, used=used)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:  # noqa: N802
    # In a container the driver lists none.
    return [] if os.environ.get("FAKE_CONTAINER") else _processes()


def nvmlDeviceGetGraphicsRunningProcesses(handle: int) -> list[Any]:  # noqa: N802
    return []


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:  # noqa: N802
    return SimpleNamespace(gpu=0)


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:  # noqa: N802
    return 600000


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:  # noqa: N802
    return 41


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:  # noqa: N802
    return 2500


def nvmlDeviceGetPowerUsage(handle: int) -> int:  # noqa: N802
    return 30000

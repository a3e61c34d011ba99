"""The memory of the GPUs by NVML, asked several times within a swap."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes of one GPU, and of each process there; ``processes`` is empty where none is listed."""

    total: int
    used: int
    free: int
    processes: Mapping[int, int]


class Gpus:
    """NVML, opened once. ``visible`` are the devices of CUDA_VISIBLE_DEVICES, in its order."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        words = environ.get("CUDA_VISIBLE_DEVICES", "")
        self.visible = [word.strip() for word in words.split(",") if word.strip()]
        self.fault = ""
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            self.fault = "nvidia-ml-py is not installed"
        # NVMLError, whose module may be what is missing.
        except Exception as error:
            self.fault = f"NVML: {error}"

    def device(self, gpu: int) -> str:
        """Return what CUDA_VISIBLE_DEVICES has for the pool's GPU number ``gpu``."""
        return self.visible[gpu] if gpu < len(self.visible) else str(gpu)

    def _handle(self, gpu: int) -> Any:
        word = self.device(gpu)
        if word.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(word))
        return self._nvml.nvmlDeviceGetHandleByUUID(word)

    def memory(self, gpus: Sequence[int]) -> dict[int, GpuMemory] | None:
        """Return the memory of each GPU; None where one cannot be read, as on unified memory."""
        if self._nvml is None:
            return None
        result = {}
        try:
            for gpu in gpus:
                handle = self._handle(gpu)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                result[gpu] = GpuMemory(
                    total=int(memory.total),
                    used=int(memory.used),
                    free=int(memory.free),
                    processes=self._processes(handle),
                )
        except Exception as error:
            self.fault = f"NVML: {error}"
            return None
        return result

    def _processes(self, handle: Any) -> dict[int, int]:
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except Exception:
            return {}
        return {int(one.pid): int(one.usedGpuMemory or 0) for one in listed}


def strangers(memory: GpuMemory, own: frozenset[int]) -> str:
    """Return the largest processes that are not in ``own``, with pid, name and MiB."""
    others = sorted(
        ((size, pid) for pid, size in memory.processes.items() if pid not in own), reverse=True
    )
    words = [f"process {pid} ({_command(pid)}) holds {size // MIB} MiB" for size, pid in others[:3]]
    return ", ".join(words)


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() or "?"
        )
    except OSError:
        return "?"


def group(pids: Sequence[int], memory: Mapping[int, GpuMemory] | None) -> frozenset[int]:
    """Return the processes on the GPUs that are in the process group of one of ``pids``."""
    leaders = set(pids)
    result = set()
    for gpu in (memory or {}).values():
        for pid in gpu.processes:
            try:
                if os.getpgid(pid) in leaders:
                    result.add(pid)
            except OSError:
                continue
    return frozenset(result)

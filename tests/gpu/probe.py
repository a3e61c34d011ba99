"""What a worker of a served vLLM holds: `--worker-extension-cls tests.gpu.probe.Probe`."""

from __future__ import annotations

from typing import Any


class Probe:
    """Methods that a worker answers to, through POST /collective_rpc."""

    def memory_held(self) -> dict[str, int]:
        """Bytes on this worker's device: tensors, their peak, PyTorch's segments, all in use."""
        import torch

        worker: Any = self
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return {
            "allocated": stats["allocated_bytes.all.current"],
            "peak": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "in_use": total - free,
            "in_use_before": total - worker.init_snapshot.free_memory,
            "budget": int(worker.requested_memory),
            "cache": int(getattr(worker, "available_kv_cache_memory_bytes", 0)),
            "given_back": _given_back(),
        }


def _given_back() -> int:
    """Bytes of segments that PyTorch counts as reserved and the driver has again."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.instance
    segments = getattr(allocator, "released_segments", {})
    return sum(handle[1] for handle in segments.values())

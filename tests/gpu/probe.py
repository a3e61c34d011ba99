"""What a worker of a served vLLM holds: `--worker-extension-cls tests.gpu.probe.Probe`.

The import also gives `--load-format dummy` other weights. The release draws all of them from
-0.001 to 0.001; an attention layer of such a model adds nothing that a token's rank could show.
"""

from __future__ import annotations

import math
from typing import Any

from tests.gpu import replies


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
            **_cached(),
        }

    def large_reply(self, number: int, mib: int) -> replies.LargeReply:
        """A reply of ``mib`` MiB. Of a worker in the engine's own process nothing is received."""
        worker: Any = self
        return replies.LargeReply(worker.rank, number, mib)


def _cached() -> dict[str, int]:
    """Bytes of PyTorch's segments that no tensor has: of its own pool, and of the others."""
    import torch

    held = {"cached": 0, "cached_in_pools": 0}
    for segment in torch.cuda.memory_snapshot():
        name = "cached" if segment["segment_pool_id"] == (0, 0) else "cached_in_pools"
        held[name] += segment["total_size"] - segment["allocated_size"]
    return held


def _draw_weights() -> None:
    """Make dummy weights as large as a trained model's: products keep their variance."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    of_release: Any = weight_utils.initialize_single_dummy_weight

    def drawn(param: Any, *limits: float, seed: int = 1234, **name: str) -> None:
        # Norms and sinks have one dimension; a matrix has its inputs last.
        bound = math.sqrt(3 / param.shape[-1]) if param.ndim > 1 and param.numel() else 0.0
        of_release(param, *((-bound, bound) if bound else (0.5, 1.5)), seed, **name)

    dummy_loader.initialize_single_dummy_weight = drawn


def _given_back() -> int:
    """Bytes of segments that PyTorch counts as reserved and the driver has again."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.instance
    segments = getattr(allocator, "released_segments", {})
    return sum(handle[1] for handle in segments.values())


_draw_weights()

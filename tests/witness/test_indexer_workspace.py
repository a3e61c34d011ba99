"""Memory that the sparse indexer of DeepSeek V4 takes, on cards of 95 GiB."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.deepseek_v4 import MODULES, prepare
from tests.witness.kernels import Gpu, KernelProcess

INDEXER = "vllm.v1.attention.backends.mla.indexer"
PRELOAD = MODULES
LIMIT = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
MIB = 1024 * 1024
SM12X, HOPPER = (12, 0), (9, 0)


def gathered(gpu: Gpu, capability: list[int], sequences: int) -> int:
    """Keys that the buffer of a prefill step is for, in sequences of full length."""
    prepare()
    gpu.become((capability[0], capability[1]))
    module: Any = importlib.import_module(INDEXER)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
    )
    return int(module.get_max_prefill_buffer_size(config)) // 1000


def simulated(gpu: Gpu, capability: list[int], value: str | None) -> int:
    """Bytes of logits that the profiling run allocates."""
    torch: Any = importlib.import_module("torch")
    prepare()
    if value is not None:
        os.environ[LIMIT] = value
    gpu.become((capability[0], capability[1]))
    module: Any = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    module.get_forward_context = lambda: SimpleNamespace(attn_metadata=None)
    sizes: list[int] = []
    empty = torch.empty

    def record(*shape: Any, **options: Any) -> Any:
        if options.get("dtype") == torch.uint8 and options.get("device") == torch.device("cpu"):
            sizes.append(int(torch.Size(shape).numel()) if isinstance(shape[0], int) else 0)
        return empty(*shape, **options)

    module.torch = SimpleNamespace(**{**vars(torch), "empty": record})
    hidden = torch.zeros(1, 8)
    module.sparse_attn_indexer(
        hidden, "layer", hidden, hidden, None, hidden, hidden,
        128, None, 512, 128, 1024, 64, hidden, True,
    )  # fmt: skip
    return max(sizes)


@pytest.mark.parametrize(("sequences", "wanted"), [(1, 1), (12, 12)])
def test_keys_are_gathered_for_the_sequences_of_a_step(
    compiled: KernelProcess, sequences: int, wanted: int
) -> None:
    assert compiled.call(gathered, capability=SM12X, sequences=sequences) == wanted


@pytest.mark.guard
@pytest.mark.parametrize(("capability", "sequences"), [(SM12X, 256), (HOPPER, 12), (HOPPER, 256)])
def test_otherwise_for_forty(
    compiled: KernelProcess, capability: tuple[int, int], sequences: int
) -> None:
    assert compiled.call(gathered, capability=capability, sequences=sequences) == 40


def test_logits_take_256_mib_at_most(interpreted: KernelProcess) -> None:
    assert interpreted.call(simulated, capability=SM12X, value=None) == 256 * MIB


@pytest.mark.guard
@pytest.mark.parametrize(
    ("capability", "value", "wanted"),
    [(SM12X, "64", 64), (SM12X, "1024", 1024), (HOPPER, None, 512), (HOPPER, "64", 64)],
)
def test_what_was_asked_for_is_taken(
    interpreted: KernelProcess, capability: tuple[int, int], value: str | None, wanted: int
) -> None:
    assert interpreted.call(simulated, capability=capability, value=value) == wanted * MIB

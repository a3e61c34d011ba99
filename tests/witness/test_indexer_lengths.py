"""Lengths of the sparse indexer's decode rows with one draft token (MTP), as its kernels read them.

persistent_topk refuses lengths that do not lie one after the other, and top_k_per_row_decode, which
takes wide rows on SM12x, reads them as if they did. Both are compiled; here is what they are given.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.deepseek_v4 import MODULES, prepare
from tests.witness.kernels import Gpu, KernelProcess

INDEXER = "vllm.v1.attention.backends.mla.indexer"
PRELOAD = MODULES
# Speculated tokens and the one before them: what other devices than 10.x take natively.
NEXT_N = 2
SEQUENCES, TOKENS, BLOCKS = 8, 32, 8


def lengths(
    gpu: Gpu, lens: list[int], news: list[int], ratio: int, stale: int = 9
) -> list[list[int] | bool]:
    """Of a step: what the operator reads row by row, what it is meant to, and whether it may.

    ``lens`` has the tokens of each request with the ``news`` of this step; a request without any
    pads the batch to the size of a CUDA graph. ``stale`` is what an earlier step has left in the
    buffer.
    """
    torch: Any = importlib.import_module("torch")
    prepare()
    gpu.become((12, 0))
    module: Any = importlib.import_module(INDEXER)
    kind = module.DeepseekV32IndexerMetadataBuilder
    builder = kind.__new__(kind)

    def buffer(*shape: int, dtype: Any = torch.int32) -> Any:
        return torch.full(shape, stale, dtype=dtype)

    builder.device = torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace(block_size=256, storage_block_size=256 // ratio)
    builder.compress_ratio = ratio
    builder.num_speculative_tokens = NEXT_N - 1
    builder.reorder_batch_threshold = NEXT_N
    builder.use_flattening = False
    builder.offsets_buffer = torch.arange(NEXT_N, dtype=torch.int32)
    builder.decode_lens_buffer = buffer(TOKENS)
    builder.decode_seq_lens_buffer = buffer(SEQUENCES, NEXT_N)
    builder.expanded_seq_lens_buffer = buffer(TOKENS)
    builder.compressed_slot_mapping_buffer = buffer(TOKENS, dtype=torch.int64)
    builder.scheduler_metadata_buffer = buffer(2, 2)
    rows = len(news) * max(news)
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    metadata = builder.build(
        0,
        SimpleNamespace(
            num_reqs=len(lens),
            num_actual_tokens=rows,
            max_query_len=max(news),
            max_seq_len=max(lens),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            slot_mapping=torch.arange(rows),
            block_table_tensor=torch.zeros(len(lens), BLOCKS, dtype=torch.int32),
            is_prefilling=None,
        ),
    )
    given = metadata.decode.seq_lens
    assert metadata.num_decode_tokens == given.numel() == rows
    read = torch.as_strided(given, (rows,), (1,), given.storage_offset()).tolist()
    wanted = [
        (length - max(news) + 1 + j) // ratio if new else 0
        for length, new in zip(lens, news, strict=True)
        for j in range(max(news))
    ]
    return [read, wanted, bool(given.is_contiguous())]


# A drafter is skipped, and a draft is dropped where a grammar does not take it: such a request has
# one token in a step, others have two.
@pytest.mark.parametrize("ratio", [1, 4])
def test_requests_without_a_draft(interpreted: KernelProcess, ratio: int) -> None:
    given: dict[str, Any] = {"lens": [900, 40, 700], "news": [1, 1, 1], "stale": 1500}
    read, wanted, contiguous = interpreted.call(lengths, ratio=ratio, **given)
    assert read == wanted
    assert contiguous


@pytest.mark.parametrize("ratio", [1, 4])
def test_a_padding_request_has_no_length(interpreted: KernelProcess, ratio: int) -> None:
    """A graph for 4 requests, replayed for 3: -1 of the fourth is 4294967295 to persistent_topk."""
    given: dict[str, Any] = {"lens": [900, 40, 700, 0], "news": [2, 2, 2, 0]}
    read, wanted, _ = interpreted.call(lengths, ratio=ratio, **given)
    assert read == wanted


@pytest.mark.guard
@pytest.mark.parametrize("ratio", [1, 4])
def test_requests_with_a_draft(interpreted: KernelProcess, ratio: int) -> None:
    given: dict[str, Any] = {"lens": [900, 40, 700], "news": [2, 2, 2]}
    read, wanted, contiguous = interpreted.call(lengths, ratio=ratio, **given)
    assert read == wanted
    assert contiguous


@pytest.mark.guard
def test_one_request_without_a_draft(interpreted: KernelProcess) -> None:
    read, wanted, contiguous = interpreted.call(lengths, lens=[900], news=[1], ratio=4)
    assert read == wanted
    assert contiguous

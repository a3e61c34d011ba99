"""The answer's doubts and text: no vLLM is needed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from sm12x.core import declared
from sm12x.core.text import GIB
from sm12x.plan import figures
from sm12x.plan.figures import Answer, Cache, Figures, Group, Room, Source, Stage

STAGE = Stage(weights=10 * GIB, draft=0, held=11 * GIB, host=0, loaded=12 * GIB)
CACHE = Cache(
    groups=(Group(kind="FullAttention", layers=32, block_size=16, page=65536, details=""),),
    backends=("FLASH_ATTN",),
    layout="LBNHC",
    block=2 << 20,
    request=4 * GIB,
    at_start=4 * GIB + (2 << 20),
    token=131072.0,
    states=False,
)
GIVEN = Figures(
    architecture="LlamaForCausalLM",
    quantization="",
    kv_dtype="auto",
    tp=2,
    pp=1,
    dp=1,
    dcp=1,
    experts=False,
    max_model_len=32768,
    limit=131072,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    utilization=0.92,
    stages=(STAGE,),
    cache=CACHE,
    rooms=(),
)
ROOM = Room(
    budget=40 * GIB,
    basis="given",
    blocks=20480,
    tokens=327680,
    concurrency=10.0,
    length=327664,
    sequences=None,
)


def source(gib: float | None, *, quantized: bool = False) -> Source:
    return Source(tensors=None if gib is None else int(gib * GIB), quantized=quantized)


def answer(**changes: Any) -> Answer:
    return Answer(
        release="0.33.0",
        stack="0123abcd",
        card="rtx-pro-6000",
        model="model",
        arguments=("--max-num-seqs", "256"),
        source=source(20),
        figures=dataclasses.replace(GIVEN, **changes),
    )


@pytest.mark.parametrize("gib", [20, 18, 25, None])
def test_weights_of_the_checkpoints_size_are_believed(gib: float | None) -> None:
    assert not [*figures.doubts(GIVEN, source(gib))]


@pytest.mark.parametrize("gib", [10, 30, 200])
def test_weights_of_another_size_are_doubted(gib: float) -> None:
    (doubt,) = figures.doubts(GIVEN, source(gib))
    assert "20.0 GiB" in doubt


def test_a_quantization_that_is_not_seen_is_doubted_without_a_size() -> None:
    assert len([*figures.doubts(GIVEN, source(None, quantized=True))]) == 1
    seen = dataclasses.replace(GIVEN, quantization="fp8")
    assert not [*figures.doubts(seen, source(None, quantized=True))]


def test_stages_drafts_and_host_memory_count_as_loaded() -> None:
    parts = (
        dataclasses.replace(STAGE, weights=5 * GIB, host=5 * GIB),
        dataclasses.replace(STAGE, draft=2 * GIB),
    )
    assert not [*figures.doubts(dataclasses.replace(GIVEN, pp=2, stages=parts), source(44))]


def test_experts_split_over_data_parallel_engines_are_a_part_on_each() -> None:
    shared = dataclasses.replace(GIVEN, dp=4)
    assert [*figures.doubts(shared, source(60))]
    assert not [*figures.doubts(dataclasses.replace(shared, experts=True), source(60))]


def test_the_largest_stage_counts() -> None:
    second = dataclasses.replace(STAGE, loaded=None, held=20 * GIB)
    assert dataclasses.replace(GIVEN, stages=(STAGE, second)).largest is second


def test_an_answer_survives_json() -> None:
    first = answer(rooms=(ROOM,))
    again, faults = declared.check(Answer, json.loads(declared.to_json(first)))
    assert (again, faults) == (first, [])


def test_the_text_says_what_fits_first() -> None:
    lines = figures.text(answer(rooms=(ROOM,))).splitlines()
    assert "starts in a KV cache of 40.00 GiB" in lines[1]
    assert "--max-model-len 327,664" in lines[2]
    assert "327,680 tokens" in lines[3]
    assert any("131072.0 bytes a token" in line for line in lines)


def test_the_size_that_the_arguments_leave_goes_before_those_that_are_given() -> None:
    left = dataclasses.replace(ROOM, budget=30 * GIB, basis="at most")
    text = figures.text(answer(rooms=(ROOM, left)))
    assert text.index("0.92 of rtx-pro-6000") < text.index("40.00 GiB")


def test_the_layers_are_details() -> None:
    assert "32 x FullAttention" not in figures.text(answer())
    assert "32 x FullAttention" in figures.text(answer(), details=True)


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({"sequences": 100}, "--max-num-seqs 100"),
        ({"refusal": "4.00 GiB KV cache is needed", "length": 8192}, "--max-model-len 8192"),
        ({"refusal": "No available memory", "length": 0}, "more GPUs"),
    ],
)
def test_the_text_says_that_vllm_does_not_start_and_what_to_change(
    changes: dict[str, Any], change: str
) -> None:
    room = dataclasses.replace(ROOM, **changes)
    text = figures.text(answer(rooms=(room,)))
    assert "does not start" in text
    assert room.refusal in text
    (line,) = figures.changes(GIVEN, room)
    assert change in line
    assert line in text


def test_the_text_of_a_refusal_is_vllms_reason() -> None:
    failed = dataclasses.replace(answer(), figures=None, failure="ValueError: no such model")
    assert "ValueError: no such model" in figures.text(failed)

"""When a sleep counts as one that has freed its memory, and when there is room for a wake-up."""

from __future__ import annotations

from typing import Any

import pytest

from sm12x.pool import proof
from sm12x.pool.engines import Rank
from sm12x.pool.gpus import MIB, GpuMemory
from sm12x.pool.state import StepError

ASLEEP = Rank(asleep={"weights": 600 * MIB, "kv_cache": 300 * MIB}, awake={}, host=600 * MIB)
TOTAL = 1000 * MIB


def memory(used: int, processes: dict[int, int] | None = None) -> GpuMemory:
    return GpuMemory(
        total=TOTAL,
        used=used * MIB,
        free=TOTAL - used * MIB,
        processes={pid: size * MIB for pid, size in (processes or {}).items()},
    )


def freed(ranks: list[Rank], **more: Any) -> int:
    settings: dict[str, Any] = {
        "tag": "weights",
        "before": None,
        "now": None,
        "known": frozenset(),
        "unseen": "",
        **more,
    }
    gpus = settings.pop("gpus", {0})
    return proof.freed("a", gpus, ranks, **settings)


def test_ranks_alone_are_a_proof_where_nvml_sees_nothing() -> None:
    assert freed([ASLEEP]) == 900 * MIB
    assert freed([ASLEEP, ASLEEP], gpus={0, 1}) == 1800 * MIB


def test_nvml_alone_is_a_proof_where_a_server_names_no_ranks() -> None:
    assert freed([], before={0: memory(950)}, now={0: memory(50)}) == 900 * MIB


def test_both_have_to_agree_on_each_gpu() -> None:
    before = {0: memory(950), 1: memory(950)}
    gpus = {0, 1}
    good = {0: memory(50), 1: memory(60)}
    assert freed([ASLEEP, ASLEEP], gpus=gpus, before=before, now=good) == 1800 * MIB
    taken = {0: memory(50), 1: memory(700, {4_000_001: 650})}
    with pytest.raises(StepError, match=r"GPU 1.*process 4000001"):
        freed([ASLEEP, ASLEEP], gpus=gpus, before=before, now=taken)


@pytest.mark.parametrize(
    ("ranks", "gpus", "tag"),
    [
        # A rank that has freed nothing, one that keeps its weights, and one that is not there.
        ([ASLEEP, Rank(asleep={}, awake={"weights": 1}, host=0)], {0, 1}, "weights"),
        ([Rank(asleep={"kv_cache": 5}, awake={"weights": 1}, host=0)], {0}, "weights"),
        ([Rank(asleep={"weights": 5}, awake={"kv_cache": 1}, host=0)], {0}, "kv_cache"),
        ([ASLEEP], {0, 1}, "weights"),
        ([], {0}, "weights"),
    ],
)
def test_what_is_no_proof(ranks: list[Rank], gpus: set[int], tag: str) -> None:
    with pytest.raises(StepError):
        freed(ranks, gpus=gpus, tag=tag)


def test_the_kv_cache_alone_leaves_the_weights() -> None:
    rank = Rank(asleep={"kv_cache": 300 * MIB}, awake={"weights": 600 * MIB}, host=0)
    assert freed([rank], tag="kv_cache") == 300 * MIB


def test_nothing_is_required_where_that_is_said() -> None:
    assert freed([], unseen=None) == 0


def test_the_residue_of_its_own_processes_is_limited() -> None:
    now = {0: memory(900, {7: 200, 8: 50, 9: 600})}
    proof.require_residue("a", {0}, {7, 8}, now, 0.3)
    with pytest.raises(StepError, match="GPU 0"):
        proof.require_residue("a", {0}, {7, 8, 9}, now, 0.3)


def test_there_is_room_for_each_rank() -> None:
    now = {0: memory(50), 1: memory(300, {4_000_002: 250})}
    proof.require_room("a", {0, 1}, [900 * MIB, 700 * MIB], now, frozenset())
    with pytest.raises(StepError, match="process 4000002"):
        proof.require_room("a", {0, 1}, [900 * MIB, 800 * MIB], now, frozenset())
    with pytest.raises(StepError, match="in a container"):
        proof.require_room("a", {0, 1}, [900 * MIB, 800 * MIB], now, frozenset({4_000_002}))
    # Its ranks are not known.
    proof.require_room("a", {0, 1}, [], now, frozenset())

"""The KV cache over a sleep: what is kept, in which order, on every rank or none, and how long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as ranks
from tests.witness import kept_kv_rig as kv
from tests.witness.executor_rig import RANKS, Gpus, isolated
from tests.witness.interrupt import walk

ranks.use_tree()

LIMIT = 50
# As a call of /sleep arrives at the engine: tags, reject, keep_kv.
KEEPING = (None, False, True)
FIRST, SECOND, THIRD = ([n] * 6 + list(range(n, n + 18)) for n in (1, 2, 3))
# Whole blocks of such a prompt, all but the one of the last token.
WHOLE = (len(FIRST) - 1) // kv.BLOCK * kv.BLOCK
FILES = ("kv_keeper.py", "kept_blocks.py")

pytestmark = pytest.mark.usefixtures("vllm_executor")


def served(rig: kv.Rig, *prompts: list[int], tokens: int = 2) -> None:
    """Answer these prompts one after the other, so that the last one ran last."""
    for prompt in prompts:
        rig.ask(f"served {len(rig.asked)}", prompt, tokens)
        rig.finish()


def swap(rig: kv.Rig, mode: str = "keep", **how: Any) -> None:
    rig.sleep(mode, **how)
    rig.engine.wake_up(None)


def computed(rig: kv.Rig) -> int:
    """How many tokens the model has computed so far."""
    count: int = rig.engine.model_executor.driver_worker.worker.computed
    return count


# -- what is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"tags": ["kv_cache"]}])
@pytest.mark.parametrize("kind", kv.KINDS)
@isolated(LIMIT)
def test_a_frozen_request_goes_on_with_its_next_token(kind: str, how: dict[str, Any]) -> None:
    counts = []
    for sleeps in (False, True):
        with kv.engine(kind) as rig:
            rig.ask("a", FIRST, 9)
            rig.ask("b", SECOND, 9)
            rig.step(4)
            if sleeps:
                before = rig.running()
                blocks = [rig.engine.scheduler.kv_cache_manager.get_block_ids(n) for n in before]
                swap(rig, **how)
                assert rig.running() == before == ["a", "b"]
                kept = [rig.engine.scheduler.kv_cache_manager.get_block_ids(n) for n in before]
                assert kept == blocks
            rig.finish()
            rig.check()
            counts.append(computed(rig))
    # Nothing is computed again.
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", kv.KINDS)
@isolated(LIMIT)
def test_abort_keeps_the_prefix_cache(kind: str) -> None:
    with kv.engine(kind) as rig:
        served(rig, FIRST)
        rig.ask("aborted", SECOND, 30)
        rig.step(3)
        hits = [rig.hit(prompt) for prompt in (FIRST, SECOND)]
        swap(rig, "abort")
        assert [rig.hit(prompt) for prompt in (FIRST, SECOND)] == hits
        assert min(hits) > 0
        served(rig, FIRST, SECOND)
        rig.check()


@pytest.mark.parametrize("asked", [None, False])
@isolated(LIMIT)
def test_without_it_a_sleep_is_what_it_was(asked: bool | None) -> None:
    with kv.engine(keep=asked is False) as rig:
        served(rig, FIRST)
        rig.ask("running", SECOND, 9)
        rig.step(3)
        rig.sleep("keep", **({} if asked is None else {"keep_kv": asked}))
        assert rig.running() == []
        assert not rig.cached()
        assert rig.report() == {}
        assert "keep_kv" not in kv.HOST.calls
        rig.engine.wake_up(None)
        rig.finish()


@isolated(LIMIT)
def test_a_call_can_ask_for_it() -> None:
    with kv.engine(keep=False) as rig:
        served(rig, FIRST)
        swap(rig, keep_kv=True)
        assert rig.hit(FIRST) == WHOLE


@isolated(LIMIT)
def test_the_released_cache_alone_is_kept_too() -> None:
    with kv.engine() as rig:
        served(rig, FIRST)
        # The worker has to be told of the last request's end.
        rig.step()
        rig.engine.sleep(0, "keep")
        rig.engine.release_kv_cache_memory()
        rig.engine.wake_up(["kv_cache"])
        assert rig.hit(FIRST) == WHOLE
        rig.check()


@pytest.mark.parametrize(
    ("mode", "resets"), [("keep", 0), pytest.param("abort", 1, marks=pytest.mark.guard)]
)
@isolated(LIMIT)
def test_encoders_results_stay_for_frozen_requests_alone(mode: str, resets: int) -> None:
    with kv.engine() as rig:
        rig.ask("running", FIRST, 9)
        rig.step(3)
        swap(rig, mode)
        worker = rig.engine.model_executor.driver_worker.worker
        assert worker.encoder_resets == resets


@isolated(LIMIT)
def test_nothing_cached_asks_no_rank() -> None:
    with kv.engine() as rig:
        resets = count_connector_resets(rig)
        swap(rig)
        assert kv.HOST.calls == ["sleep", "wake_up"]
        assert resets == []
        served(rig, FIRST)


# -- in which order -----------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(1, 14))
@isolated(LIMIT)
def test_what_ran_last_is_kept_whole_from_its_root(room: int) -> None:
    with kv.engine(blocks=60) as rig:
        served(rig, FIRST, SECOND, THIRD)
        full = WHOLE // kv.BLOCK
        kv.HOST.blocks = room
        rig.sleep()
        assert len(kv.HOST.kept) <= room
        rig.check()
        rig.check_parents()
        rig.engine.wake_up(None)
        # A prompt's last block is cached too, with the token that followed.
        newest = min(room, full + 1)
        assert rig.hit(THIRD) == min(newest, full) * kv.BLOCK
        assert rig.hit(SECOND) == min(room - newest, full) * kv.BLOCK
        assert rig.hit(FIRST) == max(0, room - 2 * (full + 1)) * kv.BLOCK
        served(rig, FIRST, SECOND, THIRD)


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["window", "state"])
@isolated(LIMIT)
def test_every_group_keeps_what_a_hit_reads(kind: str) -> None:
    for room in range(1, 30):
        with kv.engine(kind, blocks=90) as rig:
            served(rig, FIRST, SECOND)
            before = rig.hit(SECOND)
            kv.HOST.blocks = room
            rig.sleep()
            kept = len(kv.HOST.kept)
            rig.check()
            rig.engine.wake_up(None)
            hit = rig.hit(SECOND)
            assert bool(kept) == bool(hit)
            # What is kept of the newest is of use: a hit of half the length has half the blocks.
            if kept == room:
                assert hit >= before or kept * kv.BLOCK <= 2 * hit + 3 * kv.BLOCK
            served(rig, FIRST, SECOND)


def draft_by_hidden_states(rig: kv.Rig) -> None:
    """Have every lookup drop its last block, as for a draft that reads hidden states."""
    coordinator = rig.engine.scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids = set(range(len(coordinator.single_type_managers)))
    coordinator.drop_eagle_group_ids = coordinator.eagle_group_ids
    for manager in coordinator.single_type_managers:
        manager.use_eagle = True
    groups = getattr(coordinator, "attention_groups", [])
    for index, group in enumerate(groups):
        groups[index] = group._replace(use_eagle=True)


@pytest.mark.parametrize("kind", ["full", "window"])
@isolated(LIMIT)
def test_a_draft_s_lookup_finds_the_block_that_it_drops(kind: str) -> None:
    hits = []
    for room in (*range(1, 22), 10**6):
        with kv.engine(kind, blocks=90) as rig:
            draft_by_hidden_states(rig)
            served(rig, FIRST, SECOND)
            before = rig.hit(SECOND)
            kv.HOST.blocks = room
            rig.sleep()
            kept = len(kv.HOST.kept)
            rig.check()
            rig.engine.wake_up(None)
            hits.append(rig.hit(SECOND))
            # One block and no hit would be kept for nothing.
            assert bool(kept) == bool(hits[-1])
            if kind == "full" and room < 10:
                assert hits[-1] == min(before, (room - 1) * kv.BLOCK)
            served(rig, FIRST, SECOND)
    assert hits == sorted(hits)
    assert hits[-1] == before > 0


@isolated(LIMIT)
def test_running_requests_come_first_and_keep_their_order() -> None:
    with kv.engine(blocks=60) as rig:
        served(rig, THIRD)
        rig.ask("a", FIRST, 20)
        rig.ask("b", SECOND, 20)
        rig.step(5)
        held = [rig.engine.scheduler.kv_cache_manager.get_block_ids(n)[0] for n in ("a", "b")]
        kv.HOST.blocks = len(held[0]) + 3
        rig.sleep("keep")
        assert rig.running() == ["a"]
        # Three blocks of the one that is preempted: it runs last.
        assert set(kv.HOST.kept) == {*held[0], *held[1][:3]}
        report = rig.report()
        assert (
            report["kept_tokens"]
            == 3 * kv.BLOCK + rig.engine.scheduler.requests["a"].num_computed_tokens
        )
        rig.engine.wake_up(None)
        before = computed(rig)
        rig.step()
        request = rig.engine.scheduler.requests["b"]
        assert computed(rig) - before <= 1 + request.num_tokens - 3 * kv.BLOCK
        rig.finish()
        assert rig.hit(THIRD) == 0


@pytest.mark.guard
@isolated(LIMIT)
def test_blocks_that_a_transfer_writes_to_are_never_kept() -> None:
    from vllm.v1.request import RequestStatus

    with kv.engine() as rig:
        served(rig, FIRST)
        waiting = SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
        rig.engine.scheduler.kv_holding_waiting = [waiting]
        rig.sleep()
        assert "keep_kv" not in kv.HOST.calls
        assert not rig.cached()


@isolated(LIMIT)
def test_events_tell_what_is_evicted_and_nothing_else() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    with kv.engine(blocks=60, events=True) as rig:
        manager = rig.engine.scheduler.kv_cache_manager
        served(rig, FIRST, SECOND)
        manager.take_events()
        before = keys(rig)
        kv.HOST.blocks = 8
        swap(rig)
        events = manager.take_events()
        gone = [key for e in events if isinstance(e, BlockRemoved) for key in e.block_hashes]
        assert set(gone) == before - keys(rig)
        assert len(gone) == len(set(gone)) > 0
        assert len(gone) == sum(len(e.block_hashes) for e in events)
        kv.HOST.blocks = None
        swap(rig)
        assert [type(e) for e in manager.take_events()] == [AllBlocksCleared]


def keys(rig: kv.Rig) -> set[Any]:
    """The hashes in the pool, as events have them."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return {maybe_convert_block_hash(BlockHash(key)) for key, _ in rig.cached()}


# -- how long -----------------------------------------------------------------------------------


def count_connector_resets(rig: kv.Rig) -> list[str]:
    resets: list[str] = []

    def reset() -> bool:
        resets.append("reset")
        return True

    rig.engine.scheduler.reset_connector_cache = reset
    return resets


def adapter(**more: Any) -> Any:
    return SimpleNamespace(lora_int_id=1, load_inplace=False, **more)


def load_in_place(engine: Any) -> None:
    engine.add_lora(SimpleNamespace(lora_int_id=1, load_inplace=True))


def load_again(engine: Any) -> None:
    engine.remove_lora(1)
    engine.add_lora(adapter())


def sleep_deep(engine: Any) -> None:
    engine.sleep(2, "keep")
    engine.model_executor.note_weights_loaded()


def change(_: Any) -> None:
    kv.HOST.changed = True


ENDS: dict[str, Callable[[Any], object]] = {
    "level 2": sleep_deep,
    "reload": lambda engine: engine.collective_rpc("reload_weights"),
    "update": lambda engine: engine.collective_rpc("update_weights"),
    "method": lambda engine: engine.collective_rpc(lambda worker: None),
    "version": lambda engine: engine.set_weight_version("2"),
    "in place": load_in_place,
    "again": load_again,
    "changed": change,
    "asked": lambda engine: engine.sleep(1, "keep", keep_kv=False),
    "copy": lambda _: kv.HOST.failing.add("restore_kv"),
    "host": lambda _: setattr(kv.HOST, "losing", True),
}


@pytest.mark.parametrize("end", ENDS)
@isolated(LIMIT)
def test_kv_is_dropped_with_what_it_belongs_to(end: str) -> None:
    with kv.engine() as rig:
        resets = count_connector_resets(rig)
        served(rig, FIRST)
        rig.ask("running", SECOND, 9)
        rig.step(3)
        rig.sleep("keep", tags=["kv_cache"])
        assert resets == []
        ENDS[end](rig.engine)
        kv.HOST.failing -= {"reload_weights"}
        rig.engine.wake_up(None)
        assert resets == ["reset"]
        assert rig.hit(FIRST) == 0
        assert rig.running() == []
        rig.finish()
        rig.check()
        assert kv.HOST.kept == {}
        if end not in ("level 2", "asked"):
            report = rig.report()
            assert report["lost_tokens"] == report["kept_tokens"] > 0
            assert report["lost_bytes"] == report["kept_bytes"] > 0
            assert report["reason"]


KEEPS: dict[str, Callable[[Any], object]] = {
    "health": lambda engine: engine.collective_rpc("check_health"),
    "version": lambda engine: engine.set_weight_version(engine.get_weight_version()),
    "adapter": lambda engine: engine.add_lora(adapter()),
    "removed": lambda engine: engine.remove_lora(1),
    "sleep": lambda engine: engine.sleep(1, "keep"),
}


@pytest.mark.parametrize("call", KEEPS)
@isolated(LIMIT)
def test_kv_is_kept_by_what_changes_no_weights(call: str) -> None:
    with kv.engine() as rig:
        resets = count_connector_resets(rig)
        served(rig, FIRST)
        rig.ask("running", SECOND, 9)
        rig.step(3)
        rig.sleep("keep", tags=["kv_cache"])
        KEEPS[call](rig.engine)
        rig.engine.wake_up(None)
        assert rig.running() == ["running"]
        assert rig.hit(FIRST) == WHOLE
        assert resets == []
        rig.finish()
        assert rig.report()["restored_tokens"] > 0


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
@isolated(LIMIT)
def test_a_wake_up_in_two_calls_restores_once_all_is_awake(order: tuple[str, str]) -> None:
    with kv.engine() as rig:
        served(rig, FIRST)
        rig.sleep()
        assert not rig.engine.wake_up([order[0]])
        assert "restore_kv" not in kv.HOST.calls
        # A sleep in between changes nothing of what is kept.
        rig.engine.sleep(1, "keep")
        assert not rig.engine.wake_up([order[0]])
        assert rig.engine.wake_up([order[1]])
        assert kv.HOST.calls.count("restore_kv") == kv.HOST.calls.count("keep_kv") == 1
        assert rig.hit(FIRST) == WHOLE
        rig.check()


@isolated(LIMIT)
def test_a_refused_wake_up_can_be_repeated() -> None:
    with kv.engine() as rig:
        served(rig, FIRST)
        rig.sleep()
        kv.HOST.failing = {"wake_up"}
        for _ in range(2):
            with pytest.raises(kv.CallError):
                rig.engine.wake_up(None)
        kv.HOST.failing = set()
        assert rig.engine.wake_up(None)
        assert rig.hit(FIRST) == WHOLE
        rig.check()


@isolated(LIMIT)
def test_an_abort_while_asleep_leaves_its_prefix() -> None:
    with kv.engine() as rig:
        rig.ask("a", FIRST, 9)
        rig.step(3)
        rig.sleep("keep")
        rig.over.add("a")
        rig.engine.abort_requests(["a"])
        rig.engine.wake_up(None)
        assert rig.hit(FIRST) == WHOLE
        rig.check()


@isolated(LIMIT)
def test_what_cannot_be_done_is_refused_or_told() -> None:
    with kv.engine() as rig:
        served(rig, FIRST)
        kv.HOST.blocks = None
        with pytest.raises(ValueError, match="this host keeps nothing"):
            rig.sleep(keep_kv=True)
        assert not rig.engine.is_sleeping()
        with pytest.raises(ValueError, match="level 2"):
            rig.sleep(level=2, keep_kv=True)
        assert rig.hit(FIRST) == WHOLE
        rig.sleep()
        report = rig.report()
        assert report["kept_tokens"] == 0 < report["dropped_tokens"]
        assert "this host keeps nothing" in report["reason"]
        rig.engine.wake_up(None)
        assert rig.hit(FIRST) == 0


@isolated(LIMIT)
def test_the_budget_of_the_server_is_shared_by_its_ranks() -> None:
    with kv.engine(blocks=60) as rig:
        served(rig, FIRST, SECOND)
        model = rig.engine.vllm_config.model_config
        model.sleep_kv_host_memory = 5 * 2 * kv.PAGE / 2**30
        rig.sleep()
        assert len(kv.HOST.kept) == 5
        report = rig.report()
        assert report["kept_bytes"] == 5 * 2 * kv.PAGE
        assert report["kept_tokens"] == 5 * kv.BLOCK
        assert report["dropped_bytes"] > 0
        model.sleep_kv_host_memory = None


@isolated(LIMIT)
def test_the_options_of_the_server() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The arguments' defaults look for a device.
    current_platform.device_type = "cpu"
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for flags, expected in (
        ((), (False, None)),
        (("--sleep-keep-kv", "--sleep-kv-host-memory", "12.5"), (True, 12.5)),
        (("--sleep-keep-kv", "--no-sleep-keep-kv"), (False, None)),
    ):
        parsed = parser.parse_args([*flags])
        assert (parsed.sleep_keep_kv, parsed.sleep_kv_host_memory) == expected


@pytest.mark.parametrize("room", [10**6, 7])
@isolated(LIMIT)
def test_an_interrupt_at_any_line_leaves_it_whole_or_dropped(room: int) -> None:
    stack: list[Any] = []

    def prepare() -> kv.Rig:
        while stack:
            stack.pop().__exit__(None, None, None)
        context = kv.engine(blocks=60)
        rig = context.__enter__()
        stack.append(context)
        served(rig, FIRST, SECOND)
        kv.HOST.blocks = room
        if room == 10**6:
            rig.ask("running", THIRD, 9)
            rig.step(3)
        return rig

    def operate(rig: kv.Rig) -> None:
        rig.sleep("keep")
        rig.engine.wake_up(None)

    def wakes(rig: kv.Rig) -> None:
        rig.check_awake_or_kept()
        rig.engine.wake_up(None)
        ends(rig)

    def sleeps(rig: kv.Rig) -> None:
        rig.sleep("keep")
        rig.check()
        rig.engine.wake_up(None)
        ends(rig)

    def ends(rig: kv.Rig) -> None:
        rig.check()
        rig.finish()
        served(rig, FIRST, SECOND)
        rig.check()

    walk(prepare, operate, wakes, sleeps, files=FILES, stride=211)


# -- ranks --------------------------------------------------------------------------------------


@isolated(LIMIT)
def test_every_rank_keeps_and_restores(gpus: Gpus) -> None:
    with ranks.engine(gpus) as engine:
        freeze(gpus, engine)
        engine.call("sleep", 1, "keep", *KEEPING)
        reports = engine.call("sleep_report")
        sizes = [one["kv"]["kept_bytes"] for one in reports]
        assert sizes[0] > 0
        assert sizes == [sizes[0]] * RANKS
        engine.call("wake_up", None)
        for rank in range(RANKS):
            assert gpus.calls(rank, "keep_kv", "restore_kv", "drop_kv") == [
                "keep_kv 1",
                "restore_kv 1",
                "drop_kv",
            ]
        assert engine.answer("running") == [ranks.TOKEN] * 40


def freeze(gpus: Gpus, engine: ranks.Engine) -> None:
    """Have a request run, for long enough to be frozen."""
    for rank in range(RANKS):
        gpus.late(rank, "execute_model", 0.02)
    engine.ask("running", tokens=40)
    gpus.until_called(0, "execute_model")


@pytest.mark.parametrize("failing", ["keep_kv", "restore_kv"])
@isolated(LIMIT)
def test_one_rank_that_cannot_is_enough_to_drop_it(gpus: Gpus, failing: str) -> None:
    with ranks.engine(gpus) as engine:
        freeze(gpus, engine)
        gpus.fail(2, failing)
        engine.call("sleep", 1, "keep", *KEEPING)
        kept = [one["kv"]["kept_bytes"] > 0 for one in engine.call("sleep_report")]
        assert kept == [failing == "restore_kv"] * RANKS
        engine.call("wake_up", None)
        assert all(gpus.calls(rank, "drop_kv") for rank in range(RANKS))
        assert all(failing in one["kv"]["reason"] for one in engine.call("sleep_report"))
        # It was computed again, and nothing of its text is lost.
        assert engine.answer("running") == [ranks.TOKEN] * 40
        assert engine.generates("after")


@isolated(LIMIT)
def test_the_rank_with_the_least_room_decides(gpus: Gpus) -> None:
    with ranks.engine(gpus) as engine:
        freeze(gpus, engine)
        gpus.room(1, 0)
        with pytest.raises(Exception, match="cannot be kept"):
            engine.call("sleep", 1, "keep", *KEEPING)
        assert not engine.call("is_sleeping")
        assert engine.answer("running") == [ranks.TOKEN] * 40


@isolated(90)
def test_data_parallel_engines_keep_each_for_itself(gpus: Gpus) -> None:
    with ranks.data_parallel(gpus) as engines:
        # Lockstep engines pause together: none refuses, and the answer says what was not kept.
        gpus.room(0, 0)
        for _ in range(2):
            engines.ask_client("sleep_async", 1, "keep", None, False, True)
            assert engines.call("is_sleeping") == [True] * ranks.ENGINES
            assert all("kv" in rank for rank in engines.report())
            engines.ask_client("wake_up_async", None)
        assert all(engines.generates(f"{n}", engine=n) for n in range(ranks.ENGINES))

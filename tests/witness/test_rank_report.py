"""The worker's report: bytes asleep, awake and in host memory, by the allocator's own records."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.test_worker_sleep import SIZE, WORKER, Rig
from tests.witness.world import Block, World, expect, raised

pytestmark = pytest.mark.loads(WORKER)


def rig_of(world: World) -> Rig:
    """A worker of rank 3 of its engine, the second one, with sleep mode."""
    rig = Rig(world)
    rig.worker.rank = 3
    rig.worker.parallel_config = SimpleNamespace(data_parallel_index=1)
    rig.worker.vllm_config.model_config.enable_sleep_mode = True
    module: Any = importlib.import_module("vllm.distributed.parallel_state")
    module.get_pp_group = lambda: SimpleNamespace(rank_in_group=1)
    module.get_tp_group = lambda: SimpleNamespace(rank_in_group=5)
    worker: Any = importlib.import_module(WORKER)
    worker.get_pp_group, worker.get_tp_group = module.get_pp_group, module.get_tp_group
    return rig


def sizes(*blocks: Block) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in blocks:
        found[block.tag] = found.get(block.tag, 0) + block.size
    return found


def tagged(rig: Rig, *tags: str) -> dict[str, int]:
    return sizes(*(block for block in rig.blocks if block.tag in tags))


def saved(rig: Rig) -> int:
    """Bytes of the buffers that a sleep of level 2 saves one by one."""
    return SIZE * len(rig.buffers)


def test_who_and_what(world: World) -> None:
    rig = rig_of(world)
    report = rig.worker.sleep_report()
    expect("preparing", report.pop("preparing"), False)
    expect(
        "the report",
        report,
        {
            "dp_rank": 1,
            "pp_rank": 1,
            "tp_rank": 5,
            "rank": 3,
            "asleep_bytes": {},
            "awake_bytes": sizes(*rig.blocks),
            "host_copy_bytes": 0,
        },
    )


def test_each_state_of_level_1(world: World) -> None:
    rig = rig_of(world)
    weights, cache = tagged(rig, "weights"), tagged(rig, "kv_cache")
    rig.worker.sleep(level=1)
    report = rig.worker.sleep_report()
    expect("asleep", report["asleep_bytes"], weights | cache)
    expect("awake", report["awake_bytes"], {})
    expect("on the host", report["host_copy_bytes"], weights["weights"])
    expect("what the driver has", world.fake.alive().physical, 0)
    rig.worker.wake_up(["weights"])
    report = rig.worker.sleep_report()
    expect("asleep", report["asleep_bytes"], cache)
    expect("awake", report["awake_bytes"], weights)
    expect("on the host", report["host_copy_bytes"], 0)
    rig.worker.wake_up()
    report = rig.worker.sleep_report()
    expect("asleep", report["asleep_bytes"], {})
    expect("awake", report["awake_bytes"], weights | cache)


def test_level_2_keeps_buffers_alone(world: World) -> None:
    rig = rig_of(world)
    rig.worker.sleep(level=2)
    report = rig.worker.sleep_report()
    expect("asleep", report["asleep_bytes"], sizes(*rig.blocks))
    # The buffer outside of the pools stays where it is.
    expect("on the host", report["host_copy_bytes"], saved(rig) - SIZE)
    rig.worker.wake_up()
    expect("on the host", rig.worker.sleep_report()["host_copy_bytes"], 0)


def test_a_sleep_that_fails_part_way(world: World) -> None:
    rig = rig_of(world)
    world.fake.fail("cuMemUnmap", nth=2, error=999)
    assert isinstance(raised(lambda: rig.worker.sleep(level=1)), RuntimeError)
    report = rig.worker.sleep_report()
    first = rig.weights[0]
    expect("asleep", report["asleep_bytes"], {"weights": first.size})
    expect("awake", report["awake_bytes"], sizes(*(b for b in rig.blocks if b is not first)))
    expect("on the host", report["host_copy_bytes"], first.size)


def test_a_refused_wake_up_has_given_everything_back(world: World) -> None:
    rig = rig_of(world)
    rig.worker.sleep(level=1)
    before = rig.worker.sleep_report()
    world.fake.fail("cuMemCreate", nth=3)
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    expect("the report", rig.worker.sleep_report(), before)


def test_blocks_that_are_freed_or_new(world: World) -> None:
    rig = rig_of(world)
    rig.worker.sleep(level=1)
    world.free(next(block for block in rig.blocks if block.tag == "kv_cache"))
    new = world.block("kv_cache")
    report = rig.worker.sleep_report()
    expect("awake", report["awake_bytes"], sizes(new))


def test_copies_of_the_package_count(world: World) -> None:
    """Of the sleep-mode backend."""
    rig = rig_of(world)
    rig.worker._sleep_mode_backend = backend = world.use_plugin("keep")
    weights = tagged(rig, "weights")["weights"]
    backend.suspend(1)
    expect("asleep", backend.report()["host_copy_bytes"], weights)
    backend.resume()
    expect("awake", rig.worker.sleep_report()["host_copy_bytes"], weights)
    backend.suspend(2)
    expect("discarded", rig.worker.sleep_report()["host_copy_bytes"], 0)


def test_a_backend_that_says_nothing(world: World) -> None:
    """Another's backend, and a server without sleep mode."""
    rig = rig_of(world)
    rig.worker.vllm_config.model_config.enable_sleep_mode = False
    expect("without sleep mode", rig.worker.sleep_report(), None)
    rig.worker.vllm_config.model_config.enable_sleep_mode = True
    base: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    other = type("Other", (base.SleepModeBackend,), {"suspend": None, "resume": None})
    rig.worker._sleep_mode_backend = other()
    expect("another's", rig.worker.sleep_report(), None)
    worker: Any = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    expect("another worker's", worker.__new__(worker).sleep_report(), None)


class Changing(dict[int, Any]):
    """Records that change while they are gone through, as by another thread."""

    def values(self) -> Any:
        for data in super().values():
            yield data
            self[-1] = data


def test_a_report_while_the_allocator_changes(world: World) -> None:
    rig = rig_of(world)
    before = rig.worker.sleep_report()
    world.allocator.pointer_to_data = Changing(world.allocator.pointer_to_data)
    expect("the report", rig.worker.sleep_report(), before)

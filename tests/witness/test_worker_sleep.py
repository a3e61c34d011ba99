"""The worker: repeated, partial, failing and interrupted sleeps of a model."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.interrupt import walk
from tests.witness.world import Block, World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
pytestmark = pytest.mark.loads(WORKER)
SIZE = 64


class Rig:
    """A worker whose model has one buffer in each of two blocks of weights, and one elsewhere."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.torch = world.torch
        self.blocks = world.blocks()
        self.weights = [block for block in self.blocks if block.tag == "weights"]
        self.model = self.torch.nn.Module()
        self.buffers = [self.view(block) for block in self.weights[:2]]
        self.buffers.append(self.torch.arange(SIZE, dtype=self.torch.uint8))
        for name, buffer in zip(("first", "second", "elsewhere"), self.buffers, strict=True):
            self.model.register_buffer(name, buffer)
        worker = importlib.import_module(WORKER).Worker
        self.worker: Any = worker.__new__(worker)
        self.worker._sleep_saved_buffers = {}
        self.worker.model_runner = self
        self.worker._sleep_saved_parameters = {}
        # Of the untouched release.
        self.worker._sleep_saved_draft_buffers = {}
        self.worker._sleep_mode_backend = None
        # A buffer of the same name, which is another one.
        self.draft = self.torch.nn.Module()
        self.draft.register_buffer("first", self.view(self.weights[2]))
        self.worker.get_draft_model = lambda: self.draft
        self.worker.synchronize_device = lambda: None
        options = SimpleNamespace(
            sleep_mode_backend="cumem",
            sleep_preserve_parameter_names=[],
            enable_nccl_comm_suspend=False,
        )
        self.worker.model_config = options
        self.worker.vllm_config = SimpleNamespace(model_config=options)
        world.use_cuda_platform()
        self.buffers.append(self.draft.first)

    def view(self, block: Block) -> Any:
        """A tensor over device memory; reading it while it is not mapped is a fault."""
        memory = (ctypes.c_uint8 * SIZE).from_address(block.address + 4096)
        return self.torch.frombuffer(memory, dtype=self.torch.uint8)

    def values(self) -> list[list[int]]:
        return [buffer.tolist() for buffer in self.buffers]


def test_a_second_deep_sleep_keeps_what_the_first_saved(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    rig.worker.sleep(level=2)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)
    world.expect_alive(*rig.blocks)


def test_a_deep_sleep_after_a_light_one_reads_no_sleeping_buffer(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    rig.worker.sleep(level=1)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)
    world.expect_alive(*rig.blocks)


def test_waking_the_cache_first_reads_no_sleeping_buffer(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    rig.worker.sleep(level=2)
    rig.worker.wake_up(["kv_cache"])
    rig.worker.wake_up(["weights"])
    expect("the buffers", rig.values(), before)


def test_a_deep_sleep_that_fails_part_way_goes_on(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    world.fake.fail("cuMemUnmap", nth=2, error=999)
    assert isinstance(raised(lambda: rig.worker.sleep(level=2)), RuntimeError)
    rig.worker.sleep(level=2)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up(["weights"])
    expect("the buffers", rig.values(), before)


def test_a_wake_that_fails_is_retried_with_the_buffers(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    rig.worker.sleep(level=2)
    world.fake.fail("cuMemCreate", nth=3)
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)


def test_buffers_not_restored_yet_are_not_saved_again(world: World) -> None:
    """A wake that fails on another rank, or late on this one, is followed by another sleep."""
    rig = Rig(world)
    before = rig.values()
    rig.worker.sleep(level=2)
    named_buffers = rig.model.named_buffers

    def fails() -> Iterator[tuple[str, Any]]:
        if world.fake.mapped(rig.weights[0].address):
            raise RuntimeError("no")
        return iter(named_buffers())

    rig.model.named_buffers = fails
    assert raised(rig.worker.wake_up) is not None
    rig.model.named_buffers = named_buffers
    rig.worker.sleep(level=2)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)


def test_buffers_saved_for_a_sleep_that_never_was_are_not_restored(world: World) -> None:
    rig = Rig(world)
    world.fake.fail("cuMemUnmap", error=999)
    assert isinstance(raised(lambda: rig.worker.sleep(level=2)), RuntimeError)
    # Nothing is asleep: the model runs on, and changes a buffer.
    rig.buffers[0].fill_(7)
    before = rig.values()
    rig.worker.sleep(level=1)
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)


def test_buffers_saved_for_a_sleep_that_never_was_are_dropped_by_a_wake(world: World) -> None:
    rig = Rig(world)
    world.fake.fail("cuMemUnmap", error=999)
    assert isinstance(raised(lambda: rig.worker.sleep(level=2)), RuntimeError)
    rig.buffers[0].fill_(7)
    before = rig.values()
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)


def test_another_process_may_take_memory_meanwhile(world: World) -> None:
    rig = Rig(world)
    sizes = iter([(40 << 30, 80 << 30), (10 << 30, 80 << 30)])
    world.torch.cuda.mem_get_info = lambda: next(sizes)
    rig.worker.sleep(level=1)
    world.expect_alive(asleep=tuple(rig.blocks))


def test_sleep_waits_for_work_in_flight(world: World) -> None:
    rig = Rig(world)
    world.fake.begin_work(rig.weights[0].address, GRANULARITY)
    # The free memory is read first, and buffers are saved, all of it after the wait.
    waited: list[int] = []
    original = world.torch.cuda.mem_get_info

    def look() -> object:
        waited.append(world.fake.work_in_flight())
        return original()

    world.torch.cuda.mem_get_info = look
    rig.worker.sleep(level=1)
    expect("work in flight when memory was read", waited, [0, 0])
    expect("blocks unmapped under work in flight", world.fake.violations(), 0)


def test_wake_up_waits_for_its_copies(world: World) -> None:
    """The allocator's and those of the saved buffers: the caller may use any stream (#45552)."""
    rig = Rig(world)
    rig.worker.synchronize_device = world.synchronize
    rig.worker.sleep(level=1)
    copy = world.cumem.libcudart.cudaMemcpy

    def copy_that_goes_on(to: Any, source: Any, size: int) -> None:
        copy(to, source, size)
        world.fake.begin_work(to, size)

    world.cumem.libcudart.cudaMemcpy = copy_that_goes_on
    rig.worker.wake_up()
    expect("copies under way when wake_up returned", world.fake.work_in_flight(), 0)


def recovers(rig: Rig, before: list[list[int]]) -> None:
    """Awake, with the buffers as they were; and the next deep sleep keeps newer ones."""
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)
    rig.world.expect_alive(*rig.blocks)
    for i, buffer in enumerate(rig.buffers):
        buffer.fill_(100 + i)
    newer = rig.values()
    rig.worker.sleep(level=2)
    expect("physical memory asleep", rig.world.fake.alive().physical, 0)
    rig.worker.wake_up()
    expect("the newer buffers", rig.values(), newer)
    for block in rig.blocks:
        rig.world.free(block)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_an_interrupt_anywhere(world: World, call: str, part: int) -> None:
    def prepare() -> tuple[Rig, list[list[int]]]:
        rig = Rig(world)
        before = rig.values()
        if call == "wake_up":
            rig.worker.sleep(level=2)
        return rig, before

    def operate(state: tuple[Rig, list[list[int]]]) -> None:
        if call == "sleep":
            state[0].worker.sleep(level=2)
        else:
            state[0].worker.wake_up()

    def then_wake(state: tuple[Rig, list[list[int]]]) -> None:
        recovers(*state)

    def then_sleep(state: tuple[Rig, list[list[int]]]) -> None:
        state[0].worker.sleep(level=2)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        recovers(*state)

    # The allocator has a walk of its own.
    files = ("gpu_worker.py", "sleep_mode_backend.py")
    walk(prepare, operate, then_wake, then_sleep, files=files, stride=197, part=part, parts=3)


def test_a_backend_that_fails_to_resume_is_suspended(world: World) -> None:
    """It does not stay "RESUMING"."""
    rig = Rig(world)
    rig.worker.sleep(level=1)
    world.fake.fail("cuMemCreate", nth=2)
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    world.expect_alive(asleep=tuple(rig.blocks))
    backend = rig.worker.sleep_mode_backend
    expect("the state", backend.state(), "SUSPENDED")
    rig.worker.wake_up()
    expect("the state", backend.state(), "RUNNING")


@pytest.mark.guard
@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_and_wakes(world: World, level: int) -> None:
    rig = Rig(world)
    before = rig.values()
    for _ in range(3):
        rig.worker.sleep(level=level)
        world.expect_alive(asleep=tuple(rig.blocks))
        rig.worker.wake_up(["weights"])
        expect("the buffers", rig.values(), before)
        rig.worker.wake_up(["kv_cache"])
        world.expect_alive(*rig.blocks)

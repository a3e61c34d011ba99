"""A draft model has its weights after a sleep of level 2: no load of the target's brings them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.interrupt import walk
from tests.witness.test_worker_sleep import WORKER
from tests.witness.weights_rig import SIZE, WeightsRig
from tests.witness.world import Block, World, expect, raised

pytestmark = pytest.mark.loads(WORKER)

# What finds the draft model in a model runner, by the runner's attribute.
RUNNERS: dict[str, Callable[[Any], Any]] = {
    "drafter": lambda draft: draft,
    "speculator": lambda draft: draft,
    "captured": lambda draft: SimpleNamespace(unwrap=lambda: draft),
}


class Draft(WeightsRig):
    """A worker whose model has a draft: a head of its own, and an embedding of the target's."""

    def __init__(self, world: World, runner: str = "drafter") -> None:
        super().__init__(world)
        # No driver has these tensors, so they say that they are on a GPU.
        self.on_gpu: Any = type("OnGpu", (self.torch.nn.Parameter,), {"is_cpu": False})
        self.draft = self.torch.nn.Module()
        self.head = self.add("head", self.matrix_at(self.weights[2], 8192))
        # Another parameter over the same memory, as tied weights have.
        self.add("embed", self.model.up.data)
        self.worker.get_draft_model = lambda: self.draft
        self.runner_of_draft(runner, RUNNERS[runner](self.draft))
        # What is derived from parameters: a plain tensor of a layer (MLA's halves of kv_b_proj),
        # one of its quantization method, and a number that is seen as many.
        self.draft.half = self.matrix_at(self.weights[2], 12288).transpose(0, 1)
        method = type("Method", (), {"__module__": "vllm.quantization"})()
        method.scales = [None, {"w1": self.matrix_at(self.weights[1], 12288)}]
        method.layer = self.draft
        method.itself = [method]
        self.draft.quant_method = method
        self.draft.repeated = self.matrix_at(self.weights[0], 16384)[:1, :1].expand(8, 8)
        # The cache is another's to keep or not; a setting leads to everything.
        cache = next(block for block in self.blocks if block.tag == "kv_cache")
        self.draft.kv_cache = self.matrix_at(cache, 0)
        self.draft.config = type("Config", (), {"__module__": "vllm.config.vllm"})()
        self.draft.config.tensor = self.matrix_at(self.weights[1], 20480)
        self.own = {
            "head": self.head,
            "half": self.draft.half,
            "scales": method.scales[1]["w1"],
            "repeated": self.draft.repeated[:1, :1],
        }
        self.fill(5.0)

    def fill(self, value: float) -> None:
        for tensor in self.own.values():
            tensor.data.fill_(value)

    def runner_of_draft(self, runner: str, model: Any) -> None:
        name = "drafter" if runner == "captured" else runner
        setattr(self, name, SimpleNamespace(model=model))

    def add(self, name: str, data: Any) -> Any:
        parameter = self.on_gpu(data, requires_grad=False)
        self.draft.register_parameter(name, parameter)
        return parameter

    def matrix_at(self, block: Block, offset: int) -> Any:
        memory = (ctypes.c_float * SIZE).from_address(block.address + offset)
        return self.torch.frombuffer(memory, dtype=self.torch.float32).view(8, 8)

    def expect_draft(self, value: float) -> None:
        found = {name: set(tensor.flatten().tolist()) for name, tensor in self.own.items()}
        expect("the draft's weights", found, {key: {value} for key in self.own})

    def kept(self) -> set[str]:
        """The names of what is kept on the host."""
        stores = ("_sleep_saved_buffers", "_sleep_saved_parameters", "_sleep_saved_draft_buffers")
        return {name for store in stores for name in getattr(self.worker, store, ())}


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_a_draft_has_its_weights_after_a_deep_sleep(
    world: World, runner: str, tags: list[str] | None
) -> None:
    rig = Draft(world, runner)
    for _ in range(2):
        rig.worker.sleep(level=2)
        world.expect_alive(asleep=tuple(rig.blocks))
        rig.worker.wake_up(tags)
        rig.worker.reload_weights()
        rig.expect_draft(5.0)
        rig.worker.wake_up()
    expect("kept while awake", rig.kept(), set())


def test_what_a_draft_shares_is_not_loaded_by_it(world: World) -> None:
    rig = Draft(world)
    rig.load()
    rig.worker.sleep(level=2)
    place = f"{rig.model.up.data_ptr()}"
    shared = {name for name in rig.kept() if "embed" in name or place in name}
    expect("kept of the target", shared, set())
    rig.worker.wake_up()
    rig.expect_draft(5.0)


def test_a_draft_that_was_trained_on_keeps_its_newest_weights(world: World) -> None:
    rig = Draft(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.fill(7.0)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.expect_draft(7.0)


def test_a_second_deep_sleep_keeps_what_the_first_saved(world: World) -> None:
    rig = Draft(world)
    rig.worker.sleep(level=2)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.expect_draft(5.0)


def test_waking_the_cache_first_reads_no_sleeping_draft(world: World) -> None:
    rig = Draft(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up(["kv_cache"])
    rig.worker.wake_up(["weights"])
    rig.expect_draft(5.0)


def test_a_wake_up_that_fails_is_retried_with_the_draft(world: World) -> None:
    rig = Draft(world)
    rig.worker.sleep(level=2)
    world.fake.fail("cuMemCreate", nth=3)
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    rig.worker.wake_up()
    rig.expect_draft(5.0)


def test_a_sleep_without_the_host_memory_discards_nothing(world: World) -> None:
    rig = Draft(world)
    detach = rig.on_gpu.detach

    def fails(tensor: Any) -> Any:
        raise MemoryError(f"no memory for {tensor.numel()} numbers")

    rig.on_gpu.detach = fails
    assert isinstance(raised(lambda: rig.worker.sleep(level=2)), MemoryError)
    rig.on_gpu.detach = detach
    world.expect_alive(*rig.blocks)
    rig.expect_draft(5.0)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.expect_draft(5.0)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_an_interrupt_anywhere(world: World, call: str, part: int) -> None:
    def prepare() -> Draft:
        rig = Draft(world)
        if call == "wake_up":
            rig.worker.sleep(level=2)
        return rig

    def operate(rig: Draft) -> None:
        if call == "sleep":
            rig.worker.sleep(level=2)
        else:
            rig.worker.wake_up()

    def recovers(rig: Draft) -> None:
        rig.worker.wake_up()
        rig.expect_draft(5.0)
        for block in rig.blocks:
            world.free(block)

    def sleeps_again(rig: Draft) -> None:
        rig.worker.sleep(level=2)
        recovers(rig)

    files = ("gpu_worker.py",)
    walk(prepare, operate, recovers, sleeps_again, files=files, stride=197, part=part, parts=2)


@pytest.mark.guard
def test_a_light_sleep_keeps_nothing_twice(world: World) -> None:
    rig = Draft(world)
    rig.worker.sleep(level=1)
    expect("kept besides the weights", rig.kept(), set())
    rig.worker.wake_up()
    rig.expect_draft(5.0)


@pytest.mark.guard
def test_neither_the_cache_nor_another_model_is_copied(world: World) -> None:
    rig = Draft(world)
    # A reference to the target, as a head that drafts with it has.
    rig.draft.holder = [rig.model, type("Other", (), {"__module__": "other"})()]
    rig.worker.sleep(level=2)
    # What has no name is kept by its address.
    others = (rig.draft.kv_cache, rig.draft.config.tensor)
    signs = ["cache", "config", "holder", *(f"{tensor.data_ptr()}" for tensor in others)]
    bad = {name for name in rig.kept() if any(sign in name for sign in signs)}
    expect("kept of others", bad, set())
    rig.worker.wake_up()


@pytest.mark.guard
def test_weights_on_the_host_are_not_copied(world: World) -> None:
    rig = Draft(world)
    on_host = rig.torch.nn.Parameter(rig.torch.ones(4), requires_grad=False)
    rig.draft.register_parameter("offloaded", on_host)
    rig.worker.sleep(level=2)
    expect("kept", "draft.offloaded" in rig.kept(), False)
    rig.worker.wake_up()


@pytest.mark.guard
@pytest.mark.parametrize("model", [None, "ngram"])
def test_a_worker_without_a_draft_model_sleeps(world: World, model: Any) -> None:
    rig = Draft(world)
    rig.runner_of_draft("drafter", model)
    rig.worker.get_draft_model = lambda: None
    rig.worker.sleep(level=2)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    world.expect_alive(*rig.blocks)

"""A worker knows whether weights that it discarded were loaded again, by whatever way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.witness.weights_rig import WeightsRig
from tests.witness.world import World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
pytestmark = pytest.mark.loads(WORKER)
SIZE = 64


class Weights(WeightsRig):
    def missing(self) -> bool:
        found: bool = self.worker.weights_missing()
        return found


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_weights_are_missing_until_one_writes_to_them(world: World, tags: list[str] | None) -> None:
    rig = Weights(world)
    for _ in range(2):
        expect("missing", rig.missing(), False)
        rig.worker.sleep(level=2)
        rig.worker.wake_up(tags)
        expect("missing after the wake_up", rig.missing(), True)
        expect("missing, asked again", rig.missing(), True)
        rig.load()
        expect("missing after the load", rig.missing(), False)
        rig.worker.wake_up()


def test_reload_weights_settles_it(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.worker.reload_weights()
    expect("missing", rig.missing(), False)


def test_a_load_that_fails_part_way_does_not(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.fails = True
    assert isinstance(raised(lambda: rig.worker.reload_weights("up")), RuntimeError)
    expect("missing", rig.missing(), True)
    # A sleep that keeps what is there does not settle it either.
    rig.worker.sleep(level=1)
    rig.worker.wake_up()
    expect("missing after a light sleep", rig.missing(), True)
    rig.fails = False
    rig.worker.reload_weights()
    expect("missing", rig.missing(), False)


def test_a_light_sleep_keeps_that_weights_are_missing(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.worker.sleep(level=1)
    rig.worker.wake_up()
    expect("missing", rig.missing(), True)
    rig.load()
    expect("missing", rig.missing(), False)


def test_a_weight_update_is_not_done_before_its_end(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up(["weights"])
    rig.worker._weight_update_active = True
    rig.load("up")
    expect("missing in the middle", rig.missing(), True)
    rig.load("down")
    rig.worker._weight_update_active = False
    expect("missing at the end", rig.missing(), False)


def test_a_parameter_that_is_on_its_way_is_missing(world: World) -> None:
    """As a reload layer by layer has them: without memory until they are loaded."""
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    kept = dict(rig.model.named_parameters())
    for name in ("up", "down"):
        parameter = rig.torch.nn.Parameter(kept[name].to("meta"), requires_grad=False)
        rig.model.register_parameter(name, parameter)
    expect("missing meanwhile", rig.missing(), True)
    for name in ("up", "down"):
        rig.model.register_parameter(name, kept[name])
    expect("missing where nothing came", rig.missing(), True)
    rig.load()
    expect("missing", rig.missing(), False)


def test_waking_the_cache_touches_no_weight(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    rig.worker.wake_up(["kv_cache"])
    rig.worker.wake_up(["weights"])
    expect("missing", rig.missing(), True)


def test_a_wake_up_that_fails_and_is_repeated_knows(world: World) -> None:
    rig = Weights(world)
    rig.worker.sleep(level=2)
    world.fake.fail("cuMemCreate", nth=3)
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    rig.worker.wake_up()
    expect("missing", rig.missing(), True)
    rig.load()
    expect("missing", rig.missing(), False)


def test_a_wake_up_that_is_interrupted_marks_nothing_later(world: World) -> None:
    """What was loaded since must stay as it is."""
    rig = Weights(world)
    rig.worker.sleep(level=2)
    wake_up = rig.world.allocator.wake_up

    def interrupted(tags: Any = None) -> None:
        wake_up(tags)
        raise KeyboardInterrupt

    rig.world.allocator.wake_up = interrupted
    with pytest.raises(KeyboardInterrupt):
        rig.worker.wake_up()
    rig.world.allocator.wake_up = wake_up
    rig.load()
    rig.worker.wake_up()
    values = {float(value) for value in rig.model.up.flatten()}
    expect("what was loaded", values, {3.0})
    expect("missing, as far as is known", rig.missing(), True)
    rig.worker.reload_weights()
    expect("missing", rig.missing(), False)


def test_dummy_weights_are_missed_only_once_others_were_loaded(world: World) -> None:
    rig = Weights(world, load_format="dummy")
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    expect("missing of what was made up", rig.missing(), False)
    rig.worker.reload_weights()
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    expect("missing of what was loaded", rig.missing(), True)


def test_parameters_that_are_kept_are_not_missed(world: World) -> None:
    """With --sleep-preserve-parameter-names; 0.21.0 has no such option."""
    rig = Weights(world)
    keeps = hasattr(rig.worker, "_save_sleep_parameters")
    # As it does for parameters on a GPU.
    rig.worker._save_sleep_parameters = lambda model: rig.worker._save_awake(
        "_sleep_saved_parameters", dict(model.named_parameters())
    )
    rig.load()
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    expect("missing", rig.missing(), not keeps)
    if keeps:
        expect("kept", float(rig.model.up[0, 0]), 3.0)


@pytest.mark.guard
def test_a_light_sleep_writes_to_no_weight(world: World) -> None:
    rig = Weights(world)
    before = [parameter.tolist() for parameter in rig.model.parameters()]
    rig.worker.sleep(level=1)
    rig.worker.wake_up()
    expect("weights", [parameter.tolist() for parameter in rig.model.parameters()], before)

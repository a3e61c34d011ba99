"""A worker says after a sleep whether weights were discarded that a wake_up does not restore."""

from __future__ import annotations

import pytest
from tests.witness.weights_rig import WeightsRig
from tests.witness.world import World, expect

pytestmark = pytest.mark.loads("vllm.v1.worker.gpu_worker")


@pytest.mark.parametrize(("level", "discards"), [(1, False), (2, True)])
def test_a_deep_sleep_discards_the_weights(world: World, level: int, discards: bool) -> None:
    rig = WeightsRig(world)
    expect("discarded", rig.worker.sleep(level=level), discards)


@pytest.mark.parametrize("names", [("up", "down", "scale"), ("up",)])
def test_weights_that_are_kept_are_not_discarded(world: World, names: tuple[str, ...]) -> None:
    """With --sleep-preserve-parameter-names."""
    rig = WeightsRig(world)
    rig.worker.model_config.sleep_preserve_parameter_names = list(names)
    # The release keeps what is on a GPU, and the stand-in's memory is not, for torch.
    on_gpu = type("OnGpu", (rig.torch.nn.Parameter,), {"is_cpu": False})
    for parameter in rig.model.parameters():
        parameter.__class__ = on_gpu
    rig.load()
    expect("discarded", rig.worker.sleep(level=2), len(names) < 2)
    rig.worker.wake_up()
    expect("kept", float(rig.model.up[0, 0]), 3.0)
    # Again, after all is awake.
    expect("discarded", rig.worker.sleep(level=2), len(names) < 2)

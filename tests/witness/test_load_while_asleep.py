"""Nothing is loaded into memory that is asleep: the device would be lost, and the engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.witness.weights_rig import WeightsRig
from tests.witness.world import World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
pytestmark = pytest.mark.loads(WORKER)


def refused(call: Any) -> None:
    error = raised(call)
    assert isinstance(error, RuntimeError), error
    assert "weights are asleep" in str(error)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_are_asleep_are_not_reloaded(world: World, level: int) -> None:
    weights = WeightsRig(world)
    weights.worker.sleep(level=level)
    refused(weights.worker.reload_weights)
    weights.worker.wake_up(["kv_cache"])
    refused(weights.worker.reload_weights)
    weights.worker.wake_up(["weights"])
    weights.worker.reload_weights()
    expect("what was loaded", float(weights.model.up[0, 0]), 3.0)


class Transfer:
    """A weight transfer engine that writes at once."""

    supports_draft_weight_update = False

    def __init__(self, weights: WeightsRig) -> None:
        self.weights = weights

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.weights.load()


def test_no_update_begins_or_goes_on_while_weights_are_asleep(world: World) -> None:
    weights: Any = WeightsRig(world)
    weights.worker.weight_transfer_engine = Transfer(weights)
    weights.worker._check_weight_transfer_engine = lambda: None
    weights.worker.device = "cpu"
    weights.worker._is_checkpoint_format = False
    weights.reset_lora_state = lambda: None
    weights.worker.sleep(level=2)
    refused(weights.worker.start_weight_update)
    assert not weights.worker._weight_update_active
    weights.worker._weight_update_active = True
    refused(lambda: weights.worker.update_weights({}))
    refused(weights.worker.finish_weight_update)


@pytest.mark.guard
def test_a_worker_that_never_slept_reloads(world: World) -> None:
    weights = WeightsRig(world)
    weights.worker.reload_weights()
    weights.worker.reload_weights()

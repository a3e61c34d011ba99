"""An adapter is not loaded into slots that are asleep."""

from __future__ import annotations

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 60

pytestmark = pytest.mark.usefixtures("vllm_executor")


def load(engine: rig.Engine) -> object:
    from vllm.lora.request import LoRARequest

    request = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a")
    return engine.call("add_lora", request)


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_an_adapter_is_not_loaded_while_the_weights_are_asleep(gpus: Gpus, level: int) -> None:
    with rig.engine(gpus) as engine:
        assert load(engine) is True
        engine.call("sleep", level, "abort")
        with pytest.raises(Exception, match="weights are asleep"):
            load(engine)
        assert all(len(gpus.calls(rank, "add_lora")) == 1 for rank in range(RANKS))
        engine.call("wake_up", ["weights"])
        assert load(engine) is True
        engine.call("wake_up", None)
        assert load(engine) is True

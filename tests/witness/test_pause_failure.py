"""A pause that fails is the error of its caller, and the engine goes on."""

from __future__ import annotations

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


@isolated(LIMIT)
def test_a_cache_that_could_not_be_reset_fails_the_sleep_and_not_the_engine(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.1)
        engine.ask("in flight")
        gpus.until_called(0, "execute_model")
        gpus.fail(1, "reset_encoder_cache")
        with pytest.raises(Exception, match="reset_encoder_cache was made to fail"):
            engine.call("sleep", 1, "wait")
        assert engine.answer("in flight") == [rig.TOKEN] * 3
        engine.call("wake_up")
        assert engine.generates("after")

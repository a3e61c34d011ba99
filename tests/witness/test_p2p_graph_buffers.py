"""SM12x cards with working P2P opt out of the copy before a captured all-reduce."""

from __future__ import annotations

import os

import pytest
from tests.witness.test_graph_buffers import MODULE, exported
from tests.witness.world import World

pytestmark = pytest.mark.loads(MODULE)
SETTING = "VLLM_SKIP_P2P_CHECK"


@pytest.mark.parametrize("value", ["1", None])
def test_without_a_test_of_p2p_a_graph_copies(world: World, value: str | None) -> None:
    os.environ.pop(SETTING, None)
    if value is not None:
        os.environ[SETTING] = value
    assert not exported(world, family=120, live=False)


@pytest.mark.guard
def test_where_p2p_is_tested_a_graph_s_buffers_are_exported(world: World) -> None:
    os.environ[SETTING] = "0"
    assert exported(world, family=120, live=False)


def test_there_is_no_handle_of_mapped_memory_with_p2p_either(world: World) -> None:
    os.environ[SETTING] = "0"
    assert not exported(world, family=120, live=True)

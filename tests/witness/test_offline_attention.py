"""FlashInfer's decode attention on SM12x, without a network.

XQA, which SM12x decodes with, is compiled from FlashInfer's sources; the release asks NVIDIA's
server for binaries of other devices first, and goes without XQA where it gets no answer.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.world import World

MODULE = "vllm.utils.flashinfer"
pytestmark = pytest.mark.loads(MODULE)


def supported(world: World, *, family: int, is_prefill: bool, batch_invariant: bool = False) -> Any:
    """What the release says of the phase, and how often it asked the server, which is not there."""
    module: Any = importlib.import_module(MODULE)
    asked: list[str] = []

    def get(address: str, **_: Any) -> Any:
        asked.append(address)
        raise OSError("network is unreachable")

    module.requests = SimpleNamespace(get=get)
    module.has_flashinfer_cubin = lambda: False
    module.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)
    module.current_platform = SimpleNamespace(
        is_device_capability=lambda asked: asked == family,
        is_device_capability_family=lambda asked: asked == family,
    )
    for cached in (module.has_nvidia_artifactory, module.supports_trtllm_attention):
        cached.cache_clear()
    return module.supports_trtllm_attention(is_prefill=is_prefill), len(asked)


def test_sm12x_decodes_without_a_network(world: World) -> None:
    assert supported(world, family=120, is_prefill=False) == (True, 0)


def test_sm12x_asks_nobody_for_prefill(world: World) -> None:
    assert supported(world, family=120, is_prefill=True) == (False, 0)


@pytest.mark.guard
def test_batch_invariance_comes_first(world: World) -> None:
    found = supported(world, family=120, is_prefill=False, batch_invariant=True)
    assert found == (False, 0)


@pytest.mark.guard
@pytest.mark.parametrize("family", [90, 100])
def test_other_devices_ask_as_before(world: World, family: int) -> None:
    assert supported(world, family=family, is_prefill=False) == (False, 1)

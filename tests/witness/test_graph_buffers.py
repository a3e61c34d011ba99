"""Custom all-reduce in CUDA graphs: buffers of a graph that other ranks cannot be given.

While a graph is captured, the release has every rank export its inputs by CUDA IPC handles. There
are none of memory that PyTorch maps itself (expandable segments), and on SM12x over PCIe the engine
ends there. An input that is copied to the buffer shared at start needs no handle.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.world import World

MODULE = "vllm.distributed.device_communicators.custom_all_reduce"
pytestmark = pytest.mark.loads(MODULE)
SHARED = 4096


def exported(
    world: World, *, family: int, rocm: bool = False, live: bool | None = None, said: str = ""
) -> bool:
    """Whether a captured all-reduce leaves its input to be exported.

    ``live`` is what PyTorch says of expandable segments (None: it cannot say), ``said`` the setting
    that the process was started with.
    """
    torch = world.torch
    module: Any = importlib.import_module(MODULE)
    name, _, value = said.partition("=")
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(variable, None)
    if name:
        os.environ[name] = value

    def snapshot() -> dict[str, Any]:
        if live is None:
            raise RuntimeError("no CUDA")
        return {"allocator_settings": {"expandable_segments": live}}

    torch.cuda.memory._snapshot = snapshot
    torch.cuda.is_current_stream_capturing = lambda: True
    module.current_platform = SimpleNamespace(
        is_cuda=lambda: not rocm,
        is_rocm=lambda: rocm,
        is_cuda_alike=lambda: True,
        is_device_capability_family=lambda asked, device=0: asked == family,
    )
    given: list[int] = []
    module.ops = SimpleNamespace(
        all_reduce=lambda handle, inp, out, buffer, size: given.append(buffer)
    )
    # It sets itself up no further than to here where the compiled module is not there.
    module.custom_ar = False
    reduce = module.CustomAllreduce(group=None, device=0)
    reduce.disabled = False
    reduce._IS_CAPTURING = True
    reduce._ptr, reduce.rank, reduce.world_size = 0, 0, 2
    reduce.buffer_ptrs, reduce.max_size = [SHARED], 1 << 20
    reduce.fully_connected = False
    assert reduce.custom_all_reduce(torch.zeros(64)) is not None
    # Nothing is there for it to close.
    reduce.disabled = True
    assert given in ([0], [SHARED])
    return given == [0]


def test_sm12x_copies(world: World) -> None:
    assert not exported(world, family=120, live=False)


@pytest.mark.parametrize("family", [90, 100])
def test_mapped_memory_is_copied(world: World, family: int) -> None:
    assert not exported(world, family=family, live=True)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_setting_counts_where_pytorch_cannot_say(world: World, name: str) -> None:
    said = f"{name}=max_split_size_mb:512,expandable_segments:True"
    assert not exported(world, family=90, said=said)


@pytest.mark.guard
def test_what_pytorch_says_counts(world: World) -> None:
    said = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert exported(world, family=90, live=False, said=said)


@pytest.mark.guard
@pytest.mark.parametrize("family", [90, 100])
@pytest.mark.parametrize("live", [False, None])
def test_others_export(world: World, family: int, live: bool | None) -> None:
    assert exported(world, family=family, live=live)


@pytest.mark.guard
def test_rocm_stays_as_it_is(world: World) -> None:
    said = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert exported(world, family=0, rocm=True, live=True, said=said)

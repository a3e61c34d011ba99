"""Tensors are gathered with the communicator that all-reduces, and none is made for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import isolated

rig.use_tree()

RANKS, RANK = 3, 1
LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Group:
    """One rank of a group; the others have its tensors plus 100 for each rank before or after."""

    def __init__(self, *, disabled: bool = False) -> None:
        import torch
        from vllm.distributed.device_communicators import base_device_communicator
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        self.calls: list[str] = []
        base_device_communicator.dist = SimpleNamespace(all_gather_into_tensor=self.of_torch)
        self.communicator = CudaCommunicator.__new__(CudaCommunicator)
        self.communicator.world_size = RANKS
        self.communicator.device_group = "PyTorch's"
        self.communicator.pynccl_comm = SimpleNamespace(
            disabled=disabled, all_gather=self.of_pynccl, device=torch.device("cpu")
        )

    @staticmethod
    def ranks(tensor: Any) -> list[Any]:
        return [tensor + 100 * (rank - RANK) for rank in range(RANKS)]

    def of_pynccl(self, output: Any, given: Any) -> None:
        import torch

        self.calls.append("pynccl")
        assert given.is_contiguous(), "NCCL reads memory in order"
        assert output.is_contiguous()
        output.copy_(torch.stack(self.ranks(given)).view(output.shape))

    def of_torch(self, output: Any, given: Any, group: str) -> None:
        import torch

        assert group == "PyTorch's"
        self.calls.append("torch")
        output.copy_(torch.cat(self.ranks(given)))

    def gather(self, tensor: Any, dim: int) -> Any:
        found = self.communicator.all_gather(tensor, dim)
        assert found.is_contiguous()
        return found


def check(group: Group, tensor: Any, dim: int) -> None:
    import torch

    expected = torch.cat(group.ranks(tensor), dim=dim)
    found = group.gather(tensor, dim)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", [-1, 0, 1, 2, -3])
@isolated(LIMIT)
def test_a_gather_makes_no_communicator(dim: int) -> None:
    import torch

    group = Group()
    check(group, torch.arange(24.0).view(2, 3, 4), dim)
    assert group.calls == ["pynccl"]


@isolated(LIMIT)
def test_logits_of_a_slice_are_gathered_in_their_order() -> None:
    import torch

    group = Group()
    logits = torch.arange(40, dtype=torch.bfloat16).view(5, 8)
    for tensor in (logits[:, ::2], logits.t(), logits[2:4], logits[:0]):
        check(group, tensor, -1)
    assert set(group.calls) == {"pynccl"}


@pytest.mark.guard
@isolated(LIMIT)
def test_what_nccl_has_no_type_for_is_left_to_torch() -> None:
    import torch

    group = Group()
    group.gather(torch.tensor([3, 5], dtype=torch.int16), 0)
    assert group.calls == ["torch"]


@pytest.mark.guard
@isolated(LIMIT)
def test_a_disabled_communicator_gathers_nothing() -> None:
    import torch

    group = Group(disabled=True)
    check(group, torch.arange(6.0).view(2, 3), -1)
    group.communicator.pynccl_comm = None
    check(group, torch.arange(6.0).view(2, 3), 0)
    assert group.calls == ["torch", "torch"]

"""Experts on the ranks of tensor parallelism share its communicator; all others have their own."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import isolated

rig.use_tree()

LIMIT = 40
RANKS = (0, 1, 2, 3)

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Group:
    """A group of PyTorch, which is a key of its table of groups."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks


class Process:
    """Rank 0 of the processes of a server, without NCCL: ``made`` has its communicators."""

    def __init__(self, *, tensor_parallel: tuple[int, ...] | None = RANKS) -> None:
        import vllm.config
        from torch.distributed import distributed_c10d
        from vllm.distributed import parallel_state
        from vllm.distributed.device_communicators import (
            all2all,
            base_device_communicator,
            cuda_communicator,
            pynccl,
        )

        self.made: list[Any] = []
        self.groups = distributed_c10d._world.pg_map
        base_device_communicator.dist = SimpleNamespace(
            get_rank=lambda group=None: 0,
            get_world_size=lambda group=None: len(group.ranks if group else RANKS),
            get_process_group_ranks=lambda group: [*group.ranks],
            get_group_rank=lambda group, rank: 0,
        )
        made = self.made

        class Communicator:
            disabled = False

            def __init__(self, **_: Any) -> None:
                made.append(self)

        pynccl.PyNcclCommunicator = Communicator
        cuda_communicator.is_symmetric_memory_enabled = lambda: False
        manager = SimpleNamespace(destroy=lambda: None)
        all2all.AgRsAll2AllManager = lambda *_: manager
        self.parallel = SimpleNamespace(
            data_parallel_size=1, all2all_backend="allgather_reducescatter"
        )
        config = SimpleNamespace(parallel_config=self.parallel)
        vllm.config.get_current_vllm_config_or_none = lambda: config
        parallel_state._TP = None
        if tensor_parallel:
            # The communicator is made before any other.
            own: Any = SimpleNamespace(pynccl_comm=Communicator())
            group: Any = SimpleNamespace(ranks=[*tensor_parallel], device_communicator=own)
            parallel_state._TP = group

    def group(
        self,
        name: str,
        *,
        ranks: tuple[int, ...] = RANKS,
        sends_tokens: bool = False,
        stored: bool = False,
    ) -> Any:
        """The communicator of a group, as vLLM makes it."""
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        # As the releases tell it whether tokens are sent from rank to rank.
        self.parallel.data_parallel_size = 1 + sends_tokens
        options: dict[str, Any] = {}
        if "use_all2all" in inspect.signature(CudaCommunicator).parameters:
            options = {"use_all2all": sends_tokens}
        if stored:
            options["tcp_store_group"] = SimpleNamespace(ranks=ranks)
        cpu_group = Group(ranks)
        self.groups[cpu_group] = ("gloo", None)
        return CudaCommunicator(cpu_group, unique_name=f"{name}:0", **options)


@isolated(LIMIT)
def test_experts_that_tensor_parallelism_shares_make_no_communicator() -> None:
    process = Process()
    experts = process.group("ep")
    assert experts.pynccl_comm is process.made[0]
    assert len(process.made) == 1


@pytest.mark.guard
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "pp"},
        {"name": "dp"},
        {"name": "eplb"},
        {"name": "ep", "sends_tokens": True},
        {"name": "ep", "ranks": (0, 1)},
        {"name": "ep", "stored": True},
    ],
)
@isolated(LIMIT)
def test_every_other_group_makes_its_own(settings: dict[str, Any]) -> None:
    process = Process()
    other = process.group(**settings)
    assert other.pynccl_comm is process.made[1]


@pytest.mark.guard
@isolated(LIMIT)
def test_without_tensor_parallelism_s_communicator_experts_make_their_own() -> None:
    from vllm.distributed import parallel_state

    process = Process(tensor_parallel=None)
    assert process.group("ep").pynccl_comm is process.made[0]
    process = Process()
    group: Any = parallel_state._TP
    for communicator in (None, SimpleNamespace(), SimpleNamespace(pynccl_comm=None)):
        group.device_communicator = communicator
        assert process.group("ep").pynccl_comm is process.made[-1]
    assert len(process.made) == 4


@pytest.mark.guard
@isolated(LIMIT)
def test_one_rank_makes_none() -> None:
    process = Process(tensor_parallel=None)
    assert process.group("ep", ranks=(0,)).pynccl_comm is None

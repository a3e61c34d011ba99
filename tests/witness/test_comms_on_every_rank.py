"""NCCL's communicators are suspended and resumed on every rank or on none.

NCCL waits in either call for all ranks of the communicator. A rank that fails before it, or whose
device has no memory for its communicator, must not leave the others waiting.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import isolated

rig.use_tree()

RANKS = 3
LIMIT = 60
# Seconds a communicator waits for its other ranks, and between two looks.
WAIT, LOOK = 10.0, 0.005
# What the communicator of a rank takes while it is not suspended, and what the model does.
UNIT = 1 << 33
COMM, MODEL, DEVICE = 20 * UNIT, 60 * UNIT, 100 * UNIT

pytestmark = pytest.mark.usefixtures("vllm_executor")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call on all ranks: sleep or wake_up. ``fails`` has the ranks whose allocator fails,
    ``taken`` the units that other processes hold of the last rank's device. ``alone``: rank 0 makes
    the call, and no other.
    """

    call: str
    fails: tuple[int, ...] = ()
    taken: int = 0
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class After:
    """One rank after a step: the error of its call, and what is mapped there."""

    error: str
    comm: bool
    model: bool


def stats(comm: object, stat: Any, value: Any) -> int:
    """ncclCommMemStats of what a suspended communicator takes, in units of more than 4 GiB."""
    assert stat.value == 0
    value._obj.value = COMM
    return 0


def check(result: int) -> None:
    assert result == 0


class Group:
    """What vLLM looks for in a group whose communicators are suspended and resumed."""

    def __init__(self, communicator: Any) -> None:
        self.device_communicator = communicator


class Rank:
    """A process of its own: vLLM's worker and communicator over a pretended NCCL and device."""

    def __init__(self, rank: int, folder: Path, *, suspends: bool, counts: bool) -> None:
        import torch
        from vllm.distributed import parallel_state
        from vllm.distributed.device_communicators import cuda_communicator, pynccl
        from vllm.v1.worker.gpu_worker import Worker

        self.rank, self.folder = rank, folder
        self.step, self.number = Step(call=""), 0
        self.comm = self.model = True
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
        )
        world: Any = parallel_state.init_world_group([*range(RANKS)], rank, "gloo")
        parallel_state._WORLD = world
        nccl = pynccl.PyNcclCommunicator.__new__(pynccl.PyNcclCommunicator)
        nccl.disabled = nccl._suspended = False
        nccl.comm = "the communicator"
        nccl.nccl = SimpleNamespace(
            has_symbol=lambda name: True,
            ncclCommSuspend=self.suspend_comm,
            ncclCommResume=self.resume_comm,
            NCCL_CHECK=check,
            lib=SimpleNamespace(ncclCommMemStats=stats) if counts else SimpleNamespace(),
        )
        communicator = cuda_communicator.CudaCommunicator.__new__(
            cuda_communicator.CudaCommunicator
        )
        communicator.cpu_group, communicator.pynccl_comm = world.cpu_group, nccl
        world.device_communicator = communicator
        # A group of the same ranks that has the same communicator.
        self.sharing = Group(communicator)
        parallel_state._groups["sharing:0"] = weakref.ref(self.sharing)

        torch.accelerator.synchronize = lambda *_: None
        torch.accelerator.get_memory_info = lambda *_: (self.free, DEVICE)
        worker: Any = Worker.__new__(Worker)
        worker._sleep_mode_backend = SimpleNamespace(suspend=self.suspend, resume=self.resume)
        worker._sleep_saved_parameters = {}
        worker._sleep_saved_buffers = {}
        # Of the untouched release.
        worker._sleep_saved_draft_buffers = {}
        options = SimpleNamespace(enable_nccl_comm_suspend=suspends)
        worker.vllm_config = SimpleNamespace(model_config=options)
        worker.synchronize_device = lambda: None
        self.worker = worker

    @property
    def free(self) -> int:
        taken = self.step.taken * UNIT if self.rank == RANKS - 1 else 0
        return DEVICE - taken - COMM * self.comm - MODEL * self.model

    # What vLLM calls of its allocator.

    def suspend(self, level: int) -> None:
        if self.rank in self.step.fails:
            raise RuntimeError("no host memory")
        self.model = False

    def resume(self, tags: list[str] | None) -> None:
        if self.rank in self.step.fails:
            raise RuntimeError("out of memory at block 7")
        self.model = True

    # What vLLM calls of NCCL.

    def suspend_comm(self, comm: object, flags: int) -> None:
        self.meet("suspend")
        self.comm = False

    def resume_comm(self, comm: object) -> None:
        if self.free < COMM:
            raise RuntimeError("NCCL error: unhandled cuda error")
        self.meet("resume")
        self.comm = True

    def meet(self, call: str) -> None:
        """Wait for all ranks, as NCCL's bootstrap does, but not for ever."""
        for rank in range(RANKS):
            path = self.folder / f"{self.number}-{call}-{rank}"
            if rank == self.rank:
                path.touch()
        end = time.monotonic() + WAIT
        for rank in range(RANKS):
            while not (self.folder / f"{self.number}-{call}-{rank}").exists():
                if time.monotonic() > end:
                    raise RuntimeError(f"HANGS in {call}: rank {rank} never comes")
                time.sleep(LOOK)

    def take(self, step: Step) -> dict[str, Any]:
        self.step, self.number = step, self.number + 1
        error = ""
        try:
            if not (step.alone and self.rank):
                getattr(self.worker, step.call)()
        except RuntimeError as raised:
            error = f"{raised}"
        return {"error": error, "comm": self.comm, "model": self.model}


def run(
    folder: Path, *steps: Step, suspends: bool = True, counts: bool = True
) -> list[list[After]]:
    """What each rank is after each step, by step. ``counts``: NCCL knows what it has suspended."""
    folder.mkdir()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                of_rank = Rank(rank, folder, suspends=suspends, counts=counts)
                known = [of_rank.take(step) for step in steps]
                (folder / f"rank{rank}.json").write_text(json.dumps(known))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    told: list[list[dict[str, Any]]] = [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)
    ]
    return [[After(**ranks[number]) for ranks in told] for number in range(len(steps))]


def expect(ranks: Sequence[After], *, comm: bool, model: Sequence[bool] | None = None) -> None:
    assert [rank.comm for rank in ranks] == [comm] * RANKS
    if model is not None:
        assert [rank.model for rank in ranks] == [*model]


SLEEP, WAKE = Step(call="sleep"), Step(call="wake_up")
ASLEEP, AWAKE = [False] * RANKS, [True] * RANKS


@pytest.mark.parametrize(
    "failing", [(0,), (1, 2), pytest.param((0, 1, 2), marks=pytest.mark.guard)]
)
@isolated(LIMIT)
def test_a_wake_up_that_fails_on_some_ranks_resumes_none(
    tmp_path: Path, failing: tuple[int, ...]
) -> None:
    fails = Step(call="wake_up", fails=failing)
    # The second sleep is how the executor takes back the part that woke.
    slept, failed, rolled_back, woken = run(tmp_path / "ranks", SLEEP, fails, SLEEP, WAKE)
    expect(slept, comm=False, model=ASLEEP)
    expect(failed, comm=False, model=[rank not in failing for rank in range(RANKS)])
    for rank in range(RANKS):
        if rank in failing:
            assert failed[rank].error == "out of memory at block 7"
        else:
            assert "HANGS" not in failed[rank].error
            # Which ranks failed, for whoever reads this rank's log alone.
            assert f"rank {', '.join(map(str, failing))}" in failed[rank].error
    expect(rolled_back, comm=False, model=ASLEEP)
    assert [rank.error for rank in rolled_back] == [""] * RANKS
    expect(woken, comm=True, model=AWAKE)
    assert [rank.error for rank in woken] == [""] * RANKS


@isolated(LIMIT)
def test_a_sleep_that_fails_on_one_rank_suspends_none(tmp_path: Path) -> None:
    failed, slept, woken = run(tmp_path / "ranks", Step(call="sleep", fails=(1,)), SLEEP, WAKE)
    assert failed[1].error == "no host memory"
    assert all(rank.error and "HANGS" not in rank.error for rank in failed)
    expect(failed, comm=True)
    expect(slept, comm=False, model=ASLEEP)
    expect(woken, comm=True, model=AWAKE)


@pytest.mark.parametrize("taken", [21, 40])
@isolated(LIMIT)
def test_no_rank_resumes_where_one_has_no_memory_for_it(tmp_path: Path, taken: int) -> None:
    refused = Step(call="wake_up", taken=taken)
    _, failed, _, woken = run(tmp_path / "ranks", SLEEP, refused, SLEEP, WAKE)
    assert "NCCL error" not in failed[-1].error
    assert all(rank.error and "HANGS" not in rank.error for rank in failed)
    expect(failed, comm=False)
    expect(woken, comm=True, model=AWAKE)


@pytest.mark.guard
@isolated(LIMIT)
def test_what_is_just_enough_memory_is_enough(tmp_path: Path) -> None:
    _, woken = run(tmp_path / "ranks", SLEEP, Step(call="wake_up", taken=20))
    expect(woken, comm=True, model=AWAKE)


@pytest.mark.guard
@isolated(LIMIT)
def test_communicators_that_are_not_suspended_bind_no_rank_to_another(tmp_path: Path) -> None:
    fails, alone = Step(call="wake_up", fails=(0,), taken=40), Step(call="wake_up", alone=True)
    slept, failed, woken = run(tmp_path / "ranks", SLEEP, fails, alone, suspends=False)
    expect(slept, comm=True, model=ASLEEP)
    assert [bool(rank.error) for rank in failed] == [True, False, False]
    expect(failed, comm=True, model=[False, True, True])
    assert [rank.error for rank in woken] == [""] * RANKS
    expect(woken, comm=True, model=AWAKE)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_library_that_does_not_count_resumes_all_the_same(tmp_path: Path) -> None:
    _, woken = run(tmp_path / "ranks", SLEEP, WAKE, counts=False)
    expect(woken, comm=True, model=AWAKE)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_communicator_that_is_awake_needs_no_memory(tmp_path: Path) -> None:
    """The KV cache may be woken after the weights, with which communicators are resumed."""
    _, woken, again = run(tmp_path / "ranks", SLEEP, WAKE, Step(call="wake_up", taken=10))
    expect(woken, comm=True, model=AWAKE)
    assert [rank.error for rank in again] == [""] * RANKS

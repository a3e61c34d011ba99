"""An executor that a worker's death and its engine shut down at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 60
MEETING = 3.0

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Cancels:
    """Which threads are at the socket that cancels a queue's reader.

    The first of all stays there until another thread comes to the same queue, for at most
    ``MEETING`` seconds after the second shutdown was called. No other waits: two threads that go
    from queue to queue in step would never meet.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        self.began = threading.Event()
        self.called = threading.Event()
        self.together: list[tuple[str, ...]] = []
        self._met = threading.Event()
        self._at: dict[Any, list[str]] = {}
        self._lock = threading.Lock()
        self._cancel = SpinCondition.cancel
        monkeypatch.setattr(SpinCondition, "cancel", lambda queue: self._note(queue))

    def _note(self, queue: Any) -> None:
        with self._lock:
            at = self._at.setdefault(queue, [])
            at.append(threading.current_thread().name)
            alone = len(at) == 1
            if not alone:
                self.together.append(tuple(at))
                self._met.set()
            first = not self.began.is_set()
            self.began.set()
        try:
            if first and self.called.wait(LIMIT):
                self._met.wait(MEETING)
            # A second thread would now and then wait in it for ever.
            if alone:
                self._cancel(queue)
        finally:
            with self._lock:
                at.remove(threading.current_thread().name)


@isolated(LIMIT)
def test_two_threads_that_shut_down_do_not_use_a_queue_at_the_same_time(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.executor(gpus) as executor:
        cancels = Cancels(monkeypatch)
        executor.workers[1].proc.kill()
        # The thread that watches the workers has ended them, and is at the first queue.
        assert cancels.began.wait(20)
        cancels.called.set()
        executor.shutdown()
    assert not cancels.together


@isolated(LIMIT)
def test_no_worker_is_left_when_a_second_shutdown_returns(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    began = threading.Event()
    end_workers = MultiprocExecutor._ensure_worker_termination

    def late(workers: list[Any]) -> None:
        began.set()
        time.sleep(0.5)
        end_workers(workers)

    with rig.executor(gpus) as executor:
        workers = [worker.proc for worker in executor.workers]
        assert len(workers) == RANKS
        monkeypatch.setattr(MultiprocExecutor, "_ensure_worker_termination", staticmethod(late))
        workers[1].kill()
        assert began.wait(20)
        executor.shutdown()
        assert not any(worker.is_alive() for worker in workers)
        # ... and once more, in the same thread: nothing is left to do.
        executor.shutdown()

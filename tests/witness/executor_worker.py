"""The worker of the executor witnesses: vLLM's worker interface over a pretended GPU.

It runs inside the processes that vLLM's own executor starts. Everything around it (executor,
message queues, engine core, scheduler) is the code of the tree under test. A GPU is a folder that
any process can write to, so a test can play the peer that holds memory there, or break the next
call of an operation, while the worker runs elsewhere:

    rank<n>/peer       what another tenant holds, in the unit of CAPACITY
    rank<n>/used       what this worker has mapped (written by the worker)
    rank<n>/fail-<op>  how many of the next calls of <op> fail
    rank<n>/late-<op>  seconds by which each answer to <op> is delayed
    rank<n>/hang-<op>  <op> hangs as long as the file is there
    rank<n>/die-<op>   the next call of <op> ends the worker's process
    rank<n>/payload    seconds between the notice of a large reply and the reply itself
    rank<n>/keeps      the worker keeps the weights through a sleep of level 2, and says so
    rank<n>/room       how many blocks of KV cache the worker's host has room for
    rank<n>/silent     the worker does not know what is asleep
    rank<n>/batches    forward passes so far, in which data parallel ranks meet
    rank<n>/log        one line a call

With data parallel engines, n counts the ranks of all engines. ``sleep`` and ``wake_up`` keep the
contract of the allocator patches: either may be repeated, and a wake that finds no room leaves the
blocks as they were.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.witness.executor_rig import CAPACITY, DEVICES, GARBAGE, SIZES, TOKEN
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

BLOCK_BYTES = 64


class Device:
    """One pretended GPU and the two blocks its tenant has there."""

    def __init__(self, rank: int) -> None:
        self.folder = Path(os.environ[DEVICES]) / f"rank{rank}"
        self.mapped: dict[str, int] = {}
        self.host: dict[str, int] = {}

    def map(self, tag: str, content: int) -> None:
        self.mapped[tag] = content
        self._write_used()

    def unmap(self, tag: str) -> None:
        del self.mapped[tag]
        self._write_used()

    def need_room(self, tags: list[str]) -> None:
        wanted = sum(SIZES[tag] for tag in tags)
        if self._number("peer") + self._used() + wanted > CAPACITY:
            raise RuntimeError(f"CUDA Error: out of memory mapping {wanted} for {tags}")

    def called(self, operation: str, detail: str = "") -> None:
        """Note the call; answer late, not at all, or die, if the test asked for it."""
        with (self.folder / "log").open("a") as log:
            log.write(f"{operation} {detail}".strip() + "\n")
        time.sleep(self._number(f"late-{operation}"))
        while (self.folder / f"hang-{operation}").exists():
            time.sleep(0.01)
        if (self.folder / f"die-{operation}").exists():
            os._exit(1)

    def trip(self, operation: str) -> None:
        """Fail if the test asked for it."""
        left = int(self._number(f"fail-{operation}"))
        if left:
            (self.folder / f"fail-{operation}").write_text(str(left - 1))
            raise RuntimeError(f"{operation} was made to fail")

    def need_mapped(self, *tags: str) -> None:
        """Fail as a kernel does whose memory is not mapped."""
        if not set(tags) <= set(self.mapped):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def meet(self, peers: list[int]) -> None:
        """Wait for these ranks to be in their forward pass, as the experts' collectives do."""
        mine = self._number("batches") + 1
        (self.folder / "batches").write_text(str(mine))
        folders = [self.folder.parent / f"rank{rank}" / "batches" for rank in peers]
        while any(not f.exists() or float(f.read_text() or 0) < mine for f in folders):
            time.sleep(0.002)

    def keeps(self) -> bool:
        return (self.folder / "keeps").exists()

    def room(self) -> int:
        """Blocks of KV cache that the host has room for."""
        return int((self.folder / "room").read_text()) if (self.folder / "room").exists() else 99

    def silent(self) -> bool:
        return (self.folder / "silent").exists()

    def notice(self) -> float:
        """Called between the slot of a large reply and its payload: seconds to wait."""
        self.called("notice")
        return self._number("payload")

    def _used(self) -> int:
        return sum(SIZES[tag] for tag in self.mapped)

    def _write_used(self) -> None:
        (self.folder / "used").write_text(str(self._used()))

    def _number(self, name: str) -> float:
        path = self.folder / name
        return float(path.read_text()) if path.exists() else 0.0


def _delay_payloads(seconds: Callable[[], float]) -> None:
    """Let time pass in this process between the slot of a large message and its payload."""
    acquire = MessageQueue.acquire_write

    @contextlib.contextmanager
    def acquire_write(queue: Any, timeout: float | None = None) -> Iterator[Any]:
        with acquire(queue, timeout) as slot:
            yield slot
            large = slot[0] == 1
        if large:
            time.sleep(seconds())

    MessageQueue.acquire_write = acquire_write


class PretendWorker(WorkerBase):  # type: ignore[misc]
    """What vLLM asks of a worker, without a model and without a GPU."""

    gpu: Device
    peers: list[int]

    def init_device(self) -> None:
        _delay_payloads(lambda: self.gpu.notice())
        parallel = self.parallel_config
        ranks = parallel.tensor_parallel_size
        self.gpu = Device(parallel.data_parallel_rank * ranks + self.rank)
        self.peers = [self.rank + ranks * n for n in range(parallel.data_parallel_size)]

    def load_model(self, **options: Any) -> None:
        self.gpu.map("weights", 1000 + self.rank)
        self.gpu.map("kv_cache", 0)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        return {"model.layers.0.self_attn.attn": spec}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def add_lora(self, lora_request: Any) -> bool:
        self.gpu.called("add_lora")
        # The slots of adapters sleep with the weights.
        self.gpu.need_mapped("weights")
        return True

    def synchronize_device(self) -> None:
        self.gpu.called("synchronize_device")

    def check_health(self) -> None:
        self.gpu.called("check_health")
        self.gpu.trip("check_health")

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        self.gpu.trip("reset_encoder_cache")

    def shutdown(self) -> None:
        pass

    def sleep(self, level: int = 1) -> bool | None:
        gpu = self.gpu
        gpu.called("sleep", str(level))
        # The failure strikes between two blocks, as a failing host allocation does.
        if "kv_cache" in gpu.mapped:
            gpu.unmap("kv_cache")
        gpu.trip("sleep")
        if "weights" in gpu.mapped:
            if level == 1 or gpu.keeps():
                gpu.host["weights"] = gpu.mapped["weights"]
            gpu.unmap("weights")
        return False if gpu.keeps() else None

    def wake_up(self, tags: list[str] | None = None) -> None:
        gpu = self.gpu
        gpu.called("wake_up", "all" if tags is None else ",".join(tags))
        asleep = [tag for tag in SIZES if (tags is None or tag in tags) and tag not in gpu.mapped]
        gpu.trip("wake_up")
        gpu.need_room(asleep)
        for tag in asleep:
            gpu.map(tag, gpu.host.pop(tag, GARBAGE))
        # What a worker does after the allocator has woken (restore buffers, ...) may fail too.
        gpu.trip("after_wake_up")

    def discard(self, tags: tuple[str, ...]) -> None:
        gpu = self.gpu
        gpu.called("discard", ",".join(tags))
        gpu.trip("discard")
        for tag in set(tags) & set(gpu.mapped):
            gpu.unmap(tag)

    def sleep_report(self) -> dict[str, Any] | None:
        self.gpu.called("sleep_report")
        self.gpu.trip("sleep_report")
        if self.gpu.silent():
            return None
        asleep = {tag: size for tag, size in SIZES.items() if tag not in self.gpu.mapped}
        return {
            "dp_rank": self.parallel_config.data_parallel_index,
            "rank": self.rank,
            "asleep_bytes": asleep,
        }

    def kv_room(self, limit: int | None = None) -> tuple[int, int, str]:
        self.gpu.trip("kv_room")
        return self.gpu.room() * BLOCK_BYTES, BLOCK_BYTES, "the host of the test has no room."

    def keep_kv(self, blocks: list[int]) -> None:
        self.gpu.called("keep_kv", str(len(blocks)))
        self.gpu.trip("keep_kv")
        self.gpu.host["kept"] = len(blocks)

    def restore_kv(self, blocks: int) -> bool:
        self.gpu.called("restore_kv", str(blocks))
        self.gpu.need_mapped("weights", "kv_cache")
        self.gpu.trip("restore_kv")
        if self.gpu.host.get("kept") != blocks:
            raise RuntimeError(f"{self.gpu.host.get('kept')} of {blocks} blocks are kept")
        return False

    def drop_kv(self) -> None:
        self.gpu.called("drop_kv")
        self.gpu.host.pop("kept", None)

    def load_new_weights(self, value: int) -> None:
        self.gpu.need_mapped("weights")
        self.gpu.trip("load_new_weights")
        self.gpu.mapped["weights"] = value + self.rank

    def reload_weights(self) -> None:
        self.gpu.need_mapped("weights")
        self.gpu.trip("reload_weights")
        self.gpu.mapped["weights"] = 5000 + self.rank

    def start_weight_update(self) -> None:
        self.gpu.called("start_weight_update")
        self.gpu.trip("start_weight_update")

    def start_draft_weight_update(self) -> None:
        self.gpu.called("start_draft_weight_update")

    def update_weights(self, value: int) -> None:
        self.gpu.need_mapped("weights")
        self.gpu.trip("update_weights")
        self.gpu.mapped["weights"] = value + self.rank

    def finish_weight_update(self) -> None:
        self.gpu.called("finish_weight_update")
        self.gpu.trip("finish_weight_update")

    def weights(self) -> int | None:
        return self.gpu.mapped.get("weights")

    def echo(self, value: str) -> tuple[int, str]:
        self.gpu.called("echo", value)
        self.gpu.trip("echo")
        return self.rank, value

    def bulk(self, value: str, size: int) -> tuple[int, str, bytes]:
        """A reply of ``size`` bytes; vLLM sends those over 24 MiB by a socket."""
        self.gpu.called("bulk", value)
        self.gpu.trip("bulk")
        return self.rank, value, bytes([self.rank]) * size

    def execute_dummy_batch(self) -> None:
        self.gpu.called("execute_dummy_batch")
        self._forward()

    def _forward(self) -> None:
        self.gpu.need_mapped("weights", "kv_cache")
        if len(self.peers) > 1:
            self.gpu.meet(self.peers)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        names = list(scheduler_output.num_scheduled_tokens)
        if names:
            self.gpu.called("execute_model")
            self._forward()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: n for n, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
        )

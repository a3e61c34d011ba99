"""The rig of the executor witnesses: vLLM's real executor and engine, four pretended GPUs.

The tree under test is the unpacked source that ``SM12X_TREE`` names; it needs no compiled module
and no GPU. ``executor()`` starts vLLM's MultiprocExecutor with four worker processes, ``engine()``
starts the engine core in a process of its own with such an executor under it, and talks to it as
vLLM's server does; ``data_parallel()`` starts two engine cores with two workers each, and the
coordinator between them. ``in_process()`` is the executor of one GPU, whose worker runs in the same
process. The workers are those of executor_worker.py.

A test runs in a fork of pytest (``isolated``) with a time limit: vLLM is imported once, and a test
that hangs is a test that fails, with all its processes ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from tests.witness import forked, http_rig

RANKS = 4
ENGINES = 2
CAPACITY = 100
SIZES = {"weights": 60, "kv_cache": 30}
FULL = sum(SIZES.values())
GARBAGE = -1
TOKEN = 7
DEVICES = "SM12X_WITNESS_DEVICES"
# Seconds for which a test and all its processes may wait and print nothing: more than any time
# limit that it sets, and than the 8 s for which vLLM's executor waits for workers to end, then for
# SIGTERM to end them. Every process of vLLM's polls its queues meanwhile.
IDLE = 15.0
_POLLING = 0.3
_LOOK = 0.5
# Frames of the test's stack that the failure of a hanging one shows.
_FRAMES = 8

P = ParamSpec("P")

# The smallest configuration that vLLM takes for a language model.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    # Data parallel engines work in lockstep only for a model with experts.
    "num_local_experts": 4,
}


def use_tree() -> None:
    """Make ``import vllm`` take the tree under test."""
    tree = Path(os.environ["SM12X_TREE"]).resolve()
    # Behind the checkout: the tree has a package called tests as well.
    sys.path.append(str(tree))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
        VLLM_WORKER_MULTIPROC_METHOD="fork",
        # Five seconds in the release.
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="4",
    )
    # vLLM prints the whole configuration when an engine starts.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@functools.cache
def _vllm_config(engines: int = 1) -> Any:
    """A real configuration of ``engines`` data parallel engines that share RANKS pretended GPUs."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    # By class, vLLM looks at it here; by name, in a process that imports everything once more.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True
        )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=RANKS // engines,
            data_parallel_size=engines,
            data_parallel_size_local=engines,
            distributed_executor_backend="mp",
            worker_cls="tests.witness.executor_worker.PretendWorker",
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=128,
            max_model_len=128,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )


def use_dummy_weights() -> None:
    """Start what this fork starts with --load-format dummy."""
    _vllm_config().load_config.load_format = "dummy"


def prepare() -> None:
    """Import and configure in pytest's own process, once, so that every fork has it."""
    # Imports make objects that stay: collections find nothing among them.
    gc.disable()
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    # Where the machine has a GPU, vLLM would choose its platform and start CUDA.
    platforms._current_platform = UnspecifiedPlatform()
    import tests.witness.executor_worker  # noqa: F401
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.core_client
    import vllm.v1.executor.multiproc_executor  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast

    http_rig.load()

    # A reader whose notification was lost looks at its queue again after this time, 5 s in the
    # release: both ways, a call may wait twice as long.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 500

    # It polls for a second after each message, in every rank and every engine: with two processors
    # that second is all that a test's other processes get of them.
    shm_broadcast.sched_yield = _wait_a_little

    _vllm_config()
    _vllm_config(ENGINES)
    # An engine collects three times as it starts, and thaws what is frozen to collect as it ends:
    # each time it would go through all that was imported.
    gc.freeze()
    gc.unfreeze = _nothing
    gc.enable()


def _nothing() -> None: ...


def _wait_a_little() -> None:
    time.sleep(0.0005)


class Gpus:
    """The test's hand on the four pretended GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for rank in range(RANKS):
            (root / f"rank{rank}").mkdir(parents=True)

    def peer(self, rank: int, held: int) -> None:
        self._write(rank, "peer", held)

    def fail(self, rank: int, operation: str, times: int = 1) -> None:
        self._write(rank, f"fail-{operation}", times)

    def late(self, rank: int, operation: str, seconds: float) -> None:
        self._write(rank, f"late-{operation}", seconds)

    def delay_payload(self, rank: int, seconds: float) -> None:
        """The payload of each large reply comes so long after its notice."""
        self._write(rank, "payload", seconds)

    def hang(self, rank: int, *operations: str) -> None:
        """Each of these operations hangs, until ``let_go``."""
        for operation in operations:
            self._write(rank, f"hang-{operation}", 1)

    def let_go(self, rank: int, *operations: str) -> None:
        for operation in operations:
            (self.root / f"rank{rank}" / f"hang-{operation}").unlink(missing_ok=True)

    def let_everything_go(self) -> None:
        for hanging in self.root.glob("rank*/hang-*"):
            hanging.unlink()

    def die(self, rank: int, operation: str) -> None:
        """The next call of the operation ends the rank's process."""
        self._write(rank, f"die-{operation}", 1)

    def keep(self, rank: int) -> None:
        """The rank's worker keeps its weights through a sleep of level 2, and says so."""
        self._write(rank, "keeps", 1)

    def silence(self, rank: int) -> None:
        """The rank's worker does not know what is asleep."""
        self._write(rank, "silent", 1)

    def room(self, rank: int, blocks: int) -> None:
        """How many blocks of KV cache the rank's host has room for."""
        self._write(rank, "room", blocks)

    def used(self) -> list[int]:
        return [int(self._read(rank, "used") or 0) for rank in range(RANKS)]

    def calls(self, rank: int, *operations: str) -> list[str]:
        """The calls of these operations that the rank's worker has had, oldest first."""
        lines = self._read(rank, "log").splitlines()
        return [line for line in lines if line.split()[0] in operations]

    def until_called(self, rank: int, operation: str) -> None:
        while not self.calls(rank, operation):
            time.sleep(0.005)

    def _write(self, rank: int, name: str, value: float) -> None:
        (self.root / f"rank{rank}" / name).write_text(str(value))

    def _read(self, rank: int, name: str) -> str:
        path = self.root / f"rank{rank}" / name
        return path.read_text() if path.exists() else ""


def hurry(grace: float = 0.5, *, sleep: float = 3.0) -> None:
    """Shorten the limits of the tree under test, where it has them, in this fork."""
    from vllm.v1.executor import abstract, multiproc_executor

    os.environ["VLLM_SLEEP_TIMEOUT_SECONDS"] = str(sleep)
    for module, name, seconds in (
        (multiproc_executor, "REPLY_GRACE_SECONDS", grace),
        (abstract, "SLEEP_TIMEOUT_SECONDS", sleep),
    ):
        if hasattr(module, name):
            setattr(module, name, seconds)
    # Ten seconds in the release.
    multiproc_executor.MultiprocExecutor.check_health = lambda self: self.collective_rpc(
        "check_health", timeout=grace
    )


@contextlib.contextmanager
def in_process(gpus: Gpus) -> Iterator[Any]:
    """vLLM's executor of one GPU."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    os.environ[DEVICES] = str(gpus.root)
    started = UniProcExecutor(_vllm_config())
    try:
        yield started
    finally:
        started.shutdown()


@contextlib.contextmanager
def executor(gpus: Gpus) -> Iterator[Any]:
    """vLLM's multiprocess executor over four worker processes."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ[DEVICES] = str(gpus.root)
    started = MultiprocExecutor(_vllm_config())
    try:
        yield started
    finally:
        # vLLM would wait for a rank that hangs, for 8 s.
        gpus.let_everything_go()
        started.shutdown()


class Engine:
    """The client of an engine core that runs in a process of its own."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._tokens: dict[str, list[int]] = {}
        self._finished: set[str] = set()

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the engine core as the client does, but don't wait for its answer."""
        from vllm.v1.engine import EngineCoreRequestType

        call = uuid.uuid1().int >> 64
        answer: Future[Any] = Future()
        self.client.utility_results[call] = answer
        self.client._send_input(EngineCoreRequestType.UTILITY, (0, call, method, arguments))
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine core; unlike the client, don't wait for a dead one."""
        answer = self.begin(method, *arguments)
        while not answer.done():
            if self.client.resources.engine_dead:
                raise AssertionError("the engine core died")
            time.sleep(0.005)
        return answer.result()

    def ask(self, name: str, tokens: int = 3) -> None:
        """Send a request that generates ``tokens`` tokens."""
        self.client.add_request(_request(name, tokens))

    def answer(self, name: str) -> list[int]:
        """All tokens of a request. Raises if the engine dies before it ends."""
        while name not in self._finished:
            for output in self.client.get_output().outputs:
                self._tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self._finished.add(output.request_id)
        return self._tokens[name]

    def generates(self, name: str) -> bool:
        self.ask(name)
        return self.answer(name) == [TOKEN] * 3

    def weights(self) -> list[int | None]:
        found: list[int | None] = self.call("collective_rpc", "weights")
        return found


@contextlib.contextmanager
def engine(gpus: Gpus) -> Iterator[Engine]:
    """vLLM's engine core, started as its server starts it."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ[DEVICES] = str(gpus.root)
    client = EngineCoreClient.make_client(
        multiprocess_mode=True,
        asyncio_mode=False,
        vllm_config=_vllm_config(),
        executor_class=MultiprocExecutor,
        log_stats=False,
    )
    try:
        yield Engine(client)
    finally:
        client.shutdown()


class Engines:
    """The client of data parallel engine cores, as vLLM's server has it."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self._loop = loop

    def call(self, method: str, *arguments: Any, seconds: float = 5.0) -> list[Any]:
        """Call a method of every engine core: what each returns, or the exception it raises.

        An engine that does not answer in ``seconds`` gives a TimeoutError.
        """

        async def ask(engine: Any) -> Any:
            answer = self.client._call_utility_async(method, *arguments, engine=engine)
            return await asyncio.wait_for(answer, seconds)

        async def ask_all() -> list[Any]:
            calls = [ask(engine) for engine in self.client.core_engines]
            return await asyncio.gather(*calls, return_exceptions=True)

        return self._loop.run_until_complete(ask_all())

    def ask_client(self, method: str, *arguments: Any) -> Any:
        """Call a method of the client, as vLLM's server does."""
        return self._loop.run_until_complete(getattr(self.client, method)(*arguments))

    def report(self) -> list[dict[str, Any]]:
        """What the client says is asleep on each rank of all engines."""
        found: list[dict[str, Any]]
        found = self._loop.run_until_complete(self.client.sleep_report_async())
        return found

    def generates(self, name: str, *, engine: int, seconds: float = 5.0) -> bool:
        """Whether this engine answers a request."""

        async def tokens() -> list[int]:
            await self.client.add_request_async(_request(name, 3, engine))
            found: list[int] = []
            while True:
                for output in (await self.client.get_output_async()).outputs:
                    if output.request_id == name:
                        found += output.new_token_ids
                        if output.finish_reason is not None:
                            return found

        return self._loop.run_until_complete(asyncio.wait_for(tokens(), seconds)) == [TOKEN] * 3


@contextlib.contextmanager
def data_parallel(gpus: Gpus) -> Iterator[Engines]:
    """ENGINES engine cores in lockstep, started as vLLM's server starts them.

    Engine 0 has the first half of the pretended GPUs, engine 1 the second half.
    """
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ[DEVICES] = str(gpus.root)
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return EngineCoreClient.make_async_mp_client(
            vllm_config=_vllm_config(ENGINES),
            executor_class=MultiprocExecutor,
            log_stats=False,
        )

    client = loop.run_until_complete(start())
    try:
        yield Engines(client, loop)
    finally:
        client.shutdown()


def _request(name: str, tokens: int, engine: int | None = None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=engine,
    )


def isolated(seconds: float) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the test in a fork with a session of its own; end the whole session afterwards."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with tempfile.TemporaryDirectory() as folder:
                output, verdict = Path(folder, "output"), Path(folder, "verdict")
                child = os.fork()
                if child == 0:
                    _be_the_child(output, verdict, functools.partial(test, *args, **kwargs))
                hung = _wait(child, seconds, output)
                if hung:
                    hung += _where(child, output)
                _end_session(child, reaped=not hung)
                print(output.read_text(errors="replace"))
                if hung:
                    pytest.fail(f"hung: {hung}", pytrace=False)
                said = verdict.read_text() if verdict.exists() else "the process of the test died"
                if said:
                    pytest.fail(said, pytrace=False)

        return run

    return decorate


def _be_the_child(output: Path, verdict: Path, test: Callable[[], None]) -> None:
    os.setsid()
    with output.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    # pytest's capturing replaced these; what vLLM prints must reach the file.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # The workers and the engine core inherit it.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    said = ""
    try:
        test()
    except BaseException:
        said = traceback.format_exc()
    partial = verdict.with_suffix(".partial")
    partial.write_text(said)
    partial.rename(verdict)
    os._exit(0)


def _wait(child: int, seconds: float, output: Path) -> str:
    """Why a test counts as hanging; nothing where it ended."""
    start = now = printed = time.monotonic()
    size = 0
    watch = forked.Watch(child, start, _POLLING, queued=True)
    while not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.02)
        if time.monotonic() - start > seconds:
            return f"not over after {seconds:g} s"
        if time.monotonic() - now > _LOOK:
            now = time.monotonic()
            if output.exists() and output.stat().st_size > size:
                size, printed = output.stat().st_size, now
            if min(watch.waits(now), now - printed) > IDLE:
                return f"not over, and nothing done for {IDLE:g} s"
    return ""


def _where(leader: int, output: Path) -> str:
    """What a test that hangs printed last, and its stack; those of its processes are printed."""
    printed = output.read_text(errors="replace")
    os.kill(leader, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = output.read_text(errors="replace")[len(printed) :]
    for pid in _running(leader):
        # A resource tracker is a new program, which the signal would end.
        if pid != leader and "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    # The handler runs in the main thread, which the dump calls the current one.
    frames = stacks.partition("Current thread")[2].splitlines()[1 : _FRAMES + 1]
    return "\n".join(["", *printed.splitlines()[-4:], *frames])


def _end_session(leader: int, *, reaped: bool) -> None:
    """End what is left of a test's processes, and with them their shared memory.

    Python's resource tracker unlinks the shared memory of processes that died without doing so,
    once they all have: it ignores SIGTERM, and is killed last.
    """
    for number, spared in (
        (signal.SIGTERM, ""),
        (signal.SIGKILL, "resource_tracker"),
        (signal.SIGKILL, ""),
    ):
        for pid in _running(leader):
            with contextlib.suppress(OSError):
                if not spared or spared not in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if not reaped:
                reaped = os.waitpid(leader, os.WNOHANG)[0] != 0
            if reaped and not _running(leader):
                return
            time.sleep(0.02)


def _running(group: int) -> list[int]:
    """The processes of the group that run; those that are dead and unreaped do not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ...; the name may hold spaces and brackets.
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found

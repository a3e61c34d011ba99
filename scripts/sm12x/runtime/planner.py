"""Asks vLLM's own code what a model needs in GPU memory, on a machine without a GPU.

One process imports vLLM with the stand-ins of ``meta``; each question is answered in a fork of it,
as vLLM keeps global state. The fork goes through the order of vLLM's EngineCore: configure, build
on the meta device, convert, and plan the KV cache. No weights are read, nothing is fetched, and
none of the checkpoint's code runs: an audit hook refuses processes, connections and other files of
the checkpoint than its configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import pickle
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sm12x.core import declared
from sm12x.core.errors import UnknownVerdictError
from sm12x.core.text import GIB
from sm12x.plan.figures import Basis, Cache, Figures, Group, Question, Room, Stage
from sm12x.runtime import meta
from sm12x.runtime.meta import Card, Host, load

# Limits of one answer, of processor time and memory: a configuration can make vLLM loop, or
# allocate. On a machine that is busy otherwise an answer may take as many times longer.
SECONDS, MEMORY = 120, 6 << 30
_PATIENCE = 4
# Bytes of an answer that are read.
_LONGEST = 64 << 20
_REASON = 700
_NO_ANSWERS = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
# What a configuration's class says of a key that its file lacks.
_MISSING = re.compile(r"'(\w*Config)' object has no attribute '(\w+)'")
# Seconds for the conversion of weights, whose sizes are then not known.
_CONVERSION = 10
ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    # Else its import starts two processes that import torch and compile.
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}
# Imported before the fork: most of what a question would import by itself.
_COMMON = (
    "flashinfer.comm",
    "torch.testing._internal.distributed.fake_pg",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.common.cli_args",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.layers.quantization.mxfp4",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.nemotron_h",
    "vllm.model_executor.models.qwen3_5",
    "vllm.model_executor.models.qwen3_next",
    "vllm.models.deepseek_v4",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.worker.gpu.attn_utils",
    "vllm.v1.worker.gpu.spec_decode.mtp.speculator",
    "vllm.v1.worker.workspace",
)
# Files of a checkpoint that vLLM may read; safetensors files only for their headers.
_READABLE = (".json", ".safetensors", ".jinja", ".txt", ".model")
_REFUSED = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "socket.sendto"),
)


class RefusedError(Exception):
    """What a plan does not do: run code, start processes, connect."""


def prepare(card: Card) -> None:
    """Import vLLM with the stand-ins, for all questions; ENV is set before.

    What torch and vLLM print meanwhile goes to stderr, and only if an import fails.
    """
    with _quiet():
        _import(card)
    # The collector leaves these pages alone in the forks, and sees the new objects only.
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what this process prints to itself, and print it where the block fails."""
    streams = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as kept:
        for number in (1, 2):
            os.dup2(kept.fileno(), number)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(streams[1], kept.read())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)


def _import(card: Card) -> None:
    meta.replace_torch(card)
    meta.replace_platform()
    meta.replace_registry()
    try:
        load("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError as error:
        raise UnknownVerdictError(
            f"the vLLM of this image has no planner that can be asked: {error}",
            next_step="plan in an image of 0.33.0, or take the figures from the server's log",
        ) from None
    for name in _COMMON:
        # A release may have moved one: the question then imports what it needs.
        with contextlib.suppress(ImportError):
            load(name)
    meta.replace_scales()
    load("vllm.plugins").load_general_plugins()


def ask(question: Question, *, seconds: float = SECONDS, memory: int = MEMORY) -> Figures | str:
    """Return the figures, or vLLM's reason for having none, from a fork of this process."""

    def work() -> bytes:
        os.environ.update(question.env)
        guard(Path(question.folder), Path(question.draft) if question.draft else None)
        return declared.to_json(_Build(question).figures(), Figures).encode()

    text = forked(work, seconds=seconds, memory=memory)
    if isinstance(text, str):
        return text
    return declared.parse_json(Figures, text.decode(), Path("figures"), next_step="report this")


def forked(work: Callable[[], bytes], *, seconds: float, memory: int | None = None) -> bytes | str:
    """Return what ``work`` returns in a fork, or why it returned nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(work, write, seconds, memory)
    os.close(write)
    end = time.monotonic() + _PATIENCE * seconds
    text, ended = b"", False
    while not ended and len(text) < _LONGEST:
        ready, _, _ = select.select([read], [], [], max(0.0, end - time.monotonic()))
        part = os.read(read, 1 << 16) if ready else b""
        ended = bool(ready) and not part
        text += part
        if not ready:
            break
    os.close(read)
    if not ended:
        # Its own forks are of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status, _ = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if not ended or code == -signal.SIGXCPU:
        return f"no answer within {seconds:.0f} s"
    if not text:
        return f"vLLM ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    return text[1:] if text[:1] == b"+" else text[1:].decode()


def _child(work: Callable[[], bytes], write: int, seconds: float, memory: int | None) -> NoReturn:
    """Answer into ``write`` and end: "+" and the bytes, or "-" and the reason."""
    os.dup2(2, 1)
    try:
        if memory:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        limit = max(1, int(seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        try:
            answer = b"+" + work()
        except MemoryError:
            size = (memory or MEMORY) / GIB
            answer = f"-vLLM asks for more than {size:.3g} GiB of memory to plan".encode()
        except BaseException as error:
            answer = b"-" + reason(error).encode()
            # For whoever maintains this: a new release moves what it relies on.
            if os.environ.get("SM12X_PLAN_TRACE"):
                traceback.print_exc()
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer)
    finally:
        # Without the teardown of libraries, some of which abort for want of a driver.
        os._exit(0)


def reason(error: BaseException) -> str:
    """Return a release's error in one line."""
    text = " ".join(str(error).split())
    # pydantic's address of its documentation, and the values that it repeats.
    text = re.sub(r"(\[type=[^\]]*\])|(For further information visit \S+)", "", text)
    if isinstance(error, AttributeError) and (key := _MISSING.search(text)):
        return f"config.json has no {key[2]}, which {key[1]} needs"
    if isinstance(error, NotImplementedError) and "Meta" in text:
        # A kernel without a form for tensors without values.
        return f"needs a GPU to say it: {text.partition(': attempted')[0]}"
    line = f"{type(error).__name__}: {' '.join(text.split())}"[:_REASON]
    if isinstance(error, _NO_ANSWERS) and error.__traceback__:
        # A value of the configuration that no check of the release has caught.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line += f" (in {frame.name} of {Path(frame.filename).name})"
    return line


def guard(*folders: Path | None) -> None:
    """Refuse, from now on, whatever a plan has no need of."""
    places = tuple(f"{folder.resolve()}{os.sep}" for folder in folders if folder)

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            raise RefusedError(f"{event} {str(details)[:200]}")
        if event == "open" and isinstance(details[0], str):
            name = details[0]
            if name.startswith(places) and not name.endswith(_READABLE) and Path(name).is_file():
                raise RefusedError(f"{name} is read by no plan")

    sys.addaudithook(hook)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    """What the worker of a pipeline stage tells the engine."""

    stage: Stage
    specs: dict[str, Any]
    layouts: list[str]
    backends: tuple[str, ...]


class _Build:
    """One question, answered by vLLM in this process."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._host = Host()
        self._models: list[tuple[Any, Any]] = []
        meta.replace_loader(lambda *pair: self._models.append(pair))
        meta.replace_offloader(self._host)
        _plain_configs(question.folder)
        self._config = self._configure()
        self._limit = _limit(self._config.model_config)

    def figures(self) -> Figures:
        config = self._config
        parallel = config.parallel_config
        stages = parallel.pipeline_parallel_size
        later = [self._elsewhere(stage) for stage in range(1, stages)]
        first = self._worker(0)
        workers = [first, *later]
        # The order of EngineCore._initialize_kv_caches.
        cache, rooms = self._plan(workers)
        scheduler = config.scheduler_config
        return Figures(
            architecture=str(config.model_config.architecture),
            quantization=str(config.model_config.quantization or ""),
            kv_dtype=str(config.cache_config.cache_dtype),
            tp=parallel.tensor_parallel_size,
            pp=stages,
            dp=parallel.data_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            experts=bool(parallel.enable_expert_parallel or config.model_config.is_moe),
            max_model_len=config.model_config.max_model_len,
            limit=self._limit,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            utilization=config.cache_config.gpu_memory_utilization,
            stages=tuple(worker.stage for worker in workers),
            cache=cache,
            rooms=rooms,
        )

    def _configure(self) -> Any:
        """Return the configuration that `vllm serve` makes of the question's command line."""
        cli = load("vllm.entrypoints.common.cli_args")
        base: Any = load("vllm.utils.argparse_utils").FlexibleArgumentParser

        # vLLM is not here to be checked against.
        class Parser(base):  # type: ignore[misc]
            def error(self, message: str) -> NoReturn:
                raise ValueError(message)

        parser = cli.make_arg_parser(Parser(prog="vllm serve"))
        given = parser.parse_args(list(self._question.arguments))
        # EngineArgs looks the model up when it is made.
        given.model = given.tokenizer = self._question.folder
        engine = load("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(given)
        draft = engine.speculative_config
        if draft and draft.get("model"):
            if not self._question.draft:
                raise ValueError(f"the draft model {draft['model']} needs --draft DIR")
            engine.speculative_config = {**draft, "model": self._question.draft}
        changes = {
            "skip_tokenizer_init": True,
            "load_format": meta.LOAD_FORMAT,
            "trust_remote_code": False,
            "revision": None,
            "code_revision": None,
            "tokenizer_revision": None,
            # What needs the tokenizer, or is code.
            "tokenizer_mode": "auto",
            "reasoning_parser": "",
            "reasoning_parser_plugin": None,
            "reasoning_config": None,
            # One process on one machine stands for all of them.
            "nnodes": 1,
            "node_rank": 0,
            "distributed_executor_backend": "mp",
            "data_parallel_backend": "mp",
            "data_parallel_rank": None,
            "data_parallel_start_rank": None,
            "data_parallel_size_local": None,
            "data_parallel_address": None,
            "data_parallel_hybrid_lb": False,
            "data_parallel_external_lb": False,
            # The allocator of sleep mode changes no size.
            "enable_sleep_mode": False,
        }
        for name, value in changes.items():
            if hasattr(engine, name):
                setattr(engine, name, value)
        usage = load("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        return engine.create_engine_config(usage)

    def _elsewhere(self, stage: int) -> _Worker:
        """Return the worker of a pipeline stage, built in a fork of its own."""
        answer = forked(lambda: pickle.dumps(self._worker(stage)), seconds=SECONDS)
        if isinstance(answer, str):
            raise ValueError(f"pipeline stage {stage}: {answer}")
        worker: _Worker = pickle.loads(answer)  # noqa: S301 - of a fork of this process
        return worker

    def _worker(self, stage: int) -> _Worker:
        """Build the model of a stage's first GPU, as a worker of vLLM does."""
        torch = load("torch")
        config = self._config
        parallel = config.parallel_config
        rank = stage * parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        meta.replace_groups(parallel.world_size_across_dp, rank)
        state = load("vllm.distributed.parallel_state")
        device = torch.device("cuda:0")
        with load("vllm.config").set_current_vllm_config(config), meta.meta_mode(self._host):
            state.init_distributed_environment(parallel.world_size, rank, "env://", 0, "fake")
            state.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
            config.kernel_config.ir_op_priority.set_default()
            load("vllm.v1.worker.workspace").init_workspace_manager(device, 1, 1)
            offloader = load("vllm.model_executor.offloader")
            offloader.set_offloader(offloader.create_offloader(config.offload_config))
            model = load("vllm.model_executor.model_loader").get_model(vllm_config=config)
            weights = self._sizes(model)
            if config.lora_config is not None:
                manager = load("vllm.lora.worker_manager").LRUCacheWorkerLoRAManager
                lora = manager(config, device, model.embedding_modules)
                model = lora.create_lora_manager(model, config)
            draft = 0
            speculator: Any = None
            if config.speculative_config is not None:
                speculator = load("vllm.v1.worker.gpu.spec_decode").init_speculator(
                    config, device, None
                )
                if hasattr(speculator, "load_model"):
                    speculator.load_model(model)
                    parts = self._sizes(speculator.model)
                    draft = sum(size for key, size in parts.items() if key not in weights)
            held = meta.alive(self._host)
            load("vllm.platforms").current_platform.update_block_size_for_backend(config)
            specs = load("vllm.v1.worker.gpu.attn_utils").get_kv_cache_spec(config)
            names, layouts = _layouts(config)
            replicated = getattr(speculator, "dcp_size", 0) == 1
            if replicated and parallel.decode_context_parallel_size > 1:
                for name in speculator.draft_attn_layer_names & specs.keys():
                    specs[name] = dataclasses.replace(specs[name], dcp_sharded=False)
            unconverted = self._convert()
            loaded = None if unconverted else meta.alive(self._host)
        return _Worker(
            stage=Stage(
                weights=sum(weights.values()),
                draft=draft,
                held=held,
                host=self._host.size,
                loaded=loaded,
                unconverted=unconverted,
            ),
            specs=dict(specs),
            layouts=layouts,
            backends=names,
        )

    def _sizes(self, model: Any) -> dict[int, int]:
        return meta.storages([*model.parameters(), *model.buffers()], self._host)

    def _convert(self) -> str:
        """Do what vLLM does to loaded weights, and return what keeps it from being done here.

        Not all kernels have a form for tensors without values; some convert expert by expert.
        """
        kind = load("vllm.model_executor.layers.quantization.base_config").QuantizeMethodBase
        # A few scales of the cache, which it checks by their values.
        scales = load("vllm.model_executor.layers.quantization.kv_cache").BaseKVCacheMethod
        deferred = load("vllm.model_executor.layers.attention").is_deferred_attention_layer
        load("torch._dynamo").config.disable = True
        end = time.process_time() + _CONVERSION
        for model, settings in self._models:
            modules = [*model.modules()]
            methods = [(getattr(module, "quant_method", None), module) for module in modules]
            steps: list[tuple[Any, tuple[Any, ...]]] = [
                (method, (module,))
                for method, module in methods
                if isinstance(method, kind) and not isinstance(method, scales)
            ]
            steps += [(module, (settings.dtype,)) for module in modules if deferred(module)]
            if hasattr(model, "process_weights_after_loading"):
                steps.append((model, ()))
            for owner, arguments in steps:
                if time.process_time() > end:
                    return f"{type(owner).__name__}: takes longer than {_CONVERSION} s"
                try:
                    owner.process_weights_after_loading(*arguments)
                except Exception as error:
                    # Whatever a kernel raises for a tensor without values.
                    return f"{type(owner).__name__}: {reason(error)}"[:200]
        return ""

    def _plan(self, workers: list[_Worker]) -> tuple[Cache | None, tuple[Room, ...]]:
        config = self._config
        planning = load("vllm.v1.core.kv_cache_planning")
        load("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(config)
        specs = [worker.specs for worker in workers]
        every = [spec for one in specs for spec in one.values()]
        if not every:
            return None, ()
        layout = load("vllm.v1.attention.backends.utils").resolve_kv_cache_layout(
            config, [worker.layouts for worker in workers if worker.specs], every
        )
        groups = planning.get_global_kv_cache_groups(config, specs)
        config.adjust_dcp_kv_cache_interleave_size(groups)
        config.cache_config.kv_cache_layout = layout.name
        build = load("vllm.v1.core.kv_cache_config_builder").get_kv_cache_config_builder(config)
        projected = [planning._project_kv_cache_groups_to_worker(groups, one) for one in specs]
        # The stage whose part of the cache is the largest.
        parts = [part for part in projected if part]

        def block(part: Any) -> int:
            return int(planning._pool_bytes_per_block_from_builder(build, config, part))

        def needed(part: Any) -> int:
            return int(planning._max_memory_usage_bytes_from_groups(build, config, part))

        largest = max(parts, key=needed)
        length = config.model_config.max_model_len
        request = needed(largest)
        states = any(spec.__class__.__name__.startswith("Mamba") for spec in every)
        cache = Cache(
            groups=tuple(_groups(groups)),
            backends=tuple(dict.fromkeys(name for worker in workers for name in worker.backends)),
            layout=layout.name,
            block=block(largest),
            request=request,
            # vLLM keeps a block for itself: check_memory in get_kv_cache_configs.
            at_start=max(needed(part) + block(part) for part in parts),
            token=self._slope(lambda: needed(largest), groups, length),
            states=states,
        )
        given = config.cache_config.kv_cache_memory_bytes
        held = max(worker.stage.held for worker in workers)
        memory = load("torch").cuda.get_device_properties().total_memory
        rest = int(memory * config.cache_config.gpu_memory_utilization) - held
        sizes: list[tuple[int, Basis]] = [(budget, "given") for budget in self._question.budgets]
        sizes.append((int(given), "given") if given else (rest, "at most"))
        rooms = []
        for budget, basis in sizes:
            # vLLM searches up to --max-model-len.
            config.model_config.max_model_len = self._limit
            most = min(
                planning._estimate_max_model_len_from_groups(
                    build, config, part, budget - block(part)
                )
                for part in parts
            )
            config.model_config.max_model_len = length
            room = Room(
                budget=budget,
                basis=basis,
                blocks=0,
                tokens=0,
                concurrency=0.0,
                length=max(0, int(most)),
                sequences=None,
            )
            rooms.append(self._room(room, specs, groups, states))
            config.model_config.max_model_len = length
        return cache, tuple(rooms)

    def _room(self, room: Room, specs: Any, groups: Any, states: bool) -> Room:
        """Return ``room`` with vLLM's division of its bytes, or with its refusal."""
        config = self._config
        planning = load("vllm.v1.core.kv_cache_planning")
        utils = load("vllm.v1.core.kv_cache_utils")
        try:
            parts = planning.get_kv_cache_configs(config, specs, [room.budget] * len(specs), groups)
        except ValueError as error:
            text = " ".join(str(error).split()).partition(" Try increasing")[0]
            return dataclasses.replace(room, refusal=text)
        for stage, part in enumerate(parts):
            # vllm#54711: allocate_kv_cache looks each cache's first layer up in the stage's groups.
            names = {name for group in part.kv_cache_groups for name in group.layer_names}
            if any(tensor.layers[0] not in names for tensor in part.kv_cache_tensors):
                text = (
                    f"pipeline stage {stage} has no layer of a group of KV caches, and this vLLM "
                    "fails at start (vllm#54711): divide the layers otherwise with "
                    "VLLM_PP_LAYER_PARTITION"
                )
                return dataclasses.replace(room, refusal=text)
        whole = utils.generate_scheduler_kv_cache_config(parts)
        tokens, concurrency = utils.get_kv_cache_capacity(config, whole)
        # config/compilation.py: full CUDA graphs need a block for each sequence's state.
        graphs = states and not config.model_config.enforce_eager
        return dataclasses.replace(
            room,
            blocks=whole.num_blocks,
            tokens=tokens,
            concurrency=round(concurrency, 2),
            sequences=whole.num_blocks if graphs else None,
        )

    def _slope(self, needed: Callable[[], int], groups: Any, length: int) -> float:
        """Return the bytes of one more token, at a length where windows and states are full."""
        step = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
        far = step * -(-max(length, 1 << 20) // step)
        model = self._config.model_config
        sizes = []
        for model.max_model_len in (far, 2 * far):
            sizes.append(needed())
        model.max_model_len = length
        return round((sizes[1] - sizes[0]) / far, 1)


def _limit(model: Any) -> int:
    """Return the longest context of the model itself."""
    try:
        return max(int(model.get_and_verify_max_len(None)), int(model.max_model_len))
    except (ValueError, TypeError):
        # Some models need to be told.
        return int(model.max_model_len)


def _layouts(config: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the attention backends of the model that was built, and their cache layouts."""
    connector = load("vllm.distributed.kv_transfer.kv_connector.utils")
    backends = connector.get_current_attn_backends(config)
    utils = load("vllm.v1.attention.backends.utils")
    layouts = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
    return tuple(backend.get_name() for backend in backends), layouts


def _groups(groups: Iterable[Any]) -> Iterator[Group]:
    """Yield the layers of each group, those of one kind together."""
    for group in groups:
        spec = group.kv_cache_spec
        members = getattr(spec, "kv_cache_specs", None) or {"": spec}
        kinds: Counter[tuple[str, int, int, str]] = Counter()
        for member in members.values():
            details = []
            for name in ("num_kv_heads", "head_size", "dtype", "sliding_window", "compress_ratio"):
                if (value := getattr(member, name, None)) is not None:
                    details.append(f"{name} {str(value).removeprefix('torch.')}")
            kind = type(member).__name__.removesuffix("Spec")
            page = int(member.page_size_bytes)
            kinds[kind, int(member.block_size), page, ", ".join(details)] += 1
        several = len(members) > 1
        for (kind, block_size, page, text), count in kinds.items():
            layers = count if several else len(group.layer_names)
            yield Group(kind=kind, layers=layers, block_size=block_size, page=page, details=text)


def _plain_configs(folder: str) -> None:
    """Register a plain class for each model type without one here, in place of the checkpoint's.

    vLLM would ask for --trust-remote-code. The values are those of config.json alone: vLLM names
    what it misses.
    """
    transformers = load("transformers")
    mapping = load("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    own = load("vllm.transformers_utils.config")._CONFIG_REGISTRY
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    base: Any = transformers.PretrainedConfig

    def init(self: Any, **values: Any) -> None:
        if not values.get("use_sliding_window", True):
            values["sliding_window"] = None
        # transformers looks at some of them while it sets the others.
        vars(self).update(values)
        base.__init__(self, **values)

    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        kind = part.get("model_type")
        if isinstance(kind, str) and kind and kind not in mapping and kind not in own:
            plain = type("PlainConfig", (base,), {"model_type": kind, "__init__": init})
            transformers.AutoConfig.register(kind, plain)

"""The rig of the witnesses of kept KV: vLLM's real engine core over a model that knows its content.

The engine core, its scheduler, block pool and executor are those of the tree under test and run in
the test's process. The worker is ours: its KV cache is a table of blocks, and what it writes for a
token is a digest of all tokens up to it. Before each step it compares everything that attention
would read with what it should be, so that a block with another prefix, one that was not restored
and one that two requests write to is an error of the step. The next token is a function of the
digest: a text is right if and only if it is the one that a server would give that never slept.

``HOST`` says how much the worker's backend can keep, and what it does wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

# What one layer's page has per token: 2 * block size * 1 head * 8 * 4 bytes.
BLOCK = 4
PAGE = 2 * BLOCK * 8 * 4
VOCABULARY = 50
WINDOW = 6
# Tokens of the longest text.
LONGEST = 96
GONE = -1
KINDS = ("full", "window", "state")


@dataclasses.dataclass
class Host:
    """The pretended host: what it can keep, and what fails there next.

    Attributes:
        blocks: How many blocks it has room for; None: the worker cannot keep any.
        failing: Calls of the backend that fail: "keep_kv", "restore_kv", ...
        changed: Whether the weights have changed over the sleep.
        losing: Whether the host loses a block that it keeps.
        wrong_drafts: Whether drafts are wrong.

    """

    blocks: int | None = 10**6
    failing: set[str] = dataclasses.field(default_factory=set)
    changed: bool = False
    losing: bool = False
    wrong_drafts: bool = False
    calls: list[str] = dataclasses.field(default_factory=list)
    kept: dict[int, list[int]] = dataclasses.field(default_factory=dict)


class CallError(RuntimeError):
    """A call of the worker that was made to fail."""


HOST = Host()


@functools.cache
def digests(tokens: tuple[int, ...]) -> int:
    """What the model has computed after these tokens, at the last of them."""
    if not tokens:
        return 0
    # Arithmetic that is the same in every process, unlike hash().
    return (digests(tokens[:-1]) * 1_000_003 + tokens[-1] + 1) % (2**61 - 1)


def next_token(tokens: Sequence[int]) -> int:
    return digests(tuple(tokens)) % VOCABULARY


def text(prompt: Sequence[int], length: int) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclasses.dataclass
class _Running:
    tokens: list[int]
    blocks: list[list[int]]


def worker_class() -> Any:
    """The worker, once the tree under test can be imported."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

    class ContentWorker(WorkerBase):  # type: ignore[misc]
        """A model whose KV is digests, in blocks, and which checks all that it reads."""

        def init_device(self) -> None:
            self.requests: dict[str, _Running] = {}
            self.drafts: DraftTokenIds | None = None
            self.sampled: list[Any] = []
            self.computed = 0
            self.encoder_resets = 0
            self.kind = self.vllm_config.additional_config["kind"]

        def load_model(self, **_: Any) -> None: ...

        def get_kv_cache_spec(self) -> dict[str, Any]:
            attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8}
            full = FullAttentionSpec(**attention, dtype=torch.float32)
            other: Any = {
                "full": full,
                "window": SlidingWindowSpec(
                    **attention, dtype=torch.float32, sliding_window=WINDOW
                ),
                "state": MambaSpec(
                    block_size=BLOCK,
                    shapes=((PAGE // 4,),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                ),
            }[self.kind]
            return {"model.layers.0.attn": full, "model.layers.1.attn": other}

        def get_supported_kv_cache_layouts(self) -> list[str]:
            return ["LBNHC"]

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def determine_available_memory(self) -> int:
            layers = 2 if self.kind == "full" else 1
            return int(self.vllm_config.additional_config["blocks"]) * PAGE * layers

        def initialize_from_config(self, config: Any) -> None:
            self.groups = [group.kv_cache_spec for group in config.kv_cache_groups]
            self.number = config.num_blocks
            self.memory: list[list[int]] | None = self._empty()

        def compile_or_warm_up_model(self) -> CompilationTimes:
            return CompilationTimes(language_model=0.0, encoder=0.0)

        def reset_mm_cache(self) -> None: ...

        def reset_encoder_cache(self) -> None:
            self.encoder_resets += 1

        def synchronize_device(self) -> None: ...

        def check_health(self) -> None: ...

        def reload_weights(self) -> None: ...

        def update_weights(self) -> None: ...

        def add_lora(self, lora_request: Any) -> bool:
            return True

        def remove_lora(self, lora_id: int) -> bool:
            return True

        def shutdown(self) -> None: ...

        def _empty(self) -> list[list[int]]:
            return [[GONE] * BLOCK for _ in range(self.number)]

        # -- sleep --------------------------------------------------------------------------

        def _called(self, name: str) -> None:
            HOST.calls.append(name)
            if name in HOST.failing:
                raise CallError(f"{name} was made to fail")

        def sleep(self, level: int = 1) -> bool:
            self._called("sleep")
            self.memory = None
            return False

        def discard(self, tags: tuple[str, ...]) -> None:
            self._called("discard")
            self.memory = None

        def wake_up(self, tags: list[str] | None = None) -> None:
            self._called("wake_up")
            if self.memory is None and (tags is None or "kv_cache" in tags):
                self.memory = self._empty()

        def sleep_report(self) -> dict[str, Any]:
            return {"dp_rank": 0, "rank": 0, "asleep_bytes": {}}

        def kv_room(self, limit: int | None = None) -> tuple[int, int, str]:
            self._called("kv_room")
            if HOST.blocks is None:
                return 0, 2 * PAGE, "this host keeps nothing."
            room = HOST.blocks * 2 * PAGE
            return min(room, room if limit is None else limit), 2 * PAGE, "no room"

        def keep_kv(self, blocks: list[int]) -> None:
            self._called("keep_kv")
            assert self.memory is not None
            assert len(blocks) <= (HOST.blocks or 0)
            assert blocks == sorted(set(blocks))
            assert 0 not in blocks
            HOST.kept = {block: list(self.memory[block]) for block in blocks}

        def restore_kv(self, blocks: int) -> bool:
            self._called("restore_kv")
            assert self.memory is not None
            if HOST.changed:
                return True
            if HOST.losing and HOST.kept:
                HOST.kept.pop(next(iter(HOST.kept)))
            if len(HOST.kept) != blocks:
                raise RuntimeError(f"{len(HOST.kept)} of {blocks} blocks")
            for block, content in HOST.kept.items():
                self.memory[block] = list(content)
            return False

        def drop_kv(self) -> None:
            self._called("drop_kv")
            HOST.kept = {}

        # -- model --------------------------------------------------------------------------

        def execute_model(self, output: Any) -> Any:
            for name in output.finished_req_ids:
                self.requests.pop(name, None)
            for new in output.scheduled_new_reqs:
                self.requests[new.req_id] = _Running(
                    list(new.prefill_token_ids or new.prompt_token_ids),
                    [list(ids) for ids in new.block_ids],
                )
            cached = output.scheduled_cached_reqs
            for index, name in enumerate(cached.req_ids):
                request, more = self.requests[name], cached.new_block_ids[index]
                if name in cached.resumed_req_ids:
                    request.blocks = [list(ids) for ids in more]
                elif more is not None:
                    for blocks, ids in zip(request.blocks, more, strict=True):
                        blocks.extend(ids)
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            sampled, proposed = [], []
            names = list(output.num_scheduled_tokens)
            for name in names:
                drafts = output.scheduled_spec_decode_tokens.get(name, [])
                count = output.num_scheduled_tokens[name]
                tokens = self._step(self.requests[name], computed[name], count, list(drafts))
                sampled.append(tokens)
                proposed.append(self._propose(self.requests[name]) if tokens else [])
            if self.vllm_config.speculative_config is not None:
                self.drafts = DraftTokenIds(names, proposed)
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            )
            if not (names and self.vllm_config.scheduler_config.async_scheduling):
                return result
            self.sampled.append(result)
            return None

        def sample_tokens(self, grammar_output: Any) -> Any:
            """The tokens of the oldest step whose tokens were not asked for."""
            return self.sampled.pop(0)

        def take_draft_token_ids(self) -> Any:
            drafts, self.drafts = self.drafts, None
            return drafts

        def _propose(self, request: _Running) -> list[int]:
            if self.vllm_config.speculative_config is None:
                return []
            count = self.vllm_config.speculative_config.num_speculative_tokens
            right = text(request.tokens, count)
            if HOST.wrong_drafts:
                right[-1] = (right[-1] + 1) % VOCABULARY
            return right

        def _step(self, request: _Running, start: int, count: int, drafts: list[int]) -> list[int]:
            """Read, check, write; return what is sampled, nothing within a prompt."""
            assert self.memory is not None, "a step while the KV cache is asleep"
            self.computed += count
            known = len(request.tokens)
            inputs = tuple(request.tokens + drafts)
            assert start + count <= len(inputs)
            for spec, blocks in zip(self.groups, request.blocks, strict=True):
                kind = type(spec).__name__
                if kind == "MambaSpec":
                    if start:
                        state = self.memory[blocks[(start - 1) // BLOCK]][0]
                        assert state == digests(inputs[:start]), f"state at {start}"
                    target = blocks[(start + count - 1) // BLOCK]
                    self.memory[target][0] = digests(inputs[: start + count])
                    continue
                first = max(0, start - WINDOW + 1) if kind == "SlidingWindowSpec" else 0
                for place in range(first, start):
                    block = blocks[place // BLOCK]
                    content = self.memory[block][place % BLOCK]
                    assert content == digests(inputs[: place + 1]), (
                        f"{kind}: token {place} of {start}, block {block}: {content}"
                    )
                for place in range(start, start + count):
                    block = blocks[place // BLOCK]
                    assert block != 0, "the null block is written to"
                    self.memory[block][place % BLOCK] = digests(inputs[: place + 1])
            if start + count < known:
                return []
            sampled = [next_token(request.tokens)]
            for draft in drafts:
                if draft != sampled[-1]:
                    break
                sampled.append(next_token([*request.tokens, *sampled]))
            request.tokens += sampled
            return sampled

    return ContentWorker


def __getattr__(name: str) -> Any:
    """vLLM looks the worker up by name, after the tree can be imported."""
    if name == "ContentWorker":
        globals()[name] = worker_class()
        return globals()[name]
    raise AttributeError(name)


_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}


@functools.cache
def config(
    kind: str = "full",
    blocks: int = 40,
    *,
    keep: bool = True,
    caching: bool = True,
    drafts: int = 0,
    events: bool = False,
    ahead: bool = False,
) -> Any:
    """A real configuration of an engine with one pretended GPU."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LONGEST,
        )
    # The device of the test's machine has no sleep mode.
    model.enable_sleep_mode = True
    model.sleep_keep_kv = keep
    parallel = ParallelConfig(
        distributed_executor_backend="uni",
        worker_cls="tests.witness.kept_kv_rig.ContentWorker",
    )
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    if kind == "state":
        cache.mamba_cache_mode = "align"
    made = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
        parallel_config=parallel,
        speculative_config=speculative,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if events
        else None,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            async_scheduling=ahead,
        ),
        additional_config={"kind": kind, "blocks": blocks},
    )
    # The platform of the test's machine would have all layers take the blocks of full attention.
    made.scheduler_config.disable_hybrid_kv_cache_manager = False
    return made


class Rig:
    """An engine core, its requests and their texts."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.texts: dict[str, list[int]] = {}
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.over: set[str] = set()
        # The tokens that each hash of a block stands for.
        self.prefixes: dict[bytes, tuple[int, ...]] = {}
        self.requests: list[Any] = []

    @property
    def pool(self) -> Any:
        return self.engine.scheduler.kv_cache_manager.block_pool

    def ask(self, name: str, prompt: Sequence[int], tokens: int = 4) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self.asked[name] = (list(prompt), tokens)
        self.texts[name] = []
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        added, wave = self.engine.preprocess_add_request(request)
        self.requests.append(added)
        self.engine.add_request(added, wave)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for outputs in (self.engine.step_fn()[0] or {}).values():
                for output in outputs.outputs:
                    self.texts[output.request_id] += output.new_token_ids
                    if output.finish_reason is not None:
                        self.over.add(output.request_id)
            self.engine.post_step(True)
            self._note_hashes()

    def _note_hashes(self) -> None:
        for request in self.requests:
            for index, key in enumerate(request.block_hashes):
                if key not in self.prefixes:
                    self.prefixes[key] = tuple(request.all_token_ids[: (index + 1) * BLOCK])
        self.requests = [r for r in self.requests if not r.is_finished()]

    def finish(self) -> None:
        """Run until every request that is not aborted has its text, and compare it."""
        for _ in range(2000):
            if not self.engine.scheduler.has_unfinished_requests() and not self.engine.batch_queue:
                break
            self.step()
        for name, (prompt, tokens) in self.asked.items():
            right = text(prompt, tokens)
            assert self.texts[name] == right[: len(self.texts[name])], name
            if name not in self.over:
                assert self.texts[name] == right, name

    def hit(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the prefix cache has."""
        engine = self.engine
        manager = engine.scheduler.kv_cache_manager
        self.ask("hit", prompt, 1)
        request = engine.scheduler.requests["hit"]
        count: int = manager.get_computed_blocks(request)[1]
        engine.abort_requests(["hit"])
        del self.asked["hit"]
        self.over.discard("hit")
        return count

    def running(self) -> list[str]:
        return [request.request_id for request in self.engine.scheduler.running]

    def sleep(self, mode: str = "keep", level: int = 1, **how: Any) -> None:
        if mode == "abort":
            self.over |= set(self.engine.scheduler.requests)
        self.engine.sleep(level, mode, **how)

    def report(self) -> dict[str, Any]:
        kv: dict[str, Any] = self.engine.sleep_report()[0].get("kv", {})
        return kv

    def cached(self) -> dict[tuple[bytes, int], set[int]]:
        """The blocks of each hash and group."""
        return {
            (key[:-4], int.from_bytes(key[-4:], "big")): (
                set(blocks) if isinstance(blocks, dict) else {blocks.block_id}
            )
            for key, blocks in self.pool.cached_block_hash_to_block._cache.items()
        }

    def check(self) -> None:
        """No block is lost or owned twice, and each hash has its content or is gone."""
        pool = self.pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == pool.get_num_free_blocks()
        assert all(pool.blocks[block].ref_cnt == 0 for block in free)
        used = {b.block_id for b in pool.blocks if b.ref_cnt > 0 and not b.is_null}
        assert not used & set(free)
        assert len(used) + len(free) + 1 == pool.num_gpu_blocks
        owners: dict[int, int] = {}
        groups: dict[int, int] = {}
        for manager in self.engine.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                for block in blocks:
                    if not block.is_null:
                        owners[block.block_id] = owners.get(block.block_id, 0) + 1
                        group = groups.setdefault(block.block_id, manager.kv_cache_group_id)
                        assert group == manager.kv_cache_group_id
        assert owners == {block: pool.blocks[block].ref_cnt for block in used}
        keys: dict[int, set[Any]] = {}
        for (key, group), ids in self.cached().items():
            for block in ids:
                keys.setdefault(block, set()).add((key, group))
                content = self._content(block)
                if content is not None:
                    self._compare(content, self.prefixes[key], group)
        for block in pool.blocks:
            known = set(pool.cached_block_hashes_by_block.get(block.block_id, ()))
            if block.block_hash is not None:
                known.add(block.block_hash)
            assert {(k[:-4], int.from_bytes(k[-4:], "big")) for k in known} == keys.get(
                block.block_id, set()
            ), block

    def _content(self, block: int) -> list[int] | None:
        """What the block holds, or will hold once it is restored."""
        if self.engine.kv_keeper.kept is not None:
            return HOST.kept[block]
        memory: list[list[int]] | None = self.engine.model_executor.driver_worker.worker.memory
        assert memory is not None, f"block {block} has a hash and no memory"
        return memory[block]

    def _compare(self, content: list[int], prefix: tuple[int, ...], group: int) -> None:
        spec = self.engine.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        if type(spec).__name__ == "MambaSpec":
            assert content[0] == digests(prefix)
            return
        first = (len(prefix) - 1) // BLOCK * BLOCK
        for place in range(first, len(prefix)):
            assert content[place - first] == digests(prefix[: place + 1])

    def check_awake_or_kept(self) -> None:
        """What has a hash has its memory, or is kept."""
        memory = self.engine.model_executor.driver_worker.worker.memory
        assert memory is not None or self.engine.kv_keeper.kept is not None or not self.cached()

    def check_parents(self) -> None:
        """Where full attention has a block of a prefix, it has all before it."""
        cached = self.cached()
        for key, group in cached:
            spec = self.engine.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec
            if type(spec).__name__ == "FullAttentionSpec":
                prefix = self.prefixes[key]
                parents = {k for k, tokens in self.prefixes.items() if tokens == prefix[:-BLOCK]}
                assert len(prefix) <= BLOCK or any((k, group) in cached for k in parents)


@contextlib.contextmanager
def engine(kind: str = "full", blocks: int = 40, **options: Any) -> Iterator[Rig]:
    """vLLM's engine core in this process, as LLM has it without multiprocessing."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    fresh = Host()
    for field in dataclasses.fields(Host):
        setattr(HOST, field.name, getattr(fresh, field.name))
    started = EngineCore(config(kind, blocks, **options), UniProcExecutor, log_stats=False)
    try:
        yield Rig(started)
    finally:
        started.shutdown()

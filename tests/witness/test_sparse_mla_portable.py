"""DeepSeek V4's and V4.1's attention by portable kernels, where FlashInfer's is not chosen."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import portable_tests
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Gpu, KernelProcess

SWITCH = "VLLM_TRITON_MLA_SPARSE"
PORTABLE = "vllm.v1.attention.backends.mla.portable"
LAYERS = "vllm.v1.attention.backends.mla.portable_attention"
KERNELS = "vllm.v1.attention.ops.portable_mla.sparse_mla"
REFERENCE = "vllm.v1.attention.ops.portable_mla.sparse_mla_reference"
WORKSPACE = "vllm.v1.worker.workspace"
MODELS = {
    "V4": "vllm.models.deepseek_v4.nvidia",
    "V41": "vllm.models.deepseek_v41.nvidia",
}
PRELOAD = (*(f"{package}.model" for package in MODELS.values()), WORKSPACE)
# Norm over norm; on a GPU errors are 0.0017.
TOLERANCE = 6e-3
WINDOW, HEADS, TOPK = 96, 5, 32
# Tokens of vLLM's block, and of a block of the window's cache.
BLOCKS = {"V4": (256, 64), "V41": (128, 32)}
MAX_LEN = 1024


def prepare(gpu: Gpu, value: str | None = "1", capability: tuple[int, int] = (12, 0)) -> Any:
    """torch, on a device of this capability, with this value of the switch."""
    torch: Any = importlib.import_module("torch")
    sys.path.append(str(Path(__file__).parent / "portable"))
    os.environ.pop(SWITCH, None)
    if value is not None:
        os.environ[SWITCH] = value
    gpu.become(capability)
    torch.accelerator.empty_cache = lambda: None
    workspace: Any = importlib.import_module(WORKSPACE)
    workspace.init_workspace_manager(torch.device("cpu"))
    return torch


class Batch:
    """Decode requests first, then prefill requests: (context before the step, new tokens) each."""

    def __init__(
        self, model: str, ratio: int, decodes: list[list[int]], prefills: list[list[int]]
    ) -> None:
        torch: Any = importlib.import_module("torch")
        inputs: Any = importlib.import_module("sparse_inputs")
        self.torch, self.model, self.ratio = torch, model, ratio
        self.block, self.swa_tokens = BLOCKS[model]
        self.decodes, self.prefills = decodes, prefills
        requests = [*decodes, *prefills]
        self.first = sum(new for _, new in decodes)
        self.starts = [0]
        for _, new in requests:
            self.starts.append(self.starts[-1] + new)
        self.tokens = self.starts[-1]
        self.positions = [p for before, new in requests for p in range(before, before + new)]
        self.owner = [i for i, (_, new) in enumerate(requests) for _ in range(new)]
        # Blocks of a request lie in any order.
        generator = torch.Generator().manual_seed(max(ratio, 1))
        count = len(requests) * MAX_LEN // self.swa_tokens
        order = torch.randperm(count, generator=generator).to(torch.int32)
        self.swa_table = order.reshape(len(requests), -1)
        self.swa_cache = inputs.cache(count, self.swa_tokens, 1)
        self.q = inputs.queries(self.tokens, HEADS, 3)
        self.sink = inputs.sinks(HEADS, 4)
        if not self.compresses:
            return
        count = len(requests) * MAX_LEN // self.block
        order = torch.randperm(count, generator=generator).to(torch.int32)
        self.table = order.reshape(len(requests), -1)
        self.cache = inputs.cache(count, self.block // ratio, 2)
        self.chosen = []
        width = MAX_LEN // 128 if ratio == 128 else TOPK
        self.topk = torch.full((self.tokens, width), -1, dtype=torch.int32)
        for token, position in enumerate(self.positions):
            there = (position + 1) // ratio
            picked = torch.arange(there)
            if ratio != 128:
                picked = torch.randperm(there, generator=generator)[: min(there, TOPK)]
            self.chosen.append(picked)
            self.topk[token, : len(picked)] = picked.to(torch.int32)

    @property
    def compresses(self) -> bool:
        return self.ratio > (1 if self.model == "V4" else 0)

    def slots(self, positions: Any, row: Any, tokens: int) -> Any:
        positions = positions.long()
        return (row[positions // tokens].long() * tokens + positions % tokens).to(self.torch.int32)

    def window(self, token: int) -> Any:
        position = self.positions[token]
        seen = self.torch.arange(max(0, position + 1 - WINDOW), position + 1)
        return self.slots(seen, self.swa_table[self.owner[token]], self.swa_tokens)

    def layer(self) -> Any:
        module: Any = importlib.import_module(f"{MODELS[self.model]}.portable")
        kind = vars(module)[f"Deepseek{self.model}PortableAttention"]
        layer = kind.__new__(kind)
        self.torch.nn.Module.__init__(layer)
        vars(layer).update(
            n_local_heads=HEADS,
            padded_heads=HEADS,
            scale=512**-0.5,
            window_size=WINDOW,
            compress_ratio=self.ratio,
            topk_indices_buffer=self.topk if self.compresses else None,
            swa_cache_layer=SimpleNamespace(kv_cache=self.swa_cache, prefix="swa"),
            compressed_cache_prefix="layer",
            kv_cache_torch_dtype=self.torch.uint8,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=64,
            num_draft_tokens=0,
            prefix="layer",
        )
        layer.attn_sink = self.torch.nn.Parameter(self.sink, requires_grad=False)
        layer.kv_cache = self.cache if self.compresses else None
        layer._compressed_kv_cache = lambda: layer.kv_cache
        return layer

    def metadata(self) -> dict[str, Any]:
        """What the release's builders make of the batch, of what the layer reads."""
        torch, first, tokens = self.torch, self.first, self.tokens
        lists = torch.full((tokens, 1, WINDOW), -1, dtype=torch.int32)
        lens = torch.zeros(tokens, dtype=torch.int32)
        for token in range(tokens):
            slots = self.window(token)
            lists[token, 0, : len(slots)] = slots
            lens[token] = len(slots)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        swa = SimpleNamespace(
            num_decodes=len(self.decodes),
            num_decode_tokens=first,
            num_prefills=len(self.prefills),
            num_prefill_tokens=tokens - first,
            decode_swa_indices=lists[:first],
            decode_swa_lens=lens[:first],
            prefill_swa_indices=lists[first:, 0],
            prefill_swa_lens=lens[first:],
            query_start_loc_cpu=starts,
            token_to_req_indices=torch.tensor(self.owner, dtype=torch.int32),
            is_valid_token=torch.ones(tokens, dtype=torch.bool),
        )
        if not self.compresses:
            return {"swa": swa}
        slots = torch.full_like(self.topk, -1)
        counts = torch.tensor([len(c) for c in self.chosen], dtype=torch.int32)
        for token, picked in enumerate(self.chosen):
            row = self.table[self.owner[token]]
            slots[token, : len(picked)] = self.slots(picked, row, self.block // self.ratio)
        layer = SimpleNamespace(
            block_size=self.block,
            block_table=self.table,
            c128a_global_decode_topk_indices=slots[:first].unsqueeze(1),
            c128a_decode_topk_lens=counts[:first],
            c128a_prefill_topk_indices=self.topk[first:],
        )
        return {"swa": swa, "layer": layer}

    def wanted(self) -> Any:
        """[tokens, heads, 512] float64, from positions alone."""
        reference: Any = importlib.import_module(REFERENCE)
        out = self.torch.zeros(self.tokens, HEADS, 512, dtype=self.torch.float64)
        for token in range(self.tokens):
            slots = self.window(token)
            given: dict[str, Any] = {
                "q": self.q[token : token + 1],
                "swa_cache": self.swa_cache,
                "swa_slots": slots[None],
                "swa_lens": [len(slots)],
                "sink": self.sink,
                "scale": 512**-0.5,
            }
            if self.compresses:
                picked = self.chosen[token]
                row = self.table[self.owner[token]]
                given["comp_cache"] = self.cache
                given["comp_slots"] = self.slots(picked, row, self.block // self.ratio)[None]
                given["comp_lens"] = [len(picked)]
            out[token] = reference.sparse_mla_reference(**given)[0]
        return out


def forward(batch: Batch, layer: Any, found: dict[str, Any] | None) -> Any:
    """The layer's own attention over a batch; what it does not write stays 7."""
    module: Any = importlib.import_module(f"{MODELS[batch.model]}.flashinfer_sparse")
    context = SimpleNamespace(attn_metadata=found)
    module.get_forward_context = lambda: context
    out = batch.torch.full_like(batch.q, 7.0)
    layer.forward_mqa(batch.q, batch.q, batch.torch.tensor(batch.positions), out)
    return out


# ---- what runs where Triton interprets ----


def errors(
    gpu: Gpu,
    model: str,
    ratio: int,
    decodes: list[list[int]],
    prefills: list[list[int]],
    **settings: str,
) -> list[float]:
    """Relative error of each token."""
    os.environ.update(settings)
    prepare(gpu)
    batch = Batch(model, ratio, decodes, prefills)
    out = forward(batch, batch.layer(), batch.metadata())
    assert out.isfinite().all()
    pairs = zip(out.double(), batch.wanted(), strict=True)
    return [float((o - w).norm() / w.norm()) for o, w in pairs]


def dumped(gpu: Gpu, path: str) -> list[Any]:
    errors(
        gpu,
        "V4",
        4,
        [[100, 1]],
        [[0, 6]],
        VLLM_TRITON_MLA_SPARSE_DUMP="1",
        VLLM_TRITON_MLA_SPARSE_DUMP_PATH=path,
        VLLM_TRITON_MLA_SPARSE_QUERY_CHUNK_SIZE="4",
    )
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def reserved(gpu: Gpu, model: str, ratio: int) -> list[int]:
    """Bytes of workspace after the profiling run, and after a step."""
    prepare(gpu)
    workspace: Any = importlib.import_module(WORKSPACE)
    manager = workspace.current_workspace_manager()
    batch = Batch(model, ratio, [[300, 1]], [[0, 9]])
    layer = batch.layer()
    assert not forward(batch, layer, None).any()
    before = manager._workspace_size_bytes(manager._current_workspaces[0])
    # It may not grow after it.
    manager.lock()
    forward(batch, layer, batch.metadata())
    return [before, manager._workspace_size_bytes(manager._current_workspaces[0])]


# ---- what runs where Triton compiles ----


def chosen(
    gpu: Gpu, model: str, capability: list[int], value: str | None, context_parallel: int = 1
) -> str:
    """The name of the class of the attention layers."""
    prepare(gpu, value, (capability[0], capability[1]))
    module: Any = importlib.import_module(f"{MODELS[model]}.model")
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=None),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=context_parallel),
    )
    if model == "V41":
        mega = module.DeepseekV4MegaAttnAttention
        mega.is_available_for = classmethod(lambda *_: tuple(capability) == (10, 0))
    return str(module._select_dsv4_attn_cls(config).__name__)


def flash_mla_plans(gpu: Gpu, value: str | None) -> int:
    """How often a step on 9.0 asks for FlashMLA's plan."""
    prepare(gpu, value, (9, 0))
    module: Any = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    calls: list[int] = []

    def plan() -> list[None]:
        calls.append(1)
        return [None]

    module.get_mla_metadata = plan
    kind = module.DeepseekSparseSWAMetadataBuilder
    builder = kind.__new__(kind)
    builder._layer_types = [module._LAYER_TYPE_SWAONLY]
    builder.build_tile_scheduler(3)
    return len(calls)


def refusal(gpu: Gpu, name: str, value: str) -> str:
    """What the layers' check of the settings says at start."""
    prepare(gpu)
    os.environ[name] = value
    module: Any = importlib.import_module(LAYERS)
    module.device_limits = lambda device: SimpleNamespace(sm_count=188, shared_memory=gpu.shared)
    try:
        if importlib.import_module(PORTABLE).use_portable_mla():
            module.PortableSparseMLA.get_padded_num_q_heads(16)
    except ValueError as error:
        return str(error)
    return ""


def kernels_of_steps(gpu: Gpu) -> dict[str, Any]:
    """How many kernels are compiled for steps of all lengths, and one of them again."""
    torch = prepare(gpu)
    kernels: Any = importlib.import_module(KERNELS)
    cache = torch.zeros(4, 64, 584, dtype=torch.uint8)
    for tokens, width, extra, splits in (
        (1, 128, 512, 1),
        (2, 128, 512, 2),
        (3, 128, 1, 3),
        (5, 1, 17, 16),
        (8, 127, 640, 7),
    ):
        kernels.sparse_mla(
            q=torch.zeros(tokens, 16, 512, dtype=torch.bfloat16),
            swa_cache=cache,
            swa_slots=torch.zeros(tokens, width, dtype=torch.int32),
            swa_lens=torch.zeros(tokens, dtype=torch.int32),
            # One of a buffer's rows, whose addresses have no alignment but their type's.
            comp_slots=torch.zeros(tokens, extra + 1, dtype=torch.int32)[:, 1:],
            comp_lens=torch.zeros(tokens + 1, dtype=torch.int32)[1:],
            comp_cache=cache,
            sink=torch.zeros(17)[1:],
            scale=0.1,
            out=torch.zeros(tokens, 16, 512, dtype=torch.bfloat16),
            launch=kernels.Plan(kernels.SHORT_16, splits, tokens * splits * 16 * 513),
        )
    return dict(Counter(kernel.name for kernel in gpu.compiled))


def graph_mode(gpu: Gpu, allowed: str, kind: str, value: str | None) -> str:
    prepare(gpu, value)
    os.environ["VLLM_TRITON_MLA_SPARSE_ALLOW_CUDAGRAPH"] = allowed
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=kind)),
        compilation_config=SimpleNamespace(cudagraph_mode="as it was"),
    )
    importlib.import_module(PORTABLE).update_config(config)
    return str(config.compilation_config.cudagraph_mode)


# ---- the tests ----


CASES = [("V4", 1), ("V4", 4), ("V4", 128), ("V41", 0), ("V41", 1), ("V41", 2)]


@pytest.mark.parametrize(("model", "ratio"), CASES)
def test_decode_steps(interpreted: KernelProcess, model: str, ratio: int) -> None:
    decodes = [[3, 1], [0, 1], [95, 1], [96, 1], [97, 1], [300, 1]]
    found = interpreted.call(errors, model=model, ratio=ratio, decodes=decodes, prefills=[])
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize(("model", "ratio"), CASES)
def test_decode_and_prefill_in_one_step(interpreted: KernelProcess, model: str, ratio: int) -> None:
    """With several tokens of a request, as MTP verifies them, and more than four prefills."""
    found = interpreted.call(
        errors,
        model=model,
        ratio=ratio,
        decodes=[[200, 3], [90, 3]],
        prefills=[[400, 4], [0, 3], [95, 2], [1, 1], [130, 2]],
    )
    assert max(found) <= TOLERANCE, found


def test_chunks_of_queries(interpreted: KernelProcess) -> None:
    settings = {f"{SWITCH}_QUERY_CHUNK_SIZE": "3", f"{SWITCH}_TOPK_CHUNK_SIZE": "64"}
    settings |= {f"{SWITCH}_HEAD_BLOCK_SIZE": "32"}
    found = interpreted.call(
        errors, model="V4", ratio=4, decodes=[[200, 1]], prefills=[[100, 8], [0, 5]], **settings
    )
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize(("model", "ratio"), [("V4", 128), ("V41", 1)])
def test_the_profiling_run_reserves_what_steps_take(
    interpreted: KernelProcess, model: str, ratio: int
) -> None:
    before, after = interpreted.call(reserved, model=model, ratio=ratio)
    assert 0 < before == after


def test_calls_can_be_dumped(interpreted: KernelProcess, tmp_path: Path) -> None:
    lines = interpreted.call(dumped, path=str(tmp_path / "calls.jsonl"))
    # Prefill in chunks of 4 and 2 tokens, then decode.
    assert [line["q"]["shape"][0] for line in lines] == [4, 2, 1]
    assert {line["compress_ratio"] for line in lines} == {4}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (9, 0)])
def test_1_serves_all(compiled: KernelProcess, model: str, capability: tuple[int, int]) -> None:
    name = compiled.call(chosen, model=model, capability=capability, value="1")
    assert name == f"Deepseek{model}PortableAttention"


@pytest.mark.guard
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("capability", "value", "wanted"),
    [
        ((12, 0), None, "DeepseekV4FlashInferSM120Attention"),
        ((12, 1), "0", "DeepseekV4FlashInferSM120Attention"),
        ((12, 0), "", "DeepseekV4FlashInferSM120Attention"),
        ((9, 0), None, "DeepseekV4FlashMLAAttention"),
        ((10, 3), None, "DeepseekV4FlashMLAAttention"),
    ],
)
def test_the_release_serves_otherwise(
    compiled: KernelProcess,
    model: str,
    capability: tuple[int, int],
    value: str | None,
    wanted: str,
) -> None:
    assert compiled.call(chosen, model=model, capability=capability, value=value) == wanted


@pytest.mark.guard
def test_prefill_context_parallelism_keeps_flash_mla(compiled: KernelProcess) -> None:
    name = compiled.call(chosen, model="V41", capability=(9, 0), value="1", context_parallel=2)
    assert name == "DeepseekV4FlashMLAAttention"


def test_no_plan_of_flash_mla_is_made(compiled: KernelProcess) -> None:
    assert compiled.call(flash_mla_plans, value="1") == 0


@pytest.mark.guard
def test_flash_mla_gets_its_plan_otherwise(compiled: KernelProcess) -> None:
    assert compiled.call(flash_mla_plans, value=None) == 1


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        (SWITCH, "yes", "0 or 1"),
        (SWITCH, "2", "0 or 1"),
        (f"{SWITCH}_TOPK_CHUNK_SIZE", "0", "a positive integer"),
        (f"{SWITCH}_TOPK_CHUNK_SIZE", "-64", "a positive integer"),
        (f"{SWITCH}_QUERY_CHUNK_SIZE", "1.5", "a positive integer"),
        (f"{SWITCH}_HEAD_BLOCK_SIZE", "4", "(16, 32, 64)"),
        (f"{SWITCH}_HEAD_BLOCK_SIZE", "many", "(16, 32, 64)"),
        (f"{SWITCH}_ALLOW_CUDAGRAPH", "on", "0 or 1"),
        (f"{SWITCH}_DUMP", "a file", "0 or 1"),
    ],
)
def test_a_bad_value_is_refused_at_start(
    compiled: KernelProcess, name: str, value: str, takes: str
) -> None:
    said = compiled.call(refusal, name=name, value=value)
    assert name in said
    assert takes in said


def test_a_tile_that_does_not_fit_is_refused_at_start(compiled: KernelProcess) -> None:
    said = compiled.call(refusal, name=f"{SWITCH}_HEAD_BLOCK_SIZE", value="64")
    assert str(SM12X_SHARED) in said
    assert str(SM90_SHARED) not in said


def test_other_lengths_need_no_other_kernel(compiled: KernelProcess) -> None:
    # With and without splits, and what merges them.
    assert compiled.call(kernels_of_steps) == {"_sparse_mla_kernel": 2, "_merge_kernel": 1}


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41"])
def test_cuda_graphs_can_be_switched_off(compiled: KernelProcess, kind: str) -> None:
    assert "NONE" in compiled.call(graph_mode, allowed="0", kind=kind, value="1")


@pytest.mark.parametrize(
    ("allowed", "kind", "value"),
    [("1", "deepseek_v4", "1"), ("0", "llama", "1"), ("0", "deepseek_v41", None)],
)
def test_cuda_graphs_stay_otherwise(
    compiled: KernelProcess, allowed: str, kind: str, value: str | None
) -> None:
    said = compiled.call(graph_mode, allowed=allowed, kind=kind, value=value)
    assert said == "as it was"


def test_the_kernels_against_float64(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_sparse_mla_kernel.py", tmp_path, interpret=True)


def test_the_kernels_compile_for_sm12x(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_compile_attention.py", tmp_path, interpret=False)

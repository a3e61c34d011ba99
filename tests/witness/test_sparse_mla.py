"""DeepSeek V4's attention on SM12x, for which FlashMLA has no kernel."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import portable_tests
from tests.witness.deepseek_v4 import LAYER, MODULES, SWA, WINDOW, Batch, prepare
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Gpu, KernelProcess

PORTABLE = "vllm.v1.attention.backends.mla.portable"
SWITCH = "VLLM_TRITON_MLA_SPARSE"
PRELOAD = MODULES
# Norm over norm; on a GPU errors are 0.0017.
TOLERANCE = 6e-3
# Of any value: the difference between a slot that counts and one that does not.
CONTEXTS = {"few": [[3, 1], [0, 1]], "window": [[95, 1], [96, 1], [97, 1], [300, 1]]}


# ---- what runs where Triton interprets ----


def errors(
    gpu: Gpu, ratio: int, decodes: list[list[int]], prefills: list[list[int]], **settings: str
) -> list[float]:
    """Relative error of each token, of the layer's own forward over a batch."""
    os.environ.update(settings)
    module = prepare()
    gpu.become((12, 0))
    batch = Batch(ratio, decodes, prefills)
    torch = batch.torch
    layer = batch.layer()
    found = {"swa": batch.swa_metadata()}
    metadata = batch.metadata()
    if metadata is not None:
        found["layer"] = metadata
    module.get_forward_context = lambda: SimpleNamespace(attn_metadata=found)
    out = torch.full_like(batch.q, 7.0)
    layer.forward(batch.q, batch.q, batch.positions, out)
    wanted = batch.wanted()
    assert out.isfinite().all()
    return [float((o.double() - w).norm() / w.norm()) for o, w in zip(out, wanted, strict=True)]


def dumped(gpu: Gpu, path: str) -> list[Any]:
    errors(
        gpu,
        4,
        [[100, 1]],
        [[0, 6]],
        VLLM_TRITON_MLA_SPARSE_DUMP="1",
        VLLM_TRITON_MLA_SPARSE_DUMP_PATH=path,
        VLLM_TRITON_MLA_SPARSE_QUERY_CHUNK_SIZE="4",
    )
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def reserved(gpu: Gpu, ratio: int) -> list[int]:
    """Bytes of workspace after the profiling run, and after steps of any number of tokens."""
    prepare()
    gpu.become((12, 0))
    portable: Any = importlib.import_module(PORTABLE)
    workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    manager = workspace.current_workspace_manager()
    batch = Batch(ratio, [[300, 1]], [[0, 9]])
    layer = batch.layer()
    portable.reserve_workspace(layer, batch.torch.device("cpu"))
    before = manager._workspace_size_bytes(manager._current_workspaces[0])
    # It may not grow after it.
    manager.lock()
    found = {"swa": batch.swa_metadata(), "layer": batch.metadata()}
    module: Any = importlib.import_module(LAYER)
    module.get_forward_context = lambda: SimpleNamespace(attn_metadata=found)
    layer.forward(batch.q, batch.q, batch.positions, batch.torch.empty_like(batch.q))
    return [before, manager._workspace_size_bytes(manager._current_workspaces[0])]


def outside(gpu: Gpu, decodes: int, prefills: int) -> list[int]:
    """Loads of the prefill metadata, and lanes whose address is in none of its tensors."""
    numpy: Any = importlib.import_module("numpy")
    torch: Any = importlib.import_module("torch")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    prepare()
    gpu.become((12, 0))
    module: Any = importlib.import_module(SWA)
    kind = module.DeepseekSparseSWAMetadataBuilder
    builder = kind.__new__(kind)
    builder.window_size = WINDOW
    requests = decodes + prefills
    starts = torch.arange(requests + 1, dtype=torch.int32) * 3
    lens = torch.arange(requests, dtype=torch.int32) * 50 + 3
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * 4) for t in (starts, lens)]
    original = interpreter.InterpreterBuilder.create_masked_load
    counts = [0, 0]

    def load(self: Any, pointers: Any, *rest: Any) -> Any:
        at = pointers.data.astype(numpy.uint64)
        inside = numpy.zeros(at.shape, dtype=bool)
        for first, last in spans:
            inside |= (at >= first) & (at < last)
        counts[0] += 1
        counts[1] += int((~inside).sum())
        return original(self, pointers, *rest)

    interpreter.InterpreterBuilder.create_masked_load = load
    found = builder._build_deepseek_v4_metadata(decodes, prefills, lens, starts)
    wanted = [3 + min(50 * i, WINDOW - 1) for i in range(decodes, requests)]
    assert found["prefill_gather_lens"].tolist() == wanted
    return counts


# ---- what runs where Triton compiles ----


def selected(gpu: Gpu, capability: list[int], value: str | None) -> bool:
    prepare()
    if value is None:
        os.environ.pop(SWITCH, None)
    else:
        os.environ[SWITCH] = value
    gpu.become((capability[0], capability[1]))
    portable: Any = importlib.import_module(PORTABLE)
    chosen: bool = portable.use_portable_mla()
    return chosen


def refusal(gpu: Gpu, name: str, value: str) -> str:
    """What the layer's check of its settings says at start."""
    prepare()
    gpu.become((12, 0))
    os.environ[name] = value
    portable: Any = importlib.import_module(PORTABLE)
    portable.device_limits = lambda device: SimpleNamespace(sm_count=188, shared_memory=gpu.shared)
    try:
        if portable.use_portable_mla():
            portable.check_settings(16)
    except ValueError as error:
        return str(error)
    return ""


def kernels_of_steps(gpu: Gpu) -> dict[str, Any]:
    """How many kernels are compiled for steps of all lengths, and one of them again."""
    torch: Any = importlib.import_module("torch")
    gpu.become((12, 0))
    kernels: Any = importlib.import_module("vllm.v1.attention.ops.portable_mla.sparse_mla")
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


def graph_mode(gpu: Gpu, allowed: str, model: bool) -> str:
    prepare()
    gpu.become((12, 0))
    os.environ["VLLM_TRITON_MLA_SPARSE_ALLOW_CUDAGRAPH"] = allowed
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(compress_ratios=[0, 4, 128] if model else []),
            is_mm_prefix_lm=False,
        ),
        parallel_config=SimpleNamespace(worker_cls="worker"),
        scheduler_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(cudagraph_mode="as it was"),
    )
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    cuda.CudaPlatformBase.check_and_update_config(config)
    return str(config.compilation_config.cudagraph_mode)


# ---- the tests ----


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_decode_steps(interpreted: KernelProcess, ratio: int) -> None:
    decodes = [*CONTEXTS["few"], *CONTEXTS["window"]]
    found = interpreted.call(errors, ratio=ratio, decodes=decodes, prefills=[])
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_prefill(interpreted: KernelProcess, ratio: int) -> None:
    found = interpreted.call(errors, ratio=ratio, decodes=[], prefills=[[0, 7], [250, 5], [95, 3]])
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("ratio", [4, 128])
def test_decode_and_prefill_in_one_step(interpreted: KernelProcess, ratio: int) -> None:
    """With several tokens of a request, as MTP verifies them."""
    found = interpreted.call(
        errors, ratio=ratio, decodes=[[200, 3], [90, 3]], prefills=[[400, 6], [0, 5]]
    )
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("prefills", [3, 5])
def test_prefill_metadata_reads_no_request_that_is_not_there(
    interpreted: KernelProcess, prefills: int
) -> None:
    """On SM12x a masked load of such an address can end the process."""
    loads, lanes = interpreted.call(outside, decodes=2, prefills=prefills)
    assert loads == 3
    assert lanes == 0


def test_chunks_of_queries(interpreted: KernelProcess) -> None:
    settings = {"VLLM_TRITON_MLA_SPARSE_QUERY_CHUNK_SIZE": "3"}
    settings |= {"VLLM_TRITON_MLA_SPARSE_TOPK_CHUNK_SIZE": "64"}
    settings |= {"VLLM_TRITON_MLA_SPARSE_HEAD_BLOCK_SIZE": "32"}
    found = interpreted.call(
        errors, ratio=4, decodes=[[200, 1]], prefills=[[100, 8], [0, 5]], **settings
    )
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_profiling_run_reserves_what_steps_take(interpreted: KernelProcess, ratio: int) -> None:
    before, after = interpreted.call(reserved, ratio=ratio)
    assert 0 < before == after


def test_calls_can_be_dumped(interpreted: KernelProcess, tmp_path: Path) -> None:
    lines = interpreted.call(dumped, path=str(tmp_path / "calls.jsonl"))
    # Prefill in chunks of 4 and 2 tokens, then decode.
    assert [line["q"]["shape"][0] for line in lines] == [4, 2, 1]
    assert {line["compress_ratio"] for line in lines} == {4}


@pytest.mark.parametrize(
    ("capability", "value", "wanted"),
    [
        ((12, 0), None, True),
        ((12, 1), None, True),
        ((12, 0), "", True),
        ((12, 0), "1", True),
        ((12, 1), "0", False),
        ((9, 0), None, False),
        ((9, 0), "1", True),
        ((10, 0), None, False),
        ((10, 3), "0", False),
    ],
)
def test_who_is_served(
    compiled: KernelProcess, capability: tuple[int, int], value: str | None, wanted: bool
) -> None:
    assert compiled.call(selected, capability=capability, value=value) == wanted


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


def test_cuda_graphs_can_be_switched_off(compiled: KernelProcess) -> None:
    assert "NONE" in compiled.call(graph_mode, allowed="0", model=True)


@pytest.mark.guard
@pytest.mark.parametrize(("allowed", "model"), [("1", True), ("0", False)])
def test_cuda_graphs_stay_otherwise(compiled: KernelProcess, allowed: str, model: bool) -> None:
    assert compiled.call(graph_mode, allowed=allowed, model=model) == "as it was"


def test_the_kernels_against_float64(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_sparse_mla.py", tmp_path, interpret=True)


def test_every_configuration_compiles_for_sm12x(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_compile_sparse.py", tmp_path, interpret=False)

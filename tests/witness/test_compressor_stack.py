"""DeepSeek V4's compressor, which makes one KV entry of 128 tokens (C128A), on SM12x.

A thread that holds 128 tokens spills to its stack. The driver reserves that stack for every thread
that the device can have at a time, and keeps it: at the first prompt, after memory was profiled.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Gpu, KernelProcess

COMPRESSOR = "vllm.model_executor.layers.deepseek_compressor"
# What it decides at import does not depend on the device.
PRELOAD = (COMPRESSOR,)
HEAD, NOPE, ROPE = 512, 448, 64
# Bytes of stack for a thread: 19 MiB on 188 multiprocessors of 1,536 threads.
STACK = 64
# Tokens of a block of the compressor's state, by ratio (CompressorStateCache).
STATE_BLOCK = {4: 4, 128: 8}
# A block of the KV cache: rows of 576 bytes, then 8 bytes of scales for each.
ENTRIES, ROW, SCALES = 2, 576, 8
EPS = 1e-6
# Half of the last bit: e4m3 has 3 bits of fraction and ends at 2**-9 of the scale, bf16 has 7. The
# values are rounded to bf16 before they are to e4m3.
FP8, END, BF16 = 2**-4 + 2**-8, 2**-10, 2**-8


def layer(ratio: int) -> Any:
    """The release's own compressor of the main attention, without its projection's weights."""
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module(COMPRESSOR)

    class Norm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, eps: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)

    vars(module)["RMSNorm"] = Norm
    vars(module)["MergedColumnParallelLinear"] = lambda *_, **__: torch.nn.Identity()
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(qk_rope_head_dim=ROPE, rms_norm_eps=EPS), max_model_len=1024
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    vars(module)["get_current_vllm_config"] = lambda: vllm_config
    module.current_platform.device_type = "cpu"
    return module.DeepseekCompressor(
        vllm_config, ratio, 1024, HEAD, prefix="compressor", k_cache_prefix="cache"
    )


class Step:
    """One step of a request: positions ``first`` and on; the state of those before is written."""

    def __init__(self, ratio: int, first: int, tokens: int) -> None:
        torch: Any = importlib.import_module("torch")
        self.torch = torch
        self.ratio, self.first, self.tokens = ratio, first, tokens
        self.coff = 2 if ratio == 4 else 1
        width = self.coff * HEAD
        self.layer = layer(ratio)
        size = STATE_BLOCK[ratio]
        end = first + tokens
        blocks = -(-end // size)
        # Blocks of the state lie in any order, and one of another request is among them.
        self.table = torch.randperm(blocks + 1)[:blocks].to(torch.int32)
        self.state = torch.full((blocks + 1, size, 2 * width), float("nan"))
        self.layer.ape.data.copy_(torch.randn(ratio, width))
        self.kv, self.score = torch.randn(end, width), 3 * torch.randn(end, width)
        for position in range(first):
            row = self.table[position // size], position % size
            ape = self.layer.ape[position % ratio]
            self.state[row] = torch.cat([self.kv[position], self.score[position] + ape])
        self.layer.state_cache.kv_cache = self.state
        self.cache = torch.zeros(8, ENTRIES, ROW + SCALES, dtype=torch.uint8)
        self.cos_sin = torch.rand(end, ROPE) * 2 - 1
        self.positions = torch.arange(first, end)
        self.layer._static_forward_context["cache"] = SimpleNamespace(kv_cache=self.cache)
        slots = self.table[self.positions // size].long() * size + self.positions % size
        entries = torch.where((self.positions + 1) % ratio == 0, self.positions // ratio, -1)
        vars(importlib.import_module(COMPRESSOR))["get_forward_context"] = lambda: SimpleNamespace(
            attn_metadata={
                self.layer.state_cache.prefix: SimpleNamespace(
                    token_to_req_indices=torch.zeros(tokens, dtype=torch.int32),
                    slot_mapping=slots,
                    block_table=self.table[None].contiguous(),
                    block_size=size,
                ),
                "cache": SimpleNamespace(slot_mapping=entries),
            }
        )

    def run(self) -> None:
        given = self.torch.cat([self.kv[self.first :], self.score[self.first :]], dim=-1)
        rotary = SimpleNamespace(cos_sin_cache=self.cos_sin)
        self.layer(given, self.positions, rotary)

    def wanted(self, entry: int) -> Any:
        """[512] float64 of one compressed entry, rotated; from the definition."""
        torch, ratio = self.torch, self.ratio
        end = (entry + 1) * ratio
        seen = [p for p in range(end - self.coff * ratio, end) if p >= 0]
        # The tokens of the entry before give the first half of their columns, its own the second.
        half = [0 if self.coff == 1 or p < end - ratio else HEAD for p in seen]
        ape = self.layer.ape.data.double()
        columns = [slice(start, start + HEAD) for start in half]
        both = list(zip(seen, columns, strict=True))
        score = torch.stack([(self.score[p].double() + ape[p % ratio])[c] for p, c in both])
        kv = torch.stack([self.kv[p].double()[c] for p, c in both])
        mixed = (torch.softmax(score, dim=0) * kv).sum(dim=0)
        normed = mixed * torch.rsqrt(mixed.square().mean() + EPS) * self.layer.norm.weight.double()
        cos, sin = self.cos_sin[end - ratio].double().split(ROPE // 2)
        even, odd = normed[NOPE::2].clone(), normed[NOPE + 1 :: 2].clone()
        normed[NOPE::2] = even * cos - odd * sin
        normed[NOPE + 1 :: 2] = odd * cos + even * sin
        return normed

    def errors(self, entry: int) -> list[float]:
        """The largest error of its fp8 and of its bf16 values, over what rounding may do."""
        torch = self.torch
        flat = self.cache[entry // ENTRIES].flatten()
        start = entry % ENTRIES * ROW
        row = flat[start : start + ROW]
        scales = flat[ENTRIES * ROW + entry % ENTRIES * SCALES :][: NOPE // 64]
        scale = torch.exp2(scales.double() - 127)[:, None]
        plain = row[:NOPE].view(torch.float8_e4m3fn).double().view(-1, 64) * scale
        rotated = row[NOPE:].view(torch.bfloat16).double()
        wanted = self.wanted(entry)
        first, second = wanted[:NOPE].view(-1, 64), wanted[NOPE:]
        return [
            float(((plain - first).abs() / (FP8 * first.abs() + END * scale)).max()),
            float(((rotated - second).abs() / (BF16 * second.abs() + 1e-5)).max()),
        ]


# ---- what runs where Triton compiles ----


def stack(gpu: Gpu, ratio: int, capability: list[int], shared: int) -> dict[str, Any]:
    gpu.become((capability[0], capability[1]), shared=shared)
    Step(ratio, 0, 2 * ratio).run()
    launches = [launch for launch in gpu.launches if "compress" in launch.name]
    assert len(launches) == 1, [launch.name for launch in gpu.launches]
    return {
        "stack": launches[0].resources()["STACK"],
        "step": launches[0].config.get("TOKENS_PER_STEP", 0),
    }


# ---- what runs where Triton interprets ----


def errors(gpu: Gpu, ratio: int, first: int, tokens: int, step: int) -> list[float]:
    """The errors of each entry that the step completes."""
    torch: Any = importlib.import_module("torch")
    gpu.become((12, 0))
    torch.manual_seed(ratio + first)
    made = Step(ratio, first, tokens)
    if step:
        made.layer._kernel_options = {"TOKENS_PER_STEP": step}
    made.run()
    completed = range(first // ratio, (first + tokens) // ratio)
    return [error for entry in completed for error in made.errors(entry)]


# ---- what the compressor is to do ----


@pytest.mark.parametrize("capability", [[12, 0], [12, 1]])
def test_a_thread_has_no_stack_on_sm12x(compiled: KernelProcess, capability: list[int]) -> None:
    found = compiled.call(stack, ratio=128, capability=capability, shared=SM12X_SHARED)
    assert found["stack"] <= STACK


@pytest.mark.guard
def test_four_tokens_are_compressed_at_once(compiled: KernelProcess) -> None:
    found = compiled.call(stack, ratio=4, capability=[12, 0], shared=SM12X_SHARED)
    assert found == {"stack": 0, "step": 0}


@pytest.mark.guard
@pytest.mark.parametrize("capability", [[9, 0], [10, 0]])
def test_other_devices_keep_their_kernel(compiled: KernelProcess, capability: list[int]) -> None:
    found = compiled.call(stack, ratio=128, capability=capability, shared=SM90_SHARED)
    assert found["step"] == 0
    assert found["stack"] > 8192


@pytest.mark.guard
@pytest.mark.parametrize(
    ("ratio", "first", "tokens"),
    [(128, 0, 256), (128, 127, 1), (128, 200, 60), (4, 0, 12), (4, 7, 1), (4, 5, 9)],
)
def test_entries_are_those_of_the_definition(
    interpreted: KernelProcess, ratio: int, first: int, tokens: int
) -> None:
    found = interpreted.call(errors, ratio=ratio, first=first, tokens=tokens, step=0)
    assert found
    assert max(found) <= 1


@pytest.mark.guard
@pytest.mark.parametrize("step", [1, 4, 16, 128])
def test_any_step_gives_the_same_entries(interpreted: KernelProcess, step: int) -> None:
    assert max(interpreted.call(errors, ratio=128, first=0, tokens=128, step=step)) <= 1


@pytest.mark.guard
@pytest.mark.parametrize("step", [1, 2, 8])
def test_tokens_before_the_first_have_no_weight(interpreted: KernelProcess, step: int) -> None:
    assert max(interpreted.call(errors, ratio=4, first=0, tokens=8, step=step)) <= 1

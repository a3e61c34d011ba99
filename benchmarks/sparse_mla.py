"""Time the portable kernels of DeepSeek V4's and V4.1's attention on one GPU, beside FlashMLA.

    python3 benchmarks/sparse_mla.py TREE --out REPORT.json [--flashmla DIR]

TREE holds ``vllm/v1/attention/ops/portable_mla`` (an unpacked and patched release). DIR is an
unpacked official wheel's folder with ``vllm/_flashmla_C.abi3.so`` and
``vllm/third_party/flashmla``; without it there is nothing to compare with. FlashMLA's times are of
V4's blocks, ours also of V4.1's, with as many slots. All times of a report are of one run: medians
of CUDA graph replays, in microseconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WINDOW = 128
COMPRESSED = 512
SCALE = 512**-0.5
TOKEN_BYTES = 584
# Entries of a block of the window's cache, and of the compressed one.
V4, V41 = (64, 64), (32, 128)
# What one H200 reaches: bytes/s of reads, bf16 FLOP/s of matrix products.
BANDWIDTH = 4.3e12
FLOPS = 780e12


def cache(blocks: int, tokens: int, seed: int) -> torch.Tensor:
    """A packed cache [blocks, tokens, 584] uint8 of normal values."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size = -(-tokens * TOKEN_BYTES // 576) * 576
    n = blocks * tokens
    raw = torch.zeros(blocks, size, dtype=torch.uint8, device="cuda")
    values = torch.randn(n, 448, device="cuda", generator=generator) * 60
    e4m3 = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(n, 64, device="cuda", generator=generator).to(torch.bfloat16)
    data = torch.cat([e4m3, rope.view(torch.uint8).reshape(n, 128)], 1)
    raw[:, : tokens * 576] = data.reshape(blocks, -1)
    power = torch.randint(120, 125, (n, 8), device="cuda", generator=generator)
    raw[:, tokens * 576 : tokens * TOKEN_BYTES] = power.to(torch.uint8).reshape(blocks, -1)
    return torch.as_strided(raw, (blocks, tokens, TOKEN_BYTES), (size, TOKEN_BYTES, 1))


def case(
    tokens: int,
    heads: int,
    *,
    ragged: bool = False,
    blocks: int = 2048,
    layout: tuple[int, int] = V4,
) -> dict[str, Any]:
    """Arguments of ``sparse_mla`` but scale and out: 128 slots of the window, 512 compressed.

    Args:
        blocks: each cache is as large as so many blocks of 64.
        layout: entries of a block of each cache.
    """
    generator = torch.Generator(device="cuda").manual_seed(tokens * 1000 + heads)

    def draw(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.int32, device="cuda", generator=generator
        )

    slots = blocks * 64
    return {
        "q": torch.randn(tokens, heads, 512, device="cuda", generator=generator).bfloat16(),
        "swa_cache": cache(slots // layout[0], layout[0], 1),
        "swa_slots": draw(slots, tokens, WINDOW),
        "swa_lens": draw(WINDOW + 1, tokens, low=0 if ragged else WINDOW),
        "sink": torch.randn(heads, device="cuda", generator=generator),
        "comp_cache": cache(slots // layout[1], layout[1], 2),
        "comp_slots": draw(slots, tokens, COMPRESSED, low=-1 if ragged else 0),
        "comp_lens": draw(COMPRESSED + 1, tokens, low=0 if ragged else COMPRESSED),
    }


def timed(call: Callable[[], object], calls: int = 10) -> float:
    """Median microseconds of a call, of 7 replays of a graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return sorted(times)[3]


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the error over the norm of the float64 reference."""
    return float((out.double() - wanted).norm() / wanted.norm())


class FlashMLA:
    """FlashMLA of an official wheel, with heads padded to the 64 or 128 that it takes."""

    def __init__(self, folder: Path) -> None:
        torch.ops.load_library(str(folder / "vllm" / "_flashmla_C.abi3.so"))
        package = types.ModuleType("vllm")
        package.__path__ = [str(folder / "vllm")]
        sys.modules["vllm"] = package
        sys.modules["vllm._flashmla_C"] = types.ModuleType("vllm._flashmla_C")
        self.module: Any = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")

    def padded(self, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        heads = given["q"].shape[1]
        more = (64 if heads <= 64 else 128) - heads
        pad = torch.nn.functional.pad
        q = pad(given["q"], (0, 0, 0, more)).contiguous()
        return q, pad(given["sink"], (0, more), value=-torch.inf)

    def decode(self, given: dict[str, Any]) -> tuple[Callable[[], object], torch.Tensor]:
        q, sink = self.padded(given)
        out = torch.empty_like(q).unsqueeze(1)
        plan = self.module.get_mla_metadata()[0]

        def call() -> object:
            return self.module.flash_mla_with_kvcache(
                q=q.unsqueeze(1),
                k_cache=given["swa_cache"].unsqueeze(-2),
                block_table=None,
                cache_seqlens=None,
                head_dim_v=512,
                tile_scheduler_metadata=plan,
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=given["swa_slots"].unsqueeze(1),
                topk_length=given["swa_lens"],
                attn_sink=sink,
                extra_k_cache=given["comp_cache"].unsqueeze(-2),
                extra_indices_in_kvcache=given["comp_slots"].unsqueeze(1),
                extra_topk_length=given["comp_lens"],
                out=out,
            )

        return call, out.squeeze(1)[:, : given["q"].shape[1]]

    def prefill(self, given: dict[str, Any], candidates: int) -> Callable[[], object]:
        """Its prefill kernel, which reads a bf16 copy; making the copy is not in the time."""
        q, sink = self.padded(given)
        tokens = q.shape[0]
        keys = torch.randn(128 * 1024, 1, 512, device="cuda").bfloat16()
        slots = torch.randint(0, len(keys), (tokens, 1, candidates), device="cuda").int()
        lens = torch.full((tokens,), candidates, dtype=torch.int32, device="cuda")
        out = torch.empty_like(q)
        fwd = self.module.flash_mla_sparse_fwd
        return lambda: fwd(q, keys, slots, SCALE, 512, sink, lens, out)


def torch_fallback(given: dict[str, Any], rows: int) -> Callable[[], object]:
    """Gather, dequantize and attend in torch operators, as the ROCm fallback does."""
    reference: Any = importlib.import_module("portable_mla.sparse_mla_reference")
    q = given["q"][:rows].float()

    def call() -> object:
        keys = torch.cat(
            [
                reference.read_slots(given["swa_cache"], given["swa_slots"][:rows]),
                reference.read_slots(given["comp_cache"], given["comp_slots"][:rows].clamp(min=0)),
            ],
            1,
        ).float()
        scores = (q @ keys.transpose(1, 2)) * SCALE
        share = torch.sigmoid(scores.logsumexp(-1) - given["sink"])
        return (scores.softmax(-1) @ keys) * share[..., None]

    return call


def floors(tokens: int, heads: int) -> dict[str, float]:
    candidates = WINDOW + COMPRESSED
    size = tokens * (candidates * (TOKEN_BYTES + 4) + 2 * heads * 512 * 2)
    work = tokens * heads * candidates * 512 * 4
    return {"bandwidth_us": size / BANDWIDTH * 1e6, "matrix_us": work / FLOPS * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--flashmla", type=Path, metavar="DIR")
    parser.add_argument("--random", type=int, default=300, metavar="N", help="random shapes")
    options = parser.parse_args()
    sys.path.insert(0, str(options.tree / "vllm" / "v1" / "attention" / "ops"))
    kernels: Any = importlib.import_module("portable_mla.sparse_mla")
    reference: Any = importlib.import_module("portable_mla.sparse_mla_reference")
    triton: Any = importlib.import_module("triton")
    flash = FlashMLA(options.flashmla) if options.flashmla else None
    properties = torch.cuda.get_device_properties(0)
    report: dict[str, Any] = {
        "device": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "errors": {},
        "decode": {},
        "prefill": {},
        "random": {},
    }

    def attend(given: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = kernels.sparse_mla(scale=SCALE, out=out, **given)
        return done

    def save(kind: str, name: str, row: Any) -> None:
        report[kind][name] = row
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    for heads in (16, 32, 64, 128):
        given = case(9, heads, ragged=True, blocks=64)
        wanted = reference.sparse_mla_reference(scale=SCALE, **given)
        row = {"ours": error(attend(given, torch.empty_like(given["q"])), wanted)}
        if flash:
            call, out = flash.decode(given)
            call()
            row["flashmla"] = error(out, wanted)
            ours = attend(given, torch.empty_like(given["q"]))
            row["ours to flashmla"] = error(ours, out.double())
        given = case(9, heads, ragged=True, blocks=64, layout=V41)
        wanted = reference.sparse_mla_reference(scale=SCALE, **given)
        row["ours, V4.1"] = error(attend(given, torch.empty_like(given["q"])), wanted)
        save("errors", f"{heads} heads", row)

    for heads in (16, 64):
        for tokens in (1, 8, 32, 128):
            given = case(tokens, heads)
            out = torch.empty_like(given["q"])
            row = {"ours_us": timed(lambda given=given, out=out: attend(given, out))}
            if flash:
                row["flashmla_us"] = timed(flash.decode(given)[0])
                row["ratio"] = row["ours_us"] / row["flashmla_us"]
            row["torch_us"] = timed(torch_fallback(given, tokens), 1)
            row |= floors(tokens, heads)
            given = case(tokens, heads, layout=V41)
            row["v41_us"] = timed(lambda given=given, out=out: attend(given, out))
            save("decode", f"{heads} heads, {tokens} tokens", row)

    for heads in (16, 64):
        for tokens in (2048, 8192, 32768):
            given = case(tokens, heads)
            out = torch.empty_like(given["q"])
            row = {"ours_us": timed(lambda given=given, out=out: attend(given, out), 1)}
            if flash:
                row["flashmla_us"] = timed(flash.prefill(given, WINDOW + COMPRESSED), 1)
                row["ratio"] = row["ours_us"] / row["flashmla_us"]
            # 256 tokens: the copy of the keys of more would not fit.
            row["torch_us"] = timed(torch_fallback(given, 256), 1) * tokens / 256
            row |= floors(tokens, heads)
            given = case(tokens, heads, layout=V41)
            row["v41_us"] = timed(lambda given=given, out=out: attend(given, out), 1)
            save("prefill", f"{heads} heads, {tokens} tokens", row)

    # One graph, other contents: it replays with what is there then.
    given = case(8, 16, ragged=True, blocks=64)
    out = torch.empty_like(given["q"])
    attend(given, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(given, out)
    other = case(8, 16, ragged=True, blocks=64)
    worst = 0.0
    for name in ("swa_slots", "swa_lens", "comp_slots", "comp_lens"):
        given[name].copy_(other[name].flip(0))
        graph.replay()
        worst = max(worst, error(out, reference.sparse_mla_reference(scale=SCALE, **given)))
    save("random", "graph replays, largest error", worst)

    numbers = random.Random(0)  # noqa: S311
    worst = 0.0
    for _ in range(options.random):
        heads = numbers.choice([1, 5, 8, 16, 20, 32, 48, 64, 128])
        given = case(numbers.randint(1, 24), heads, ragged=True, blocks=8)
        width, extra = numbers.randint(1, WINDOW), numbers.randint(1, COMPRESSED)
        given["swa_slots"] = given["swa_slots"][:, :width].contiguous()
        given["comp_slots"] = given["comp_slots"][:, :extra].contiguous()
        got = attend(given, torch.empty_like(given["q"]))
        wanted = reference.sparse_mla_reference(scale=SCALE, **given)
        if wanted.norm() > 0:
            worst = max(worst, error(got, wanted))
    save("random", f"{options.random} shapes, largest error", worst)


if __name__ == "__main__":
    main()

"""Random shapes of the portable sparse attention on one GPU, against float64.

    python -m tests.gpu.sparse_mla_random TREE --out REPORT [--shapes 10000] [--jobs 8]

TREE holds ``vllm/v1/attention/ops/portable_mla`` (an unpacked and patched release). A shape draws
queries, heads, widths of both lists, their live lengths, the blocks of a layer of DeepSeek V4 or
V4.1 and the gap between them, scales, sinks up to both infinities, tile and splits; every fifth
shape takes slots and lengths that no cache has, where the result must be finite and nothing else
is asked.

Exit code 1 where a shape is further from float64 than the tolerance, is not finite, or fails: the
report names its number, from which `--first N --shapes 1` repeats it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Norm of the error over the norm of the result that issue and witness allow a bf16 output.
TOLERANCE = 4e-3
# A result whose norm is smaller rounds to zeros in float32, and has no relative error.
SMALLEST = 2.0**-126
SCALE = 512**-0.5
LARGEST = 2**31 - 1
HEADS = (1, 2, 5, 8, 15, 16, 17, 20, 32, 33, 48, 64, 65, 128)
SINKS = (float("-inf"), -1e4, 0.0, 1e4, float("inf"))
SCALES = ((118, 134), (120, 124), (60, 200), (1, 3))


def shape(number: int, inputs: Any, kernels: Any) -> tuple[dict[str, Any], Any]:
    """Arguments of ``sparse_mla`` but scale and out, and the plan; the same for one number."""
    draw = random.Random(number)  # noqa: S311
    # Few shapes are large: float64 takes one query after the other.
    tokens = draw.choice([1, 2, 3, 5, 8, 13, 24] + [96] * (number % 50 == 0))
    heads = draw.choice(HEADS)
    width, extra = draw.randint(1, 160), draw.choice([0, 1, 31, 32, 33, draw.randint(1, 640)])
    low, high = draw.choice(SCALES)
    window, block = draw.choice((*kernels._LAYERS, kernels._HALVED))
    extra *= block > 0
    blocks = draw.randint(1, 6)
    gap = draw.choice([0, 576, 4 * 576])
    given: dict[str, Any] = {
        "q": inputs.queries(tokens, heads, number),
        "swa_cache": inputs.cache(blocks, window, number + 1, low, high, gap),
        "swa_slots": inputs.draw(-1, blocks * window, (tokens, width), number + 2),
        "swa_lens": inputs.draw(0, width + 1, (tokens,), number + 3),
        "sink": inputs.sinks(heads, number + 4),
    }
    if draw.random() < 0.3:
        given["sink"][draw.randrange(heads)] = draw.choice(SINKS)
    if extra:
        given["comp_cache"] = inputs.cache(blocks, block, number + 5, low, high)
        given["comp_slots"] = inputs.draw(-1, blocks * block, (tokens, extra), number + 6)
        given["comp_lens"] = inputs.draw(0, extra + 1, (tokens,), number + 7)
    properties = importlib.import_module("torch").cuda.get_device_properties(0)
    if draw.random() < 0.5:
        launch = kernels.plan(tokens, heads, width + extra, properties.multi_processor_count)
    else:
        tile, splits = draw.choice(kernels.TILES), draw.choice([1, 2, 3, 7, 16, 32])
        launch = kernels.Plan(tile, splits, 0 if splits == 1 else tokens * splits * heads * 513)
    return given, launch


def hostile(given: dict[str, Any], number: int) -> None:
    """Slots and lengths that no cache or list has."""
    draw = random.Random(number)  # noqa: S311
    for name in ("swa_slots", "swa_lens", "comp_slots", "comp_lens"):
        if name in given:
            flat = given[name].view(-1)
            for _ in range(3):
                value = draw.choice([LARGEST, -LARGEST - 1, draw.randint(-LARGEST, LARGEST)])
                flat[draw.randrange(len(flat))] = value


def at_once(given: dict[str, Any], reference: Any) -> Any:
    """What ``sparse_mla_reference`` gives query by query, of all queries at once: [T, H, 512]."""
    torch: Any = importlib.import_module("torch")
    keys, live = [], []
    for name in ("swa", "comp"):
        if f"{name}_cache" in given:
            slots, lens = given[f"{name}_slots"], given[f"{name}_lens"]
            keys.append(reference.read_slots(given[f"{name}_cache"], slots.clamp(min=0)).double())
            places = torch.arange(slots.shape[1], device=slots.device)
            live.append((places < lens[:, None]) & (slots >= 0))
    k, mask = torch.cat(keys, 1), torch.cat(live, 1)[:, None]
    scores = (given["q"].double() @ k.transpose(1, 2) * SCALE).masked_fill(~mask, -torch.inf)
    share = torch.sigmoid(scores.logsumexp(2) - given["sink"].double())
    # A query without a candidate has no softmax; it gives zeros.
    return (scores.softmax(2).nan_to_num(0.0) @ k) * share.nan_to_num(0.0)[..., None]


def one(number: int, inputs: Any, kernels: Any, reference: Any) -> float:
    """The error of one shape; 0 of a hostile one."""
    torch: Any = importlib.import_module("torch")
    given, launch = shape(number, inputs, kernels)
    bad = number % 5 == 4
    if bad:
        hostile(given, number)
    out = torch.full_like(given["q"], torch.nan)
    kernels.sparse_mla(scale=SCALE, out=out, launch=launch, **given)
    if not bool(out.isfinite().all()):
        raise ValueError("a result is not finite")
    if bad:
        return 0.0
    wanted = at_once(given, reference)
    if number % 50 == 1:
        slow = reference.sparse_mla_reference(scale=SCALE, **given)
        torch.testing.assert_close(wanted, slow, rtol=1e-9, atol=1e-12)
    norm = float(wanted.norm())
    return float((out.double() - wanted).norm()) / (norm if norm > SMALLEST else 1.0)


def part(tree: Path, out: Path, numbers: range, seconds: float) -> None:
    """Check the shapes of ``numbers`` for ``seconds`` at most; the figures go to ``out``."""
    end = time.monotonic() + seconds
    for folder in (tree / "vllm/v1/attention/ops", ROOT / "tests/witness/portable"):
        sys.path.insert(0, str(folder))
    inputs = importlib.import_module("sparse_inputs")
    kernels = importlib.import_module("portable_mla.sparse_mla")
    reference = importlib.import_module("portable_mla.sparse_mla_reference")
    # Inputs are drawn on the host, and each process would take all of its cores.
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    errors: list[float] = []
    failed: dict[int, str] = {}
    hostile_shapes = 0
    for number in numbers:
        if time.monotonic() > end:
            break
        try:
            errors.append(one(number, inputs, kernels, reference))
        except Exception:
            failed[number] = traceback.format_exc(limit=3)[-800:]
            # After an illegal address nothing of this process can be believed.
            if "CUDA error" in failed[number]:
                break
            continue
        hostile_shapes += number % 5 == 4
        if not errors[-1] <= TOLERANCE:
            failed[number] = f"error {errors[-1]:.2e}"
    figures: dict[str, float] = {
        "compared": len(errors) - hostile_shapes,
        "hostile": hostile_shapes,
    }
    figures |= {"largest_error": max(errors, default=0.0)}
    out.write_text(json.dumps({**figures, "failed": failed}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--shapes", type=int, default=10_000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first")
    parser.add_argument("--seconds", type=float, default=500, metavar="S", help="end after these")
    parser.add_argument("--jobs", type=int, default=8, metavar="N", help="processes on the GPU")
    parser.add_argument("--step", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        end = options.first + options.shapes * options.step
        numbers = range(options.first, end, options.step)
        part(options.tree, options.out, numbers, options.seconds)
        return 0
    jobs = min(options.jobs, options.shapes)
    parts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for job in range(jobs):
            mine = len(range(job, options.shapes, jobs))
            words = [sys.executable, "-m", "tests.gpu.sparse_mla_random", str(options.tree)]
            words += ["--out", f"{scratch}/{job}", "--first", str(options.first + job)]
            words += ["--shapes", str(mine), "--step", str(jobs)]
            words += ["--seconds", str(options.seconds)]
            running.append(subprocess.Popen(words, cwd=ROOT))
        codes = [process.wait() for process in running]
        for job, code in enumerate(codes):
            if code:
                parts.append({"failed": {f"process {job}": f"ended with {code}"}})
            else:
                parts.append(json.loads(Path(f"{scratch}/{job}").read_text()))
    failed = {name: text for found in parts for name, text in found["failed"].items()}
    result = {
        "shapes": options.shapes,
        "compared": sum(found.get("compared", 0) for found in parts),
        "hostile": sum(found.get("hostile", 0) for found in parts),
        "largest_error": max(found.get("largest_error", 0.0) for found in parts),
        "failed": failed,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "failed": dict(list(failed.items())[:5])}, indent=1))
    whole = result["compared"] + result["hostile"] == options.shapes
    return 0 if whole and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

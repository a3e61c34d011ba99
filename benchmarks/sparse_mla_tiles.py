"""Time tiles of the portable attention of DeepSeek V4 on one GPU, to choose those of a device.

    python3 benchmarks/sparse_mla_tiles.py TREE --out REPORT.json

TREE holds ``vllm/v1/attention/ops/portable_mla`` (an unpacked and patched release). Several
processes compile, and take turns to time: medians of CUDA graph replays, in microseconds. A tile is
named by heads of the call, heads and candidates of a step, warps, stages and the limit of
registers (0: none); "x2" are splits for two programs on each multiprocessor. `error` is against
float64.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import multiprocessing
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.sparse_mla import SCALE, V4, V41, case, error, timed

PROCESSES = 14
WIDTH = 640
PREFILL = {"2048 tokens": (2048, V4), "8192 tokens": (8192, V4), "2048 tokens, V4.1": (2048, V41)}
DECODE = (8, 32, 128)


class Candidate(NamedTuple):
    """A tile for calls of ``heads`` heads; ``registers`` limits those of a thread, 0 does not."""

    heads: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int

    @property
    def name(self) -> str:
        return " ".join(f"{field}={value}" for field, value in self._asdict().items())


def candidates() -> list[Candidate]:
    """Return the tiles for 16 and for 64 heads that are worth a measurement."""
    few = [
        Candidate(16, 16, *sizes) for sizes in product((16, 32), (4, 8), (1, 2, 3), (0, 128, 168))
    ]
    few = [one for one in few if one.registers in (0, 128 if one.num_warps == 8 else 168)]
    few += [Candidate(16, 16, *sizes) for sizes in ((64, 8, 1, 0), (32, 2, 1, 0), (16, 2, 2, 0))]
    many = [
        *((64, 64, 8, 2, 0), (64, 64, 8, 1, 0), (64, 32, 8, 2, 0), (32, 32, 4, 1, 0)),
        *((32, 32, 8, 1, 0), (32, 32, 8, 2, 0), (32, 16, 8, 2, 0), (32, 16, 4, 2, 0)),
        *((16, 32, 4, 2, 0), (16, 32, 8, 1, 0), (16, 32, 8, 2, 0), (16, 16, 8, 2, 128)),
    ]
    return few + [Candidate(64, *sizes) for sizes in many]


class Limited:
    """A kernel that is launched with a limit of registers."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel = kernel
        self.options = {"maxnreg": registers} if registers else {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        launch = self.kernel[grid]
        return lambda *arguments, **named: launch(*arguments, **named, **self.options)


def measure(kernels: Any, reference: Any, one: Candidate, lock: Any) -> dict[str, Any]:
    """Return the error and the times of a tile, or why it cannot run."""
    tile = kernels.Tile(one.block_h, one.block_n, one.num_warps, one.num_stages, 0)
    given = case(9, one.heads, ragged=True, blocks=64)
    out = torch.empty_like(given["q"])
    try:
        kernels.sparse_mla(scale=SCALE, out=out, launch=kernels.Plan(tile, 1, 0), **given)
        torch.cuda.synchronize()
    except Exception as failure:
        return {"failure": f"{failure}"[:200]}
    wanted = reference.sparse_mla_reference(scale=SCALE, **given)
    row: dict[str, Any] = {"error": error(out, wanted)}

    def add(name: str, tokens: int, layout: tuple[int, int], splits: int, calls: int) -> None:
        given = case(tokens, one.heads, layout=layout, blocks=512)
        out = torch.empty_like(given["q"])
        cells = 0 if splits == 1 else tokens * splits * one.heads
        launch = kernels.Plan(tile, splits, cells * (kernels.HEAD_DIM + 1))
        scratch = torch.empty(max(1, launch.scratch_elements), device="cuda")

        def call() -> object:
            return kernels.sparse_mla(scale=SCALE, out=out, launch=launch, scratch=scratch, **given)

        call()
        torch.cuda.synchronize()
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            row[name] = round(timed(call, calls), 1)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    for name, (tokens, layout) in PREFILL.items():
        add(name, tokens, layout, 1, 1)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens in DECODE:
        programs = tokens * -(-one.heads // one.block_h)
        steps = -(-WIDTH // one.block_n)
        for resident in (1, 2, 3):
            splits = max(1, min(steps, resident * processors // programs, kernels.MAX_SPLITS))
            add(f"{tokens} tokens x{resident}", tokens, V4, splits, 10)
    return row


def work(tree: Path, chosen: list[Candidate], lock: Path, results: Any) -> None:
    """Measure tiles, and put name and result of each into ``results``; None is the end."""
    sys.path.insert(0, str(tree / "vllm" / "v1" / "attention" / "ops"))
    kernels: Any = importlib.import_module("portable_mla.sparse_mla")
    reference: Any = importlib.import_module("portable_mla.sparse_mla_reference")
    kernel = kernels._sparse_mla_kernel
    with lock.open("a") as handle:
        for one in chosen:
            kernels._sparse_mla_kernel = Limited(kernel, one.registers)
            results.put((one.name, measure(kernels, reference, one, handle)))
    results.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--only", default="", metavar="TEXT", help="tiles with this in their names")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    listed = [one for one in candidates() if options.only in one.name]
    with tempfile.NamedTemporaryFile() as lock:
        workers = [
            context.Process(
                target=work, args=(options.tree, listed[first::PROCESSES], Path(lock.name), results)
            )
            for first in range(PROCESSES)
        ]
        for worker in workers:
            worker.start()
        report: dict[str, Any] = {}
        left = len(workers)
        while left:
            result = results.get()
            if result is None:
                left -= 1
                continue
            report[result[0]] = result[1]
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()

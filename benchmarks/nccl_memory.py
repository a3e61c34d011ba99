"""What NCCL's communicators hold on each GPU: python benchmarks/nccl_memory.py --out FOLDER

One process for each visible GPU makes as many communicators of all of them as a server of
tensor parallelism has, and uses each: PyTorch's own, and vLLM's of the tensor-parallel and the
expert-parallel group. Measured are the MiB that the first GPU has less after each, and the time of
an all-reduce, under each of a few settings of NCCL's. A sleeping server keeps this memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import cases

COMMUNICATORS = 3
# Bytes of an all-reduce: a decoded token, eight requests' tokens, and a prompt's.
SIZES = (8 << 10, 1 << 20, 64 << 20)
REPEATS = 30
FEWER, SMALLER = {"NCCL_MAX_CTAS": "8"}, {"NCCL_BUFFSIZE": "1048576"}
# Through host memory, as between cards that cannot read each other's.
NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
SETTINGS: dict[str, dict[str, str]] = {
    " ".join(f"{name}={value}" for name, value in setting.items()) or "as released": setting
    for setting in (
        {},
        SMALLER,
        FEWER,
        {"NCCL_MAX_CTAS": "4"},
        {"NCCL_MAX_CTAS": "4", **SMALLER},
        NO_PEERS,
        {**NO_PEERS, **FEWER},
    )
}


@dataclass(kw_only=True)
class Held(cases.Measured):
    """MiB of the context, of each communicator in turn, and µs of an all-reduce by bytes."""

    setting: str = ""
    gpus: int = 0
    nccl: str = ""
    context: float = 0.0
    communicators: list[float] = field(default_factory=list)
    microseconds: dict[str, float] = field(default_factory=dict)


def rank(number: int, gpus: int, out: Path) -> None:
    """What one process does; the first one writes ``out``."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(number)

    def in_use() -> float:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return float(total - free) / cases.MIB

    block = torch.zeros(max(SIZES) // 2, dtype=torch.bfloat16, device="cuda")
    block.add_(1)
    before = in_use()
    # Not bound to a device: a group would share what the first one has.
    dist.init_process_group("nccl", rank=number, world_size=gpus)
    groups = [dist.group.WORLD]
    groups += [dist.new_group([*range(gpus)]) for _ in range(COMMUNICATORS - 1)]
    held: list[float] = []
    known = before
    for group in groups:
        for size in SIZES:
            dist.all_reduce(block[: size // 2], group=group)
        now = in_use()
        held.append(round(now - known, 1))
        known = now
    times: dict[str, float] = {}
    for size in SIZES:
        taken: list[float] = []
        for _ in range(REPEATS):
            dist.barrier(group=groups[0])
            torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(block[: size // 2], group=groups[1])
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - began) * 1e6)
        times[str(size)] = round(statistics.median(taken), 1)
    if number == 0:
        own = block.numel() * block.element_size() / cases.MIB
        found = {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "context": round(before - own, 1),
            "communicators": held,
            "microseconds": times,
        }
        out.write_text(json.dumps(found))
    dist.barrier(group=groups[0])
    # Destroying communicators takes seconds, and tells nothing.
    os._exit(0)


def measure(setting: str, gpus: int, out: Path) -> Held:
    """Run the ranks under one setting."""
    report = out / "rank.json"
    report.unlink(missing_ok=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{29500 + [*SETTINGS].index(setting)}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--out", f"{report}", "--rank", f"{number}/{gpus}"],
            env={**os.environ, **common, **SETTINGS[setting]},
        )
        for number in range(gpus)
    ]
    try:
        codes = [process.wait(cases.LIMIT) for process in ranks]
    except subprocess.TimeoutExpired:
        return Held(setting=setting, gpus=gpus, error=f"no end after {cases.LIMIT} s")
    finally:
        for process in ranks:
            process.kill()
    if any(codes) or not report.is_file():
        return Held(setting=setting, gpus=gpus, error=f"the ranks end with {codes}")
    found = json.loads(report.read_text())
    report.unlink()
    return Held(setting=setting, gpus=gpus, **found)


def table(known: Sequence[Held]) -> str:
    """Markdown."""
    head = ["setting", "context", "communicators", "together"]
    head += [f"µs, {size >> 10} KiB" for size in SIZES]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for one in known:
        if one.error:
            lines.append(f"| {one.setting} | {one.error} |")
            continue
        cells = [one.setting, f"{one.context:.0f}"]
        cells += [" + ".join(f"{part:.0f}" for part in one.communicators)]
        cells += [f"{sum(one.communicators):.0f}"]
        cells += [f"{one.microseconds[str(size)]:.0f}" for size in SIZES]
        lines.append(f"| {' | '.join(cells)} |")
    gpus, nccl = (known[0].gpus, known[0].nccl) if known else (0, "")
    return "\n".join([f"MiB of one GPU of {gpus}, NCCL {nccl}.", "", *lines]) + "\n"


def main() -> int:
    options_of = cases.parser(__doc__)
    options_of.add_argument("--rank", help=argparse.SUPPRESS)
    options = options_of.parse_args()
    if options.rank:
        number, _, gpus = options.rank.partition("/")
        rank(int(number), int(gpus), options.out)
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        options_of.error(f"{gpus} GPUs are visible: communicators take two or more")
    options.out.mkdir(parents=True, exist_ok=True)
    return cases.run_all(
        "nccl_memory",
        options.out,
        [(setting, functools.partial(measure, setting, gpus, options.out)) for setting in SETTINGS],
        table,
    )


if __name__ == "__main__":
    sys.exit(main())

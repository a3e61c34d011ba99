"""Every GPU run of one or more bases, on all GPUs of a host: python -m tests.gpu.walk --help

    python -m tests.gpu.walk 0.33.0=TARGET --out DIR

TARGET is where `unpack.sh` of tests.gpu.payload puts a base; a run starts once its TARGET is
unpacked, so one base can be sent while another runs. The runs are in the order below: those that
compile kernels first, those that read another run's report after it. A run gets GPUs, a port and a
process group of its own. DIR gets NAME.json and NAME.txt of each run, NAME.log of a server, and
walk.json with the exit code and the seconds of each.

Exit code 1 where a run failed, took too long or could not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sm12x.core import process

ROOT = Path(__file__).resolve().parents[2]
# Written by unpack.sh when all of a base is there.
UNPACKED = "unpacked"
# The release's Python without DeepGEMM and FlashMLA, made here.
ABSENT = "absent"
LEFT_OUT = ("vllm/third_party/deep_gemm", "vllm/third_party/flashmla", "vllm/_flashmla*.so")
# Seconds in which a run that is ended ends its server and writes its report.
GRACE = 20.0
OPS = "{tree}/vllm/v1/attention/ops"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command. ``{target}``, ``{tree}`` and ``{out}`` in what it is started with are the base's
    folder, its packages and the folder of the reports. ``after`` names runs that must have ended,
    well or not. A run that takes no GPU is started beside any other.
    """

    base: str
    name: str
    words: tuple[str, ...]
    tree: str = "stack"
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ("{tree}",)
    after: tuple[str, ...] = ()
    limit: int = 500


# A warm-up of DeepGEMM compiles for minutes what these models do not call, as FlashInfer's
# all-reduce compiles.
SETTINGS = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


def servers(
    base: str,
    name: str,
    script: str,
    *flags: str,
    tree: str = "stack",
    gpus: int = 1,
    environment: Mapping[str, str] | None = None,
    against: str = "",
    steps: bool = False,
    pages: bool = False,
    shared: bool = False,
    limit: int = 500,
) -> Run:
    """A run of tests.gpu.SCRIPT, whose answers are compared with the report of ``against``.

    ``flags`` are the script's own and, after --serve, the servers'. With ``steps`` these log when
    `keep` made the steps of a sleep and of a wake-up; with ``pages`` the indexer of DeepSeek V4.1
    has the pages of SM12x. With ``shared`` all ranks of a server are on one GPU.
    """
    folders = ["steps"] * steps + ["pages"] * pages + ["one_gpu"] * shared
    words = ["-m", f"tests.gpu.{script}", "--out", f"{{out}}/{name}.json"]
    if against:
        words += ["--against", f"{{out}}/{against}.json"]
    flags = (*flags, *SHARED) if shared else flags
    environment = {**(environment or {}), **(MANY_RANKS if shared else {})}
    return Run(
        base=base,
        name=name,
        words=(*words, *flags),
        tree=tree,
        gpus=gpus,
        environment={**SETTINGS, **environment},
        path=(*(f"{ROOT / 'tests' / 'gpu' / folder}" for folder in folders), "{tree}"),
        after=(against,) if against else (),
        limit=limit,
    )


V4, V41 = (
    ("serve", "--model", model, "--cycles", "1") for model in ("deepseek-v4", "deepseek-v41")
)
HYBRID, MOE, DENSE, SMOKE = (
    ("serve", "--model", model) for model in ("hybrid", "qwen3-moe", "dense-fp8", "smoke")
)
NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}
NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
PORTABLE, STOCK = {"VLLM_TRITON_MLA_SPARSE": "1"}, {"VLLM_TRITON_MLA_SPARSE": "0"}
KEEP = ("--sleep-mode-backend", "keep")
# As over PCIe, where vLLM has no all-reduce of its own.
PCIE4, PCIE2 = (
    ("--tensor-parallel-size", size, "--disable-custom-all-reduce") for size in ("4", "2")
)
# The headline's pair: 16.3 GiB on each GPU.
LARGE4, LARGE2 = (("rotate", "--graphs", "--layers", layers, "--dummy") for layers in ("56", "28"))
TURNS = ("rotate", "--graphs", "--layers", "6")
RESIDUE = ("--layers", "4", "--cycles", "1", "--serve")
SUSPEND = (*KEEP, "--enable-nccl-comm-suspend")
# Graphs' memory is asleep too, with vLLM's own backend alone.
OFFLOAD = ("--sleep-mode-offload-cudagraph",)
FEW_SEQUENCES = ("--max-num-seqs", "32")
# MiB of a reply. Up to 24 go through shared memory.
REPLIES = ("--replies", "128", "1024")
# With development mode alone requests wait for the wake-up.
REFUSING = (*KEEP, "--enable-sleep-routes")
# 0.33.0 takes layers that a table routes in the first of two stages alone: of six, three.
FIRST_STAGE = {"SM12X_HASH_LAYERS": "3"}
# Ranks that share a GPU, which NCCL 2.30 allows: what two GPUs compute, on one.
SHARED = (
    *("--distributed-executor-backend", "mp", "--disable-custom-all-reduce"),
    *("--gpu-memory-utilization", "0.2"),
)
# Servers of several walks, one beside the other.
BESIDE = ("--answers", "--utilization", "0.25")
MANY_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
TP2, PP2 = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")


def sampler(name: str) -> dict[str, str]:
    """FlashInfer's sampling, with a cache of its own: units that are compiled are files there."""
    return {"VLLM_USE_FLASHINFER_SAMPLER": "1", "FLASHINFER_WORKSPACE_BASE": f"{{out}}/{name}.jit"}


def draft(tokens: int) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})


def allocator(base: str, name: str) -> Run:
    """What the allocator does in many cycles, and when memory is missing."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_allocator.py")
    named = "thousand or oversized or tried_again or ten_cycles or maps_little"
    return Run(
        base=base,
        name=name,
        words=(*words, "-k", named),
        # The image serves with this backend.
        environment={"SM12X_TREE": "{tree}", "SM12X_BACKEND": "keep"},
    )


def by_allocator(base: str, name: str, script: str, *trees: str, gpus: int = 1) -> Run:
    """A benchmark of the allocator of trees side by side, with the host's own PyTorch and no kernel
    that an earlier run compiled.
    """
    words = (f"benchmarks/{script}.py", "--out", f"{{out}}/{name}", *trees)
    cache = {"TRITON_CACHE_DIR": f"{{out}}/{name}.triton"}
    return Run(base=base, name=name, words=words, gpus=gpus, environment=cache, path=())


def measured(
    base: str, name: str, *words: str, path: tuple[str, ...] = ("{tree}",), limit: int = 200
) -> Run:
    """A benchmark of the portable kernels."""
    out = ("--out", f"{{out}}/{name}.json")
    return Run(base=base, name=name, words=(*words, *out), path=path, limit=limit)


def portable(
    name: str, model: tuple[str, ...], *flags: str, against: str = "33-v4-portable", **more: Any
) -> Run:
    """A server of 0.33.0 with CUDA graphs whose attention and indexer are the portable kernels."""
    environment = {**PORTABLE, **more.pop("environment", {})}
    words = (*model, "--graphs", "--serve", *KEEP, *flags)
    return servers("0.33.0", name, *words, environment=environment, against=against, **more)


def kernels(name: str, *files: str) -> Run:
    """Tests of tests/witness/portable, whose kernels run on the GPU, not in the interpreter."""
    folder = ROOT / "tests" / "witness" / "portable"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
    where = (f"--rootdir={folder}", f"--confcutdir={folder}")
    tests = (f"{folder / file}" for file in files)
    path = ("{tree}", OPS, f"{folder}")
    return Run(base="0.33.0", name=name, words=(*words, *where, *tests), path=path)


def kept_kv(name: str, run: str, *flags: str, **more: Any) -> Run:
    """A run of tests.gpu.kept_kv, which is on one GPU."""
    return servers("0.33.0", name, "kept_kv", run, *flags, **more)


RANDOM = ("-m", "tests.gpu.sparse_mla_random", "{tree}")
# Compilers beside them would slow them down.
TIMED = ("33-sparse-mla", "33-deepgemm", "33-random", "33-sanitizer")
RUNS = (
    servers("0.33.0", "33-v4", *V4, "--serve", *KEEP, limit=800),
    servers("0.33.0", "33-hybrid", *HYBRID, "--serve", *KEEP),
    servers("0.33.0", "33-moe", *MOE, "--serve", *KEEP),
    servers("0.33.0", "33-dense", *DENSE, "--serve", *KEEP),
    servers("0.33.0", "33-smoke", *SMOKE, "--serve", *KEEP),
    # The tools' wheels are those that `python -m tests.gpu.bench --fetch` puts there.
    servers("0.33.0", "33-bench", "bench", "--tools", "{target}/tools", "--serve", *KEEP,
            environment={"SM12X_CACHE": "{out}/33-bench.cache"}),
    servers("0.33.0", "33-hybrid-stock", *HYBRID, tree="stock", against="33-hybrid"),
    servers("0.33.0", "33-moe-stock", *MOE, tree="stock", against="33-moe"),
    servers("0.33.0", "33-dense-stock", *DENSE, tree="stock", against="33-dense"),
    servers("0.33.0", "33-smoke-stock", *SMOKE, tree="stock", against="33-smoke"),
    servers("0.33.0", "33-v4-stock", *V4, tree="stock", against="33-v4", limit=800),
    # A captured all-reduce has the addresses of what a communicator gives back in its sleep.
    servers("0.33.0", "33-residue4", *MOE, "--graphs", *RESIDUE, *PCIE4, *SUSPEND, gpus=4),
    servers("0.33.0", "33-residue2", *MOE, "--graphs", *RESIDUE, *PCIE2, *SUSPEND, gpus=2),
    # As between cards that cannot read each other's memory.
    servers("0.33.0", "33-residue4-no-peers", *MOE, "--graphs", *RESIDUE, *PCIE4, *KEEP, gpus=4,
            environment=NO_PEERS),
    servers("0.33.0", "33-residue2-no-peers", *MOE, "--graphs", *RESIDUE, *PCIE2, *KEEP, gpus=2,
            environment=NO_PEERS),
    servers("0.33.0", "33-offload4", *MOE, "--graphs", *RESIDUE, *PCIE4, *OFFLOAD, gpus=4),
    servers("0.33.0", "33-offload2", *MOE, "--graphs", *RESIDUE, *PCIE2, *OFFLOAD, gpus=2),
    servers("0.33.0", "33-offload", *MOE, "--graphs", *RESIDUE, *OFFLOAD),
    servers("0.33.0", "33-graphs4", *MOE, "--graphs", *RESIDUE, *PCIE4, *KEEP, gpus=4),
    servers("0.33.0", "33-graphs2", *MOE, "--graphs", *RESIDUE, *PCIE2, *KEEP, gpus=2),
    servers("0.33.0", "33-graphs", *MOE, "--graphs", *RESIDUE, *KEEP),
    servers("0.33.0", "33-rotate", *TURNS, "--cycles", "100", "--serve", *KEEP, *FEW_SEQUENCES,
            limit=700),
    servers("0.33.0", "33-rotate4", *LARGE4, "--cycles", "15", *REPLIES, "--serve", *PCIE4, *KEEP,
            *FEW_SEQUENCES, gpus=4, steps=True, limit=900),
    servers("0.33.0", "33-rotate4-stock", *LARGE4, "--cycles", "4", "--turns", "--serve", *PCIE4,
            *FEW_SEQUENCES, tree="stock", gpus=4, limit=700),
    servers("0.33.0", "33-rotate2", *LARGE2, "--cycles", "15", *REPLIES, "--serve", *PCIE2, *KEEP,
            *FEW_SEQUENCES, gpus=2, limit=700),
    servers("0.33.0", "33-rotate2-stock", *LARGE2, "--cycles", "4", "--turns", "--serve", *PCIE2,
            *FEW_SEQUENCES, tree="stock", gpus=2, limit=700),
    # One address for both, which swaps by request: 2 starts and 2 more after a kill -9.
    servers("0.33.0", "33-pool", "pool", "--graphs", "--dummy", "--serve", *KEEP, *FEW_SEQUENCES,
            limit=400),
    servers("0.33.0", "33-pool2", "pool", "--graphs", "--dummy", "--serve", *PCIE2, *KEEP,
            *FEW_SEQUENCES, gpus=2, limit=400),
    servers("0.33.0", "33-api-servers", "api_servers", "--serve", *REFUSING),
    servers("0.33.0", "33-deep", "deep", "--serve", *KEEP),
    servers("0.33.0", "33-deep-stock", "deep", tree="stock"),
    allocator("0.33.0", "33-allocator"),
    by_allocator("0.33.0", "33-sleep", "sleep", "cumem={target}/stock", "keep={tree}+plugin+keep",
                 "unprepared={tree}+plugin+keep+unprepared"),
    # What four workers take at a time, without their server.
    by_allocator("0.33.0", "33-sleep4", "sleep", "one={tree}+plugin+keep",
                 "four={tree}+plugin+keep+4", gpus=4),
    # KV that a sleep keeps: what a conversation gains, texts of each kind, and many swaps.
    kept_kv("33-kv-conversation", "conversation", limit=300),
    kept_kv("33-kv-swap", "swap", limit=300),
    kept_kv("33-kv-dense", "kinds", "--model", "dense-fp8", "--lora", limit=300),
    kept_kv("33-kv-moe", "kinds", limit=300),
    kept_kv("33-kv-hybrid", "kinds", "--model", "hybrid", limit=300),
    kept_kv("33-kv-v4", "kinds", "--model", "deepseek-v4", "--longest", "5000",
            environment=PORTABLE, limit=800),
    kept_kv("33-kv-mtp", "kinds", "--model", "deepseek-v4", "--longest", "5000", "--serve",
            *draft(2), environment=PORTABLE, limit=800),
    kept_kv("33-kv-soak", "soak", "--swaps", "100", limit=300),
    # The end of a server whose KV is kept, and of its peer.
    servers("0.33.0", "33-kv-rotate", *TURNS, "--cycles", "3", "--serve", *KEEP, *FEW_SEQUENCES,
            "--enable-prefix-caching", "--sleep-keep-kv", limit=500),
    by_allocator("0.33.0", "33-churn", "load_churn", "stock={target}/stock", "stack={tree}"),
    # Blocks of the KV cache that are kept, beside bare copies.
    Run(base="0.33.0", name="33-kv-copies", limit=200,
        words=("-m", "tests.gpu.kv_copies", "{tree}", "--out", "{out}/33-kv-copies.json"),
        environment={"TRITON_CACHE_DIR": "{out}/33-kv-copies.triton"}, path=()),
    # A start that compiles FlashInfer's sampling, and one that finds it compiled.
    Run(base="0.33.0", name="33-aot-build", gpus=0, limit=600,
        words=("-m", "tests.gpu.aot", "{target}", "--base", "0.33.0",
               "--out", "{out}/33-aot-build.json")),
    servers("0.33.0", "33-jit", *SMOKE, "--serve", *KEEP, environment=sampler("33-jit")),
    servers("0.33.0", "33-aot", *SMOKE, "--serve", *KEEP, tree="aot",
            environment=sampler("33-aot")),
    servers("0.33.0", "33-tp2", *MOE, "--serve", *TP2, *KEEP, gpus=2, against="33-moe"),
    servers("0.33.0", "33-tp2-one", *MOE, "--serve", *TP2, *KEEP, shared=True, against="33-moe"),
    # The plan beside the servers' own logs.
    Run(base="0.33.0", name="33-plans-one", limit=500, environment=SETTINGS,
        words=("-m", "tests.gpu.plans", "--gpus", "1", "--out", "{out}/33-plans-one.json",
               "--logs", "{out}/33-plans-one.logs")),
    Run(base="0.33.0", name="33-plans", gpus=2, limit=700, environment=SETTINGS,
        words=("-m", "tests.gpu.plans", "--gpus", "2", "--out", "{out}/33-plans.json",
               "--logs", "{out}/33-plans.logs")),
    # The portable kernels of DeepSeek V4 and V4.1: tests/gpu/portable.sh.
    kernels("33-kernels", "test_logits.py", "test_sparse_mla_kernel.py",
            "test_block_fp8_einsum.py"),
    portable("33-v4-portable", V4, against="", limit=800),
    servers("0.33.0", "33-v4-graphs", *V4, "--graphs", "--serve", *KEEP, environment=STOCK,
            against="33-v4-portable", limit=800),
    portable("33-v4-mtp", V4, *draft(2)),
    portable("33-v4-absent", V4, tree=ABSENT, environment=NO_DEEP_GEMM),
    portable("33-v4-no-deepgemm", V4, environment=NO_DEEP_GEMM),
    portable("33-v4-tp2", V4, *TP2, gpus=2),
    portable("33-v4-first-stage", V4, against="", environment=FIRST_STAGE),
    portable("33-v4-pp2", V4, *PP2, gpus=2, environment=FIRST_STAGE, against="33-v4-first-stage"),
    portable("33-v41-portable", V41, against="", pages=True, limit=800),
    portable("33-v4-beside", (*V4, *BESIDE), against="", environment=FIRST_STAGE, limit=600),
    portable("33-v41-beside", (*V41, *BESIDE), against="", pages=True, limit=600),
    portable("33-v4-pp2-one", V4, *PP2, shared=True, environment=FIRST_STAGE,
             against="33-v4-beside"),
    portable("33-v41-pp2-one", V41, *PP2, shared=True, pages=True, against="33-v41-beside"),
    # FlashMLA on 9.0 takes no other pages.
    servers("0.33.0", "33-v41-graphs", *V41, "--graphs", "--serve", *KEEP, "--block-size", "64",
            environment=STOCK, against="33-v41-portable", limit=800),
    portable("33-v41-tp2", V41, *TP2, gpus=2, pages=True, against="33-v41-portable"),
    portable("33-v41-pp2", V41, *PP2, gpus=2, pages=True, against="33-v41-portable"),
    measured("0.33.0", "33-sparse-mla", "benchmarks/sparse_mla.py", "{tree}", "--flashmla",
             "{tree}", "--random", "150"),
    measured("0.33.0", "33-deepgemm", "benchmarks/portable_deepgemm.py", "--no-sweep",
             path=(OPS, "{tree}/vllm/third_party")),
    measured("0.33.0", "33-tiles", "benchmarks/sparse_mla_tiles.py", "{tree}"),
    measured("0.33.0", "33-random", *RANDOM, "--shapes", "10000"),
    Run(base="0.33.0", name="33-sanitizer",
        # Triton 3.8 asks the driver for attributes that 9.0 has not, and goes on.
        words=("compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9",
               sys.executable, *RANDOM, "--out", "{out}/33-sanitizer.json", "--first", "20000",
               "--shapes", "60", "--step", "1")),
    # What NCCL's communicators hold, with the host's own PyTorch.
    Run(base="0.33.0", name="33-nccl", gpus=4,
        words=("benchmarks/nccl_memory.py", "--out", "{out}"), path=()),
    # FlashAttention 2 with code of our own, after what is timed; 9.0 takes the third otherwise. One
    # cubin for all of SM12x takes four minutes less than two.
    Run(base="0.33.0", name="33-native-build", gpus=0, limit=1500,
        words=("-m", "tests.gpu.native", "{target}", "--base", "0.33.0",
               "--module", "_vllm_fa2_C", "--arch-list", "9.0a;12.0f",
               "--out", "{out}/33-native-build.json"),
        after=TIMED),
    servers("0.33.0", "33-native", *DENSE, "--cycles", "1", "--serve", *KEEP,
            "--attention-backend", "FLASH_ATTN", "--attention-config.flash_attn_version", "2",
            tree="native", limit=800),
    # Every module of the release, for SM12x alone: audits and ops.
    Run(base="0.33.0", name="33-full-build", gpus=0, limit=1700,
        words=("-m", "tests.gpu.native", "{target}", "--base", "0.33.0", "--into", "full",
               "--arch-list", "12.0a;12.1a", "--out", "{out}/33-full-build.json"),
        after=("33-native-build", *TIMED)),
)  # fmt: skip


def next_run(
    waiting: Sequence[Run],
    *,
    free: int,
    pending: Collection[str],
    there: Collection[tuple[str, str]],
) -> Run | None:
    """The run to start now, if any.

    Runs keep their order, but one whose packages are not there yet, or that comes after a run that
    has not ended, lets those behind it pass. One that waits for more GPUs lets only those pass that
    take none: it would wait for as long as there are small ones.

    Args:
        free: GPUs that no run has.
        pending: names of runs that wait or run.
        there: bases and trees that can be used.
    """
    room = free
    for run in waiting:
        if (run.base, run.tree) not in there or {*run.after} & {*pending}:
            continue
        if run.gpus <= room:
            return run
        room = 0
    return None


@dataclass(frozen=True, kw_only=True)
class Result:
    """``code`` is the exit code, None of a run that could not start."""

    code: int | None = None
    seconds: float = 0.0


class Started:
    """A run under way: its process, its GPUs, and since when."""

    def __init__(self, run: Run, tree: Path, out: Path, gpus: Sequence[int], number: int) -> None:
        def filled(words: Sequence[str]) -> list[str]:
            places = {"{target}": tree.parent, "{tree}": tree, "{out}": out}
            for place, folder in places.items():
                words = [word.replace(place, f"{folder}") for word in words]
            return [*words]

        self.run, self.gpus = run, tuple(gpus)
        path = [f"{ROOT}", f"{ROOT / 'scripts'}", *filled(run.path)]
        words = filled(run.words)
        if words[0] == "-m" or words[0].endswith(".py"):
            words = [sys.executable, *words]
        # Ports of servers and of their engines, far from each other and from another walk's.
        first = 8200 + 100 * int(os.environ.get("SM12X_WALK", "0"))
        port = first + number
        ports = {"SM12X_TEST_PORT": f"{port}", "VLLM_PORT": f"{20000 + 200 * (port - 8200)}"}
        own = {"PYTHONPATH": ":".join(path), "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        settings = zip(run.environment, filled([*run.environment.values()]), strict=True)
        self._began = time.monotonic()
        self.process = process.Background(
            words,
            log=out / f"{run.name}.txt",
            cwd=ROOT,
            env={**dict(settings), **ports, **own},
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def ended(self) -> int | None:
        """The exit code, None while it runs. A run that is over its time is ended."""
        if self.process.poll() is None and self.seconds > self.run.limit:
            process.end_all([self.process], GRACE)
        return self.process.poll()


@contextlib.contextmanager
def variant(target: Path, name: str) -> Iterator[Path]:
    """Yield a copy of TARGET/stack by hard links, which is TARGET/NAME once the block succeeds."""
    staged = target / f"{name}.part"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(target / "stack", staged, copy_function=os.link, symlinks=True)
    yield staged
    staged.rename(target / name)


def without_libraries(target: Path) -> None:
    """Make TARGET/absent."""
    with variant(target, ABSENT) as staged:
        for pattern in LEFT_OUT:
            for path in [*staged.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def usable(targets: Mapping[str, Path], runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The bases and trees of ``runs`` that are there; makes the one that is made here."""
    for base, tree in {(run.base, run.tree) for run in runs}:
        target = targets[base]
        if not (target / UNPACKED).is_file():
            continue
        if tree == ABSENT and not (target / ABSENT).is_dir():
            without_libraries(target)
        if (target / tree).is_dir():
            yield base, tree


def walk(
    runs: Sequence[Run], targets: Mapping[str, Path], out: Path, *, gpus: int, patience: float
) -> dict[str, Result]:
    """Start the runs as GPUs become free.

    Args:
        patience: seconds to wait for packages that are not there, while nothing runs.

    Returns:
        What became of each run, by name.
    """
    results = {run.name: Result() for run in runs}
    waiting, running, free = [*runs], list[Started](), [*range(gpus)]
    idle = time.monotonic()
    try:
        while waiting or running:
            for started in [*running]:
                code = started.ended()
                if code is None:
                    continue
                running.remove(started)
                free = sorted([*free, *started.gpus])
                seconds = round(started.seconds, 1)
                results[started.run.name] = Result(code=code, seconds=seconds)
                print(f"{started.run.name}: exit code {code} after {seconds} s", flush=True)
                write(results, out)
            pending = {run.name for run in (*waiting, *(started.run for started in running))}
            there = set(usable(targets, waiting))
            run = next_run(waiting, free=len(free), pending=pending, there=there)
            if run:
                waiting.remove(run)
                taken, free = free[: run.gpus], free[run.gpus :]
                tree = targets[run.base] / run.tree
                number = len(runs) - len(waiting)
                running.append(Started(run, tree, out, taken, number))
                where = f"on GPU {', '.join(map(str, taken))}" if taken else "beside the others"
                print(f"{run.name}: started {where}", flush=True)
                continue
            if running:
                idle = time.monotonic()
            elif time.monotonic() - idle > patience:
                break
            time.sleep(0.5)
    finally:
        process.end_all([started.process for started in running], GRACE)
        write(results, out)
    return results


def write(results: Mapping[str, Result], out: Path) -> None:
    told = {name: asdict(result) for name, result in results.items()}
    (out / "walk.json").write_text(json.dumps(told, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="+", metavar="BASE=TARGET", help="a base, unpacked")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", type=int, default=2, help="of the host (default: 2)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these alone, in order"
    )
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all runs but these")
    parser.add_argument(
        "--patience", type=float, default=0, metavar="S", help="seconds to wait for packages"
    )
    options = parser.parse_args()
    targets: dict[str, Path] = {}
    for word in options.target:
        base, _, folder = word.partition("=")
        if base not in {run.base for run in RUNS} or not folder:
            parser.error(
                f"{word!r} is not BASE=TARGET with a base of {sorted({r.base for r in RUNS})}"
            )
        targets[base] = Path(folder).resolve()
    known = {run.name: run for run in RUNS}
    unknown = {*options.only, *options.skip} - {*known}
    if unknown:
        parser.error(f"no run is called {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in dict.fromkeys(options.only)] or RUNS
    runs = [run for run in chosen if run.base in targets and run.name not in options.skip]
    too_large = [run.name for run in runs if run.gpus > options.gpus]
    runs = [run for run in runs if run.gpus <= options.gpus]
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = walk(runs, targets, out, gpus=options.gpus, patience=options.patience)
    for name in too_large:
        print(f"{name}: not run, needs more GPUs than --gpus")
    wrong = [name for name, result in results.items() if result.code != 0]
    for name in wrong:
        code = results[name].code
        print(
            f"{name}: " + ("not run, no packages" if code is None else f"failed, {out}/{name}.txt")
        )
    print(f"{len(results) - len(wrong)} of {len(results) + len(too_large)} runs passed")
    return 1 if wrong or too_large else 0


if __name__ == "__main__":
    sys.exit(main())

"""Marlin-MoE's temporary buffer (c_tmp) is as large as its kernel addresses, on each release.

vllm#43730, as #36889 before it, takes the illegal memory accesses of W4A16 experts for a c_tmp that
is too small, and allocates more. It is not too small, and no patch of ours changes it. The threads
compute the highest address with 256 threads; only the 32 * tb_n_warps that hold sums write (the
kernel's ``is_th_active``), 64 of them for thread_n = 128. This is shown by computation: the parts
of the release's ops.cu and marlin_template.h that choose a configuration, allocate c_tmp, deal the
tiles to the thread blocks and address c_tmp are cut out, compiled for the CPU and run, for every
small problem and for random ones up to the sizes of today's models.

What is not the release's text is in marlin_buffer.cpp: loops, random shapes, and a host that has
any number of registers, shared memory, SMs and compiled kernels.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import tarfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm12x import layout
from sm12x.core import index
from sm12x.stack.model import base as bases

DRIVER = Path(__file__).with_name("marlin_buffer.cpp")
OPS = "csrc/moe/marlin_moe_wna16/ops.cu"
KERNEL = "csrc/moe/marlin_moe_wna16/marlin_template.h"
LIMITS = "csrc/quantization/marlin/marlin.cuh"
ALIGN = "vllm/model_executor/layers/fused_moe/moe_align_block_size.py"
OPERATOR = "moe_wna16_marlin_gemm"
# Arguments that set aside the operator's own choice of a configuration.
CHOSEN = {"thread_k", "thread_n", "blocks_per_sm"}

Walk = Callable[..., dict[str, float]]


@pytest.fixture(scope="module", params=bases.versions())
def source(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The release's files that the tests read, path -> text."""
    base = bases.load(request.param)
    archive = index.fetch("vllm", base.sdist.name, base.sdist.sha256, cache=layout.cache())
    found: dict[str, str] = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            if path in (OPS, KERNEL, LIMITS) or re.fullmatch(r"vllm/.*\.py", path):
                file = opened.extractfile(member)
                assert file is not None
                found[path] = file.read().decode()
    return found


def cut(text: str, first: str, end: str, *, through: bool = False) -> str:
    """From ``first``, which occurs once, to the next ``end``."""
    assert text.count(first) == 1, f"{first!r} occurs {text.count(first)} times"
    start = text.index(first)
    stop = text.index(end, start + len(first))
    return text[start : stop + (len(end) if through else 0)]


def at_run_time(text: str) -> str:
    """The kernel's text with the parameters of its template as plain variables."""
    text = text.replace("if constexpr", "if")
    return re.sub(r"\b(?:static )?constexpr\b", "const", text)


def parts(source: Mapping[str, str]) -> dict[str, str]:
    """What marlin_buffer.cpp includes, in the release's own words."""
    host = source[OPS]
    kernel = source[KERNEL]
    kernel = kernel[kernel.rindex("__global__ void Marlin(") :]
    host_choice = host[: host.index("void marlin_mm(")]
    call = cut(host, "exec_cfg = determine_exec_config(", ")")
    return {
        "limits": "\n".join(
            re.findall(r"static constexpr int (?:min|max)_thread_[nk] = \d+;", source[LIMITS])
        ),
        "config": cut(host, "typedef struct {\n  int thread_k;", "MarlinFuncPtr get_marlin_kernel(")
        + host_choice[host_choice.rindex("exec_config_t determine_exec_config(") :],
        "size": cut(host, "long max_c_tmp_size", "c_tmp = "),
        "launch": cut(host, "int thread_m_blocks = div_ceil", "bool is_a_8bit"),
        "arguments": call.partition("(")[2],
        "blocks": cut(host, "int blocks = sms", "\n"),
        "tiles": at_run_time(cut(kernel, "// parallel: num valid", "// read moe block data given")),
        "slices": at_run_time(
            cut(kernel, "// Compute all information about the current slice", "// A sizes/strides")
        ),
        "warps": at_run_time(cut(kernel, "constexpr int tb_n_warps", ";", through=True)),
        "reduce": at_run_time(cut(kernel, "auto global_reduce_fp32 =", "\n  };", through=True)),
        "call": cut(
            kernel, "if (slice_count > 1 && !use_atomic_add) {", "\n      }\n", through=True
        ),
        "next": cut(kernel, "slice_row = 0;\n      if (!in_part2)", "init_slice();", through=True),
    }


def build(found: Mapping[str, str], folder: Path) -> Walk:
    """Compile the driver with these parts; the function runs it and gives its last line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (folder / f"{name}.inc").write_text(text + "\n")
    program = folder / "walk"
    words = ("g++", "-std=c++17", "-O2", "-w", "-I", folder, DRIVER, "-o", program)
    subprocess.run(words, check=True)

    def walk(*arguments: int) -> dict[str, float]:
        done = subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=True
        )
        lines = done.stdout.splitlines()
        words = lines[-1].split()
        answer = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        if lines[0].startswith("int4 "):
            answer |= dict(zip(("used", "of"), map(float, lines[0].split()[1::2]), strict=True))
        print(done.stdout)
        return answer

    return walk


@pytest.fixture(scope="module")
def walk(source: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return build(parts(source), tmp_path_factory.mktemp("walk"))


def test_no_small_problem_reduces_outside_of_the_buffer(walk: Walk) -> None:
    """Every grid of up to 8 blocks, 4 x 9 tiles of n and tokens, 9 of k, each configuration."""
    found = walk(8)
    assert found["reducing"] > 300_000
    assert found["too_small"] == 0
    assert found["locks_short"] == 0
    # The bound is reached: a smaller buffer would not do.
    assert found["fullest"] == 1


@pytest.mark.parametrize("seed", range(2))
def test_no_random_problem_reduces_outside_of_the_buffer(walk: Walk, seed: int) -> None:
    """Shapes up to n = 32768, 4096 blocks of tokens, 256 SMs; the release chooses the tiles."""
    found = walk(seed, 10_000)
    assert found["reducing"] > 1_000
    assert found["too_small"] == 0
    assert found["locks_short"] == 0


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("if (moe_block_size == 8) max_c_tmp_size *= 2;", ""),
        ("sms * 4 *", "sms * 3 *"),
        ("moe_block_size *", "(moe_block_size - 4) *"),
        ("(long)size_n *", "(long)(size_n - 64) *"),
    ],
)
def test_a_smaller_buffer_is_found_too_small(
    source: Mapping[str, str], tmp_path: Path, find: str, replace: str
) -> None:
    found = parts(source)
    assert found["size"].count(find) == 1
    found["size"] = found["size"].replace(find, replace)
    walk = build(found, tmp_path)
    assert walk(4)["too_small"] > 0


def test_all_threads_writing_would_be_found(source: Mapping[str, str], tmp_path: Path) -> None:
    """What the threads compute: without the kernel's own limit the buffer would be too small."""
    found = parts(source)
    find = "if (!is_th_active) {"
    assert found["reduce"].count(find) == 1
    found["reduce"] = found["reduce"].replace(find, "if (false) {")
    assert build(found, tmp_path)(4)["too_small"] > 0


def test_the_example_of_the_report_stays_inside(walk: Walk) -> None:
    """#36889: RTX A6000, one token, n = 2560, 64 sorted ids, 168 blocks, 128 x 128 tiles.

    It computes 83,200 int4 of 81,920 from 159 * 512 + 256 * 6 + 255. The kernel's 64 threads end
    at 159 * 512 + 64 * 6 + 63. With k = 512, an assumption, no tile is split: nothing is reduced.
    """

    def example(k: int) -> dict[str, float]:
        return walk(8, 2560, k, 8, 84, 2, 256, 128, 128, 8, 0, 64)

    deep = example(4096)
    assert (deep["used"], deep["of"]) == (159 * 512 + 64 * 6 + 63 + 1, 81_920)
    assert example(512)["used"] == 0


def test_the_sorted_ids_hold_the_padded_tokens(source: Mapping[str, str]) -> None:
    """The length that c_tmp is computed from is no less than what the kernel is given to do."""
    (function,) = (
        node
        for node in ast.parse(source[ALIGN]).body
        if isinstance(node, ast.FunctionDef) and node.name == "moe_align_block_size"
        if not node.decorator_list
    )
    body = ast.get_source_segment(source[ALIGN], function, padded=True)
    assert body is not None
    lines = textwrap.dedent(cut(body, "    max_num_tokens_padded = topk_ids", "    sorted_ids ="))
    draw = random.Random(0)  # noqa: S311
    for _ in range(5_000):
        experts, block = draw.choice((1, 8, 60, 256, 512)), draw.choice((8, 16, 32, 48, 64))
        chosen = draw.randint(1, draw.choice((4, 64, 4096)))
        counts = [0] * experts
        # Few experts take all, or each takes its share.
        of = draw.randint(1, experts)
        for _ in range(chosen):
            counts[draw.randrange(of)] += 1
        names: dict[str, Any] = {
            "topk_ids": SimpleNamespace(numel=lambda chosen=chosen: chosen),
            "num_experts": experts,
            "block_size": block,
            "pad_sorted_ids": draw.random() < 0.5,
            "round_up": lambda number, by: -(-number // by) * by,
        }
        exec(lines, names)  # noqa: S102 (the release's own formula)
        padded = sum(-(-count // block) * block for count in counts)
        assert padded <= names["max_num_tokens_padded"]


def test_nothing_in_the_release_sets_the_configuration_aside(source: Mapping[str, str]) -> None:
    """The bound holds for up to four blocks on an SM, which the operator's own choice keeps to."""
    callers = 0
    for path, text in source.items():
        if not path.endswith(".py") or OPERATOR not in text or path.endswith("_custom_ops.py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(OPERATOR):
                callers += 1
                assert not CHOSEN & {word.arg for word in node.keywords}, path
    assert callers >= 2

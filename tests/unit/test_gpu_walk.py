"""In which order tests.gpu.walk starts its runs, and what it makes for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu import walk
from tests.gpu.walk import ABSENT, RUNS, UNPACKED, Run, next_run

THERE = {("b", "stack")}


def run(name: str, *, gpus: int = 1, after: tuple[str, ...] = (), tree: str = "stack") -> Run:
    return Run(base="b", name=name, words=(), gpus=gpus, after=after, tree=tree)


@pytest.mark.parametrize(
    ("waiting", "free", "pending", "expected"),
    [
        ([run("a"), run("b")], 1, set(), "a"),
        ([run("a"), run("b")], 0, set(), None),
        ([run("a", after=("z",)), run("b")], 1, {"z"}, "b"),
        ([run("a", after=("z",)), run("b")], 1, set(), "a"),
        ([run("a", tree="stock"), run("b")], 1, set(), "b"),
        # A small run does not pass a large one.
        ([run("a", gpus=2), run("b")], 1, set(), None),
        ([run("a", gpus=2), run("b"), run("c", gpus=0)], 1, set(), "c"),
        ([run("a", gpus=2), run("b")], 2, set(), "a"),
        ([], 2, set(), None),
    ],
)
def test_the_next_run(
    waiting: list[Run], free: int, pending: set[str], expected: str | None
) -> None:
    found = next_run(waiting, free=free, pending=pending, there=THERE)
    assert (found.name if found else None) == expected


def test_runs_have_names_of_their_own_and_come_after_earlier_ones() -> None:
    names = [entry.name for entry in RUNS]
    assert len({*names}) == len(names)
    for number, entry in enumerate(RUNS):
        assert {*entry.after} <= {*names[:number]}


def test_a_base_is_usable_once_it_is_unpacked(tmp_path: Path) -> None:
    package = tmp_path / "stack" / "vllm"
    (package / "third_party" / "deep_gemm").mkdir(parents=True)
    (package / "third_party" / "deep_gemm" / "__init__.py").touch()
    (package / "_flashmla_C.abi3.so").touch()
    (package / "kept.py").write_text("kept")
    runs = [run("a"), run("c", tree=ABSENT), run("d", tree="stock")]
    assert set(walk.usable({"b": tmp_path}, runs)) == set()
    (tmp_path / UNPACKED).touch()
    assert set(walk.usable({"b": tmp_path}, runs)) == {("b", "stack"), ("b", ABSENT)}
    left = {
        path.relative_to(tmp_path / ABSENT).as_posix() for path in (tmp_path / ABSENT).rglob("*")
    }
    assert left == {"vllm", "vllm/kept.py", "vllm/third_party"}
    assert (package / "_flashmla_C.abi3.so").is_file()
    assert (package / "third_party" / "deep_gemm" / "__init__.py").is_file()

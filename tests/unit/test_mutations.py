"""Mutations: which there are, what they make of a text, and how an outcome is judged."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.tools import derive, mutate
from tests.tools.mutate import MutantOutcome, MutationReport

from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases
from sm12x.stack.model.series import Stack
from sm12x_dev.witness import junit, mutations
from sm12x_dev.witness.pytests import Run

WITNESS = "tests/witness/test_it.py"
ADDED = """diff --git a/vllm/a.py b/vllm/a.py
index 1..2 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1 +1,4 @@
 one = 1
+two = 2
+if two > one:
+    print(two)
diff --git a/csrc/a.cpp b/csrc/a.cpp
@@ -1 +1,2 @@
+  release();
"""


def _patch(name: str, *, content: str = ADDED) -> Any:
    files = [SimpleNamespace(path=path) for path in ("vllm/a.py", "csrc/a.cpp")]
    return SimpleNamespace(
        name=name, files=files, witnesses=(WITNESS,), content=lambda: content.encode()
    )


def _stack(*names: str) -> Stack:
    return cast(Stack, SimpleNamespace(patches=tuple(_patch(name) for name in names)))


def _base(folder: Path, *entries: str) -> bases.Base:
    (folder / mutations.NAME).write_text("schema = 1\n" + "\n".join(entries))
    return cast(bases.Base, SimpleNamespace(folder=folder, version="1.0"))


def _entry(patch: str = "Correct", find: str = "two = 2", more: str = "") -> str:
    return (
        f'[[mutation]]\npatch = "{patch}"\nfile = "vllm/a.py"\nfind = "{find}"\n'
        f'replace = "two = 1"\nwhy = "it is two"\n{more}'
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/a.py").write_text("one = 1\ntwo = 2\nif two > one:\n    print(two)\n")
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Correct-it", "0002-Correct-it-well.patch"),
        ("0001-Correct-it", "0002-Correct-it-well.patch"),
        ("0002-Correct-it-well.patch", "0002-Correct-it-well.patch"),
        ("Add", "0001-Add.patch"),
        ("Correct", None),
        ("0003", None),
        ("", None),
        ("it-well", None),
    ],
)
def test_a_patch_is_found_by_the_beginning_of_its_name(name: str, found: str | None) -> None:
    stack = _stack("0001-Add.patch", "0002-Correct-it-well.patch", "0003-Correct-that.patch")
    patch = mutations.patch_of(stack, name)
    assert (patch.name if patch else None) == found


def test_a_mutation_changes_the_one_place(tmp_path: Path, tree: Path) -> None:
    stack = _stack("0001-Correct-it.patch")
    mutants, findings = mutations.kept(_base(tmp_path, _entry()), stack, tree, tmp_path)
    (mutant,) = mutants
    assert findings == []
    assert (mutant.stale, mutant.text.split("\n")[1]) == ("", "two = 1")
    assert mutations.check(_base(tmp_path, _entry()), stack, tree, tmp_path) == []


@pytest.mark.parametrize("find", ["two = 3", "two", "", "two = 1"])
def test_a_stale_mutation_is_found(tmp_path: Path, tree: Path, find: str) -> None:
    base, stack = _base(tmp_path, _entry(find=find)), _stack("0001-Correct-it.patch")
    (mutant,) = mutations.kept(base, stack, tree, tmp_path)[0]
    assert mutant.stale
    (finding,) = mutations.check(base, stack, tree, tmp_path)
    assert finding.line == 2
    # Without the source there is no text to compare.
    assert mutations.check(base, stack, None, tmp_path) == []


def test_a_mutation_of_a_file_that_the_patch_does_not_change_is_stale(
    tmp_path: Path, tree: Path
) -> None:
    base = _base(tmp_path, _entry().replace("vllm/a.py", "vllm/b.py"))
    (mutant,) = mutations.kept(base, _stack("0001-Correct-it.patch"), tree, tmp_path)[0]
    assert "vllm/b.py" in mutant.stale


def test_a_mutation_of_the_package_is_made_on_the_checkout(tmp_path: Path, tree: Path) -> None:
    # GIVEN a checkout with the package that the witnesses of a patch run
    file = f"{mutations.PACKAGE}/a.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text((tree / "vllm" / "a.py").read_text())
    base = _base(tmp_path, _entry().replace("vllm/a.py", file))
    # THEN a file of it is mutated as one that the patch changes
    (mutant,) = mutations.kept(base, _stack("0001-Correct-it.patch"), tree, tmp_path)[0]
    assert (mutant.stale, mutant.text.split("\n")[1]) == ("", "two = 1")


def test_what_is_wrong_with_the_list(tmp_path: Path) -> None:
    stack = _stack("0001-Correct-it.patch", "0002-Add.patch")
    base = _base(
        tmp_path,
        _entry("Mended"),
        _entry("Correct", more='by = "tests/witness/test_other.py::test_x"\n'),
    )
    findings = mutations.check(base, stack, None, tmp_path)
    assert [finding.line for finding in findings] == [2, 1, 9]
    assert "0002-Add.patch" in findings[1].message
    assert "test_other" in findings[2].message
    assert mutations.kept(base, stack, tmp_path, tmp_path)[1] == findings[:1]


@pytest.mark.parametrize(
    ("old", "new"), [("why", "wy"), ('"two = 1"', "1"), ("schema = 1", "schema = 2"), ("[[", "[")]
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str) -> None:
    base = _base(tmp_path, _entry())
    path = base.folder / mutations.NAME
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadFileError):
        mutations.load(base)


def test_no_list_is_no_mutation(tmp_path: Path) -> None:
    base = cast(bases.Base, SimpleNamespace(folder=tmp_path, version="1.0"))
    assert mutations.load(base) == ()
    assert mutations.check(base, _stack("0001-Correct-it.patch"), None, tmp_path) == []
    with pytest.raises(BadFileError):
        mutate.require(base)


def test_mutations_are_derived_of_added_lines_alone(tmp_path: Path, tree: Path) -> None:
    untouched = tmp_path / "base"
    (untouched / "vllm").mkdir(parents=True)
    (untouched / "vllm/a.py").write_text("one = 1\n")
    (untouched / "csrc").mkdir()
    (untouched / "csrc/a.cpp").write_text("void f() {\n  int a = 1;\n}\n")
    (tree / "csrc").mkdir()
    (tree / "csrc/a.cpp").write_text("void f() {\n  int a = 1;\n  release();\n}\n")
    stack = _stack("0001-Correct-it.patch")
    mutants = derive.derived(stack, untouched, tree, count=9, seed=0)
    assert [(mutant.file, mutant.label, mutant.why) for mutant in mutants] == [
        ("csrc/a.cpp", "line 3", "without: release();"),
        ("vllm/a.py", "line 2", "without: two = 2"),
        ("vllm/a.py", "line 3", "negated: if two > one:"),
        ("vllm/a.py", "line 4", "without: print(two)"),
    ]
    texts = [mutant.text.split("\n") for mutant in mutants]
    assert texts[0][2].strip() == ";"
    assert texts[1][1] == "pass"
    assert texts[2][2] == "if not (two > one):"
    assert texts[3][3] == "    pass"
    # Bounded, and the same for the same seed.
    few = derive.derived(stack, untouched, tree, count=2, seed=1)
    assert len(few) == 2
    assert few == derive.derived(stack, untouched, tree, count=2, seed=1)


def test_derived_python_stays_python() -> None:
    text = (
        'def f(a):\n    """Text."""\n    b = [\n        a,\n    ]\n    while a and b: a = 0\n'
        "    if (a\n        and b):\n        raise E(\n            a)\n    return a; c = 1\n"
    )
    found = list(derive._python(text, set(range(1, 20))))
    for _, _, mutated in found:
        ast.parse(mutated)
    assert sorted(line for line, _, _ in found) == [3, 6, 9, 11]


@pytest.mark.parametrize(
    ("line", "mutated"),
    [
        ("  release();", "  ;"),
        ("  count = 0;", "  ;"),
        ("  count = 0;  // done", "  ;"),
        ("  return 1;", "  ;"),
        ("  if (a && b()) {", "  if (!(a && b())) {"),
        ("  } else if (a) {", "  } else if (!(a)) {"),
        ("  int a = 0;", None),
        ("  CUresult result = map();", None),
        ("  const char* text = name();", None),
        ("  // release();", None),
        ("#define A b;", None),
        ("  a = b +", None),
        ("}", None),
    ],
)
def test_lines_of_cpp(line: str, mutated: str | None) -> None:
    found = list(derive._cpp(f"{{\n{line}\n}}\n", {2}))
    assert [text.split("\n")[1] for _, _, text in found] == ([mutated] if mutated else [])


def test_a_line_in_the_middle_of_a_statement_is_left_alone() -> None:
    assert list(derive._cpp("{\n  a(b,\n    c(1);\n", {3})) == []


def _run(*outcomes: str, problem: str = "") -> Run:
    tests = tuple(
        junit.Test(name=f"test_{n}", outcome=outcome, guard=False, said="", detail="", seconds=0)
        for n, outcome in enumerate(outcomes)
    )
    return Run(witness=WITNESS, side="mutant", tests=tests, problem=problem)


@pytest.mark.parametrize(
    ("run", "state", "test"),
    [
        (_run("passed", "failed"), mutate.KILLED, f"{WITNESS}::test_1"),
        (_run("passed", "passed"), mutate.SURVIVED, ""),
        (_run("passed", "error"), mutate.UNKNOWN, ""),
        (_run("skipped", "passed"), mutate.UNKNOWN, ""),
        (_run(), mutate.UNKNOWN, ""),
        (_run(problem="pytest was ended by signal 11\nmore"), mutate.UNKNOWN, ""),
    ],
)
def test_only_a_red_test_kills(run: Run, state: str, test: str) -> None:
    assert mutate.judge(run)[:2] == (state, test)


def _outcome(state: str) -> MutantOutcome:
    return MutantOutcome(
        patch="0001-Correct-it.patch",
        file="vllm/a.py",
        label="mutation 1",
        why="it is two",
        state=state,
        test="",
        said="",
    )


@pytest.mark.parametrize(
    ("states", "ok"),
    [
        ((mutate.KILLED, mutate.KILLED), True),
        ((mutate.KILLED, mutate.SURVIVED), False),
        ((mutate.KILLED, mutate.STALE), False),
        ((mutate.KILLED, mutate.UNKNOWN), False),
    ],
)
def test_what_fails_the_run(states: tuple[str, ...], ok: bool) -> None:
    report = MutationReport(
        base_version="1.0",
        stack_id="0",
        outcomes=tuple(_outcome(state) for state in states),
        findings=(),
    )
    assert report.ok is ok
    assert mutate.text(report).count("  ! ") == (0 if ok else 1)


def test_every_patch_has_a_mutation() -> None:
    from sm12x.stack.model import series

    for version in bases.versions():
        base = bases.load(version)
        stack = series.load(base)
        having = {
            patch.name
            for entry in mutations.load(base)
            if (patch := mutations.patch_of(stack, entry.patch))
        }
        assert having == {patch.name for patch in stack.patches}, version


def test_the_mutations_of_every_base_belong_to_its_patches() -> None:
    from sm12x.stack.model import series

    for version in bases.versions():
        base = bases.load(version)
        stack = series.load(base)
        for entry in mutations.load(base):
            assert mutations.patch_of(stack, entry.patch), f"{version}: {entry.patch}"
            assert entry.why

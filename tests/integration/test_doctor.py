"""`sm12x doctor` on the machine that runs the tests, whatever it has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sm12x import layout

SCHEMA = json.loads((layout.data() / "schemas" / "doctor-1.json").read_text())
# What a bare host may lack. Importing it has to fail here, so that a new import is noticed.
_BARE = """
import sys
for name in ("rich", "yaml", "requests", "packaging", "elftools", "zstandard"):
    sys.modules[name] = None
sys.argv = ["sm12x", "doctor", *sys.argv[1:]]
from sm12x.cli import main
main()
"""


def doctor(*arguments: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    words = ["-c", _BARE] if bare else ["-m", "sm12x", "doctor"]
    return subprocess.run(
        [sys.executable, *words, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nowhere", "COLUMNS": "80"},
    )


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    done = doctor("--json")
    found: dict[str, object] = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    summary = found["summary"]
    assert isinstance(summary, dict)
    assert done.returncode == (1 if summary["bad"] else 0), done.stderr
    return found


def test_it_says_what_it_could_not_see(report: dict[str, object]) -> None:
    machine, gpus = report["machine"], report["gpus"]
    assert isinstance(machine, dict)
    if gpus:
        pytest.skip("this machine has a GPU")
    findings = report["findings"]
    assert isinstance(findings, list)
    unknown = [each["seen"] for each in findings if each["severity"] == "unknown"]
    if machine["driver"] is None:
        assert any(seen.startswith("could not see a driver") for seen in unknown)
    assert not [each for each in findings if each["id"] == "gpu.code"]


def test_a_bare_python_is_enough(report: dict[str, object]) -> None:
    # GIVEN no library but those that parse options and read its data
    done = doctor("--json", bare=True)

    # THEN it finds the same
    assert "Traceback" not in done.stderr
    again = json.loads(done.stdout)
    assert again["machine"] == report["machine"]
    assert [each["id"] for each in again["findings"]] == [
        each["id"]
        for each in report["findings"]  # type: ignore[attr-defined]
    ]


def test_text_is_one_line_a_finding_at_80_columns() -> None:
    done = doctor()
    assert done.returncode in (0, 1)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  $ ")]
    assert max(map(len, lines)) <= 80
    # Off a terminal there are no colours.
    assert "\x1b" not in done.stdout


def test_explain() -> None:
    done = doctor("--explain", "gpu.leftover")
    assert done.returncode == 0
    assert re.match(r"gpu\.leftover: .+\n\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("--explain", "gpu.leftovr"), 2, "gpu.leftover"),
        (("--audit", "/nowhere/audit.json"), 4, "/nowhere/audit.json cannot be read"),
        (("--audit", "a", "--image", "b"), 2, "give one of them"),
        (("deepseek-v4-flash-rtx-pro-6000-tp",), 2, "deepseek-v4-flash-rtx-pro-6000-tp4"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], code: int, part: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == code
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_recipe_that_this_machine_may_not_hold() -> None:
    done = doctor("--json", "deepseek-v4-flash-rtx-pro-6000-tp4")
    findings = json.loads(done.stdout)["findings"]
    assert [each for each in findings if each["id"] == "recipe.needs"]


def test_nothing_is_written(tmp_path: Path) -> None:
    # GIVEN a cache of a past build
    stale = tmp_path / "vllm" / "torch_compile_cache" / "0a"
    stale.mkdir(parents=True)
    (stale / "graph.py").write_text("")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    # WHEN it is reported
    done = doctor("--cache", str(tmp_path))

    # THEN the command that removes it is printed or its age is unknown, and it is still there
    assert str(tmp_path) in done.stdout.replace("\n", "").replace(" ", "")
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before

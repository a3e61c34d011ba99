"""Evidence: what a folder has to hold, and which entries lint and lists take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.benching import cell, gpu, host, llama_benchy, metric, report, step

from sm12x import cli, layout
from sm12x.bench import evidence, run
from sm12x.bench.report import Answer, BenchReport, Finding, RecipeFacts, ToolFile
from sm12x.core import declared
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.recipes import evidence as entries
from sm12x.recipes import lint, load
from sm12x.recipes.evidence import Evidence
from sm12x.stack.model import series
from sm12x.wheel.ledger import Ledger, PatchEntry

RECIPE = "gpt-oss-120b-rtx-pro-6000"
PATCHES = {"0001-a.patch": "a" * 64, "0002-b.patch": "b" * 64}
STACK = series.id_of(PATCHES.items())


def ledger() -> Ledger:
    patches = tuple(
        PatchEntry(
            name=name,
            subject="",
            upstream="",
            drop_when="",
            witness="",
            sha256=sha256,
            state="applied",
            native="",
        )
        for name, sha256 in PATCHES.items()
    )
    texts = (
        *("sdist", "sdist_sha256", "official_wheel", "official_wheel_sha256", "machine", "python"),
        *("arch_list", "cmake_archs", "compiler", "nvcc", "lock_sha256"),
    )
    rest: Any = dict.fromkeys(texts, "")
    return Ledger(
        base_version="0.33.0",
        stack_id=STACK,
        patches=patches,
        mode="quick",
        files=(),
        libraries=(),
        dependencies={},
        **rest,
    )


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose base 0.33.0 is not that stack, but which has published it."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    text = (layout.recipes() / f"{RECIPE}.yaml").read_text()
    (folder / f"{RECIPE}.yaml").write_text(text)
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "default").write_text("0.33.0\n")
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    return folder


def publish(recipes: Path, ledger_sha256: str) -> None:
    (recipes.parent / "patches" / entries.RELEASED).write_text(
        f'schema = 1\n[[stack]]\nrelease = "0.33.0"\nstack_id = "{STACK}"\ndate = "2026-11-30"\n'
        f'ledgers = {{ "x86_64 quick" = "{ledger_sha256}" }}\n'
    )


Make = Callable[..., Path]


@pytest.fixture
def make(recipes: Path, tmp_path: Path) -> Make:
    """Writes a folder: ``make(verdict="failed")``."""

    def folder(**changes: Any) -> Path:
        out = tmp_path / "bench"
        (out / run.RAW).mkdir(parents=True, exist_ok=True)
        many = cell(
            concurrency=10,
            requests=30,
            decode=metric(700.0),
            first_token_ms=metric(*[500.0] * 30),
        )
        raw = {
            "x.log": "fine\n",
            "benchy-d0-c1.json": llama_benchy(cell()),
            "benchy-d0-c10.json": llama_benchy(many),
            "tools.json": '{"final_score": 88}',
        }
        kept = {}
        for name, text in raw.items():
            (out / run.RAW / name).write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            kept[name] = ToolFile(name=name, sha256=digest, hidden=False)
        declared.write_json(out / run.LEDGER, ledger())
        digest = hashlib.sha256((out / run.LEDGER).read_bytes()).hexdigest()
        publish(recipes, digest)
        recipe = load.load(recipes / f"{RECIPE}.yaml")
        one = report()
        one = replace(
            one,
            server=replace(one.server, version=f"0.33.0+sm12x.{STACK}.quick"),
            stack=replace(one.stack, stack_id=STACK, mode="quick", ledger_sha256=digest),
            recipe=RecipeFacts(
                key=RECIPE,
                model=recipe.model,
                text="",
                runs_sha256=entries.runs_sha256(recipe),
                overrides={"port": "8001"},
            ),
            steps=(
                step("canary-before"),
                step(files=(kept["x.log"], kept["benchy-d0-c1.json"])),
                step("benchy-d0-c10", files=(kept["benchy-d0-c10.json"],), cells=(many,)),
                step("tools", files=(kept["tools.json"],), figures={"final_score": 88.0}),
                step("canary-after"),
            ),
        )
        declared.write_json(out / run.NAME, replace(one, **changes))
        return out

    return folder


def test_a_folder_that_holds_becomes_an_entry(recipes: Path, make: Make) -> None:
    path, entry = evidence.add(make(), "")
    assert path.parent == recipes / entries.FOLDER / RECIPE
    assert entries.read(path) == entry
    assert (entry.hardware, entry.gpus, entry.power_limit) == ("rtx-pro-6000", 1, 600.0)
    assert (entry.figures.decode, entry.figures.decode_most) == (100.0, 700.0)
    assert entry.figures.tool_score == 88.0
    assert entry.overrides == {"port": "8001"}
    recipe = load.load(recipes / f"{RECIPE}.yaml")
    assert entries.of(recipe) == [entry]
    assert entries.state(recipe, [entry]).startswith("verified (2026-11-30, 1 x ")
    lines = CliRunner().invoke(cli.root, ["recipe", "list"]).output
    assert entry.summary() in lines
    listed = CliRunner().invoke(cli.root, ["recipe", "list", "--json"]).output
    (brief,) = json.loads(listed)["recipes"]
    assert brief["state"] == "verified"
    assert brief["evidence"][0]["bench_sha256"] == entry.bench_sha256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"verdict": "incomplete"}, "verdict"),
        ({"random_weights": True}, "not judged"),
        ({"host": host(unseen="no GPU is here")}, "not seen"),
        ({"host": host(gpu(), gpu(index=1))}, "takes 1 GPUs of a machine"),
        ({"host": host(gpu(hardware="gb10", name="NVIDIA GB10"))}, "is for rtx-pro-6000"),
        ({"host": host(gpu(hardware="", name="H200"))}, "not a GPU that recipes name"),
        ({"recipe": None}, "does not say"),
        ({"findings": (Finding(level="impossible", step="x", text="too fast"),)}, "too fast"),
        ({"server": report().server}, "its ledger is of vLLM"),
        ({"stack": report().stack}, "not of this project"),
        (
            {
                "steps": (
                    step("canary-before"),
                    step(),
                    step("canary-after", answers=(Answer(prompt=1, sha256="", garbage=""),)),
                )
            },
            "another greedy text",
        ),
        ({"steps": (step(cells=(cell(concurrency=4),)),)}, "one request"),
    ],
)
def test_a_folder_that_does_not_hold_is_refused(
    recipes: Path, make: Make, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FindingsError, match=reason):
        evidence.add(make(**changes), RECIPE)
    assert not (recipes / entries.FOLDER).exists()


def test_a_file_that_was_changed_or_names_somebody_is_refused(make: Make) -> None:
    folder = make()
    (folder / run.RAW / "x.log").write_text("better\n")
    with pytest.raises(FindingsError, match=r"x\.log is not as the run left it"):
        evidence.add(folder, "")
    folder = make()
    (folder / "report.md").write_text("served from /home/joe/models\n")
    with pytest.raises(FindingsError, match=r"report\.md has a secret"):
        evidence.add(folder, "")


def test_figures_that_no_tool_wrote_are_refused(make: Make) -> None:
    folder = make()
    path = folder / run.NAME
    text = path.read_text()
    path.write_text(text.replace("700.0", "900.0"))
    with pytest.raises(FindingsError, match="benchy-d0-c10 are not those of tools/"):
        evidence.add(folder, "")
    path.write_text(text.replace('"final_score": 88.0', '"final_score": 99.0'))
    with pytest.raises(FindingsError, match="figures of tools are not"):
        evidence.add(folder, "")
    # A verdict is judged again.
    path.write_text(text.replace('"state": "done"', '"state": "failed"', 1))
    with pytest.raises(FindingsError, match="verdict is failed"):
        evidence.add(folder, "")


def test_a_ledger_that_is_another_is_refused(recipes: Path, make: Make) -> None:
    folder = make()
    publish(recipes, "c" * 64)
    with pytest.raises(FindingsError, match="no stack"):
        evidence.add(folder, "")
    folder = make()
    other = replace(ledger(), nvcc="other")
    declared.write_json(folder / run.LEDGER, other)
    with pytest.raises(FindingsError, match="not the one that bench"):
        evidence.add(folder, "")
    (folder / run.LEDGER).unlink()
    with pytest.raises(FindingsError, match=r"no ledger\.json"):
        evidence.add(folder, "")


def test_a_recipe_that_sleeps_needs_swaps(recipes: Path, make: Make) -> None:
    path = recipes / f"{RECIPE}.yaml"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if line.strip() == "level: never")
    end = next(n for n in range(at + 1, len(lines)) if not lines[n].startswith("    "))
    path.write_text("".join([*lines[:at], "    level: 1\n", *lines[end:]]))
    with pytest.raises(FindingsError, match="no swap was measured"):
        evidence.add(make(), "")


def findings(recipes: Path) -> list[str]:
    paths = sorted(recipes.glob("*.yaml"))
    known = {str(path): load.load(path) for path in paths}
    return [one.text for one in lint.evidence_findings(paths, known)]


def test_lint_refuses_entries_that_do_not_hold(recipes: Path, make: Make) -> None:
    path, entry = evidence.add(make(), "")
    assert findings(recipes) == []
    # A recipe whose notes change is the same; one that runs something else is not.
    recipe = recipes / f"{RECIPE}.yaml"
    recipe.write_text("# a note\n" + recipe.read_text())
    assert findings(recipes) == []
    other = {**json.loads(declared.to_json(entry)), "patches": {"0001-a.patch": "a" * 64}}
    path.with_name("x.json").write_text(json.dumps(other))
    (path.parent / "notes.txt").write_text("")
    stray = path.parent.with_name("no-such-recipe")
    stray.mkdir()
    path.with_name("y.json").write_text("{")
    (stray / path.name).write_text(path.read_text())
    texts = " / ".join(findings(recipes))
    for words in (f"do not make the stack {STACK}", "holds no JSON", "there is no recipe"):
        assert words in texts
    assert len(findings(recipes)) == 4
    assert entries.of(load.load(recipe)) == [entry]
    before = recipe.read_text()
    recipe.write_text(before.replace("\ndefaults:\n", "\ndefaults:\n  new: 1\n"))
    assert before != recipe.read_text()
    assert any("runs something else now" in text for text in findings(recipes))
    assert entries.of(load.load(recipe)) == []


def test_an_entry_of_a_checkouts_own_stack_holds(
    recipes: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make()
    (recipes.parent / "patches" / entries.RELEASED).unlink()
    with pytest.raises(FindingsError, match="no stack"):
        evidence.add(folder, "")
    (recipes.parent / "patches" / "0.33.0").mkdir()
    monkeypatch.setattr(series, "read_id", lambda folder: STACK)
    _, entry = evidence.add(folder, "")
    assert entry.stack_id == STACK


def test_entries_of_this_checkout_hold() -> None:
    assert findings(layout.recipes()) == []


def test_a_folder_without_a_report_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"bench\.json"):
        evidence.add(tmp_path, "")


def test_reports_types_are_as_declared(make: Make) -> None:
    assert isinstance(run.read(make()), BenchReport)
    assert declared.schema(Evidence)["additionalProperties"] is False

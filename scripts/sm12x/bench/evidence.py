"""From a benchmark's folder to the entry of a pull request, where the folder holds."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from pathlib import Path

from sm12x.bench import judge, presets, run, tools
from sm12x.bench.redact import Redaction
from sm12x.bench.report import BenchReport, Cell, Metric, Step
from sm12x.core import declared, files
from sm12x.core.errors import BadFileError, FindingsError, ToolFailedError
from sm12x.core.text import GIB, first_of
from sm12x.doctor.report import DoctorReport
from sm12x.recipes import evidence, load
from sm12x.recipes.evidence import Evidence, Figures, Swap
from sm12x.recipes.model import Recipe
from sm12x.verify.report import VerifyReport
from sm12x.wheel import ledger as ledgers


def add(folder: Path, name: str, url: str = "") -> tuple[Path, Evidence]:
    """Check a folder against a recipe, and write the entry.

    Args:
        name: the recipe's; "" is the one that the run names.
        url: where the whole folder can be fetched.

    Raises:
        BadFileError: a file of the folder, or the recipe, cannot be read.
        FindingsError: the folder does not hold; every reason is in the message.
    """
    report = run.read(folder)
    key = name or (report.recipe.key if report.recipe else "")
    if not key:
        raise BadFileError(
            f"{folder / run.NAME} names no recipe",
            next_step="measure again with `sm12x bench URL --recipe RECIPE`",
        )
    recipe = load.load(load.find(key))
    reasons = [*_faults(folder, report, recipe)]
    if not reasons:
        entry = _entry(folder, report, recipe, url)
        reasons = evidence.faults(entry, recipe)
    if reasons:
        raise FindingsError(
            f"{folder} is no evidence for {recipe.key}: {first_of(reasons, 4)}",
            next_step="correct what they say, and measure again; docs/bench.md has the rules",
        )
    stem = f"{entry.date}-{entry.hardware}-{entry.bench_sha256[:8]}"
    path = recipe.path.parent / evidence.FOLDER / recipe.key / f"{stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    declared.write_json(path, entry)
    return path, entry


def _faults(folder: Path, report: BenchReport, recipe: Recipe) -> Iterator[str]:
    """Yield why a folder is no evidence for a recipe."""
    # Judged again: the file may have been written by hand.
    preset = presets.load().presets[report.preset]
    found = judge.findings(report.steps, report.host, preset, active=None)
    verdict = judge.verdict(report.steps, (*report.findings, *found), report.swap)
    if report.verdict != "passed" or verdict != "passed":
        yield f"its verdict is {verdict if report.verdict == 'passed' else report.verdict}"
    texts = {one.text for one in (*report.findings, *found) if one.level == "impossible"}
    yield from sorted(texts)
    if other := judge.canary(report.steps):
        yield other
    if report.random_weights:
        yield "its texts were not judged (--random-weights)"
    if report.recipe is None or report.recipe.key != recipe.key:
        yield f"it does not say that {recipe.key} was run"
    elif report.recipe.runs_sha256 != evidence.runs_sha256(recipe):
        yield f"{recipe.key} runs something else now"
    gpus = {(gpu.name, gpu.hardware) for gpu in report.host.gpus}
    if report.host.unseen or not gpus:
        yield f"its GPUs were not seen: {report.host.unseen}"
    elif len(gpus) > 1:
        yield "its GPUs are of several kinds"
    elif not report.host.gpus[0].hardware and not _anywhere(recipe):
        yield f"{report.host.gpus[0].name} is not a GPU that recipes name"
    if not report.stack.stack_id:
        yield f"the server is vLLM {report.server.version or 'of no version'}, not of this project"
    else:
        yield from _ledger(folder, report)
    if not any(_plain(cell) and cell.concurrency == 1 for cell in _cells(report)):
        yield "it has no figures of one request without context"
    for step in report.steps:
        yield from _results(folder / run.RAW, step, report)
    yield from _names(folder)


def _results(raw: Path, step: Step, report: BenchReport) -> Iterator[str]:
    """Yield what of a step is not as its tool wrote it."""
    for one in step.files:
        path = raw / one.name
        if Path(one.name).name != one.name or not path.is_file():
            yield f"{run.RAW}/{one.name} is not there"
        elif files.sha256(path) != one.sha256:
            yield f"{run.RAW}/{one.name} is not as the run left it"
    if step.state != "done" or step.kind not in ("benchy", "serve", "tools"):
        return
    path = raw / f"{step.name}.json"
    try:
        if step.kind == "benchy":
            same = tools.cells(path, presets.load().presets[report.preset]) == step.cells
        elif step.kind == "serve":
            same = tools.serve_figures(path)["figures"] == step.figures
        else:
            same = tools.tool_figures(path) == step.figures
    except ToolFailedError as error:
        yield error.message
        return
    if not same or path.name not in {one.name for one in step.files}:
        yield f"the figures of {step.name} are not those of {run.RAW}/{path.name}"


def _anywhere(recipe: Recipe) -> bool:
    return recipe.sm12x is not None and "any" in recipe.sm12x.hardware


def _ledger(folder: Path, report: BenchReport) -> Iterator[str]:
    path = folder / run.LEDGER
    if not path.is_file():
        yield "it has no ledger.json (`sm12x bench --image IMAGE` reads that of the image)"
        return
    if files.sha256(path) != report.stack.ledger_sha256:
        yield "its ledger.json is not the one that bench.json names"
    try:
        ledger = ledgers.read(path)
    except BadFileError as error:
        yield error.message
        return
    if ledger.wheel_version != report.server.version:
        yield f"its ledger is of vLLM {ledger.wheel_version}, the server is {report.server.version}"


def _names(folder: Path) -> Iterator[str]:
    """Yield each file of text that has a secret, an address, or a path of a home folder."""
    redaction = Redaction({}, {}, "")
    for path in sorted(folder.rglob("*")):
        # The ledger has versions of four numbers, which look like addresses.
        if path.suffix in (".json", ".md", ".log", ".csv", ".yaml") and path.name != run.LEDGER:
            text = path.read_text(encoding="utf-8", errors="replace")
            if redaction.text(text) != text:
                yield f"{path.relative_to(folder)} has a secret, an address or a user's path"


def _cells(report: BenchReport) -> list[Cell]:
    return [cell for step in report.steps for cell in step.cells]


def _plain(cell: Cell) -> bool:
    """Whether a cell is of prompts without context, and has both figures."""
    return not cell.depth and bool(cell.prefill and cell.decode and cell.first_token_ms)


def _median(metric: Metric | None) -> float:
    value = metric.median if metric else None
    return 0.0 if value is None else value


def _figures(report: BenchReport) -> Figures:
    cells = _cells(report)
    one = next(cell for cell in cells if _plain(cell) and cell.concurrency == 1)
    most = max((cell for cell in cells if _plain(cell)), key=lambda cell: _median(cell.decode))
    deep = max(
        (
            cell
            for cell in cells
            if cell.decode and cell.concurrency == 1 and not cell.context_phase
        ),
        key=lambda cell: cell.depth,
    )
    rates = [step.acceptance for step in report.steps if step.acceptance is not None and step.cells]
    scores = {step.kind: step.figures for step in report.steps if step.state == "done"}
    return Figures(
        prefill=_median(one.prefill),
        decode=_median(one.decode),
        first_token_ms=_median(one.first_token_ms),
        decode_most=_median(most.decode),
        concurrency=most.concurrency,
        depth=deep.depth,
        decode_deep=_median(deep.decode) if deep.depth else None,
        acceptance=statistics.median(rates) if rates else None,
        tool_score=scores.get("tools", {}).get("final_score"),
        gsm8k=scores.get("gsm8k", {}).get("accuracy"),
    )


def _swap(report: VerifyReport | None) -> Swap | None:
    if report is None or report.verdict != "passed":
        return None
    sleeps = [turn.sleep_seconds for turn in report.turns if turn.sleep_seconds is not None]
    wakes = [turn.wake_seconds for turn in report.turns if turn.wake_seconds is not None]
    residue = max((trend.last_bytes for trend in report.trends), default=None)
    return Swap(
        cycles=report.cycles,
        sleep_seconds=statistics.median(sleeps),
        wake_seconds=statistics.median(wakes),
        residue_gib=None if residue is None else residue / GIB,
    )


def _doctor(folder: Path) -> tuple[str, ...]:
    """Return the checks of the doctor that found something; none where it was not asked."""
    path = folder / run.DOCTOR
    if not path.is_file():
        return ()
    step = "measure again, or delete the file"
    report = declared.read_json(DoctorReport, path, next_step=step, what="doctor's report")
    found = (one.id for one in report.findings if one.severity in ("bad", "warn"))
    return tuple(dict.fromkeys(found))


def _entry(folder: Path, report: BenchReport, recipe: Recipe, url: str) -> Evidence:
    gpu, stack = report.host.gpus[0], report.stack
    ledger = ledgers.read(folder / run.LEDGER)
    return Evidence(
        recipe=recipe.key,
        runs_sha256=evidence.runs_sha256(recipe),
        overrides=dict(report.recipe.overrides) if report.recipe else {},
        date=report.begun[:10],
        release=ledger.base_version,
        stack_id=stack.stack_id,
        mode="full" if ledger.mode == "full" else "quick",
        ledger_sha256=stack.ledger_sha256,
        patches={patch.name: patch.sha256 for patch in ledger.patches},
        image_digest=stack.image_digest,
        hardware=gpu.hardware or "any",
        gpus=len(report.host.gpus),
        machines=recipe.sm12x.machines if recipe.sm12x else 1,
        gpu=gpu.name,
        driver=report.host.driver,
        power_limit=gpu.power_limit,
        preset=report.preset,
        tools=dict(report.tools),
        figures=_figures(report),
        swap=_swap(report.swap),
        doctor=_doctor(folder),
        bench_sha256=hashlib.sha256((folder / run.NAME).read_bytes()).hexdigest(),
        url=url,
    )

"""The run of a benchmark: its steps one after another, kept in a folder from which it goes on."""

from __future__ import annotations

import datetime
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm12x import __version__
from sm12x.bench import facts, judge, presets, tools
from sm12x.bench.presets import Preset
from sm12x.bench.redact import Redaction
from sm12x.bench.report import (
    Answer,
    BenchReport,
    BenchVerdict,
    HostFacts,
    RecipeFacts,
    ServerFacts,
    StackFacts,
    Step,
    StepKind,
    ToolFile,
)
from sm12x.bench.tools import Job, Target, Tools
from sm12x.core import declared, files, process
from sm12x.core.errors import BadFileError, ServerError, Sm12xError, ToolFailedError, UsageError
from sm12x.doctor.host import Host
from sm12x.doctor.report import DoctorReport
from sm12x.verify import cycles
from sm12x.verify import judge as texts
from sm12x.verify.client import ACCEPTED, DRAFTED, CallError, Server
from sm12x.verify.memory import Watch
from sm12x.verify.report import Limits, VerifyReport

NAME, LEDGER, DOCTOR, RAW = "bench.json", "ledger.json", "doctor.json", "tools"
BEFORE, AFTER = "canary-before", "canary-after"
# Seconds between two looks at a tool, and that it has to end.
_LOOK, _GRACE = 0.2, 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. ``skip`` are kinds of steps; ``swaps`` cycles of sleep and wake-up.

    ``step_limit`` is the seconds that one tool may take.
    """

    preset: str
    out: Path
    seed: int
    tokenizer: str = ""
    corpus: Path | None = None
    image: str = ""
    skip: frozenset[str] = frozenset()
    swaps: int = 0
    random_weights: bool = False
    step_limit: float = 3600.0
    timeout: float = 300.0
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured, as far as it is known before the first step."""

    server: ServerFacts
    stack: StackFacts
    ledger: str
    recipe: RecipeFacts | None
    host: HostFacts
    doctor: DoctorReport | None = None
    model_config: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    name: str
    kind: StepKind
    depth: int = 0
    concurrency: int = 0


def plan(preset: Preset, swaps: int) -> Iterator[_Plan]:
    """Yield the steps of a run in their order."""
    yield _Plan(name=BEFORE, kind="canary")
    for depth in preset.depths:
        for concurrency in preset.concurrency:
            name = f"benchy-d{depth}-c{concurrency}"
            yield _Plan(name=name, kind="benchy", depth=depth, concurrency=concurrency)
    yield _Plan(name="serve", kind="serve")
    if preset.tools:
        yield _Plan(name="tools", kind="tools")
    if preset.gsm8k:
        yield _Plan(name="gsm8k", kind="gsm8k")
    if swaps:
        yield _Plan(name="swap", kind="swap")
    yield _Plan(name=AFTER, kind="canary")


def read(folder: Path) -> BenchReport:
    """Read the report of a folder. Raises BadFileError."""
    step = "name a folder that `sm12x bench` wrote"
    report = declared.read_json(BenchReport, folder / NAME, next_step=step, what="benchmark")
    try:
        datetime.datetime.fromisoformat(report.begun)
        presets.load().presets[report.preset]
    except (ValueError, KeyError) as error:
        raise BadFileError(f"{folder / NAME}: no date or preset: {error}", next_step=step) from None
    return report


class Run:
    """One run into ``settings.out``, which may have the first steps of it.

    Args:
        servers: the server, and for swaps one that takes turns with it.
        observe: is told what is being done, and which steps there are.
        tell: is given a sentence for the user.

    Raises:
        UsageError: the folder has another run.
        BadFileError: the folder's report cannot be read.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        settings: Settings,
        subject: Subject,
        installed: Tools,
        redaction: Redaction,
        watch: Watch,
        *,
        observe: Callable[[str], None] = lambda doing: None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._servers, self._settings, self._subject = servers, settings, subject
        self._tools, self._redaction, self._watch = installed, redaction, watch
        self._observe, self._tell = observe, tell
        self._preset = presets.load().presets[settings.preset]
        self._steps: dict[str, Step] = {}
        self._swap: VerifyReport | None = None
        self._began = time.monotonic()
        self._begun, self._before, self._seed = _now(), 0.0, settings.seed
        self._running = True
        self._corpus = ("", "")
        self._resume()

    def _resume(self) -> None:
        out = self._settings.out
        if not (out / NAME).exists():
            if out.is_dir() and any(out.iterdir()):
                raise UsageError(
                    f"{out} is not empty, and has no {NAME}", next_step="name another folder: --out"
                )
            return
        old, new = _identity(read(out)), _identity(self.report())
        other = [name for name in new if old[name] != new[name]]
        if other:
            raise UsageError(
                f"{out} has a benchmark that differs in: {', '.join(other)}",
                next_step="give another folder: --out, or delete this one",
            )
        kept = read(out)
        self._steps = {step.name: step for step in kept.steps if step.state == "done"}
        self._begun, self._before, self._seed = kept.begun, kept.seconds, kept.seed
        self._swap, self._corpus = kept.swap, (kept.corpus, kept.corpus_sha256)

    def run(self) -> BaseException | None:
        """Run the steps that are not done, and return the error that ended the run early."""
        out = self._settings.out
        (out / RAW).mkdir(parents=True, exist_ok=True)
        if self._subject.ledger:
            files.write_text(out / LEDGER, self._subject.ledger)
        if self._subject.doctor:
            declared.write_json(out / DOCTOR, self._redaction.value(self._subject.doctor))
        error: BaseException | None = None
        # A terminal that closes must not leave a tool behind that asks on.
        with cycles.Interrupts(self._tell):
            error = self._all()
        self._running = False
        self.write(stopped=error is not None)
        return error

    def _all(self) -> BaseException | None:
        out = self._settings.out
        try:
            name, digest, _ = tools.corpus(self._tools, self._settings.corpus, self._tell)
            if self._corpus[1] not in ("", digest):
                raise UsageError(
                    f"{out} was begun with another text ({self._corpus[0]}, now {name})",
                    next_step="give the same --corpus, or another folder: --out",
                )
            self._corpus = (name, digest)
            steps = [*plan(self._preset, self._settings.swaps)]
            for number, step in enumerate(steps, 1):
                if step.name not in self._steps:
                    self._observe(f"{number} of {len(steps)}: {step.name}")
                    self._one(step, number)
                    self.write()
        # On any error: what is done is kept.
        except BaseException as caught:
            return caught
        return None

    def report(self, *, stopped: bool = False) -> BenchReport:
        """Return the report so far, without what must not be shared."""
        subject, settings = self._subject, self._settings
        order = [one.name for one in plan(self._preset, settings.swaps)]
        steps = tuple(self._steps[name] for name in order if name in self._steps)
        findings = judge.findings(
            steps,
            subject.host,
            self._preset,
            active=judge.active_parameters(subject.model_config),
        )
        verdict: BenchVerdict = judge.verdict(steps, findings, self._swap)
        versions = dict(self._tools.versions)
        if version := tools.vllm_version() or (settings.image and subject.stack.release):
            versions["vllm bench serve"] = version
        report = BenchReport(
            begun=self._begun,
            seconds=self._before + time.monotonic() - self._began,
            verdict="stopped" if stopped else "running" if self._running else verdict,
            sm12x=__version__,
            preset=settings.preset,
            prefix_caching=self._preset.prefix_caching,
            random_weights=settings.random_weights,
            seed=self._seed,
            tools=versions,
            corpus=self._corpus[0],
            corpus_sha256=self._corpus[1],
            server=subject.server,
            stack=subject.stack,
            recipe=subject.recipe,
            host=subject.host,
            steps=steps,
            swap=self._swap,
            findings=findings,
        )
        return self._redaction.value(report)

    def write(self, *, stopped: bool = False) -> None:
        """Write bench.json, whole or not at all."""
        files.write_text(
            self._settings.out / NAME, declared.to_json(self.report(stopped=stopped), BenchReport)
        )

    def _one(self, one: _Plan, number: int) -> None:
        """Run a step and keep what came of it. Raises KeyboardInterrupt, and where no server is."""
        # Another seed for each step: equal prompts would be found in the prefix cache.
        seed = (self._seed + number) % (1 << 32)
        step = Step(name=one.name, kind=one.kind, state="done", begun=_now(), seed=seed)
        if why := self._why_not(one):
            self._steps[one.name] = replace(step, state="skipped", why=why)
            self._tell(f"{one.name}: skipped: {why}")
            return
        server = self._servers[0]
        before, began = server.counters(), time.monotonic()
        indices = tuple(gpu.index for gpu in self._subject.host.gpus)
        error: Sm12xError | None = None
        with facts.Sampler(Host(), indices) as sampler:
            try:
                step = self._filled(one, step, seed)
            except Sm12xError as caught:
                error = caught
                why = self._redaction.text(error.message)
                step = replace(self._steps.get(one.name, step), state="failed", why=why)
            except KeyboardInterrupt:
                self._steps[one.name] = replace(step, state="interrupted", why="interrupted")
                raise
        after = server.counters()
        drafted, accepted = _spent(before, after, DRAFTED), _spent(before, after, ACCEPTED)
        self._steps[one.name] = step = replace(
            step,
            seconds=time.monotonic() - began,
            drafted=drafted,
            accepted=accepted,
            cached=_spent(before, after, facts.CACHED),
            looked_up=_spent(before, after, facts.LOOKED_UP),
            gpus=sampler.summary(),
        )
        self._tell(judge.line(step))
        if error is not None:
            # A server that is gone fails every step after this one too.
            with suppress(CallError):
                server.call("GET", "/v1/models", timeout=30.0)
                return
            raise ServerError(
                f"{server.url} does not answer any more; {one.name} has failed: {error.message}",
                next_step="read the server's log, start it, and run this again to go on",
            )

    def _why_not(self, one: _Plan) -> str:
        if one.kind in self._settings.skip:
            return f"--skip {one.kind}"
        most, preset = self._subject.server.max_model_len, self._preset
        needs = {"benchy": one.depth + preset.prompt + preset.output}
        needs["serve"] = preset.serve.input + preset.serve.output
        # A chat template takes some tokens more.
        if most and needs.get(one.kind, 0) > most:
            return f"needs {needs[one.kind]} tokens of context, and the server has {most}"
        return ""

    def _filled(self, one: _Plan, step: Step, seed: int) -> Step:
        """Run one step, and return it with its results. Raises Sm12xError."""
        settings, raw = self._settings, self._settings.out / RAW
        target = Target(
            address=self._servers[0].url,
            model=self._servers[0].model,
            shown=self._shown_model(),
            tokenizer=settings.tokenizer,
            key=settings.key,
            timeout=settings.timeout,
        )
        match one.kind:
            case "canary":
                return replace(step, answers=self._canary())
            case "swap":
                return self._swaps(step)
            case "benchy":
                job = tools.benchy(
                    self._tools,
                    target,
                    self._preset,
                    self._corpus[1],
                    raw,
                    depth=one.depth,
                    concurrency=one.concurrency,
                    seed=seed,
                )
                return self._tool(
                    job, step, lambda: {"cells": tools.cells(job.result, self._preset)}
                )
            case "serve":
                made = tools.serve(target, self._preset, raw, settings.image, seed=seed)
                if isinstance(made, str):
                    return replace(step, state="skipped", why=made)
                return self._tool(made, step, lambda: tools.serve_figures(made.result))
            case "tools":
                job = tools.tool_calls(self._tools, target, raw, seed=seed)
                return self._tool(job, step, lambda: {"figures": tools.tool_figures(job.result)})
            case "gsm8k":
                job = tools.tool_calls(
                    self._tools, target, raw, seed=seed, gsm8k=self._preset.gsm8k
                )
                log = raw / f"{step.name}.log"
                return self._tool(
                    job,
                    step,
                    lambda: {"figures": tools.gsm8k_figures(self._tools, log, job.result)},
                )

    def _shown_model(self) -> str:
        recipe = self._subject.recipe
        root = Path(self._subject.server.root)
        return (
            (recipe.model if recipe else "")
            or (root.name if root.is_absolute() else str(root))
            or self._servers[0].model
        )

    def _tool(self, job: Job, step: Step, read: Callable[[], dict[str, Any]]) -> Step:
        """Run a tool to its end, and return the step with what ``read`` gives of its result.

        Raises ToolFailedError where it fails, takes too long, or has no result.
        """
        log = self._settings.out / RAW / f"{step.name}.log"
        job.result.unlink(missing_ok=True)
        step = replace(step, command=self._redaction.value(_shown(job.argv)))
        self._steps[step.name] = step
        end = time.monotonic() + self._settings.step_limit
        child = process.Background(job.argv, log=log, env=job.env, cwd=job.cwd)
        code: int | None = None
        try:
            while code is None and time.monotonic() < end:
                code = child.wait(_LOOK)
            if code:
                ends = f"its log ends with: {tools.reason(log) or 'nothing'}"
                raise ToolFailedError(f"it ended with {code}; {ends}", next_step=f"read {log}")
            if code is None:
                raise ToolFailedError(
                    f"it took longer than {self._settings.step_limit:g} s",
                    next_step="give --step-limit",
                )
            # Before names are hidden: a host may be called like a key.
            step = replace(step, **read())
        finally:
            process.end_all([child], _GRACE if code is None else 0.0)
            self._steps[step.name] = step = self._kept(step, job)
        return step

    def _kept(self, step: Step, job: Job) -> Step:
        """Return the step with its files: as the tool wrote them, but for what is hidden."""
        raw = self._settings.out / RAW
        reports = raw / f"{step.name}-reports"
        paths = [raw / f"{step.name}.log", job.result]
        for path in sorted(reports.rglob("*.md")):
            paths.append(path.replace(raw / f"{step.name}-{path.name.rpartition('_')[2]}"))
        shutil.rmtree(reports, ignore_errors=True)
        kept = []
        for path in paths:
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                clean = self._redaction.text(text)
                if clean != text:
                    files.write_text(path, clean)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                kept.append(ToolFile(name=path.name, sha256=digest, hidden=clean != text))
        return replace(step, files=tuple(kept))

    def _canary(self) -> tuple[Answer, ...]:
        """Ask verify's prompts, greedily. Raises ServerError."""
        server = self._servers[0]
        answers: list[Answer] = []
        for number, prompt in enumerate(cycles.PROMPTS, 1):
            try:
                answer = server.complete(prompt, cycles.TOKENS)
            except CallError as error:
                # Longer than the model's context.
                if error.status != 400 or not answers:
                    raise
                continue
            digest = hashlib.sha256(answer.text.encode()).hexdigest()
            wrong = texts.garbage(answer.text, answer.ids)
            garbage = "" if self._settings.random_weights else server.shown(wrong)
            answers.append(Answer(prompt=number, sha256=digest, garbage=garbage))
        return tuple(answers)

    def _swaps(self, step: Step) -> Step:
        """Put the server to sleep and wake it up as `sm12x verify` does, and keep its report."""
        settings = cycles.Settings(
            cycles=self._settings.swaps,
            models=tuple(server.model for server in self._servers),
            random_weights=self._settings.random_weights,
            limits=Limits(),
        )
        run = cycles.Run(self._servers, settings, self._watch, tell=self._tell)
        error = run.run()
        self._swap = self._redaction.value(run.report())
        if isinstance(error, Sm12xError | KeyboardInterrupt):
            raise error
        if error is not None:
            raise ToolFailedError(f"the swaps failed: {error!r}", next_step="report this defect")
        bad = [check.check for check in self._swap.checks if check.verdict == "breach"]
        if bad:
            why = f"breached: {', '.join(bad)}; docs/verify.md says what each means"
            return replace(step, state="failed", why=why)
        return step


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _identity(report: BenchReport) -> Mapping[str, object]:
    """Return what a run that goes on in a folder has to agree on with what is there."""
    gpus = [(gpu.name, gpu.power_limit) for gpu in report.host.gpus]
    return {
        "version of sm12x": report.sm12x,
        "preset": report.preset,
        "random weights": report.random_weights,
        "tools": report.tools,
        "model": report.server.model,
        "version of the server": report.server.version,
        "stack": report.stack,
        "recipe": report.recipe,
        "GPUs": (report.host.driver, gpus),
    }


def _shown(argv: Sequence[str]) -> tuple[str, ...]:
    """The command with a program that is given as text left out."""
    words = [Path(argv[0]).name, *argv[1:]]
    return tuple("..." if "\n" in word else word for word in words)


def _spent(before: Mapping[str, float], after: Mapping[str, float], name: str) -> int | None:
    """Return how far a counter went; None where it is not there, or the server started anew."""
    if name not in before or name not in after or after[name] < before[name]:
        return None
    return int(after[name] - before[name])


def require_swappable(servers: Sequence[Server], swaps: int) -> None:
    """Raise UsageError for a second server without swaps."""
    if len(servers) > 1 and not swaps:
        raise UsageError(
            "a second server takes part in swaps alone", next_step="give --swaps 5, or one address"
        )


def tokenizer(given: str, server: ServerFacts, recipe_model: str) -> str:
    """Return the tokenizer to count with: the user's, a folder here, or a name on a hub.

    Raises:
        UsageError: none of them is known.
    """
    for candidate in (given, server.root, recipe_model, server.model):
        if candidate and (Path(candidate).is_dir() or not Path(candidate).is_absolute()):
            return candidate
    raise UsageError(
        f"the tokenizer of {server.model} is not here: {server.root or 'the server names none'}",
        next_step="give --tokenizer with a folder that has tokenizer.json, or a name on the hub",
    )


def model_config(names: Sequence[str], hub: Path) -> Path | None:
    """Return the config.json of a model: in a folder, or in the cache of Hugging Face."""
    for name in filter(None, names):
        if (Path(name) / "config.json").is_file():
            return Path(name) / "config.json"
        cached = hub / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
        if found := sorted(cached.glob("*/config.json")):
            return found[-1]
    return None


def check_out(out: Path) -> None:
    """Raise BadFileError where a folder cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFileError(
            f"{out} cannot be made: {error.strerror}", next_step="name another folder: --out"
        ) from None

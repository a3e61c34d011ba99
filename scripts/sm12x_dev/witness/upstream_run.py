"""Run the release's own tests on the patched source, and where need be on the untouched one.

Where it is recorded what they give on the untouched source, only what differs is run there.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import ToolFailedError
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.witness import environment, junit, record, upstream_tests
from sm12x_dev.witness.environment import pip_install
from sm12x_dev.witness.pytests import ENDED, PLUGIN
from sm12x_dev.witness.record import Outcomes, Record
from sm12x_dev.witness.upstream_tests import (
    FileRun,
    HubModel,
    Report,
    Suite,
    UpstreamPlan,
    UpstreamResult,
)
from sm12x_dev.witness.witness import BASE, PATCHED, SIDES

# Seconds one test, and one test file, may take.
TEST_LIMIT = 90
FILE_LIMIT = 600
RECORD = "upstream-base.json"
# Packages that the release's tests import and its closure lacks, with hashes.
_TOOLS_LOCK = Path("tests/witness/upstream.lock")
_TAIL = 20
# pytest's exit code where the one test that it is asked for is not there.
_NO_SUCH_TEST = 4
# Files of tests at a time.
_JOBS = 2
# What an answer of sm12x_zygote begins with.
_ANSWER = "sm12x-zygote: "


def packages(
    base: Base,
    suite: Suite,
    *,
    python: Path,
    root: Path,
    cache: Path,
    say: Callable[[str], None],
    machine: str = platform.machine(),
) -> Path:
    """Return a folder of the packages that the tests need besides those of the witnesses.

    It is kept in ``cache`` and made once for each content of the locks.

    Args:
        python: of the witnesses' environment, which these packages come on top of.
        root: the checkout, for the locked test tools.
        say: told what is about to be downloaded, before it is.

    Raises:
        BadFileError: the data names a package that the lock does not have.
        ToolFailedError: uv could not install.
        NoSpaceError: too little room for what is about to be installed.
    """
    lock = _lock(base, suite, root, machine)
    home = cache / environment.HOMES / environment.home_name(base, lock, machine, "upstream-")
    if not home.is_dir():
        environment.install(
            base,
            home,
            lock,
            lambda fresh: [pip_install("--python", str(python), "--target", str(fresh))],
            whole=home,
            what="the tests",
            mib=suite.environment.download_mib,
            say=say,
        )
    return home


def _lock(base: Base, suite: Suite, root: Path, machine: str) -> str:
    key = f"{suite.path}: environment.packages"
    return environment.pinned(base, suite.environment.packages, root / _TOOLS_LOCK, key, machine)


def conditions(base: Base, suite: Suite, *, root: Path, machine: str = platform.machine()) -> str:
    """Return a digest of the release, the environment of its tests, and the locked packages.

    Which tests are run is no part of it: a file without a record, or one that runs other tests
    than the record has, is run on the untouched source too.
    """
    packages = (
        environment.requirements(base, machine=machine, root=root),
        _lock(base, suite, root, machine),
    )
    return digest(base, suite, packages)


def digest(base: Base, suite: Suite, packages: Sequence[str]) -> str:
    """Return the digest of ``conditions``; ``packages`` are texts of locks."""
    total = hashlib.sha256(base.sdist.sha256.encode())
    # Its packages are among the locked ones, in whichever list they are.
    total.update(repr((replace(suite.environment, packages=()), suite.models)).encode())
    for line in sorted({line for text in packages for line in text.splitlines()}):
        total.update(line.encode())
    return total.hexdigest()[:16]


def run(
    base: Base,
    stack: Stack,
    suite: Suite,
    *,
    archive: Path,
    python: Path,
    extra: Path | None,
    baseline: Record | None = None,
    record_for: str = "",
    only: Sequence[str] = (),
    test_seconds: float = TEST_LIMIT,
    file_seconds: float = FILE_LIMIT,
    on_file: Callable[[str, str], None] | None = None,
    on_alone: Callable[[int], None] | None = None,
) -> Report:
    """Run the release's tests of the files that ``stack`` changes on both trees.

    Args:
        archive: the sdist of the base.
        python: an interpreter that has pytest and what the release imports.
        extra: a folder of further packages.
        baseline: the outcomes on the untouched tree; a file that gives the same on the patched one
          is not run on the untouched one.
        record_for: unless empty, the conditions to record the outcomes on the untouched tree for.
        only: test files, or changed files; all where empty.
        test_seconds: how long one test may take.
        file_seconds: how long one test file may take.
        on_file: called with (test file, side) when it has been run.
        on_alone: called with the number of tests that are run again, before they are.

    Raises:
        apply.StackConflictError: the stack does not apply.
        BadFileError: ``only`` names what is neither.
    """
    with tempfile.TemporaryDirectory(prefix="sm12x-up-") as name:
        folder = Path(name)
        trees = {side: folder / side for side in SIDES}
        tree.unpack(archive, trees[PATCHED])
        # It is untouched still.
        plan = upstream_tests.plan(suite, stack, trees[PATCHED])
        if only:
            plan = plan.narrowed(only)
        apply.apply(base, stack, trees[PATCHED])
        runner = _Runner(
            suite=suite,
            archive=archive,
            trees=trees,
            python=python,
            extra=extra,
            folder=folder,
            test_seconds=test_seconds,
            seconds=file_seconds,
        )
        runs, recorded = _both(plan.files, runner, baseline.files if baseline else {}, on_file)
        if record_for:
            files = {file: outcomes(runs[file, BASE]) for file in plan.files}
            record.write(base, RECORD, record_for, files)
        results = _judged(suite, plan, runs, runner, on_alone)
    return Report(
        base_version=base.version,
        stack_id=stack.id,
        plan=plan,
        results=tuple(results),
        stale=tuple(upstream_tests.stale(suite, plan.files, results)),
        recorded=recorded,
    )


def listed(suite: Suite, stack: Stack, *, archive: Path, only: Sequence[str] = ()) -> UpstreamPlan:
    """Return what ``run`` would run, without running it."""
    with tempfile.TemporaryDirectory(prefix="sm12x-up-") as name:
        source = Path(name) / BASE
        tree.unpack(archive, source)
        plan = upstream_tests.plan(suite, stack, source)
    return plan.narrowed(only) if only else plan


def outcomes(run: FileRun) -> Outcomes:
    """Return what is recorded of a run on the untouched tree."""
    by_test = {name: upstream_tests.outcome(run, name) for name in run.tests}
    return Outcomes.of(by_test, problem=run.problem)


def _both(
    targets: Sequence[str],
    runner: _Runner,
    baseline: Mapping[str, Outcomes],
    on_file: Callable[[str, str], None] | None,
) -> tuple[dict[tuple[str, str], FileRun], int]:
    """Return each file's run on each tree, and how many of the untouched tree are recorded ones."""
    # Nothing can be worse than a file that gives no outcome on the untouched tree: running it takes
    # its whole time limit.
    without = [file for file in targets if file in baseline and not baseline[file].tests]
    empty = FileRun(tests={}, problem="", detail="")
    runs = {(file, side): empty for file in without for side in SIDES}
    rest = [file for file in targets if file not in without]
    runs |= runner.run(rest, PATCHED, on_file)
    same = [file for file in rest if baseline.get(file) == outcomes(runs[file, PATCHED])]
    runs |= {(file, BASE): runs[file, PATCHED] for file in same}
    runs |= runner.run([file for file in rest if file not in same], BASE, on_file)
    return runs, len(same) + len(without)


def _judged(
    suite: Suite,
    plan: UpstreamPlan,
    runs: Mapping[tuple[str, str], FileRun],
    runner: _Runner,
    on_alone: Callable[[int], None] | None,
) -> list[UpstreamResult]:
    """Return the verdicts; a test that is worse on the patched tree is run again first, alone."""
    again = {
        file: upstream_tests.differing(runs[file, BASE], runs[file, PATCHED]) for file in plan.files
    }
    ids = [f"{file}::{test}" for file, names in again.items() for test in names]
    if ids and on_alone:
        on_alone(len(ids))
    # One tree after the other: they cannot compete for a resource then.
    alone = {key: run for side in SIDES for key, run in runner.run(ids, side).items()}
    results: list[UpstreamResult] = []
    for file, tests in again.items():
        second = {
            test: (alone[f"{file}::{test}", BASE], alone[f"{file}::{test}", PATCHED])
            for test in tests
        }
        results += upstream_tests.judge(suite, file, runs[file, BASE], runs[file, PATCHED], second)
    return results


@dataclass(kw_only=True)
class _Runner:
    suite: Suite
    archive: Path
    trees: Mapping[str, Path]
    python: Path
    extra: Path | None
    folder: Path
    test_seconds: float
    seconds: float
    rounds: int = 0

    def run(
        self,
        targets: Sequence[str],
        side: str,
        on_file: Callable[[str, str], None] | None = None,
    ) -> dict[tuple[str, str], FileRun]:
        """Run each of ``targets`` (files, or tests) on one tree, in forks of one process.

        Raises:
            ToolFailedError: no target was run: the environment is at fault, not a test.
        """
        if not targets:
            return {}
        if not self.trees[side].exists():
            # The untouched tree, which is seldom needed where its outcomes are recorded.
            tree.unpack(self.archive, self.trees[side])
        self.rounds += 1
        folder = self.folder / f"{self.rounds}-{side}"
        folder.mkdir()
        runs: dict[tuple[str, str], FileRun] = {}

        def answer(line: str) -> None:
            if line.startswith(_ANSWER):
                number, code = json.loads(line.removeprefix(_ANSWER))
                runs[targets[number], side] = _read(folder, number, targets[number], code)
                if on_file:
                    on_file(targets[number], side)

        detail = "it was not run"
        try:
            process.stream(
                [self.python, "-m", "sm12x_zygote", self._work(folder, targets)],
                cwd=self.trees[side],
                env=self._settings(folder),
                on_line=answer,
                next_step="read these lines; `sm12x-dev cache clear --all` deletes an incomplete "
                "environment",
            )
        except ToolFailedError as error:
            if not runs:
                raise
            detail = error.message
        for target in targets:
            unread = FileRun(tests={}, problem=upstream_tests.CRASHED, detail=detail)
            runs.setdefault((target, side), unread)
        return runs

    def _work(self, folder: Path, targets: Sequence[str]) -> Path:
        """Write the list of what the process of ``targets`` has to do."""
        _hub(folder / "t" / "hub", self.suite.models)
        path = folder / "work.json"
        work = [
            {
                "arguments": [
                    *(target, "-q", f"--junitxml={folder / f'{number}.xml'}"),
                    *("-o", "junit_family=xunit2"),
                    # pytest's own form parses the source of each test that fails: a third of the
                    # time.
                    "--tb=native",
                    # Remembers nothing from the other tree.
                    *("-p", "no:cacheprovider"),
                    # Of pytest-timeout.
                    *("-o", f"timeout={self.test_seconds:g}", "-o", "timeout_method=signal"),
                ],
                "leave": self._left(target),
                "cuda": target.split("::", 1)[0] in self.suite.environment.gated,
                "log": str(folder / f"{number}.log"),
                "seconds": self.seconds,
            }
            for number, target in enumerate(targets)
        ]
        request = {
            "platform": self.suite.environment.platform,
            "empty": self.suite.environment.empty,
            "preload": self.suite.environment.preload,
            "models": [model.implemented for model in self.suite.models],
            "answer": _ANSWER,
            # Tests that are run again, alone, cannot compete for a resource then.
            "jobs": 1 if "::" in targets[0] else _JOBS,
            "work": work,
        }
        path.write_text(json.dumps(request), encoding="utf-8")
        return path

    def _left(self, target: str) -> list[str]:
        """Return the tests of the file that are not run."""
        file = target.split("::", 1)[0]
        return [
            entry.test.split("::", 1)[1]
            for entry in self.suite.cannot
            if entry.file == file and not entry.run and entry.test != file
        ]

    def _settings(self, folder: Path) -> dict[str, str | None]:
        scratch = folder / "t"
        scratch.mkdir(exist_ok=True)
        # Without the machine's models, its devices and the network.
        homes = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME")
        unset = ("PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
        return {
            **dict.fromkeys((*unset, "VIRTUAL_ENV")),
            **dict.fromkeys(homes, str(scratch)),
            "PYTHONPATH": ":".join([str(PLUGIN), *([str(self.extra)] if self.extra else [])]),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_PLUGINS": "",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            # No model runs, and torch's compiler imports what is not installed.
            "TORCHDYNAMO_DISABLE": "1",
        }


def _read(folder: Path, number: int, target: str, code: int | None) -> FileRun:
    """Return the run of a target whose pytest ended with ``code``, None where it was killed."""
    try:
        log = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        log = "(nothing was printed)"
    if code == _NO_SUCH_TEST and "::" in target:
        return FileRun(tests={}, problem="", detail="")
    if code in ENDED:
        with suppress(ValueError):
            tests = {test.name: test for test in junit.read(folder / f"{number}.xml")}
            return FileRun(tests=tests, problem="", detail="")
    problem = upstream_tests.HUNG if code is None else upstream_tests.CRASHED
    return FileRun(tests={}, problem=problem, detail="\n".join(log.splitlines()[-_TAIL:]))


def _hub(folder: Path, models: Sequence[HubModel]) -> None:
    """Make the folder of downloaded models, as huggingface_hub lays it out, of ``models``."""
    for model in models:
        home = folder / f"models--{model.name.replace('/', '--')}"
        revision = hashlib.sha1(model.config.encode(), usedforsecurity=False).hexdigest()
        snapshot = home / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(model.config, encoding="utf-8")
        if model.tokenizer:
            (snapshot / "tokenizer.json").write_text(model.tokenizer, encoding="utf-8")
            plain = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            (snapshot / "tokenizer_config.json").write_text(plain, encoding="utf-8")
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(revision, encoding="utf-8")

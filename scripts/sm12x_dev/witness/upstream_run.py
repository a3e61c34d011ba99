"""Run the release's own tests on the untouched and on the patched source, side by side.

Where it is recorded what they give on the untouched source, only what differs is run there.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import Sm12xError
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.witness import junit, upstream_record, upstream_tests, witness
from sm12x_dev.witness.upstream_record import Record
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
# Seconds that importing the release may take, before the first test.
_START_LIMIT = 600
# Packages that the release's tests import and its closure lacks, with hashes.
_TOOLS_LOCK = Path("tests/witness/upstream.lock")
PLUGIN = Path(__file__).resolve().parent / "pytest_plugin"
_TAIL = 20
_POLL = 0.1
# pytest's exit codes that come with a whole junit file; 5: no test in the file.
_ENDED = (0, 1, 2, 5)
# ... and what it ends with where the one test that it is asked for is not there.
_NO_SUCH_TEST = 4
# Processes that share the files of tests, in all.
_PROCESSES = 2


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
    """A folder of the packages that the tests need besides those of the witnesses' environment.

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
    wanted = _wanted(base, suite, root, machine)
    home = cache / witness.HOMES / witness.home_name(base, wanted, machine, "upstream-")
    if not home.is_dir():
        witness.install(
            base,
            home,
            wanted,
            lambda fresh: [witness.pip_install("--python", str(python), "--target", str(fresh))],
            whole=home,
            what="the tests",
            mib=suite.environment.download_mib,
            say=say,
        )
    return home


def _wanted(base: Base, suite: Suite, root: Path, machine: str) -> str:
    told = f"{suite.path}: environment.packages"
    return witness.pinned(base, suite.environment.packages, root / _TOOLS_LOCK, told, machine)


def conditions(base: Base, suite: Suite, *, root: Path, machine: str = platform.machine()) -> str:
    """What the outcomes on the untouched source depend on, as a digest; see ``packages``."""
    locked = (
        witness.requirements(base, machine=machine, root=root),
        _wanted(base, suite, root, machine),
    )
    return upstream_record.conditions(base, suite, locked)


def run(
    base: Base,
    stack: Stack,
    suite: Suite,
    *,
    archive: Path,
    python: Path,
    extra: Path | None,
    record: Record | None = None,
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
        record: what the untouched tree gave; a file that gives the same on the patched one is not
          run on the untouched one.
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
        for side in SIDES:
            tree.unpack(archive, trees[side])
        plan = upstream_tests.plan(suite, stack, trees[BASE])
        if only:
            plan = plan.narrowed(only)
        apply.apply(base, stack, trees[PATCHED], archive=archive)
        runner = _Runner(
            suite=suite,
            trees=trees,
            python=python,
            extra=extra,
            folder=folder,
            test_seconds=test_seconds,
            seconds=file_seconds,
        )
        runs, recorded = _both(plan.files, runner, record, on_file)
        if record_for:
            upstream_record.write(base, record_for, {f: runs[f, BASE] for f in plan.files})
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
    """What ``run`` would run, without running it."""
    with tempfile.TemporaryDirectory(prefix="sm12x-up-") as name:
        source = Path(name) / BASE
        tree.unpack(archive, source)
        plan = upstream_tests.plan(suite, stack, source)
    return plan.narrowed(only) if only else plan


def _both(
    targets: Sequence[str],
    runner: _Runner,
    record: Record | None,
    on_file: Callable[[str, str], None] | None,
) -> tuple[dict[tuple[str, str], FileRun], int]:
    """The run of each file on each tree, and how many of the untouched tree's are recorded ones."""
    known = record.files if record else {}
    # Nothing can be worse than a file that gives no outcome on the untouched tree: running it takes
    # its whole time limit.
    without = [file for file in targets if file in known and not known[file].tests]
    first = [file for file in targets if file in known and known[file].tests]
    runs = runner.run(first, (PATCHED,), processes=_PROCESSES, on_file=on_file)
    runs |= {(file, PATCHED): FileRun(tests={}, problem="", detail="") for file in without}
    same = [file for file in first if record and record.has(file, runs[file, PATCHED])] + without
    runs |= {(file, BASE): runs[file, PATCHED] for file in same}
    differing = [file for file in first if (file, BASE) not in runs]
    runs |= runner.run(differing, (BASE,), processes=_PROCESSES, on_file=on_file)
    others = [file for file in targets if file not in known]
    runs |= runner.run(others, SIDES, on_file=on_file)
    return runs, len(same)


def _judged(
    suite: Suite,
    plan: UpstreamPlan,
    runs: Mapping[tuple[str, str], FileRun],
    runner: _Runner,
    on_alone: Callable[[int], None] | None,
) -> list[UpstreamResult]:
    """The verdicts; a test that is worse on the patched tree is run again first, alone."""
    again = {
        file: upstream_tests.differing(runs[file, BASE], runs[file, PATCHED]) for file in plan.files
    }
    tests = [(file, test) for file, names in again.items() for test in names]
    alone: dict[str, FileRun] = {}
    if tests:
        if on_alone:
            on_alone(len(tests))
        ids = [f"{file}::{test}" for file, test in tests]
        # One tree after the other: they cannot compete for a resource then.
        alone = {
            f"{side} {target}": found
            for side in SIDES
            for (target, _), found in runner.run(ids, (side,)).items()
        }
    return [
        result
        for file in plan.files
        for result in upstream_tests.judge(
            suite,
            file,
            runs[file, BASE],
            runs[file, PATCHED],
            {
                test: (alone[f"{BASE} {file}::{test}"], alone[f"{PATCHED} {file}::{test}"])
                for test in again[file]
            },
        )
    ]


@dataclass(kw_only=True)
class _Runner:
    suite: Suite
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
        sides: Sequence[str],
        *,
        processes: int = 1,
        on_file: Callable[[str, str], None] | None = None,
    ) -> dict[tuple[str, str], FileRun]:
        """Run each of ``targets`` (files, or tests) on the trees of ``sides``, these at a time.

        So many ``processes`` share the targets on each side.
        """
        self.rounds += 1
        batches = [
            _Batch(self.folder / f"{self.rounds}-{side}-{share}", side, targets[share::processes])
            for side in sides
            for share in range(min(processes, len(targets)))
        ]
        running: list[tuple[_Batch, process.Background]] = []
        try:
            for batch in batches:
                running.append((batch, self._start(batch)))
            while running:
                for batch, background in list(running):
                    ended = background.poll() is not None
                    for target in batch.read():
                        if on_file:
                            on_file(target, batch.side)
                    if ended or batch.overdue(self.seconds):
                        background.stop()
                        batch.read()
                        batch.close(background.log)
                        running.remove((batch, background))
                time.sleep(_POLL)
        finally:
            for _, background in running:
                background.stop()
        return {
            (target, batch.side): found for batch in batches for target, found in batch.runs.items()
        }

    def _start(self, batch: _Batch) -> process.Background:
        batch.folder.mkdir()
        scratch = batch.folder / "t"
        scratch.mkdir()
        _hub(scratch / "hub", self.suite.models)
        work = batch.folder / "work.json"
        work.write_text(
            json.dumps(
                {
                    "platform": self.suite.environment.platform,
                    "empty": self.suite.environment.empty,
                    "preload": self.suite.environment.preload,
                    "models": [model.implemented for model in self.suite.models],
                    "answers": str(batch.answers),
                    "work": [
                        {
                            "arguments": self._arguments(target, batch.report(number)),
                            "leave": self._left(target),
                            "cuda": target.split("::", 1)[0] in self.suite.environment.gated,
                            "log": str(batch.log(number)),
                            "seconds": self.seconds,
                        }
                        for number, target in enumerate(batch.targets)
                    ],
                }
            ),
            encoding="utf-8",
        )
        paths = [str(PLUGIN), *([str(self.extra)] if self.extra else [])]
        return process.Background(
            [self.python, "-m", "sm12x_zygote", work],
            cwd=self.trees[batch.side],
            env={
                "PYTHONPATH": ":".join(paths),
                "PYTHONDONTWRITEBYTECODE": None,
                "PYTHONHOME": None,
                "PYTEST_ADDOPTS": None,
                "PYTEST_PLUGINS": None,
                "VIRTUAL_ENV": None,
                # Without the machine's models, its devices and the network.
                "HOME": str(scratch),
                "TMPDIR": str(scratch),
                "XDG_CACHE_HOME": str(scratch),
                "XDG_CONFIG_HOME": str(scratch),
                "HF_HOME": str(scratch),
                "HF_HUB_OFFLINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "VLLM_PLUGINS": "",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": "1",
                # No model runs, and torch's compiler imports what is not installed.
                "TORCHDYNAMO_DISABLE": "1",
            },
            log=batch.folder / "log",
        )

    def _left(self, target: str) -> list[str]:
        """The tests of the file that are not run."""
        file = target.split("::", 1)[0]
        return [
            entry.test.split("::", 1)[1]
            for entry in self.suite.cannot
            if entry.file == file and not entry.run and entry.test != file
        ]

    def _arguments(self, target: str, report: Path) -> list[str]:
        return [
            target,
            "-q",
            f"--junitxml={report}",
            *("-o", "junit_family=xunit2"),
            # pytest's own form parses the source of each test that fails: a third of the time.
            "--tb=native",
            # Remembers nothing from the other tree.
            *("-p", "no:cacheprovider"),
            # Of pytest-timeout.
            *("-o", f"timeout={self.test_seconds:g}", "-o", "timeout_method=signal"),
        ]


class _Batch:
    """The targets of one process, and what is known of them."""

    def __init__(self, folder: Path, side: str, targets: Sequence[str]) -> None:
        self.folder = folder
        self.side = side
        self.targets = list(targets)
        self.answers = folder / "answers"
        self.runs: dict[str, FileRun] = {}
        self._last = time.monotonic() + _START_LIMIT

    def report(self, number: int) -> Path:
        return self.folder / f"{number}.xml"

    def log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def overdue(self, seconds: float) -> bool:
        """Whether the process, which ends its pytests itself, has not done so."""
        return time.monotonic() > self._last + seconds + _START_LIMIT / 10

    def read(self) -> list[str]:
        """Read the new answers; returns the targets that they are about."""
        try:
            lines = self.answers.read_text(encoding="utf-8").split("\n")[:-1]
        except OSError:
            return []
        fresh = self.targets[len(self.runs) : len(lines)]
        for target in fresh:
            number = len(self.runs)
            self.runs[target] = self._found(number, json.loads(lines[number])["code"])
            self._last = time.monotonic()
        return fresh

    def close(self, log: Path) -> None:
        """After the process has ended: a target without an answer was not run.

        Raises:
            Sm12xError: no target was run: the environment is at fault, not a test.
        """
        if self.targets and not self.runs:
            raise Sm12xError(
                f"the process that runs the tests on the {self.side} tree ended before the first; "
                f"its last lines:\n{_tail(log)}\n",
                next_step="read these lines; `sm12x-dev cache clear --all` deletes an incomplete "
                "environment",
            )
        for target in self.targets:
            self.runs.setdefault(
                target, FileRun(tests={}, problem=upstream_tests.CRASHED, detail=_tail(log))
            )

    def _found(self, number: int, code: int | None) -> FileRun:
        if code is None:
            return FileRun(tests={}, problem=upstream_tests.HUNG, detail=_tail(self.log(number)))
        if code == _NO_SUCH_TEST and "::" in self.targets[number]:
            return FileRun(tests={}, problem="", detail="")
        try:
            tests = junit.read(self.report(number))
        except ValueError:
            code = code if code not in _ENDED else 3
        if code not in _ENDED:
            return FileRun(tests={}, problem=upstream_tests.CRASHED, detail=_tail(self.log(number)))
        return FileRun(tests={test.name: test for test in tests}, problem="", detail="")


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


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(nothing was printed)"
    return "\n".join(lines[-_TAIL:])

"""pytest processes on source trees, some at a time, each in a process group that ends with it."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from sm12x.core import process
from sm12x_dev.witness import junit

# Seconds one pytest process may take for each of its witnesses.
TIME_LIMIT = 1800
PLUGIN = Path(__file__).resolve().parent / "pytest_plugin"
_TAIL = 15
# pytest's exit codes that come with a whole junit file: all passed, some failed, not all could be
# collected, there are none.
ENDED = (0, 1, 2, 5)

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One witness on one tree. ``problem`` is "" unless pytest itself did not do its work."""

    witness: str
    side: str
    tests: tuple[junit.Test, ...]
    problem: str

    @property
    def outcomes(self) -> dict[str, str]:
        """Return the outcome of each test by its name."""
        return {test.name: test.outcome for test in self.tests}


class Pytests:
    """Runs witnesses; a context that ends its processes where it is left by an error.

    ``submit`` calls a function in one of ``jobs`` threads, and the function calls ``run``.
    """

    def __init__(self, *, python: Path, root: Path, seconds: float, jobs: int) -> None:
        self._python = python
        self._root = root
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(max_workers=jobs)
        self._running: set[process.Background] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._numbers = itertools.count(1)
        self._home = tempfile.TemporaryDirectory(prefix="sm12x-witness-")
        self._folder = Path(self._home.name)

    def __enter__(self) -> Pytests:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._stopped = True
            for job in self._running:
                job.kill()
        self._threads.shutdown(cancel_futures=True)
        self._home.cleanup()

    def submit(
        self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs
    ) -> Future[_T]:
        """Call ``function`` in a thread, as soon as one is free."""
        return self._threads.submit(function, *arguments, **named)

    def run(
        self, witnesses: Sequence[str], side: str, source: Path, *arguments: str
    ) -> tuple[Run, ...]:
        """Run ``witnesses`` on the tree ``source`` in one pytest, to which ``arguments`` are given.

        Raises:
            CancelledError: the context was left.
        """
        with self._lock:
            if self._stopped:
                raise CancelledError
            report = self._folder / f"{next(self._numbers)}-{side}.xml"
            job = process.Background(
                [
                    self._python,
                    *("-m", "pytest", *witnesses, "-q"),
                    # One that cannot be collected is no reason not to run the others.
                    "--continue-on-collection-errors",
                    *(f"--junitxml={report}", "-o", "junit_family=xunit2"),
                    *("-p", "sm12x_witness_plugin"),
                    # Remembers nothing from the other tree.
                    *("-p", "no:cacheprovider"),
                    *("-c", f"{self._root / 'pyproject.toml'}", "--rootdir", f"{self._root}"),
                    *arguments,
                ],
                cwd=self._root,
                env=self._variables(side, source),
                log=report.with_suffix(".log"),
            )
            self._running.add(job)
        limit = self._seconds * len(witnesses)
        try:
            code = job.wait(limit)
        finally:
            # Processes that a test has left must not run beside the next pytest.
            job.stop()
            with self._lock:
                self._running.remove(job)
        tests, problem = _tests(report, code, limit)
        if problem:
            log = job.log.read_text(encoding="utf-8", errors="replace")
            problem = "\n".join([problem, *log.splitlines()[-_TAIL:]])
        return tuple(
            Run(
                witness=witness,
                side=side,
                tests=tuple(test for test in tests if test.module == _module(witness)),
                problem=problem,
            )
            for witness in witnesses
        )

    def _variables(self, side: str, source: Path) -> dict[str, str | None]:
        return {
            "SM12X_TREE": str(source),
            "SM12X_SIDE": side,
            # A kernel that Triton interprets is many small products, which threads of NumPy's
            # OpenBLAS wait for: 26 s of processor time, and 7 with one thread.
            "OMP_NUM_THREADS": "1",
            # Where witnesses keep what they compile, by its text: see tests/witness/native.py.
            "SM12X_WITNESS_COMPILED": str(self._folder),
            "PYTHONPATH": str(PLUGIN),
            # The tree's modules are compiled once for all its witnesses.
            "PYTHONDONTWRITEBYTECODE": None,
            "PYTEST_ADDOPTS": None,
            "PYTHONHOME": None,
            "VIRTUAL_ENV": None,
            # vLLM does not remove the sockets between its processes: they go with the report.
            "VLLM_RPC_BASE_PATH": str(self._folder),
        }


def _tests(report: Path, code: int | None, limit: float) -> tuple[tuple[junit.Test, ...], str]:
    """Return the tests of a report, and what is wrong with the pytest that ended with ``code``."""
    problem = f"pytest ended with {code}"
    if code is None:
        problem = f"pytest did not finish in {limit:g} s and was killed"
    elif code < 0:
        problem = f"pytest was ended by signal {-code}"
    elif code in ENDED:
        with suppress(ValueError):
            return junit.read(report), ""
    return (), problem


def _module(witness: str) -> str:
    """Return the module of a witness: "tests/witness/test_x.py::test_y" -> tests.witness.test_x."""
    return witness.partition("::")[0].removesuffix(".py").replace("/", ".")

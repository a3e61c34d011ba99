"""Witnesses: each patch's tests, red on the untouched base and green on the patched one.

A test is red only if it ran and its own assertions failed. One that could not be collected, whose
set-up failed, that was skipped, or whose pytest crashed or hung, is neither red nor green.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sm12x.core import files, lockfile, pipconfig, process
from sm12x.core.declared import shown
from sm12x.core.errors import BadFileError, NoSpaceError, ToolFailedError, ToolMissingError
from sm12x.stack.model.base import Base, Witness
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.witness import junit

BASE = "base"
PATCHED = "patched"
SIDES = (BASE, PATCHED)
# The outcome of a test that a tree's run does not have.
_ABSENT = "absent"
# The folder of the environments, in the cache.
HOMES = "witness"
# Folder of an environment for the packages that only some witnesses see (tests/witness/kernels.py).
APART = "apart"
# Seconds one pytest process may take.
TIME_LIMIT = 1800
# pytest, which no release depends on, with hashes.
_TOOLS_LOCK = Path("tests/witness/requirements.lock")
_PLUGIN = Path(__file__).resolve().parent / "pytest_plugin"
_TAIL = 15
# <version>-<machine>-<kind>-<key>
_OTHER = re.compile(r"^([^-]+)-(x86_64|aarch64)-([a-z]+)-[0-9a-f]{12}$")
_FULL = re.compile("No space left on device|Disk quota exceeded|os error 28")
# Seconds between two looks at the running ones.
_POLL = 0.1
# Loading torch and vLLM takes longer than most tests of a witness: witnesses of one rig share a
# pytest, at most this many, so that every processor has work to the end.
_RIGS = ("executor_rig", "kernels", "world")
_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One witness on one tree. ``problem`` is "" unless pytest itself did not do its work."""

    witness: str
    side: str
    tests: tuple[junit.Test, ...]
    problem: str


@dataclass(frozen=True, kw_only=True)
class WitnessTest:
    """One test of one patch, on both trees.

    ``base`` and ``patched`` are its outcomes ("passed", "failed", "error", "skipped", "absent", or
    "crashed" when pytest did not live to tell). ``reasons`` are the violations of the rule: a test
    that is marked ``patched_only`` is absent from the base.
    """

    patch: str
    witness: str
    test: str
    guard: bool
    base: str
    patched: str
    reasons: tuple[str, ...]
    detail: str

    @property
    def ok(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, kw_only=True)
class WitnessReport:
    base_version: str
    stack_id: str
    checks: tuple[WitnessTest, ...]

    @shown
    def passed(self) -> int:
        return sum(check.ok for check in self.checks)

    @shown
    def failed(self) -> int:
        return len(self.checks) - self.passed


def environment(
    base: Base,
    *,
    root: Path,
    cache: Path,
    say: Callable[[str], None],
    machine: str = platform.machine(),
) -> Path:
    """The Python that runs the witnesses, in an environment made of the base's lock.

    It is kept in ``cache`` and made once for each content of the lock.

    Args:
        root: the checkout, for the locked test tools.
        say: told what is about to be downloaded, before it is.

    Raises:
        BadFileError: base.toml names a package that the lock does not have.
        ToolFailedError: uv could not install.
        NoSpaceError: too little room for what is about to be installed.
    """
    wanted = requirements(base, machine=machine, root=root)
    apart = _apart(base, machine)
    home = cache / HOMES / environment_name(base, machine=machine, root=root)
    python = home / "bin" / "python"
    if not python.exists():

        def commands(fresh: Path) -> list[list[str]]:
            command = [
                pipconfig.find_uv(),
                "venv",
                "--quiet",
                "--relocatable",
                "--python",
                sys.executable,
            ]
            into = pip_install("--python", str(fresh / "bin" / "python"))
            listed = fresh.with_name("apart.txt")
            listed.write_text(apart, encoding="utf-8")
            beside = [[*into[:-1], "--target", str(fresh / APART), into[-1], str(listed)]]
            return [[*command, str(fresh)], *(beside if apart else ()), into]

        # Unpacked, the wheels of 0.21.0 take 1.7 times their size, and once only: uv links the
        # files of its cache. The rest is for wheels on their way.
        install(
            base,
            home,
            wanted,
            commands,
            whole=python,
            what="the witnesses",
            mib=base.witness.download_mib,
            say=say,
        )
    return python


def pip_install(*where: str) -> list[str]:
    """uv's command to install a lock, whose path is to follow, ``where``."""
    return [
        *(pipconfig.find_uv(), "pip", "install", *where),
        # The lock has been resolved; what it leaves out is left out on purpose.
        *("--no-deps", "--require-hashes", "--only-binary=:all:"),
        # torch alone takes 3 s longer without, in each of the many processes.
        *("--compile-bytecode", "--requirement"),
    ]


def install(
    base: Base,
    home: Path,
    wanted: str,
    commands: Callable[[Path], Sequence[Sequence[str]]],
    *,
    whole: Path,
    what: str,
    mib: int,
    say: Callable[[str], None],
) -> None:
    """Make ``home``, whole or not at all; ``whole`` is what is then there.

    Args:
        wanted: the lock that is installed.
        commands: those that make the folder they are given; the last one takes a lock.
        what: the user of the packages in messages: "the witnesses".
        mib: how much may have to be downloaded.

    Raises:
        ToolFailedError: uv could not install.
        NoSpaceError: too little room, before or on the way.
    """
    say(
        f"installing {len(lockfile.parse(wanted).pins)} packages for {what} of {base.version} "
        f"into {home}: up to {mib} MiB to download"
    )
    files.require_space(home.parent, mib * 3 / 1024, what=f"the environment of {what}")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as name:
        fresh = Path(name) / "environment"
        listed = Path(name) / "requirements.txt"
        listed.write_text(wanted, encoding="utf-8")
        *before, last = commands(fresh)
        for words in (*before, [*last, str(listed)]):
            _installing(base, words, what)
        # Under its final name only when it is whole: a killed run starts over.
        try:
            fresh.rename(home)
        except OSError:
            # Another run made the same one meanwhile.
            if not whole.exists():
                raise


def _installing(base: Base, words: Sequence[str], what: str) -> None:
    """Run uv; a full disk raises another error than a package that does not fit this Python."""
    try:
        process.run(
            words,
            env={**pipconfig.load().uv_environment(), "UV_PYTHON_DOWNLOADS": "never"},
            next_step="read uv's message above; a package that needs another Python than "
            f"{platform.python_version()} (the release is for {base.python}) needs --python of an "
            "environment that has pytest and torch",
        )
    except ToolFailedError as error:
        if not _FULL.search(error.message):
            raise
        raise NoSpaceError(
            f"the environment of {what} of {base.version} cannot be installed: the disk is full",
            next_step="free space there, or move the cache with SM12X_CACHE",
        ) from None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment in the cache: ``size`` in bytes as they lie there, ``bases`` that use it.

    uv links the files of its own cache, so that removing one of two that hold the same frees less.
    """

    path: Path
    size: Annotated[int, Field(alias="bytes")]
    bases: tuple[str, ...]


def environments(
    known: Sequence[Base], *, root: Path, cache: Path, machine: str = platform.machine()
) -> list[Environment]:
    """The environments in the cache, and which of ``known`` each is for; stopped runs' too.

    Raises:
        BadFileError: the lock of one of ``known`` cannot be read.
    """
    used = {
        environment_name(base, machine=machine, root=root): base.version
        for base in known
        if base.lock_path(machine).is_file()
    }
    homes = cache / HOMES
    if not homes.is_dir():
        return []
    folders = [path for path in sorted(homes.iterdir()) if path.is_dir()]
    # Environments of other tests of a base: the newest one counts as in use.
    newest: dict[tuple[str, ...], Path] = {}
    for path in sorted(folders, key=lambda path: path.stat().st_mtime):
        match = _OTHER.match(path.name)
        if match and match[1] in {base.version for base in known}:
            newest[match.groups()] = path
    used |= {path.name: groups[0] for groups, path in newest.items()}
    return [
        Environment(
            path=path,
            size=_size(path),
            bases=(used[path.name],) if path.name in used else (),
        )
        for path in folders
    ]


def remove(environment: Environment) -> None:
    """Delete an environment; a run that is using it fails."""
    # Under another name first: a half deleted folder must not count as a complete one.
    aside = environment.path.with_name(f".{environment.path.name}.removed")
    if environment.path.name.startswith("."):
        aside = environment.path
    else:
        environment.path.rename(aside)
    if aside.is_symlink():
        # What it names, such as a folder on another disk, is not ours.
        aside.unlink()
    else:
        shutil.rmtree(aside)


def _size(folder: Path) -> int:
    """Bytes of a folder, a file of several names once."""
    seen: set[int] = set()
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(top, name))  # noqa: PTH118 - 40,000 files
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return total


def home_name(base: Base, wanted: str, machine: str, kind: str = "") -> str:
    """The name of the folder of an environment; ``kind`` is of one that is not the witnesses'."""
    version = platform.python_version()
    key = hashlib.sha256(f"{version}\n{wanted}".encode()).hexdigest()[:12]
    return f"{base.version}-{machine}-{kind}{key}"


def requirements(base: Base, *, machine: str, root: Path) -> str:
    """The packages of the witnesses' environment, as a requirements file with hashes."""
    told = f"{base.folder / 'base.toml'}: witness.packages"
    return pinned(base, base.witness.packages, root / _TOOLS_LOCK, told, machine)


def environment_name(base: Base, *, machine: str, root: Path) -> str:
    """The name of the folder of the witnesses' environment."""
    wanted = requirements(base, machine=machine, root=root) + _apart(base, machine)
    return home_name(base, wanted, machine)


def _apart(base: Base, machine: str) -> str:
    """The packages that lie apart in it, as a requirements file; empty where there are none."""
    told = f"{base.folder / 'base.toml'}: witness.apart"
    return pinned(base, base.witness.apart, None, told, machine)


def pinned(base: Base, names: Sequence[str], tools: Path | None, told: str, machine: str) -> str:
    """The pins of ``names``, which ``told`` names, in the lock of ``base``, and all of ``tools``.

    Raises BadFileError where the lock does not have one.
    """
    path = base.lock_path(machine)
    pins = {pin.name: pin for pin in lockfile.read(path).pins}
    absent = sorted(set(names) - pins.keys())
    if absent:
        raise BadFileError(
            f"{told} names {', '.join(absent)}, which {path.name} does not have",
            next_step="name packages of the lock, as it writes them",
        )
    chosen = [*(pins[name] for name in names), *(lockfile.read(tools).pins if tools else ())]
    return "".join(pin.text for pin in chosen)


def run(
    base: Base,
    stack: Stack,
    patches: Sequence[Patch],
    *,
    archive: Path,
    python: Path,
    root: Path,
    seconds: float = TIME_LIMIT,
    jobs: int = 2,
    on_run: Callable[[str, str], None] | None = None,
) -> WitnessReport:
    """Run the witnesses of ``patches`` on the untouched and on the fully patched source.

    Args:
        archive: the sdist of the base.
        python: an interpreter that has pytest and what the witnesses import.
        root: the checkout, whose tests/ the witnesses are in.
        seconds: how long one pytest process may take.
        jobs: how many of them may run at a time.
        on_run: called with (witness, side) before each.

    Raises:
        apply.StackConflictError: the stack does not apply.
    """
    witnesses = sorted(
        dict.fromkeys(path for patch in patches for path in patch.witnesses),
        key=lambda path: path not in base.witness.first,
    )
    with tempfile.TemporaryDirectory(prefix="sm12x-witness-") as name:
        trees = {side: Path(name) / side for side in SIDES}
        for side in SIDES:
            tree.unpack(archive, trees[side])
        apply.apply(base, stack, trees[PATCHED], archive=archive)
        runs = run_on(
            trees,
            witnesses,
            python=python,
            root=root,
            seconds=seconds,
            jobs=jobs,
            on_run=on_run,
            alone=base.witness.first,
        )
    return WitnessReport(
        base_version=base.version,
        stack_id=stack.id,
        checks=tuple(
            check
            for patch in patches
            for path in patch.witnesses
            for check in judge(patch.name, runs[path, BASE], runs[path, PATCHED], base.witness)
        ),
    )


def run_on(
    trees: Mapping[str, Path],
    witnesses: Sequence[str],
    *,
    python: Path,
    root: Path,
    seconds: float = TIME_LIMIT,
    jobs: int = 2,
    on_run: Callable[[str, str], None] | None = None,
    alone: Sequence[str] = (),
) -> dict[tuple[str, str], Run]:
    """Run ``witnesses`` on the source in each of ``trees``, side -> folder; see ``run``.

    Those of one rig share a process, but for those ``alone``. Where it crashes or hangs, each of
    them is run again in one of its own.
    """
    if shutil.which(str(python)) is None:
        raise ToolMissingError(
            f"{python} is not an executable",
            next_step="give the Python of an environment that has pytest and torch",
        )
    waiting = [(paths, side) for paths in _shares(witnesses, alone, root) for side in trees]
    running: list[Job] = []
    runs: dict[tuple[str, str], Run] = {}
    with tempfile.TemporaryDirectory(prefix="sm12x-witness-") as name:
        started = 0
        compiled = Path(name) / "compiled"
        compiled.mkdir()
        try:
            while waiting or running:
                if waiting and len(running) < jobs:
                    paths, side = waiting.pop(0)
                    if on_run:
                        for path in paths:
                            on_run(path, side)
                    started += 1
                    report = Path(name) / f"{started}-{side}.xml"
                    running.append(
                        Job(
                            paths,
                            side,
                            trees[side],
                            report,
                            python,
                            root,
                            env={"SM12X_WITNESS_COMPILED": str(compiled)},
                        )
                    )
                    continue
                for job in list(running):
                    done = job.result(seconds)
                    if done is None:
                        continue
                    running.remove(job)
                    if len(done) > 1 and any(run.problem for run in done):
                        # One of them has ended the pytest of all.
                        waiting += [((run.witness,), run.side) for run in done]
                    else:
                        runs |= {(run.witness, run.side): run for run in done}
                time.sleep(_POLL)
        finally:
            for job in running:
                job.process.stop()
    return runs


def _shares(witnesses: Sequence[str], alone: Sequence[str], root: Path) -> list[tuple[str, ...]]:
    """The witnesses that share a pytest: of one rig, in order; those ``alone`` have their own."""
    shares: list[list[str]] = []
    last: dict[str, list[str]] = {}
    for path in witnesses:
        rig = "" if path in alone else _rig(root / path)
        if rig and rig in last and len(last[rig]) < _SHARE:
            last[rig].append(path)
            continue
        last[rig] = [path]
        shares.append(last[rig])
    return [tuple(share) for share in shares]


def _rig(witness: Path) -> str:
    """The one of _RIGS that a witness imports, "" for none."""
    try:
        text = witness.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Pytest says what is wrong with it.
        return ""
    return next(
        (
            rig
            for rig in _RIGS
            if re.search(rf"^from tests\.witness\b.*\b{rig}\b", text, re.MULTILINE)
        ),
        "",
    )


def judge(patch: str, base: Run, patched: Run, known: Witness) -> list[WitnessTest]:
    """Compare a witness's run on the untouched tree with the one on the patched tree.

    ``known`` says which tests the untouched tree passes, or fails, unlike that of other releases.
    """
    prefix = f"{base.witness}::"
    upstream, needed = (
        {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        for names in (known.upstream, known.needed)
    )
    before = {test.name: test for test in base.tests}
    after = {test.name: test for test in patched.tests}
    checks: list[WitnessTest] = []

    def whole(reason: str, *, crashed: str = "", detail: str = "") -> None:
        checks.append(
            WitnessTest(
                patch=patch,
                witness=base.witness,
                test="(the whole witness)",
                guard=False,
                base="crashed" if crashed == BASE else "",
                patched="crashed" if crashed == PATCHED else "",
                reasons=(reason,),
                detail=detail,
            )
        )

    for side in (base, patched):
        if side.problem:
            first, _, rest = side.problem.partition("\n")
            whole(f"on the {_tree(side.side)}: {first}", crashed=side.side, detail=rest)
    if base.problem or patched.problem:
        return checks
    names = dict.fromkeys([*before, *after])
    guards = {test.name for test in (*before.values(), *after.values()) if test.guard}
    guards = (guards | upstream) - needed
    one_sided = {test.name for test in after.values() if test.patched_only} - before.keys()
    if names.keys() <= guards | one_sided:
        whole("has no test, guards aside: nothing shows that the patch is needed")
    for name in sorted((upstream | needed) - names.keys()):
        whole(f"has no test {name}, which [witness] in base.toml names")
    for name in names:
        wanted = {BASE: junit.PASSED if name in guards else junit.FAILED, PATCHED: junit.PASSED}
        if name in one_sided:
            wanted[BASE] = _ABSENT
        checks.append(
            _check(
                patch,
                base.witness,
                name,
                before.get(name),
                after.get(name),
                guard=name in guards,
                wanted=wanted,
            )
        )
    return checks


def _check(
    patch: str,
    witness: str,
    name: str,
    before: junit.Test | None,
    after: junit.Test | None,
    *,
    guard: bool,
    wanted: Mapping[str, str],
) -> WitnessTest:
    reasons: list[str] = []
    detail = ""
    for side, test in ((BASE, before), (PATCHED, after)):
        outcome = test.outcome if test else _ABSENT
        if outcome == wanted[side]:
            continue
        said = f": {test.said[:200]}" if test and test.said else ""
        if outcome == junit.PASSED:
            reasons.append(
                f"passes on the {_tree(side)}: it does not show that the patch is needed"
            )
        elif outcome == junit.FAILED:
            reasons.append(f"fails on the {_tree(side)}{said}")
        elif outcome == junit.ERROR:
            reasons.append(f"did not get to run on the {_tree(side)}{said}")
        elif outcome == junit.SKIPPED:
            reasons.append(f"is skipped on the {_tree(side)}{said}")
        else:
            reasons.append(f"is not there on the {_tree(side)}")
        detail = detail or (test.detail if test else "")
    return WitnessTest(
        patch=patch,
        witness=witness,
        test=name,
        guard=guard,
        base=before.outcome if before else _ABSENT,
        patched=after.outcome if after else _ABSENT,
        reasons=tuple(reasons),
        detail=detail,
    )


class Job:
    """A pytest of ``witnesses``, running; ``arguments`` and ``env`` are given to it as well."""

    def __init__(
        self,
        witnesses: Sequence[str],
        side: str,
        source: Path,
        report: Path,
        python: Path,
        root: Path,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._witnesses = tuple(witnesses)
        self._side = side
        self._report = report
        self._start = time.monotonic()
        self.process = process.Background(
            [
                python,
                "-m",
                "pytest",
                *witnesses,
                "-q",
                # One that cannot be collected is no reason not to run the others.
                "--continue-on-collection-errors",
                f"--junitxml={report}",
                "-p",
                "sm12x_witness_plugin",
                # Remembers nothing from the other tree.
                "-p",
                "no:cacheprovider",
                "-o",
                "junit_family=xunit2",
                "-c",
                str(root / "pyproject.toml"),
                "--rootdir",
                str(root),
                *arguments,
            ],
            cwd=root,
            env={
                **(env or {}),
                "SM12X_TREE": str(source),
                "SM12X_SIDE": self._side,
                "PYTHONPATH": str(_PLUGIN),
                # The tree's modules are compiled once for all its witnesses.
                "PYTHONDONTWRITEBYTECODE": None,
                "PYTEST_ADDOPTS": None,
                "PYTHONHOME": None,
                "VIRTUAL_ENV": None,
                # vLLM does not remove the sockets between its processes: they go with the report.
                "VLLM_RPC_BASE_PATH": str(report.parent),
            },
            log=report.with_suffix(".log"),
        )

    def result(self, seconds: float) -> tuple[Run, ...] | None:
        """What the run gave, by witness; None while it goes on.

        It has ``seconds`` for each of its witnesses.
        """
        code = self.process.poll()
        if code is None:
            limit = seconds * len(self._witnesses)
            if time.monotonic() - self._start < limit:
                return None
            self.process.stop()
            return self._ended(f"pytest did not finish in {limit:g} s and was killed")
        # Processes that a test has left must not run beside the next pytest.
        self.process.stop()
        if code < 0:
            return self._ended(f"pytest was ended by signal {-code}")
        # 0: all passed, 1: some failed, 2: not all could be collected, 5: there are none.
        if code not in (0, 1, 2, 5):
            return self._ended(f"pytest ended with {code}")
        try:
            tests = junit.read(self._report)
        except ValueError:
            return self._ended(f"pytest ended with {code}")
        return tuple(
            Run(
                witness=witness,
                side=self._side,
                tests=tuple(test for test in tests if test.module == _module(witness)),
                problem="",
            )
            for witness in self._witnesses
        )

    def _ended(self, problem: str) -> tuple[Run, ...]:
        tail = self.process.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        said = "\n".join([problem, *tail])
        return tuple(
            Run(witness=witness, side=self._side, tests=(), problem=said)
            for witness in self._witnesses
        )


def _module(witness: str) -> str:
    """The module of a witness: "tests/witness/test_x.py::test_y" -> "tests.witness.test_x"."""
    return witness.partition("::")[0].removesuffix(".py").replace("/", ".")


def _tree(side: str) -> str:
    return "untouched base" if side == BASE else "patched tree"

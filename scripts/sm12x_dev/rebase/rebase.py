"""Porting a stack to another release: patches that apply, are upstream, or need a person.

The new folder is made whole beside the place it is for and takes its name at the end: a run that
fails or is stopped leaves nothing.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version

from sm12x.core import files, lockfile
from sm12x.core.errors import (
    BadFileError,
    PatchConflictError,
    Sm12xError,
    UnknownVerdictError,
    UsageError,
    of_system,
)
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base, Dropped, Override
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import tree
from sm12x_dev import lock
from sm12x_dev.rebase import (
    base_draft,
    conflicts,
    porting,
    release_facts,
    status,
    verdict,
)
from sm12x_dev.rebase.base_draft import Release
from sm12x_dev.rebase.conflicts import PortReport
from sm12x_dev.rebase.porting import PortedStack, PortResult
from sm12x_dev.rebase.status import RebaseOutcome
from sm12x_dev.rebase.verdict import PatchVerdict
from sm12x_dev.witness import junit, witness
from sm12x_dev.worktree import staging

# Data of a base that is written by hand: a first version is better than none.
_COPIED = ("audit-policy.toml",)
_SOURCE = "source"
_UNTOUCHED = "untouched"
_GIT = "git"
# Runs witnesses on a tree for a base: (base, paths of witnesses, tree) -> their runs.
RunWitnesses = Callable[[Base, Sequence[str], Path], Sequence[witness.Run]]
# Runs the witnesses of a patch on an untouched release in between: (new base, patch, release).
Probe = Callable[[Base, Patch, str], PatchVerdict]
_Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PatchOutcome:
    """One patch on the new release. ``state`` as status.decide says it."""

    patch: Patch
    state: str
    verdict: PatchVerdict
    port: PortResult
    since: str

    @property
    def kept(self) -> bool:
        return self.port.taken and self.state in (status.NEEDED, status.UNKNOWN)

    @property
    def open(self) -> bool:
        """Whether a person must resolve it: not in the new stack, and not known to be upstream."""
        return not self.kept and self.state != status.UPSTREAM


@dataclass(frozen=True, kw_only=True)
class RebaseReport:
    """``folder`` is the new base's, ``stack_id`` that of its patches; ``to_check`` is for a person.

    ``probed`` are the results on the releases in between. ``port`` is where the patches in conflict
    can be resolved, None where there are none. ``unrun`` says why no witness could run, None where
    they did or were not to.
    """

    source: str
    version: str
    folder: Path
    stack_id: str
    outcomes: tuple[PatchOutcome, ...]
    to_check: tuple[str, ...]
    probed: tuple[RebaseOutcome, ...] = ()
    port: PortReport | None = None
    unrun: Sm12xError | None = None

    @property
    def open(self) -> tuple[PatchOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.open)


class ConflictsLeftError(PatchConflictError):
    """The folder is written, and some patches have to be resolved by hand."""

    def __init__(self, report: RebaseReport) -> None:
        left = report.open
        where = (
            f"edit the files above, then `sm12x-dev continue {quote(report.port.directory)}`; "
            if report.port is not None
            else ""
        )
        super().__init__(
            f"{len(left)} of {len(report.outcomes)} patches of {report.source} are not in "
            f"{report.version} yet: {', '.join(outcome.patch.name for outcome in left)}",
            next_step=f"{where}the rest is in {report.folder}",
        )


class WitnessesUnrunError(UnknownVerdictError):
    """The folder is written, but it is unknown which of its patches are needed."""

    def __init__(self, report: RebaseReport, cause: Sm12xError) -> None:
        super().__init__(
            f"it is unknown whether {report.version} needs the patches of {report.source}: its "
            f"witnesses could not run: {cause.message}",
            next_step=f"{cause.next_step}; then run this again with --force, or with --python of "
            "an environment that has pytest and torch",
        )


def quote(path: Path) -> str:
    """A path as one word of a command line."""
    return shlex.quote(str(path))


@dataclass(frozen=True, kw_only=True)
class RebaseRequest:
    """The request: the stack, the release to port it to, and options.

    Args:
        found: the release that the stack goes to.
        source: the sdist of the base that is ported; ``target`` that of ``found``.
        root: the checkout that the witnesses' paths are in.
        out: where the new folder goes; patches/ of the checkout, or any other folder.
        force: replace a folder that is there.
        known: the recorded outcomes of the patches on other releases.
        overrides: of the new base's lock, as [[override]] of base.toml has them.
        run_witnesses: None runs none.
        chosen: run only these witnesses (paths), None for all.
        make_locks: whether to resolve the new base's locks.
        lock_needed: whether ``run_witnesses`` needs them.
        releases: all there are; those in between are probed to say since when a fix is upstream.
        probe: None probes none and uses only recorded outcomes.
        say: told what is being done.
        ports: the folder in which a tree is made where patches are left to be resolved.
    """

    base: Base
    stack: Stack
    found: Release
    source: Path
    target: Path
    root: Path
    out: Path
    force: bool
    known: Sequence[RebaseOutcome]
    overrides: Sequence[Override]
    run_witnesses: RunWitnesses | None
    chosen: Sequence[str] | None
    make_locks: bool
    lock_needed: bool
    releases: Sequence[str]
    probe: Probe | None
    say: _Say
    ports: Path

    @property
    def folder(self) -> Path:
        """The new base's."""
        return self.out / self.found.version


@dataclass(kw_only=True)
class _Work:
    """The results of the steps, filled in one after the other."""

    folder: Path
    trees: Mapping[str, Path] = field(default_factory=dict)
    to_check: list[str] = field(default_factory=list)
    torch: dict[str, str] = field(default_factory=dict)
    unrun: Sm12xError | None = None


def rebase(asked: RebaseRequest) -> RebaseReport:
    """Write the folder of the release, with every patch that it needs and that merges.

    Raises:
        DirtyTreeError: the new folder is there already, or is no base's.
        StackConflictError, MessageError: as porting.port.
    """
    base, found = asked.base, asked.found
    staging.require_free(asked.folder, force=asked.force)
    if found.version == base.version:
        raise UsageError(
            f"the stack of {base.version} is on {found.version} already",
            next_step="name another release",
        )
    with tempfile.TemporaryDirectory(prefix="sm12x-rebase-") as scratch:
        report, ported = _rebase(asked, Path(scratch))
        if not any(outcome.open and outcome.port.conflicts for outcome in report.outcomes):
            return report
        names = [
            outcome.patch.name for outcome in report.outcomes if outcome.state != status.UPSTREAM
        ]
        names = [name for name in names if name in ported.commits]
        try:
            asked.say("making a tree to resolve the conflicts in")
            port = conflicts.start(
                _free(asked.ports / found.version),
                Path(scratch) / _GIT,
                asked.target,
                ported,
                names,
                source=base.version,
                new=bases.parse(asked.folder / "base.toml"),
                label=found.sdist.name,
            )
        except (Sm12xError, OSError) as error:
            # The folder has the results of up to an hour; the tree can be made again.
            why = error.message if isinstance(error, Sm12xError) else error
            line = f"conflicts: no tree to resolve them in could be made in {asked.ports}: {why}"
            return replace(report, to_check=(*report.to_check, line))
        return replace(report, port=port)


def _free(wanted: Path) -> Path:
    """``wanted``, or the first of its name with a number that is not there yet."""
    found, number = wanted, 1
    while found.exists():
        number += 1
        found = wanted.with_name(f"{wanted.name}-{number}")
    return found


def _rebase(asked: RebaseRequest, scratch: Path) -> tuple[RebaseReport, PortedStack]:
    """The new folder, and what is in conflict with the repository to resolve it in."""
    base, stack, found = asked.base, asked.stack, asked.found
    with staging.fresh(asked.folder, force=asked.force) as folder:
        trees = {side: scratch / side for side in (_SOURCE, _UNTOUCHED)}
        work = _Work(folder=folder, trees=trees)
        asked.say(f"unpacking {base.sdist.name} and {found.sdist.name}")
        tree.unpack(asked.source, trees[_SOURCE])
        tree.unpack(asked.target, trees[_UNTOUCHED])
        new = _draft(asked, work)
        locked: Sequence[str] = ()
        if asked.make_locks:
            locked = write_locks(base, new, work.torch, work.to_check, asked.say)
        here = platform.machine()
        if asked.run_witnesses is not None and asked.lock_needed and here not in locked:
            work.unrun = BadFileError(
                f"there is no lock for {here}",
                next_step=f"see the line `lock.{here}` above; add an [[override]] to "
                f"{asked.folder / 'base.toml'}",
            )
            asked = replace(asked, run_witnesses=None)
        new = bases.parse(folder / "base.toml")
        verdicts = _verdicts(asked, new, work)
        asked.say(f"trying {len(stack.patches)} patches")
        ported = porting.port(
            base,
            stack,
            trees[_SOURCE],
            trees[_UNTOUCHED],
            leave_out=lambda patch: verdicts[patch.name].state == verdict.UPSTREAM,
            root=asked.root,
            label=found.sdist.name,
            copy=scratch / _GIT,
        )
        outcomes: list[PatchOutcome] = []
        probed: list[RebaseOutcome] = []
        for result in ported.results:
            outcome = _outcome(result, verdicts[result.patch.name], asked)
            if (
                asked.run_witnesses is not None
                and asked.probe is not None
                and outcome.verdict.green
            ):
                outcome = _since(outcome, base, new, asked.releases, asked.probe, probed, work)
            outcomes.append(outcome)
        _write(base, new, outcomes, ported.exported, work)
        identity = series.load(bases.parse(folder / "base.toml")).id
    return (
        RebaseReport(
            source=base.version,
            version=found.version,
            folder=asked.folder,
            stack_id=identity,
            outcomes=tuple(outcomes),
            probed=tuple(probed),
            to_check=tuple(work.to_check),
            unrun=work.unrun,
        ),
        ported,
    )


def records(report: RebaseReport) -> list[RebaseOutcome]:
    """The outcomes to record in patches/status.toml."""
    return [
        RebaseOutcome(
            patch=outcome.patch.name,
            base=report.source,
            release=report.version,
            verdict=outcome.verdict.state,
            text=outcome.port.state,
            witness=outcome.verdict.summary,
            since=outcome.since,
            why=outcome.verdict.why,
        )
        for outcome in report.outcomes
    ] + list(report.probed)


def _draft(asked: RebaseRequest, work: _Work) -> Base:
    asked.say("reading the release's own metadata and build files")
    trees = work.trees
    said, before = release_facts.read(trees[_UNTOUCHED]), release_facts.read(trees[_SOURCE])
    identity = tree.tree_id(trees[_UNTOUCHED])

    def write(cuda: str | None) -> tuple[Base, tuple[str, ...]]:
        drafted = base_draft.draft(
            asked.base,
            asked.found,
            said,
            before,
            tree=identity,
            torch_cuda=cuda,
            overrides=asked.overrides,
        )
        files.write_text(work.folder / "base.toml", drafted.text())
        return bases.parse(work.folder / "base.toml"), drafted.to_check

    new, to_check = write(None)
    work.torch = _closure_of_torch(new) if asked.make_locks else {}
    cuda = work.torch.get("cuda-toolkit")
    if cuda:
        new, to_check = write(cuda)
    work.to_check += to_check
    return new


def _closure_of_torch(new: Base) -> dict[str, str]:
    """All that the release's torch asks for, name -> version; empty where it cannot be resolved."""
    try:
        return lock.resolve(new, next(iter(new.locks)), [f"torch=={new.toolchain.torch}"])
    except Sm12xError:
        # Making the locks fails for the same reason, and reports it.
        return {}


def write_locks(
    base: Base,
    new: Base,
    torch: Mapping[str, str],
    to_check: list[str],
    say: Callable[[str], None],
    *,
    machine: str = platform.machine(),
) -> tuple[str, ...]:
    """Write the locks of ``new`` into its folder; the machines that have one.

    A failure for one machine is added to ``to_check``; the other machines' locks are still made.

    Args:
        base: whose witnesses' packages are looked for in the new lock.
        torch: what the release's torch asks for.
        machine: the one whose lock the packages are taken from, where it was made.
    """
    made: list[str] = []
    for name in new.locks:
        say(f"resolving the lock for {name}")
        try:
            texts = lock.make(new, name)
        except Sm12xError as error:
            to_check.append(f"lock.{name}: {error.message}")
            continue
        files.write_text(new.lock_path(name), texts.closure)
        files.write_text(new.build_lock_path(name), texts.build)
        to_check += [f"lock.{name}: {fault}" for fault in lock.verify(new, name, texts)]
        made.append(name)
    if len(made) < len(new.locks):
        to_check.append(
            "lock: for a package that cannot be installed add an [[override]] to base.toml, and "
            "run this again with --force, which keeps the overrides"
        )
    chosen = machine if machine in made else next(iter(made), None)
    if chosen is not None and base.lock_path(chosen).is_file():
        packages, notes = base_draft.witness_packages(
            base.witness.packages,
            lockfile.read(base.lock_path(chosen)),
            lockfile.read(new.lock_path(chosen)),
            torch=torch,
        )
        to_check += notes
        path = new.folder / "base.toml"
        files.write_text(
            path, base_draft.amended(path.read_text(encoding="utf-8"), packages=packages)
        )
    return tuple(made)


def _verdicts(asked: RebaseRequest, new: Base, work: _Work) -> Mapping[str, PatchVerdict]:
    """The verdict of each patch's witnesses on the untouched release."""
    trees, run_witnesses, patches = work.trees, asked.run_witnesses, asked.stack.patches
    source, earlier = (trees[side].with_name(f"{side}-witnessed") for side in (_UNTOUCHED, _SOURCE))
    wanted = list(dict.fromkeys(path for patch in patches for path in patch.witnesses))
    if asked.chosen is not None:
        wanted = [path for path in wanted if path in asked.chosen]
    runs: dict[str, witness.Run] = {}
    # The same on the release that the patches are for.
    before: dict[str, witness.Run] = {}
    if run_witnesses is not None and wanted:
        try:
            # On copies: bytecode that a run leaves would be a change to what patches are tried on.
            shutil.copytree(trees[_UNTOUCHED], source, symlinks=True)
            runs = {run.witness: run for run in run_witnesses(new, wanted, source)}
            again = [path for path, run in runs.items() if _control_failed(run)]
            if again:
                for run in run_witnesses(new, again, source):
                    runs[run.witness] = verdict.repeated(runs[run.witness], run)
            unsure = [path for path, run in runs.items() if verdict.doubtful([run])]
            if unsure:
                shutil.copytree(trees[_SOURCE], earlier, symlinks=True)
                before = {r.witness: r for r in run_witnesses(new, unsure, earlier)}
        except Sm12xError as error:
            work.unrun = error
        except OSError as error:
            work.unrun = of_system(error) or BadFileError(
                str(error), next_step="check that path, and who may read and write there"
            )
    unrun = (
        "its witness was not run"
        if work.unrun is None
        else f"its witness could not run: {work.unrun.message.splitlines()[0]}"
    )
    found: dict[str, PatchVerdict] = {}
    for patch in patches:
        own = [runs[path] for path in patch.witnesses if path in runs]
        left = [path for path in patch.witnesses if path not in runs]
        known = [before[path] for path in patch.witnesses if path in before]
        said = verdict.judge(own, known) if own else PatchVerdict(state=verdict.UNKNOWN, why=unrun)
        if left and own and said.state == verdict.UPSTREAM:
            # With some of the witnesses only the defect can be shown, not its absence.
            said = PatchVerdict(
                state=verdict.UNKNOWN, green=said.green, why=f"{left[0]} was not run"
            )
        # It is recorded, and the tree is in another folder each time.
        found[patch.name] = replace(said, why=said.why.replace(f"{source}/", ""))
    return found


def _control_failed(run: witness.Run) -> bool:
    return any(test.guard and test.outcome != junit.PASSED for test in run.tests)


def _outcome(ported: PortResult, said: PatchVerdict, asked: RebaseRequest) -> PatchOutcome:
    state, version = status.decide(said.state, ported.state), asked.found.version
    first = ""
    if state == status.UPSTREAM:
        later = Version(version) > Version(asked.base.version)
        first = status.since(ported.patch.name, version, asked.known) if later else version
    return PatchOutcome(patch=ported.patch, state=state, verdict=said, port=ported, since=first)


def _since(
    outcome: PatchOutcome,
    base: Base,
    new: Base,
    releases: Sequence[str],
    probe: Probe,
    probed: list[RebaseOutcome],
    work: _Work,
) -> PatchOutcome:
    """The outcome with the first release that has the fix, looked for in those not yet tried."""
    if outcome.state != status.UPSTREAM or outcome.verdict.state != verdict.UPSTREAM:
        return outcome
    candidates = verdict.between(releases, base.version, outcome.since)
    said: dict[str, PatchVerdict] = {}

    def ask(version: str) -> PatchVerdict:
        said[version] = probe(new, outcome.patch, version)
        return said[version]

    try:
        release, _ = verdict.first(candidates, outcome.since, ask)
    except (Sm12xError, OSError) as error:
        # One release that cannot be had is no reason to give up the rest of the run.
        have = [version for version, found in said.items() if found.state == verdict.UPSTREAM]
        release = min([outcome.since, *have], key=Version)
        why = error.message if isinstance(error, Sm12xError) else error
        work.to_check.append(
            f"dropped: {outcome.patch.name} is upstream since {release} or earlier, not all "
            f"releases could be tried: {why}"
        )
    probed += [
        RebaseOutcome(
            patch=outcome.patch.name,
            base=base.version,
            release=version,
            verdict=found.state,
            text="",
            witness=found.summary,
            since=release if found.state == verdict.UPSTREAM else "",
            why=found.why,
        )
        for version, found in said.items()
    ]
    return replace(outcome, since=release)


def _write(
    base: Base,
    new: Base,
    outcomes: Sequence[PatchOutcome],
    exported: Mapping[str, bytes],
    work: _Work,
) -> None:
    """Write patches, series and the [[dropped]] entries into the new folder."""
    for name, content in exported.items():
        (work.folder / name).write_bytes(content)
    lines = series.header(base) + "".join(f"{name}\n" for name in exported)
    files.write_text(work.folder / "series", lines)
    # A later release has the fixes of an earlier one; an earlier release was not checked.
    later = Version(new.version) > Version(base.version)
    tried = {status.slug(outcome.patch.name) for outcome in outcomes}
    # One that has been resolved since is in the stack, and so among those that were tried.
    old = [entry for entry in base.dropped if status.slug(entry.patch) not in tried]
    if not later:
        work.to_check += [
            f"dropped: whether {entry.patch} is needed here was not checked" for entry in old
        ]
    # Also of patches in conflict: once resolved they are in the stack, with the same witnesses.
    red = [
        outcome.verdict
        for outcome in outcomes
        if outcome.state != status.UPSTREAM and outcome.verdict.red
    ]
    text = (work.folder / "base.toml").read_text(encoding="utf-8")
    text = base_draft.amended(
        text,
        dropped=[*(old if later else ()), *_dropped(outcomes, base)],
        # Patches share witnesses.
        upstream=list(dict.fromkeys(name for said in red for name in said.green)),
        needed=list(dict.fromkeys(name for said in red for name in said.failing_guards)),
    )
    files.write_text(work.folder / "base.toml", text)
    for name in _COPIED:
        if (base.folder / name).is_file():
            shutil.copyfile(base.folder / name, work.folder / name)
            work.to_check.append(f"{name}: is that of {base.version}")


def _dropped(outcomes: Sequence[PatchOutcome], base: Base) -> list[Dropped]:
    found: list[Dropped] = []
    for outcome in outcomes:
        if outcome.state == status.UPSTREAM:
            by = (
                f"its witness: {outcome.verdict.summary}"
                if outcome.verdict.green
                else "all of its text"
            )
            why = f"{by} on the untouched release; needed in {base.version}"
        elif outcome.open:
            why = _why_open(outcome)
        else:
            continue
        found.append(
            Dropped(patch=outcome.patch.name, state=outcome.state, since=outcome.since, why=why)
        )
    return found


def _why_open(outcome: PatchOutcome) -> str:
    """Why a patch is not in the new stack, though it may be needed."""
    ported = outcome.port
    paths = ", ".join(conflict.path for conflict in ported.conflicts)
    if ported.state == porting.PRESENT:
        why = "its text is there, its witness is red"
    elif ported.state == porting.FOLLOWS:
        why = f"merges once {', '.join(ported.follows)} is in"
    else:
        why = f"does not merge in {paths}"
    if outcome.state == status.UNKNOWN:
        return f"{why}; whether it is needed is unknown: {outcome.verdict.why}"
    return why

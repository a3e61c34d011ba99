"""The native modules that a stack touches, those to compile, and the expected time.

Costs in base.toml, cores and memory decide whether a full build is worth its time here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sm12x.core import files, text
from sm12x.core.declared import Declared
from sm12x.core.errors import BuildFailedError, NoSpaceError, UsageError
from sm12x.stack.model.base import Base, Module, ThirdPartySource
from sm12x.stack.model.series import Stack
from sm12x.wheel.compile import schedule

# Where native code and its build description live in the tree. A change below these paths must
# reach a compiled module; otherwise the ledger would name a change that the image lacks.
_NATIVE_FOLDERS = ("csrc/", "cmake/")
_NATIVE_FILES = ("CMakeLists.txt",)

_MODES = ("quick", "full")


@dataclass(frozen=True, kw_only=True)
class Kept(Declared):
    """A module that stays the official wheel's although the mode or the stack asks for it.

    ``missing`` names the third-party sources that it would need and that are not there.
    """

    target: str
    path: str
    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModuleChoice:
    """The modules to compile and to keep."""

    modules: tuple[Module, ...]
    kept: tuple[Kept, ...]


def is_native(path: str) -> bool:
    """Tell whether ``path``, in the source tree, is native source or its build description."""
    return path in _NATIVE_FILES or path.startswith(_NATIVE_FOLDERS)


def touched(base: Base, paths: Iterable[str]) -> tuple[Module, ...]:
    """Return the modules to compile when ``paths`` are changed, in the order of base.toml.

    Raises:
        BuildFailedError: a native file belongs to no module that base.toml describes.
    """
    modules: set[str] = set()
    for path in filter(is_native, paths):
        # `*` in a glob matches within a folder, `**` across folders.
        takers = {
            module.target
            for module in base.modules
            if any(files.matches(path, glob) for glob in module.inputs)
        }
        modules |= takers
        if not takers:
            targets = ", ".join(module.target for module in base.modules)
            raise BuildFailedError(
                f"the stack changes {path}, which belongs to no native module of {base.version} "
                f"(known: {targets}): the change would not be in the wheel",
                next_step=f"describe its module in {base.folder / 'base.toml'} or drop the change",
            )
    return tuple(module for module in base.modules if module.target in modules)


def require_source(base: Base, name: str) -> ThirdPartySource:
    """Return the third-party source ``name`` of ``base``. Raises UsageError without one."""
    declared = {source.name: source for source in base.sources}
    if name not in declared:
        raise UsageError(
            f"{base.version} has no third-party source {name!r}",
            next_step=f"use {text.near(name, declared) or text.either(declared)}",
        )
    return declared[name]


def require_patch_levels(base: Base, names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` of sources of which another patch level may be taken, once each.

    Raises UsageError for one that the base does not have, or that is pinned to a commit alone.
    """
    for name in names:
        if not require_source(base, name).version_file:
            raise UsageError(
                f"{name} of {base.version} is pinned to a commit and has no patch levels",
                next_step=f"leave out --accept-patch-level {name}, and name a checkout of its pin",
            )
    return tuple(sorted(set(names)))


def choose(
    base: Base,
    targets: Collection[str],
    *,
    mode: str,
    available: Collection[str] = (),
) -> ModuleChoice:
    """Choose the modules of ``base`` to compile when the stack touches ``targets``.

    Quick mode takes what the stack touches, if it is cheap; full mode takes all. A module of which
    a third-party source is not ``available`` is kept.
    """
    compiled: list[Module] = []
    kept: list[Kept] = []
    for module in base.modules:
        if mode == "quick" and module.target not in targets:
            continue
        if mode == "quick" and not module.quick:
            reason = "the stack changes it, and quick mode does not compile it"
            kept.append(Kept(target=module.target, path=module.path, reason=reason))
            continue
        gone = tuple(name for name in module.sources if name not in available)
        if gone:
            reason = f"{' and '.join(gone)} not found, and the ops made of it would be lost"
            entry = Kept(target=module.target, path=module.path, reason=reason, missing=gone)
            kept.append(entry)
            continue
        compiled.append(module)
    return ModuleChoice(modules=tuple(compiled), kept=tuple(kept))


def for_stack(base: Base, stack: Stack) -> tuple[Module, ...]:
    """Return the modules that a stack makes necessary to compile. Raises as ``touched`` does.

    Computed from the paths in the patches, before anything is unpacked; so a patch that the base
    already has counts here, although it is not compiled later.
    """
    return touched(base, sorted({file.path for patch in stack.patches for file in patch.files}))


AUTO = "auto"
WANTED = (*_MODES, AUTO)
# In auto mode a full build is expected to take less than so many minutes.
LIMIT_MINUTES = 20.0
# Configuring, linking, and what runs beside the compilers.
_FIXED_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The mode of a build; ``reason`` is one short line."""

    mode: str
    reason: str


def decide(
    base: Base,
    *,
    cores: int,
    memory_gib: float,
    available: Collection[str],
    mode: str,
) -> Decision:
    """Decide between quick and full mode.

    Args:
        memory_gib: the free memory.
        available: the third-party sources that are there.
        mode: "quick", "full" or "auto".

    Raises:
        NoSpaceError: ``mode`` is "full", and its largest unit does not fit in the memory.
    """
    if mode == "quick":
        return Decision(mode="quick", reason="as asked for")
    choice = choose(base, (), mode="full", available=available)
    minutes = full_minutes(base, choice.modules, cores=cores, memory_gib=memory_gib)
    peak = max((module.peak_gib for module in choice.modules), default=0.0)
    if peak > memory_gib:
        why = f"the full build needs {peak:.1f} GiB of memory, {memory_gib:.1f} GiB are free"
        if mode == "full":
            raise NoSpaceError(why, next_step="free memory, or build in quick mode")
        return Decision(mode="quick", reason=why)
    against = base.toolchain.not_full
    if mode == "full":
        but = f", though {against}" if against else ""
        return Decision(mode="full", reason=f"as asked for{but}")
    if against:
        return Decision(mode="quick", reason=against)
    figures = _figures(minutes, cores, memory_gib)
    lacking = [f"{entry.target} lacks {', '.join(entry.missing)}" for entry in choice.kept]
    absent = [name for name in base.toolchain.auto_needs if name not in available]
    if all(module.quick for module in choice.modules):
        reason = f"no module beyond quick mode's can be compiled: {'; '.join(lacking)}"
    elif absent:
        those = "; ".join(
            f"{entry.target} lacks {', '.join(entry.missing)}"
            for entry in choice.kept
            if {*absent} & {*entry.missing}
        )
        reason = f"a full build would not compile most of the code: {those}"
    elif minutes >= LIMIT_MINUTES:
        limit = f"auto takes it where that is under {LIMIT_MINUTES:.0f}"
        reason = f"the full build would take {figures}; {limit}"
    else:
        but = f"; stays official: {'; '.join(lacking)}" if lacking else ""
        return Decision(mode="full", reason=f"it takes {figures}{but}")
    return Decision(mode="quick", reason=reason)


@dataclass(frozen=True, kw_only=True)
class FullStep:
    """``modules`` (paths in the wheel) that a full build compiles beyond quick mode's, where it has
    ``sources`` whose availability is uncertain; together with all earlier steps this takes
    ``minutes``. For those in ``given_only`` no repository is known.
    """

    minutes: float
    modules: tuple[str, ...]
    sources: tuple[str, ...] = ()
    given_only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a full build would add on this machine: with the certain sources, then with all.

    ``figures`` is the first step's time in words; ``against`` why auto would not take it, "" where
    time alone decides.
    """

    figures: str
    steps: tuple[FullStep, ...]
    against: str = ""


def offer(base: Base, *, cores: int, memory_gib: float, sure: Collection[str]) -> Offer | None:
    """Return what a full build would add to a quick one; None where it adds nothing.

    Args:
        sure: the third-party sources that are there whatever the network has.
    """
    steps: list[FullStep] = []
    paths: set[str] = set()
    every = [source.name for source in base.sources]
    peak = 0.0
    for available in (sure, every):
        choice = choose(base, (), mode="full", available=available)
        added = [
            module for module in choice.modules if not module.quick and module.path not in paths
        ]
        if not added:
            continue
        paths |= {module.path for module in added}
        peak = max([peak, *(module.peak_gib for module in added)])
        sources = {name for module in added for name in module.sources} - {*sure}
        minutes = full_minutes(base, choice.modules, cores=cores, memory_gib=memory_gib)
        bare = {one.name for one in base.sources if not one.git}
        steps.append(
            FullStep(
                minutes=minutes,
                modules=tuple(module.path for module in added),
                sources=tuple(sorted(sources)),
                given_only=tuple(sorted(sources & bare)),
            )
        )
    if not steps:
        return None
    against = base.toolchain.not_full
    if peak > memory_gib:
        against = f"it needs {peak:.1f} GiB of memory, {memory_gib:.1f} GiB are free"
    return Offer(
        figures=_figures(steps[0].minutes, cores, memory_gib), steps=tuple(steps), against=against
    )


def _figures(minutes: float, cores: int, memory_gib: float) -> str:
    return f"about {minutes:.0f} min on {cores} cores with {memory_gib:.0f} GiB free"


def full_minutes(
    base: Base, modules: Collection[Module], *, cores: int, memory_gib: float
) -> float:
    """Estimate the minutes of a full build on ``cores`` with ``memory_gib`` free.

    It compiles ``modules``, and FlashInfer's with the image.
    """
    # The units of a module are not known before CMake has run: each counts as typical units
    # that sum up to its cost; a cost above the longest unit's counts as that unit and the rest.
    longest = max((unit.cpu_seconds for unit in base.units), default=schedule.DEFAULT_SECONDS)
    units: list[tuple[float, float]] = []
    for module in modules:
        rest = module.cpu_seconds
        if rest > longest:
            units.append((longest, module.peak_gib))
            rest -= longest
        units += _typical(rest, schedule.DEFAULT_GIB)
    room = max(memory_gib - schedule.RESERVE_GIB, schedule.DEFAULT_GIB)
    later = [
        unit for module in base.flashinfer for unit in _typical(module.cpu_seconds, module.peak_gib)
    ]
    seconds = sum(
        schedule.makespan(phase, cores=cores, memory_gib=room) for phase in (units, later)
    )
    return (seconds + _FIXED_SECONDS) / 60


def _typical(seconds: float, gib: float) -> list[tuple[float, float]]:
    """Return units of the typical length that take ``seconds`` in all."""
    count = math.ceil(seconds / schedule.DEFAULT_SECONDS)
    return [(seconds / count, gib)] * count if count else []

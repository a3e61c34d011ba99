"""Compiles all units of the modules with ninja, in pools by their measured memory."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm12x.core import files, machine, process
from sm12x.core.errors import BuildFailedError, NoSpaceError, Sm12xError
from sm12x.core.progress import Steps
from sm12x.stack.model.base import Base, Module
from sm12x.wheel.compile import cmake, launcher, schedule

# Lines of a failed unit's output to show, from its end.
_LAST_LINES = 15
# Objects and what a compiler leaves in the temporary folder while it runs.
_UNIT_GIB, _JOB_GIB = 0.02, 0.5
# What each unit has cost: base.toml's figures are from here.
RESULTS = "units.jsonl"
_MANIFEST = "pools.ninja"

_BUILDS = re.compile(r"^\[\d+/\d+\] Building \w+ object (?P<name>.+)$")
_FAILED = re.compile(r"^FAILED: (?:\[code=(?P<code>\d+)\] )?(?P<name>\S+)")
_EDGE = re.compile(r"^build (?P<name>\S+): \w+_COMPILER__.*$", re.MULTILINE)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
# What nvcc, gcc and clang print when the kernel kills a program of theirs, whatever their own exit
# status is. 137 is that of a compiler which was killed itself.
_KILLED = re.compile(
    r"died due to signal 9|Killed signal terminated program|unable to execute command: Killed"
)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """``name`` is its object as ninja calls it, ``source`` the file as people do.

    ``cpu_seconds`` and ``peak_gib`` are what it is expected to cost.
    """

    name: str
    source: str
    target: str
    cpu_seconds: float
    peak_gib: float


def _units(base: Base, modules: Sequence[Module], settings: cmake.Settings) -> dict[str, Unit]:
    """Return all units of ``modules`` by the name of their object, as CMake has configured them."""
    build = settings.work / "build"
    text = (build / "compile_commands.json").read_text(encoding="utf-8")
    units: dict[str, Unit] = {}
    for entry in json.loads(text):
        name = os.path.relpath(build / entry["output"], build)
        for module in modules:
            if f"CMakeFiles/{module.target}.dir/" in name:
                source = os.path.relpath(entry["file"], settings.work / "src")
                seconds, gib = schedule.cost(base, source, at_most_gib=module.peak_gib)
                units[name] = Unit(
                    name=name,
                    source=source,
                    target=module.target,
                    cpu_seconds=seconds,
                    peak_gib=gib,
                )
    return units


def compile_modules(
    base: Base,
    modules: Sequence[Module],
    settings: cmake.Settings,
    *,
    on_step: Steps | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, int]:
    """Compile and link ``modules``. Returns of how many units each is made.

    Raises:
        NoSpaceError: the largest unit takes more memory, or all more disk, than there is.
        BuildFailedError: a unit does not compile, or a module does not link.
    """
    variables = {
        **cmake.variables(base, modules, settings),
        launcher.RESULTS: str(settings.work / RESULTS),
        "NINJA_STATUS": "[%f/%t] ",
    }
    # CMake runs again where its files have changed: the units are known only after that.
    _call(_ninja(settings, "build.ninja"), variables, settings, lambda _: None)
    units = _units(base, modules, settings)
    targets = [module.target for module in modules]
    dry = process.run(_ninja(settings, "-n", *targets), env=variables).stdout
    pending = [match["name"] for match in map(_BUILDS.match, dry.splitlines()) if match]
    run = _Run(units=units, left={name: units[name] for name in pending if name in units})
    memory = settings.memory_gib or cmake.free_memory_gib()
    largest = max(run.left.values(), key=lambda unit: unit.peak_gib, default=None)
    if largest and largest.peak_gib > memory:
        raise NoSpaceError(
            f"compiling {largest.source} takes {largest.peak_gib:.1f} GiB of memory, "
            f"{memory:.1f} GiB are free",
            next_step="close other programs, add swap, or build on a larger machine",
        )
    cores = settings.jobs or machine.cores()
    need = _UNIT_GIB * len(run.left) + _JOB_GIB * min(cores, len(run.left))
    files.require_space(
        settings.work,
        need,
        what=f"compiling {len(run.left)} units",
        move="name a folder on another disk with --work",
    )
    room = max(memory - schedule.RESERVE_GIB, largest.peak_gib if largest else 0.0)

    def line(text: str) -> None:
        run.take(text)
        if on_step:
            costs = [(unit.cpu_seconds, unit.peak_gib) for unit in run.left.values()]
            seconds = schedule.makespan(costs, cores=cores, memory_gib=room)
            on_step("compile", len(units) - len(run.left), len(units), seconds)

    line("")
    _write_manifest(settings.work / "build", run.left, room)
    for jobs in (cores, 1):
        run.failed, run.code, run.output = None, "", []
        words = _ninja(settings, "-f", _MANIFEST, "-j", str(jobs), *targets)
        try:
            _call(words, variables, settings, line)
        except BuildFailedError:
            if run.failed is None:
                raise
            if run.killed and jobs != 1:
                if say:
                    say(
                        f"{run.failed.source}: the kernel killed its compiler for lack of memory; "
                        "the rest is compiled one unit at a time"
                    )
                continue
            for text in run.output if say else ():
                # In a container the log's file is not accessible from outside.
                say(f"    {text}")
            raise _failure(run, need, settings) from None
        break
    return dict(Counter(unit.target for unit in units.values()))


@dataclass(kw_only=True)
class _Run:
    """The remaining units, and the first that failed, with its exit status and ninja's output."""

    units: Mapping[str, Unit]
    left: dict[str, Unit]
    failed: Unit | None = None
    code: str = ""
    output: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Read a line of ninja: a unit that is done, one that failed, or what its compiler says."""
        failed = _FAILED.match(line)
        if failed and self.failed is None and failed["name"] in self.units:
            # ninja has shown it as built in the line before.
            self.failed, self.code = self.units[failed["name"]], failed["code"] or ""
            self.left[self.failed.name] = self.failed
        elif done := _BUILDS.match(line):
            self.left.pop(done["name"], None)
        elif self.failed and not line.startswith(("[", "ninja: ", "FAILED: ")):
            self.output.append(line)

    @property
    def killed(self) -> bool:
        return self.code == "137" or any(map(_KILLED.search, self.output))


def pools(units: Collection[Unit], memory_gib: float) -> tuple[dict[str, int], dict[str, str]]:
    """Divide units into ninja's pools, whose compilers fit in ``memory_gib`` all together.

    Units of about the same memory (within a factor of two) share a pool. Each pool has room for
    one unit; the rest is divided by work, so that the pools end at about the same time.

    Returns:
        How many units of each pool compile at a time, and the pool of each unit's object.
    """
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(math.ceil(math.log2(max(unit.peak_gib, 0.125))), []).append(unit)
    peaks = {key: max(unit.peak_gib for unit in group) for key, group in groups.items()}
    spare = memory_gib - sum(peaks.values())
    if spare < 0:
        depth = max(1, int(memory_gib / max(peaks.values())))
        return {"all": depth}, {unit.name: "all" for unit in units}
    work = {
        key: sum(unit.cpu_seconds * unit.peak_gib for unit in group)
        for key, group in groups.items()
    }
    total = sum(work.values()) or 1.0
    depths = {
        f"gib{key}": 1 + int(spare * work[key] / total / max(peaks[key], 0.01))
        for key in sorted(groups)
    }
    return depths, {unit.name: f"gib{key}" for key, group in groups.items() for unit in group}


def _write_manifest(build: Path, units: Mapping[str, Unit], memory_gib: float) -> None:
    """Write ninja's file anew with a pool for each unit; CMake's own stays as it made it."""
    depths, pool_of = pools(units.values(), memory_gib)

    def pooled(edge: re.Match[str]) -> str:
        pool = pool_of.get(edge["name"])
        return f"{edge[0]}\n  pool = {pool}" if pool else edge[0]

    heads = "".join(f"pool {name}\n  depth = {n}\n" for name, n in depths.items())
    text = (build / "build.ninja").read_text(encoding="utf-8")
    (build / _MANIFEST).write_text(heads + _EDGE.sub(pooled, text), encoding="utf-8")


def _call(
    words: list[str],
    variables: Mapping[str, str],
    settings: cmake.Settings,
    on_line: Callable[[str], None],
) -> None:
    # ninja itself, not `cmake --build`: that one, when terminated, leaves ninja compiling.
    log = settings.work / "logs" / "ninja.log"
    cmake.run(words, variables, log, "the native modules could not be built", on_line)


def _failure(run: _Run, need_gib: float, settings: cmake.Settings) -> Sm12xError:
    assert run.failed is not None  # noqa: S101 - called for a unit that failed
    source = run.failed.source
    again = shlex.join(_ninja(settings, run.failed.name))
    if any(map(_NO_SPACE.search, run.output)):
        return NoSpaceError(
            f"the disk was full while compiling {source}; the build needs {need_gib:.1f} GiB under "
            f"{settings.work} and in the temporary folder",
            next_step="free space there and run the command again: it goes on where it stopped",
        )
    if run.killed:
        return NoSpaceError(
            f"the kernel killed the compiler of {source} for lack of memory, and nothing ran "
            "beside it",
            next_step=f"add swap, or build on a larger machine; repeat it alone with `{again}`",
        )
    # The first line is the command.
    last = "".join(f"    {line}\n" for line in run.output[1:][-_LAST_LINES:])
    return BuildFailedError(
        f"{source}, a unit of {run.failed.target}, could not be compiled; its last lines:\n{last}",
        next_step=f"read {settings.work / 'logs' / 'ninja.log'}; repeat it alone with `{again}`",
    )


def _ninja(settings: cmake.Settings, *words: str) -> list[str]:
    return [str(cmake.tool("ninja", settings.python)), "-C", str(settings.work / "build"), *words]

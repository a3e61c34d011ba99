"""Compiles all units of the modules with ninja, in the scheduler's order; reports progress."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm12x.core import files, machine, process
from sm12x.core.errors import BuildFailedError, NoSpaceError, Sm12xError, ToolFailedError
from sm12x.core.progress import Steps
from sm12x.stack.model.base import Base, Module
from sm12x.wheel.compile import cmake, launcher, schedule
from sm12x.wheel.compile.broker import Broker, CompilerRun
from sm12x.wheel.compile.schedule import Scheduler, Unit

# Lines of a failed unit's log to show, from its end.
_LAST_LINES = 15
# A launcher that waits for its turn.
_LAUNCHER_GIB = 0.007
# Objects and what a compiler leaves in the temporary folder while it runs.
_UNIT_GIB, _JOB_GIB = 0.02, 0.5
RESULTS = "units.jsonl"

_BUILDS = re.compile(r"^\[\d+/\d+\] Building \w+ object (?P<name>.+)$")
_REGENERATES = "Re-running CMake"
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")


def _units(base: Base, modules: Sequence[Module], settings: cmake.Settings) -> dict[str, Unit]:
    """All units of ``modules``, by the name of their object, as CMake has configured them."""
    build = settings.work / "build"
    text = (build / "compile_commands.json").read_text(encoding="utf-8")
    found: dict[str, Unit] = {}
    for entry in json.loads(text):
        name = os.path.relpath(build / entry["output"], build)
        for module in modules:
            if f"CMakeFiles/{module.target}.dir/" not in name:
                continue
            source = _shown(Path(entry["file"]), settings)
            seconds, gib = schedule.cost(base, source, at_most_gib=module.peak_gib)
            found[name] = Unit(
                name=name,
                source=source,
                target=module.target,
                cpu_seconds=seconds,
                peak_gib=gib,
            )
    return found


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
    every = _units(base, modules, settings)
    names = _pending(modules, settings)
    pending = {name: one for name, one in every.items() if names is None or name in names}
    memory = settings.memory_gib or cmake.free_memory_gib()
    schedule.require_memory(pending.values(), memory)
    cores = settings.jobs or machine.cores()
    need = _UNIT_GIB * len(pending) + _JOB_GIB * min(cores, len(pending))
    files.require_space(
        settings.work,
        need,
        what=f"compiling {len(pending)} units",
        move="name a folder on another disk with --work",
    )
    spare = memory - schedule.RESERVE_GIB - _LAUNCHER_GIB * len(pending)
    room = max(spare, *(one.peak_gib for one in pending.values()), 0.0)
    run = _Run(
        every=len(every),
        left=dict(pending),
        cores=cores,
        memory_gib=room,
        results=settings.work / RESULTS,
        on_step=on_step,
        say=say,
    )
    run.show()
    scheduler = Scheduler(cores=cores, memory_gib=room)
    logs = settings.work / "logs"
    try:
        with Broker(scheduler, every, run.take, run.tick) as broker:
            variables = {
                **cmake.variables(base, modules, settings),
                launcher.SOCKET: str(broker.address),
                launcher.LOGS: str(logs / "units"),
            }
            # ninja itself, not `cmake --build`: that one, when terminated, leaves ninja compiling.
            # All units start and wait for their turn, and some links may run beside them.
            words = _ninja(settings, "-j", str(len(pending) + cores), *_targets(modules))
            process.stream(words, env=variables, log=logs / "ninja.log", on_line=lambda _: None)
    except ToolFailedError as error:
        if run.failed:
            _tell(launcher.log_path(logs / "units", run.failed[0].unit.name), say)
            raise _failure(run.failed[0], logs / "units", need, settings) from None
        again = shlex.join(_ninja(settings, *_targets(modules)))
        raise BuildFailedError(
            f"the native modules could not be built: {error.message}",
            next_step=f"read {logs / 'ninja.log'}; repeat it with `{again}`",
        ) from None
    if run.left:
        # Units that ninja found finished, once it had run CMake.
        run.left.clear()
        run.show()
    return dict(Counter(one.target for one in every.values()))


@dataclass(kw_only=True)
class _Run:
    """The remaining units, and the results. The broker's thread calls ``take`` and ``tick``."""

    every: int
    left: dict[str, Unit]
    cores: int
    memory_gib: float
    results: Path
    on_step: Steps | None
    say: Callable[[str], None] | None
    failed: list[CompilerRun] = field(default_factory=list)
    _expected: float = 60.0
    _taken: float = 60.0
    _elapsed: Mapping[str, float] = field(default_factory=dict)

    def take(self, result: CompilerRun) -> None:
        record = {**dataclasses.asdict(result), "unit": result.unit.name}
        with self.results.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record, sort_keys=True) + "\n")
        if result.again:
            if self.say:
                self.say(
                    f"{result.unit.source}: the kernel killed its compiler for lack of memory; "
                    "it is compiled again, alone"
                )
            return
        if result.failed:
            self.failed.append(result)
            return
        self.left.pop(result.unit.name, None)
        self._expected += result.unit.cpu_seconds
        self._taken += result.seconds
        self.show()

    def tick(self, elapsed: Mapping[str, float]) -> None:
        self._elapsed = elapsed
        self.show()

    def show(self) -> None:
        if self.on_step:
            costs = [(self._rest(one), one.peak_gib) for one in self.left.values()]
            left = schedule.makespan(costs, cores=self.cores, memory_gib=self.memory_gib)
            self.on_step("compile", self.every - len(self.left), self.every, left)

    def _rest(self, one: Unit) -> float:
        """Seconds that a unit still takes.

        Scaled by the actual to the expected time of the finished units: the processor may differ,
        or a compiler cache may have them. A unit that exceeds its estimate counts as nearly done.
        """
        whole = one.cpu_seconds * self._taken / self._expected
        return max(whole - self._elapsed.get(one.name, 0.0), whole / 10)


def last_lines(log: str, count: int = _LAST_LINES) -> str:
    """The last ``count`` non-empty lines, indented; without the command at the top."""
    lines = [line.rstrip() for line in log.splitlines()]
    said = [line for line in lines if line and not line.startswith("+ cd ")]
    return "\n".join(f"    {line}" for line in said[-count:])


def _tell(log: Path, say: Callable[[str], None] | None) -> None:
    """The whole log of a unit: in a container its file is not accessible from outside."""
    if say and log.is_file():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            say(f"    {line}")


def _failure(
    result: CompilerRun, logs: Path, need_gib: float, settings: cmake.Settings
) -> Sm12xError:
    name, source = result.unit.name, result.unit.source
    log = launcher.log_path(logs, name)
    again = shlex.join(_ninja(settings, name))
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if _NO_SPACE.search(text):
        return NoSpaceError(
            f"the disk was full while compiling {source}; the build needs {need_gib:.1f} GiB under "
            f"{settings.work} and in the temporary folder",
            next_step="free space there and run the command again: it goes on where it stopped",
        )
    if result.killed:
        return NoSpaceError(
            f"the kernel killed the compiler of {source} for lack of memory twice, the second time "
            f"with nothing beside it: it takes more than {result.peak_gib:.1f} GiB",
            next_step=f"add swap, or build on a larger machine; repeat it alone with `{again}`",
        )
    return BuildFailedError(
        f"{source}, a unit of {result.unit.target}, could not be compiled; its last lines:\n"
        f"{last_lines(text)}\n",
        next_step=f"read {log}; repeat it alone with `{again}`",
    )


def _pending(modules: Sequence[Module], settings: cmake.Settings) -> list[str] | None:
    """The objects that ninja would make, by its own account; None if it has to run CMake first."""
    words = _ninja(settings, "-n", *_targets(modules))
    said = process.run(words, env={"NINJA_STATUS": "[%f/%t] "}).stdout
    if _REGENERATES in said:
        return None
    matches = (_BUILDS.match(line) for line in said.splitlines())
    return [match["name"] for match in matches if match]


def _targets(modules: Sequence[Module]) -> list[str]:
    return [module.target for module in modules]


def _ninja(settings: cmake.Settings, *words: str) -> list[str]:
    return [str(cmake.tool("ninja", settings.python)), "-C", str(settings.work / "build"), *words]


def _shown(path: Path, settings: cmake.Settings) -> str:
    """A source as people know it: relative to the release's tree, or to the third-party folder."""
    roots: Mapping[Path, str] = {
        settings.work / "src": "",
        settings.work / "third_party": "third_party/",
        **({settings.third_party.resolve(): "third_party/"} if settings.third_party else {}),
    }
    for root, prefix in roots.items():
        if path.is_relative_to(root):
            return f"{prefix}{path.relative_to(root).as_posix()}"
    return path.as_posix()

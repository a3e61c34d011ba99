"""Does the native code load, register its operators, and is the stand-in driver kept apart?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x import layout
from sm12x.core import process
from sm12x.core.errors import ToolFailedError
from sm12x.core.files import sha256
from sm12x.core.text import counted, first_of
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render
from sm12x.runtime.check.report import FAIL, Line, Topic
from sm12x.runtime.places import CACHE_VARIABLES, Places
from sm12x.wheel.ledger import Ledger, is_program

REBUILD = "rebuild the image with `make bundle`, and read the audit of its wheel"
# A probe imports torch and vLLM: 20 s from a cold disk, over ten minutes under qemu-user.
_PROBE_SECONDS = 3600

# A probe: its kind, its question and variables to set for it -> its answer.
Ask = Callable[[str, object, Mapping[str, str | None]], Any]


@dataclass(frozen=True, kw_only=True)
class LoadedDriver:
    """``path`` is the real driver, None without one; ``env`` is what a probe needs to have one."""

    path: str | None
    env: Mapping[str, str | None]


def prober(scratch: Path) -> Ask:
    """Probes in processes of their own, whose caches are in ``scratch``.

    An import of vLLM writes to its caches; `check` must work on a read-only image without any.
    """
    base: dict[str, str | None] = {
        **{name: str(scratch / name.lower()) for name in CACHE_VARIABLES},
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def ask(kind: str, question: object, env: Mapping[str, str | None]) -> Any:
        done = process.run(
            [sys.executable, "-P", "-m", "sm12x.runtime.check.probe", kind],
            env={**base, **env},
            stdin=json.dumps(question),
            timeout=_PROBE_SECONDS,
            next_step=REBUILD,
        )
        return json.loads(done.stdout)

    return ask


def check_driver(places: Places, ask: Ask, ldconfig: str) -> tuple[LoadedDriver, list[Line]]:
    """Find the libcuda that a program loads here, and check that it is not the stand-in.

    Args:
        ldconfig: the output of `ldconfig -p`, "" where there is none.
    """
    topic = Topic("driver", REBUILD)
    lines = []
    libcuda = ask("driver", None, {})
    folder = places.stand_in.parent
    if not places.stand_in.is_file():
        lines.append(topic.failed(f"{places.stand_in} is missing"))
    on_path = [line.strip() for line in ldconfig.splitlines() if f"{folder}/" in line]
    if on_path or (libcuda and _same(Path(libcuda), places.stand_in)):
        lines.append(
            topic.failed(
                f"the stand-in libcuda is on the default path: {libcuda or on_path[0]}",
                f"take {folder} out of LD_LIBRARY_PATH and of /etc/ld.so.conf.d",
            )
        )
        libcuda = None
    if lines:
        pass
    elif libcuda:
        lines.append(topic.passed(f"the real libcuda is used: {libcuda}"))
    else:
        lines.append(topic.passed("no libcuda on the default path: the stand-in is used here"))
    old = os.environ.get("LD_LIBRARY_PATH", "")
    paths = f"{folder}:{old}" if old else str(folder)
    return LoadedDriver(path=libcuda, env={} if libcuda else {"LD_LIBRARY_PATH": paths}), lines


def _same(libcuda: Path, stand_in: Path) -> bool:
    try:
        return libcuda.samefile(stand_in) or sha256(libcuda) == sha256(stand_in)
    except OSError:
        return False


def check_modules(ledger: Ledger, places: Places, driver: LoadedDriver, ask: Ask) -> list[Line]:
    """Load every library of the ledger, then compare the registered operators with it."""
    topic = Topic("modules", REBUILD)
    question = {
        "site": str(places.site),
        "libraries": [entry.path for entry in ledger.libraries if not is_program(entry.path)],
    }
    try:
        answer = ask("modules", question, driver.env)
    except ToolFailedError as error:
        return [topic.failed(f"loading stopped the probe: {error.message}")]
    lines = []
    state: dict[str, str] = answer["libraries"]
    for path, problem in state.items():
        if problem == "other-python":
            continue
        if problem:
            lines.append(topic.failed(f"{path} does not load: {problem}"))
    foreign = sorted(path for path, problem in state.items() if problem == "other-python")
    if not lines:
        number = len(state) - len(foreign)
        which = "the real libcuda" if driver.path else "the stand-in libcuda"
        lines.append(topic.passed(f"{number} native modules load with {which}"))
    if foreign:
        lines.append(topic.noted(f"{counted(len(foreign), 'module')} for other Pythons not loaded"))
    return [*lines, *_operators(ledger, answer["ops"])]


def check_extras(ledger: Ledger, driver: LoadedDriver, ask: Ask) -> list[Line]:
    """Import each extra's modules: vLLM skips one that fails, or fails at its first call."""
    topic = Topic("extras", REBUILD)
    lines = []
    for extra in ledger.extras:
        try:
            answer = ask("imports", extra.modules, driver.env)
        except ToolFailedError as error:
            message = f"{extra.package} stopped the probe: {error.message}"
            lines.append(topic.failed(message))
            continue
        problems = {name: problem for name, problem in answer.items() if problem}
        lines += [
            topic.failed(f"{name} cannot be imported: {problem}")
            for name, problem in problems.items()
        ]
        if not problems:
            message = f"{extra.package}: {counted(len(answer), 'module')} can be imported"
            lines.append(topic.passed(message))
    return lines


def _operators(ledger: Ledger, registered: Sequence[str]) -> list[Line]:
    topic = Topic("operators", REBUILD)
    # "ns::name.overload"; a ledger entry without an overload asks for any of that name.
    names = {*registered, *(name.partition(".")[0] for name in registered)}
    # Ops that were read from a file have no namespace.
    bare = {name.rpartition("::")[2] for name in names}
    lines = []
    for library in ledger.libraries:
        registry = bare if library.ops_by == "read" else names
        lost = [name for name in library.ops if name not in registry]
        if lost:
            lines.append(
                topic.failed(
                    f"{library.path} registers {len(library.ops) - len(lost)} of the official "
                    f"wheel's {len(library.ops)} operators; lost: {first_of(lost, 5)}"
                )
            )
    total = sum(len(library.ops) for library in ledger.libraries)
    if not total:
        lines.append(topic.failed("the ledger lists no operators, so none can be compared"))
    if not any(line.state == FAIL for line in lines):
        lines.append(topic.passed(f"all {total} operators of the official wheel are registered"))
        if any(library.ops_by == "read" for library in ledger.libraries):
            lines.append(
                topic.noted("the ledger's list was read from files: compared without namespaces")
            )
    return lines


def check_arguments(recipes: Mapping[str, Recipe], driver: LoadedDriver, ask: Ask) -> list[Line]:
    """Give every recipe's command to the release's own parser (about 20 s).

    A recipe that is blocked on this release may have arguments of another release: the parser's
    answer is noted, and is no fault of the image.
    """
    topic = Topic("recipes", REBUILD)
    lines, commands, env = [], {}, {}
    for key, recipe in recipes.items():
        rendered = render(recipe, settings={}, environ={}, solo=recipe.sm12x is None)
        if rendered.serve is None:
            lines.append(
                topic.noted(f"{key} does not run `vllm serve`: its arguments are not checked")
            )
            continue
        commands[key] = list(rendered.serve)
        env[key] = sorted(rendered.env)
    if not recipes:
        return [topic.failed("there is no recipe in the image")]
    if not commands:
        return lines
    try:
        answer = ask("arguments", {"commands": commands, "env": env}, driver.env)
    except ToolFailedError as error:
        return [*lines, topic.failed(f"the parser could not be run: {error.message}")]
    release = layout.release()
    for key in commands:
        faults = answer["problems"][key]
        strange = [*faults, *answer["warnings"][key]]
        if strange and recipes[key].blocked_on(release):
            report = "; ".join(strange)
            lines.append(
                topic.noted(f"{key} is blocked on {release}, whose parser reports: {report}")
            )
            continue
        lines += [topic.warned(f"{key}: {text}") for text in answer["warnings"][key]]
        if faults:
            lines.append(
                topic.failed(
                    f"{key}: vLLM refuses it: {'; '.join(faults)}",
                    "correct the recipe: its flags must be those of this release",
                )
            )
        else:
            lines.append(
                topic.passed(f"{key}: vLLM's parser takes all {len(commands[key])} arguments")
            )
    return lines

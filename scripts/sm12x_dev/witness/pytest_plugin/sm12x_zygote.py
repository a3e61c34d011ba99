"""A process that imports a source tree once, and forks a pytest for every test file of a list.

    python -m sm12x_zygote WORK.json

Runs in the folder of the source tree, in whatever environment can import it: it may import nothing
of sm12x. WORK.json is

    {"platform": "module:Class", "empty": ["module"], "preload": ["module"],
     "models": ["module:Class"], "answer": "prefix", "jobs": 2,
     "work": [{"arguments": [pytest's arguments], "leave": ["TestThis::test_it"], "cuda": false,
               "log": "file", "seconds": 60.0}]}

``jobs`` pytests run at a time. When one has ended, a line is printed: the prefix and, as JSON, its
number in ``work`` and its exit code: negative for the signal that ended it, null if it was still
running after ``seconds`` and was killed with its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Seconds between two looks at the running pytests, and those that the imports may take.
_POLL, _START_LIMIT = 0.02, 600
_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A session of its own is not reached by what ends the parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.alarm(_START_LIMIT)
    # ``tests`` must be the tree's, whatever else is on the path.
    sys.path.insert(0, str(Path.cwd()))
    # Imports make objects that stay: collections find nothing among them.
    gc.disable()
    importlib.import_module("pytest")
    for name in request["empty"]:
        sys.modules[name] = types.ModuleType(name)
    # What cannot be imported fails the tests that import it, each with the reason.
    with contextlib.suppress(Exception):
        _choose(request["platform"])
    for name in request["preload"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _look_at_models_in_forks()
    for name in request["models"]:
        with contextlib.suppress(Exception):
            _register(name)
    # A collection in a fork would go through all that was imported, and copy the memory it is in.
    # vLLM's tests collect after each test, and thaw what is frozen before: a third of a second.
    gc.freeze()
    gc.unfreeze = _nothing
    gc.enable()
    signal.alarm(0)
    waiting = list(enumerate(request["work"]))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < request["jobs"]:
            number, item = waiting.pop(0)
            running[_fork(item)] = number, time.monotonic() + item["seconds"]
        for child, (number, end) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() < end:
                continue
            # What its tests have started must not go on beside the next ones.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            if not done:
                os.waitpid(child, 0)
            del running[child]
            code = os.waitstatus_to_exitcode(status) if done else None
            # On a line of its own, whatever an import has printed before.
            print(f"\n{request['answer']}{json.dumps([number, code])}", flush=True)  # noqa: T201 - read
        time.sleep(_POLL)


def _pretend_cuda() -> None:
    """Report CUDA as the platform from now on.

    A test file asks when it is imported, and skips itself. The release's modules, which asked
    before, go on with the platform that was chosen.
    """
    platforms = importlib.import_module("vllm.platforms")
    kind = type(platforms.current_platform)
    answers = {name: lambda _: True for name in ("is_cuda", "is_cuda_alike")}
    vars(platforms)["_current_platform"] = type(kind.__name__, (kind,), answers)()


def _look_at_models_in_forks() -> None:
    """Fork where vLLM starts a process to look at a model's class, which imports it all again.

    That takes half of the time that a test may take, and more where others run beside it.
    """
    registry = importlib.import_module("vllm.model_executor.models.registry")
    vars(registry)["_run_in_subprocess"] = _in_fork


def _in_fork(function: Callable[[], Any]) -> Any:
    """Call ``function`` in a fork; RuntimeError, as vLLM's own, if it raises or ends early."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = pickle.dumps((function(), ""))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    # Of our own fork, which may have ended before it wrote.
    value, failure = pickle.loads(answer) if answer else (None, "it ended")  # noqa: S301
    if failure:
        raise RuntimeError(f"Error raised in subprocess:\n{failure}")
    return value


def _register(model: str) -> None:
    """Make vLLM know the class of a model, which it would look at in a fork, for each test."""
    module, _, name = model.partition(":")
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    registry.register_model(name, getattr(importlib.import_module(module), name))


def _nothing() -> None: ...


class _Leave:
    """A plugin that takes tests out of those that were collected, all cases of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not self._names & set(_called(item.nodeid))]


def _called(node: str) -> Iterator[str]:
    """Every name that stands for a test: of its class, of all its cases, of this one."""
    parts = node.split("::")[1:]
    for end in range(1, len(parts) + 1):
        yield "::".join(parts[:end])
    yield "::".join(parts).split("[", 1)[0]


def _choose(platform: str) -> None:
    """Make vLLM take the platform ``module:Class``, whatever devices this machine has.

    Before anything else is imported: modules keep the platform that they have found.
    """
    if platform:
        module, _, name = platform.partition(":")
        platforms = importlib.import_module("vllm.platforms")
        chosen = getattr(importlib.import_module(module), name)
        vars(platforms)["_current_platform"] = chosen()


def _fork(item: dict[str, Any]) -> int:
    """Start one pytest in a fork, and return its process."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _pytest(item, parent)
    return child


def _pytest(item: dict[str, Any], parent: int) -> None:
    """In the child: run pytest, and end this process with its exit code."""
    code = 3
    try:
        os.setsid()
        # A session of its own is not reached by what ends the parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(3)
        log = os.open(item["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        pytest = importlib.import_module("pytest")
        if item["cuda"]:
            _pretend_cuda()
        code = int(pytest.main(item["arguments"], plugins=[_Leave(item["leave"])]))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # No handler of the parent's may run here, and no thread be waited for.
        os._exit(code)


if __name__ == "__main__":
    main()

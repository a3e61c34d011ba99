"""The steps of a sleep: how they are timed, and what a server's worker logs of them with
tests/gpu/steps on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.steps.sleep_steps import Steps

STEPS = Path(__file__).resolve().parents[1] / "gpu" / "steps" / "sm12x_hook.py"
IMPORTED = ("vllm_sleep_keep", "vllm_sleep_keep.host_copies", "sleep_steps")
# The package, as far as steps are made by it.
PACKAGE = '''
import gc, logging, types
logger = logging.getLogger("steps")
torch = types.SimpleNamespace(cuda=types.SimpleNamespace(
    synchronize=lambda: None, empty_cache=lambda: None))
def touch(address, size): return address + size
class Runtime:
    def register(self, address): return address
    def copy(self): raise RuntimeError
    def wait(self): pass
class HostCopies:
    def sleep(self, allocator, tags):
        """The package's own."""
        self._digests()
        gc.collect()
        return tags
    def wake_up(self, allocator, tags):
        self._map_and_restore()
        raise RuntimeError("out of memory")
    def _digests(self): pass
    def _put_to_sleep(self): pass
    def _map_and_restore(self): pass
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package's host_copies, imported in a process that has begun with the hook."""
    folder = tmp_path / "vllm_sleep_keep"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "host_copies.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(STEPS.parent)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in IMPORTED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("steps_hook", STEPS)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield importlib.import_module("vllm_sleep_keep.host_copies")
    for name in IMPORTED:
        sys.modules.pop(name, None)


@pytest.fixture
def copies(module: Any) -> Any:
    return module.HostCopies()


def test_steps_are_timed_until_they_are_taken(module: Any) -> None:
    # GIVEN a module whose copies fail
    touch, runtime = module.touch, module.Runtime()
    # WHEN some of its calls are timed
    steps = Steps(module)
    assert module.touch(1, 2) == 3
    assert runtime.register(4) == 4
    assert runtime.register(address=5) == 5
    with pytest.raises(RuntimeError):
        runtime.copy()
    taken = steps.taken()
    # THEN each step has its times, and later calls have none
    assert [*taken] == ["touch", "register", "copy"]
    for begin, end, together in taken.values():
        assert 0 <= begin <= end
        assert 0 <= together <= end - begin
    assert module.touch is touch
    runtime.wait()
    assert "wait" not in steps.taken()


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, list[float]]]]:
    texts = [record.getMessage().split(":", 1) for record in caplog.records]
    return [(name, json.loads(spans)) for name, spans in texts]


def test_a_sleep_and_a_wake_up_log_their_steps(
    copies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "steps"):
        assert copies.sleep(None, ("weights",)) == ("weights",)
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.wake_up(None, None)
    (slept, sleep), (woke, wake) = logged(caplog)
    assert (slept, [*sleep]) == ("Steps of sleep", ["digests", "collect"])
    assert (woke, [*wake]) == ("Steps of wake_up", ["map"])
    assert all(0 <= begin <= end for begin, end, _ in (*sleep.values(), *wake.values()))


def test_the_package_is_the_same_otherwise(copies: Any) -> None:
    assert copies.sleep.__doc__ == "The package's own."
    assert not [one for one in sys.meta_path if type(one).__module__ == "steps_hook"]

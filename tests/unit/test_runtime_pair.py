"""`pair`: which words make an arrangement, and what happens when one of it fails."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import machine, process
from sm12x.core.errors import ToolFailedError, UsageError
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render
from sm12x.runtime import health, pair, tiny

FIRST, SECOND = "deepseek-v4-flash-rtx-pro-6000-tp4", "mimo-v2.5-flash-rtx-pro-6000-tp4"


def find(name: str) -> Recipe | None:
    path = layout.recipes() / f"{name}.yaml"
    return load.load(path) if path.is_file() else None


def test_the_pair_that_ships_is_the_pair_it_names() -> None:
    recipe = find("rotation-pair-rtx-pro-6000-tp4")
    assert recipe is not None
    assert recipe.sm12x is not None
    words = render(recipe, settings={}, environ={}, solo=False).argv[5:]
    found, seconds = pair.members(words, find, {"SM12X_AWAKE_PORT": "1"})
    assert tuple(member.key for member in found) == recipe.sm12x.pair
    assert [member.server.port for member in found] == [8000, 8001]
    assert {member.level for member in found} == {1}
    assert seconds == 3600


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((FIRST,), "two recipes with ports of their own"),
        ((FIRST, "+", FIRST), "two recipes with ports of their own"),
        ((FIRST, "+"), "a recipe's name is missing"),
        ((FIRST, "+", "nothing"), "there is no recipe 'nothing'"),
        ((FIRST, "+", "smoke"), "smoke never sleeps"),
        (("--load-seconds", "soon", FIRST), "a number of seconds"),
        (("--load-seconds", "\u00b2", FIRST), "a number of seconds"),
        ((FIRST, "port=abc", "+", SECOND), "on port 'abc', which is none"),
        ((FIRST, "port=99999", "+", SECOND), "on port '99999', which is none"),
        ((FIRST, "prot=1", "+", SECOND), "perhaps you meant port"),
    ],
)
def test_what_is_no_pair_is_refused(words: Sequence[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair.members(words, find, {})


class Child:
    """A server that runs until its turn to end has come."""

    started: list[Child] = []  # noqa: RUF012 - reset by each test

    def __init__(self, argv: Sequence[str], *, log: None, env: Mapping[str, str]) -> None:
        self.argv, self.env, self.code = argv, env, None
        Child.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = -15  # type: ignore[assignment]

    def stop(self) -> None:
        self.terminate()


@pytest.fixture
def arrangement(monkeypatch: pytest.MonkeyPatch) -> Sequence[pair.PairMember]:
    Child.started = []
    monkeypatch.setattr(process, "Background", Child)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return pair.members([FIRST, "+", SECOND], find, {})[0]


def test_the_last_is_loaded_first_and_sleeps(
    arrangement: Sequence[pair.PairMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str, str]] = []

    def request(server: health.Listener, method: str, path: str, _: float) -> tuple[int, bytes]:
        asked.append((server.port, method, path))
        return 200, b'{"is_sleeping": true}'

    def nap(_: float) -> None:
        raise pair.Stopped

    monkeypatch.setattr(health, "request", request)
    monkeypatch.setattr(time, "sleep", nap)
    assert pair.run(arrangement, load_seconds=1) == 0
    assert asked == [
        (8001, "GET", "/health"),
        (8001, "POST", "/sleep?level=1"),
        (8001, "GET", "/is_sleeping"),
        (8000, "GET", "/health"),
    ]
    assert [child.code for child in Child.started] == [-15, -15]


@pytest.mark.parametrize(("given", "jobs"), [({}, "8"), ({"MAX_JOBS": "3"}, None)])
def test_each_server_compiles_within_the_memory_that_is_left(
    arrangement: Sequence[pair.PairMember],
    monkeypatch: pytest.MonkeyPatch,
    given: Mapping[str, str],
    jobs: str | None,
) -> None:
    # The first that is started takes 24 of the 32 GiB.
    monkeypatch.setattr(machine, "available", lambda: (8 if Child.started else 32) << 30)
    monkeypatch.setattr(machine, "cores", lambda: 16)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def nap(_: float) -> None:
        raise pair.Stopped

    monkeypatch.setattr(health, "request", lambda *_: (200, b'{"is_sleeping": true}'))
    monkeypatch.setattr(time, "sleep", nap)
    pair.run(arrangement, load_seconds=1)
    assert [child.env.get("MAX_JOBS") for child in Child.started] == [jobs, "2" if jobs else None]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b'{"is_sleeping": false}', "/is_sleeping answers false"),
        (200, b'{"is_sleeping": false, "note": "true"}', "/is_sleeping answers false"),
        (200, b"a true story", "/is_sleeping answers no true or false"),
        (401, b"who?", r"/sleep says 401: who\?. Next: set VLLM_SLEEP_API_KEY"),
    ],
)
def test_a_server_that_does_not_sleep_ends_the_pair(
    arrangement: Sequence[pair.PairMember],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    said: str,
) -> None:
    def request(server: object, method: str, path: str, _: float) -> tuple[int, bytes]:
        return (200 if path == "/health" else status), body

    monkeypatch.setattr(health, "request", request)
    with pytest.raises(ToolFailedError, match=f"did not go to sleep: {said}"):
        pair.run(arrangement, load_seconds=1)
    assert [child.code for child in Child.started] == [-15]


def test_a_server_that_dies_while_loading_ends_the_pair(
    arrangement: Sequence[pair.PairMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(*_: object) -> tuple[int, bytes]:
        Child.started[0].code = 3  # type: ignore[assignment]
        raise ConnectionRefusedError

    monkeypatch.setattr(health, "request", request)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(ToolFailedError, match="ended with 3, so the others are stopped too"):
        pair.run(arrangement, load_seconds=1)


def test_the_tiny_model_is_complete(tmp_path: Path) -> None:
    assert tiny.main([str(tmp_path / "model")]) == 0
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(tiny.files())
    alphabet = tiny.byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("a")] == "a"
    assert alphabet[ord(" ")] == "\u0120"
    assert tiny.main([]) == 2


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert tiny.main([str(tmp_path / "file" / "model")]) == 4
    assert "cannot be written" in capsys.readouterr().err

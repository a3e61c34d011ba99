"""What tests.gpu.rotate expects of large replies, and tests.gpu.api_servers of API servers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

import pytest
from tests.gpu import api_servers, rotate, serve
from tests.gpu.api_servers import Answer
from tests.gpu.replies import MIB, LargeReply

SERVED = Answer(status=200, text='{"choices": [{"text": "as before"}]}', seconds=0.01)
REFUSED = Answer(status=503, text="", seconds=0.01)


def test_a_large_reply_arrives_small_and_of_its_rank_and_call() -> None:
    sent = LargeReply(1, 7, 2)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps((sent,), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000
    assert [buffer.raw().nbytes for buffer in buffers] == [2 * MIB]
    (received,) = pickle.loads(data, buffers=[b.raw().tobytes() for b in buffers])  # noqa: S301
    assert received == asdict(sent.received())
    assert (received["rank"], received["number"], received["size"]) == (1, 7, 2 * MIB)
    others = [LargeReply(0, 7, 2), LargeReply(1, 8, 2), LargeReply(1, 7, 3)]
    assert sent.received() not in [other.received() for other in others]


class Line:
    """Answers a completion with the next of ``answers``, the last one again and again."""

    def __init__(self, *answers: Answer, asleep: bool = True) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self._last = answers[-1]
        self._asleep = asleep

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        text = f'{{"is_sleeping":{"true" if self._asleep else "false"}}}'
        return Answer(status=200, text=text, seconds=0.01)

    def complete(self, **settings: Any) -> Answer:
        self._last = next(self._answers, self._last)
        return self._last


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> serve.Steps:
    monkeypatch.setattr(serve, "used", lambda: 0)
    return serve.Steps()


LATE = Answer(status=503, text="", seconds=1.0)


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (Line(REFUSED), 0),
        # A request that an API server lets through before it has asked.
        (Line(SERVED, REFUSED), 1),
        (Line(LATE, REFUSED), 1),
        (Line(REFUSED, asleep=False), 1),
        (Line(Answer(status=0, text="TimeoutError", seconds=20.0)), 2),
    ],
)
def test_requests_of_a_sleeping_engine_are_refused_at_once(
    report: serve.Steps, other: Line, wrong: int
) -> None:
    lines: Any = {1: [Line(REFUSED)], 2: [other]}
    api_servers.refused(report, lines, "asleep")
    api_servers.told(report, lines, "asleep")
    assert len(report.wrong) == wrong


@pytest.mark.parametrize(
    ("answer", "wrong"), [(SERVED, 0), (REFUSED, 1), (Answer(status=500, text="", seconds=0), 1)]
)
def test_requests_of_an_engine_awake_are_answered_as_before(
    report: serve.Steps, answer: Answer, wrong: int
) -> None:
    lines: Any = {1: [Line(SERVED)], 2: [Line(answer)]}
    api_servers.served(report, lines, "as before", "awake")
    assert len(report.wrong) == wrong
    api_servers.served(report, lines, "otherwise", "awake")
    assert len(report.wrong) == wrong + 2


class Server:
    """Counts the calls of a member's server."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int) -> float:
        self.calls.append("sleep")
        return 0.0

    def wake_up(self) -> float:
        self.calls.append("wake_up")
        return 0.0


class Member:
    """Replies of two ranks; ``change`` is made to them."""

    def __init__(self, name: str, change: Callable[[list[Any]], list[Any]] = list) -> None:
        self.name, self.texts, self.server = name, (name,), Server()
        self._change = change

    def ask(self) -> tuple[str, ...]:
        return self.texts

    def reply(self, number: int, mib: int) -> tuple[float, list[Any]]:
        ranks = [asdict(LargeReply(rank, number, mib).received()) for rank in range(2)]
        return 0.0, self._change(ranks)


class Late:
    """Of each rank the reply to the call before."""

    def __init__(self) -> None:
        self._before: list[Any] = []

    def __call__(self, replies: list[Any]) -> list[Any]:
        self._before, late = replies, self._before
        return late or replies


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (list, 0),
        (lambda replies: replies[::-1], 4),
        (lambda replies: replies[:1], 4),
        (lambda replies: [{**one, "checksum": 0} for one in replies], 4),
        (Late(), 3),
    ],
)
def test_replies_are_those_of_the_ranks_to_this_call(
    report: serve.Steps, change: Callable[[list[Any]], list[Any]], wrong: int
) -> None:
    one, other = Member("one", change), Member("other")
    seen = rotate.Report()
    rotate.large_replies(seen, cast("Any", one), cast("Any", other), [1, 2], 2)
    assert len(seen.wrong) == wrong
    assert one.server.calls == ["sleep", "wake_up"] * 2

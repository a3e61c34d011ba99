"""The run: sleeps and wake-ups, requests, measurements, and restoring the servers at the end."""

from __future__ import annotations

import datetime
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Self

from sm12x.core.errors import ServerError, Sm12xError
from sm12x.core.text import counted
from sm12x.doctor.host import Unseen
from sm12x.verify import conversation, judge
from sm12x.verify.client import ACCEPTED, DRAFTED, CallError, Completion, Identity, Server
from sm12x.verify.memory import Watch
from sm12x.verify.report import (
    AnswerReport,
    ConversationReport,
    Limits,
    RunVerdict,
    ServerReport,
    StopReport,
    StressReport,
    TurnReport,
    VerifyReport,
    When,
)

# Prompts with long answers. The last one fills more than one block of the KV cache (256 tokens on
# DeepSeek V4), so that it reads any stale prefix cache after a wake-up.
PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The planets of the solar system, in order of their distance from the sun, are:\n1.",
    "".join(f"{n} squared is {n * n}. " for n in range(1, 90)),
)
TOKENS, _STRESS_TOKENS = 48, 64
# Characters of a text in a report, and different faults of a stress.
_SHOWN, _FAULTS = 160, 3
# Characters to show before the first difference of two texts.
_TOGETHER = 12
# Seconds that a frozen stream may take after the wake-up.
_STREAM_SECONDS = 300.0
# Seconds within which a second signal counts as the same one, from terminal and wrapper.
_SAME = 1.0


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: at once, or after a call in flight that changes a server.

    A second one is never held back.

    Args:
        tell: is given a sentence when a signal is held back.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._waiting_for = ""
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self.count = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored signals stay ignored: SIGHUP under nohup, SIGINT in the background of a shell.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Let ``what`` finish; then raise KeyboardInterrupt if a signal has come."""
        came = self.count
        self._waiting_for = what
        try:
            yield
        finally:
            self._waiting_for = ""
        if self.count > came:
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.count and now - self._first < _SAME:
            return
        self.count += 1
        self._first = now
        if self.count == 1 and self._waiting_for:
            self._tell(
                f"interrupted: waiting for {self._waiting_for}, so that no server is left asleep "
                "(interrupt again to leave at once)"
            )
            return
        raise KeyboardInterrupt


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. ``models``: one per server, in order; "" is a server's first model.

    ``conversation``: tokens of the prompt of one that is measured after the cycles, 0 for none.
    """

    cycles: int = 5
    level: int = 1
    requests: int = 30
    concurrency: int = 8
    models: tuple[str, ...] = ()
    random_weights: bool = False
    force: bool = False
    conversation: int = 0
    limits: Limits = field(default_factory=Limits)


@dataclass(kw_only=True)
class _Member:
    """A server, and its state in the run.

    ``asleep`` is None after a failed call that changes it. ``unanswered``: such a call got no
    answer, and may still be in progress on the server. ``waking`` are the remaining calls of a
    started wake-up. ``before`` are the texts before the first sleep of each prompt that the server
    takes. ``restored``: the run has given it its first state back; ``fault`` is why it could not.
    """

    server: Server
    identity: Identity | None = None
    asleep: bool | None = None
    touched: bool = False
    unanswered: bool = False
    waking: list[Callable[[], float]] = field(default_factory=list)
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sleeps: int = 0
    wakes: int = 0
    restored: bool = False
    fault: Exception | None = None

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def was_asleep(self) -> bool:
        """Whether it slept before the run."""
        return bool(self.identity and self.identity.asleep)

    @property
    def changed(self) -> bool:
        """Whether the run may have left it in another state than before the run."""
        return self.touched and self.asleep != self.was_asleep

    def left(self) -> str:
        """Return a sentence on its state at the end; "" for one that the run has not touched."""
        was = _state(self.was_asleep)
        if not self.touched:
            return ""
        if not self.changed:
            return f"{self.name} is {was}{' again' if self.restored else ''}, as it was"
        if isinstance(self.fault, CallError) and self.fault.gone:
            return f"{self.name} does not answer any more, and was {was}"
        state = "may be asleep" if self.asleep is None else f"is {_state(self.asleep)}"
        reason = self.fault.message if isinstance(self.fault, Sm12xError) else repr(self.fault)
        because = f" ({reason})" if self.fault else ""
        path = "sleep?level=1" if self.was_asleep else "wake_up"
        command = f"curl -X POST '{self.server.url}/{path}'"
        return f"{self.name} {state}, and was {was}{because}: {command}"


class Run:
    """One run over one server, or over two that take turns.

    Args:
        observe: is told what is being done, before each step; ``report`` has what is known.
        tell: is given a sentence that the user must not miss.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        settings: Settings,
        watch: Watch,
        *,
        observe: Callable[[str], None] = lambda doing: None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._members = [_Member(server=server) for server in servers]
        self._settings = settings
        self._watch = watch
        self._observe = observe
        self._tell = tell
        self._interrupts = Interrupts(tell)
        self._turns: list[TurnReport] = []
        self._stress: list[StressReport] = []
        self._conversations: list[ConversationReport] = []
        self._stopped: StopReport | None = None
        self._doing = "asking the servers"
        self._began = time.monotonic()
        self._begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._ended = False

    def run(self) -> BaseException | None:
        """Run all steps, restore every server, and return the error that ended the run early."""
        error: BaseException | None = None
        with self._interrupts:
            try:
                self._measure()
            # On any error: the servers must not be left asleep.
            except BaseException as caught:
                error = caught
                self._stopped = self._why(caught)
            # The first signal may come just here; only the second one leaves at once.
            for _ in range(2):
                if self._interrupts.count > 1:
                    break
                try:
                    self._restore()
                    break
                except KeyboardInterrupt as again:
                    error = again
                    self._stopped = self._stopped or self._why(again)
            changed = [one.left() for one in self._members if one.changed]
            if error is None and changed:
                error = ServerError(
                    "the run is complete, but a server is not in its state from before the run: "
                    + "; ".join(changed),
                    next_step="run that command, and read the server's log",
                )
                self._doing = "restoring the servers' state"
                self._stopped = self._why(error)
        self._ended = True
        return error

    def report(self) -> VerifyReport:
        """Return the report so far."""
        settings = self._settings
        servers = tuple(
            ServerReport(
                name=one.name,
                url=one.server.url,
                version=one.identity.version,
                model=one.server.shown(one.identity.model),
                asleep_at_start=one.identity.asleep,
                prompts=len(one.before),
                steady=sum(len(set(texts)) == 1 for texts in one.before.values()),
            )
            for one in self._members
            if one.identity
        )
        checks = judge.checks(
            settings.limits,
            servers,
            self._turns,
            self._stress,
            self._conversations,
            random_weights=settings.random_weights,
            memory_unseen=self._watch.unseen,
        )
        verdict: RunVerdict = judge.verdict(checks) if self._ended else "running"
        return VerifyReport(
            begun=self._begun,
            seconds=time.monotonic() - self._began,
            verdict="stopped" if self._stopped else verdict,
            cycles=settings.cycles,
            level=settings.level,
            limits=settings.limits,
            memory_unseen=self._watch.unseen,
            servers=servers,
            turns=tuple(self._turns),
            stress=tuple(self._stress),
            conversations=tuple(self._conversations),
            trends=judge.trends(self._turns),
            checks=checks,
            stopped=self._stopped,
            left=tuple(filter(None, (one.left() for one in self._members if self._ended))),
        )

    def _why(self, error: BaseException) -> StopReport:
        stopped = isinstance(error, KeyboardInterrupt)
        why = "it was interrupted" if stopped else repr(error)
        step = "run the same command again: it begins anew" if stopped else "report this defect"
        if isinstance(error, Sm12xError):
            why, step = error.message, error.next_step
        return StopReport(during=self._doing, why=why, next_step=step, interrupted=stopped)

    def _begin(self, doing: str) -> None:
        self._doing = doing
        self._show(doing)

    def _show(self, doing: str) -> None:
        # A terminal that is gone, or cannot show a letter, must not leave a server asleep.
        with suppress(Exception):
            self._observe(doing)

    def _measure(self) -> None:
        self._identify()
        first, second = self._members[0], self._members[-1]
        two = first is not second
        # One server is awake at the beginning of a turn; it is the one that goes to sleep.
        if first.asleep and second.asleep:
            self._wake(first, "for the run: no server was awake")
            if two:
                self._require_two(second, asleep=True)
        if first.asleep:
            first, second = second, first
        for one in self._members:
            if not one.asleep:
                self._baseline(one)
        if two and not second.asleep:
            self._sleep(second, "for the run: both were awake")
            self._require_two(first, asleep=False)
        for cycle in range(1, self._settings.cycles + 1):
            for sleeps, wakes in ((first, second), (second, first)) if two else ((first, first),):
                self._turn(cycle, sleeps, wakes)
        if self._settings.conversation:
            for one, other in ((first, second), (second, first)) if two else ((first, first),):
                self._converse(one, other)

    def _converse(self, one: _Member, other: _Member) -> None:
        """Measure a conversation with ``one``, which is awake; ``other`` is awake afterwards."""
        tokens, two = self._settings.conversation, one is not other
        self._begin(f"a conversation of {tokens} tokens with {one.name}")
        why = "for its conversation"

        def sleep() -> None:
            self._sleep(one, why, mode="keep")
            if two:
                self._wake(other, why)

        def wake() -> None:
            if two:
                self._sleep(other, why)
            self._wake(one, why)

        self._conversations.append(
            conversation.measure(one.server, tokens, sleep, wake, seconds=_STREAM_SECONDS)
        )
        if two:
            self._sleep(one, why)
            self._wake(other, why)

    def _identify(self) -> None:
        models = [*self._settings.models, *([""] * len(self._members))]
        for one, model in zip(self._members, models, strict=False):
            self._begin(f"asking {one.server}")
            one.identity = one.server.identify(model)
            one.asleep = one.identity.asleep
            if self._settings.level == 2:
                one.server.require_reloading()
        for one in self._members:
            busy = one.server.at_work()
            step = "keep users away from it for the time of the run, or give --force"
            if isinstance(busy, Unseen):
                reason = f"whether requests run on {one.server} could not be seen: {busy.why}"
                step = f"start it without --disable-log-stats and a proxy before it, or {step}"
            elif busy:
                reason = f"{one.server} is at work on {counted(busy, 'request')}"
            else:
                continue
            if not self._settings.force:
                raise ServerError(f"{reason}; a sleep aborts what runs", next_step=step)
            self._tell(f"{reason}; --force: a sleep aborts what runs")

    def _require_two(self, one: _Member, *, asleep: bool) -> None:
        """Raise ServerError if a call to the other server has changed ``one`` as well."""
        if one.server.is_sleeping() != asleep:
            raise ServerError(
                "both addresses lead to the same server: a call to one has changed the state of "
                "the other",
                next_step="give the addresses of two servers, or one address",
            )

    def _turn(self, cycle: int, sleeps: _Member, wakes: _Member) -> None:
        turn = TurnReport(
            cycle=cycle,
            sleeps=sleeps.name,
            wakes=wakes.name,
            first_sleep=not sleeps.sleeps,
            first_wake=not wakes.wakes,
        )
        self._turns.append(turn)
        at = f"cycle {cycle} of {self._settings.cycles}"

        def record(**what: Any) -> None:
            self._turns[-1] = replace(self._turns[-1], **what)

        record(**self._sleep(sleeps, at))
        record(ranks=sleeps.server.ranks())
        record(wake_seconds=self._wake(wakes, at))
        wakes.wakes += 1
        record(after=self._watch.of(sleeps.name, self._watch.sample()))
        self._begin(f"{at}: asking {wakes.name}")
        record(answer_seconds=wakes.server.complete(PROMPTS[0], 1).seconds)
        if wakes.before:
            record(answers=self._compare(wakes))
            if cycle == self._settings.cycles:
                self._burst(wakes, "after")
        else:
            self._baseline(wakes)
        self._begin(f"{at}: {wakes.name} is awake")

    def _baseline(self, one: _Member) -> None:
        """Texts and concurrent requests before the first sleep; they also warm up memory."""
        self._begin(f"asking {one.name} before its first sleep")
        for prompt in PROMPTS:
            try:
                texts = [one.server.complete(prompt, TOKENS).text for _ in range(2)]
            except CallError as error:
                # Longer than the model's context; without any the fault is another one.
                if error.status != 400 or (prompt is PROMPTS[-1] and not one.before):
                    raise
                continue
            one.before[prompt] = tuple(texts)
        self._burst(one, "before")

    def _compare(self, one: _Member) -> tuple[AnswerReport, ...]:
        answers = []
        for prompt, before in one.before.items():
            answer = one.server.complete(prompt, TOKENS)
            verdict = judge.compared(answer.text, before)
            wrong = judge.garbage(answer.text, answer.ids)
            shown = "" if verdict == "equal" and not wrong else _parting(answer.text, before[0])
            answers.append(
                AnswerReport(
                    prompt=PROMPTS.index(prompt) + 1,
                    verdict=verdict,
                    garbage=_short(one.server, wrong),
                    text=_short(one.server, shown),
                )
            )
        return tuple(answers)

    def _sleep(self, one: _Member, why: str, mode: str = "") -> dict[str, Any]:
        """Put a server to sleep, and return the fields of a turn's report about that."""
        before = self._watch.sample()
        with self._changing(one, why, "goes to sleep", "sleep"):
            try:
                seconds = one.server.sleep(self._settings.level, mode=mode)
            except CallError as error:
                # Another client's call is in flight, which is left alone.
                if error.status == 409:
                    one.asleep = False
                raise
            one.asleep = True
        self._require_state(one, "/sleep", "wakes it up")
        one.sleeps += 1
        asleep = self._watch.sample()
        self._watch.slept(one.name, before, asleep)
        return {
            "sleep_seconds": seconds,
            "before": self._watch.of(one.name, before),
            "asleep": self._watch.of(one.name, asleep),
        }

    def _wake(self, one: _Member, why: str) -> float:
        server = one.server
        one.waking = _from_level_2(server) if self._settings.level == 2 else [server.wake_up]
        seconds = 0.0
        with self._changing(one, why, "wakes up", "wake-up"):
            while one.waking:
                seconds += one.waking[0]()
                del one.waking[0]
            one.asleep = False
        self._require_state(one, "/wake_up", "puts it to sleep")
        return seconds

    @contextmanager
    def _changing(self, one: _Member, why: str, doing: str, what: str) -> Iterator[None]:
        """Calls that change a server's state, which is not known until they have returned."""
        self._begin(f"{why}: {one.name} {doing}")
        one.touched, one.asleep = True, None
        with self._interrupts.held(f"the {what} of {one.name}"):
            try:
                yield
            except CallError as error:
                one.unanswered = error.unanswered
                raise

    def _require_state(self, one: _Member, route: str, other: str) -> None:
        """Raise ServerError if a server does not say the state that a call has given it."""
        expected = one.asleep
        if one.server.is_sleeping() != expected:
            # One of the two answers is wrong; which one is asked again at the end.
            one.asleep = None
            raise ServerError(
                f"{one.server} answers {route} with 200, and is not {_state(expected)} afterwards",
                next_step=f"check that nothing else {other} (a proxy), and read its log",
            )

    def _burst(self, one: _Member, when: When) -> None:
        settings = self._settings
        if not settings.requests:
            return
        self._begin(f"{one.name}: {settings.requests} requests, {settings.concurrency} at a time")
        before = one.server.counters()
        began = time.monotonic()
        answers = _at_a_time(one.server, settings.requests, settings.concurrency)
        seconds = time.monotonic() - began
        drafted, accepted = _spent(before, one.server.counters())
        good = [answer for answer in answers if isinstance(answer, Completion)]
        checked = [] if settings.random_weights else good
        wrong = [
            problem for answer in checked if (problem := judge.garbage(answer.text, answer.ids))
        ]
        faults = [str(answer.message) for answer in answers if isinstance(answer, Sm12xError)]
        distinct = list(dict.fromkeys(faults + wrong))
        tokens = [answer.tokens for answer in good]
        times = [answer.seconds for answer in good]
        self._stress.append(
            StressReport(
                server=one.name,
                when=when,
                requests=settings.requests,
                failed=settings.requests - len(good),
                garbled=len(wrong),
                seconds=seconds,
                # A server that omits a token count gets 0, so no speed is reported.
                tokens=0 if None in tokens else sum(filter(None, tokens)),
                median_seconds=statistics.median(times) if times else None,
                slowest_seconds=max(times, default=None),
                drafted=drafted,
                accepted=accepted,
                faults=tuple(_short(one.server, problem) for problem in distinct[:_FAULTS]),
            )
        )

    def _restore(self) -> None:
        """Restore every server's state: put servers to sleep first, to free memory."""
        with self._interrupts.held("the servers' state to be restored"):
            for asleep in (True, False):
                for one in self._members:
                    if one.was_asleep is asleep and one.changed and not one.fault:
                        # On any error: the other server must still be restored.
                        try:
                            self._put_back(one)
                        except Exception as error:
                            one.fault = error

    def _put_back(self, one: _Member) -> None:
        """Give a server the state that it had before the run. Raises ServerError."""
        self._show(f"restoring {one.name}: it was {_state(one.was_asleep)} before the run")
        server, level = one.server, self._settings.level
        # /is_sleeping is not enough between the two calls of a wake-up from level 2, nor while a
        # call may be in progress on the server: it gives the state before that call ends.
        if one.asleep is None and not one.unanswered and not (one.waking and level == 2):
            one.asleep = server.is_sleeping()
            if not one.changed:
                return
        if one.was_asleep:
            server.sleep(level, retry=True)
        elif level == 1:
            server.wake_up(retry=True)
        else:
            for step in one.waking or _from_level_2(server):
                step()
        one.restored = True
        one.asleep = server.is_sleeping()


def _from_level_2(server: Server) -> list[Callable[[], float]]:
    """The calls, in order, that wake up a server without its weights."""
    return [
        lambda: server.wake_up("weights", retry=True),
        server.reload_weights,
        lambda: server.wake_up("kv_cache", retry=True),
    ]


def _state(asleep: bool | None) -> str:
    return "asleep" if asleep else "awake"


def _parting(text: str, before: str) -> str:
    """The text from shortly before its first difference."""
    pairs = enumerate(zip(text, before, strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(len(text), len(before)))
    start = max(0, same - _TOGETHER)
    return f"{'...' if start else ''}{text[start:]}"


def _short(server: Server, text: str) -> str:
    return server.shown(text)[:_SHOWN]


def _spent(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[int | None, int | None]:
    """Return the tokens drafted and accepted between two readings; None where not counted."""
    names = (DRAFTED, ACCEPTED)
    if not all(name in reading for name in names for reading in (before, after)):
        return None, None
    drafted, accepted = (int(after[name] - before[name]) for name in names)
    # Fewer than before: the server has started anew.
    return (None, None) if min(drafted, accepted) < 0 else (drafted, accepted)


def _at_a_time(server: Server, requests: int, concurrency: int) -> list[Completion | Sm12xError]:
    """Send so many requests, a few at a time; KeyboardInterrupt ends it at once.

    Where the first of them all fail, the rest is not sent: each would wait for its time-out.
    """
    came: list[bool] = []

    def send(number: int) -> Completion | Sm12xError:
        answer: Completion | Sm12xError
        if len(came) >= min(concurrency, requests) and not any(came):
            return ServerError("not sent: all requests before it failed", next_step="")
        try:
            answer = server.complete(_question(number), _STRESS_TOKENS)
        except Sm12xError as error:
            answer = error
        came.append(isinstance(answer, Completion))
        return answer

    pool = ThreadPoolExecutor(concurrency)
    try:
        return [*pool.map(send, range(requests))]
    finally:
        # Without waiting: the process ends by itself where a request hangs after an interrupt.
        pool.shutdown(wait=False, cancel_futures=True)


def _question(number: int) -> str:
    return f"Exercise {number + 1}. Describe how one counts to {number + 11}.\nAnswer:"

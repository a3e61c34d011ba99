"""The run of `verify` over servers in memory: what is called when, and how servers are left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.verifying import GIB, MIB, MemoryServer, blind, gpu_of, seeing

from sm12x.core import declared
from sm12x.core.errors import ServerError
from sm12x.doctor.host import Unseen
from sm12x.doctor.model import Gpu, GpuProcess
from sm12x.verify import memory
from sm12x.verify.client import CallError
from sm12x.verify.cycles import Interrupts, Run, Settings
from sm12x.verify.memory import Watch
from sm12x.verify.report import Limits, RankUse, VerifyReport

# Servers in memory answer in no time that could be compared.
UNTIMED = Limits(min_speed=0)
SMALL = Settings(cycles=2, requests=3, concurrency=2, limits=UNTIMED)


def run(
    *servers: MemoryServer, settings: Settings = SMALL, watch: Watch | None = None
) -> tuple[VerifyReport, BaseException | None]:
    one = Run(servers, settings, watch or blind())
    error = one.run()
    return one.report(), error


def by_hand(report: VerifyReport) -> list[str]:
    """The servers that may be in another state than before: the report has a command for each."""
    return [sentence.split()[0] for sentence in report.left if "curl" in sentence]


def changes(server: MemoryServer) -> list[str]:
    return [call for call in server.calls if call.startswith(("sleep", "wake", "reload"))]


def test_one_server_sleeps_and_wakes_up_so_often() -> None:
    server = MemoryServer()
    report, error = run(server)
    assert (error, report.verdict, report.stopped) == (None, "passed", None)
    assert changes(server) == ["sleep 1", "wake_up"] * 2
    assert [(turn.sleeps, turn.wakes) for turn in report.turns] == [("A", "A")] * 2
    assert report.turns[0].swap_seconds is None
    assert [(one.when, one.requests) for one in report.stress] == [("before", 3), ("after", 3)]
    assert (len(report.left), by_hand(report), server.asleep) == (1, [], False)


def test_what_the_sleeping_server_says_of_its_ranks_is_reported() -> None:
    said = (RankUse(dp=0, pp=0, tp=1, asleep={"weights": 7}, awake={}, host_copies=7),)
    servers = [MemoryServer(name="A", says=said), MemoryServer(name="B", level=1)]
    report, _ = run(*servers, settings=Settings(cycles=1, requests=0))
    assert [(turn.sleeps, turn.ranks) for turn in report.turns] == [("A", said), ("B", None)]
    # It is in the JSON, and takes no part in the verdict.
    assert json.loads(declared.to_json(report))["turns"][0]["ranks"][0]["asleep"] == {"weights": 7}


def test_level_2_loads_the_weights_between_the_halves_of_the_wake_up() -> None:
    server = MemoryServer()
    report, _ = run(server, settings=Settings(cycles=1, level=2, requests=0))
    assert changes(server) == ["sleep 2", "wake_up weights", "reload_weights", "wake_up kv_cache"]
    assert report.verdict == "passed"
    assert report.turns[0].wake_seconds == 1.5


def outcome(report: VerifyReport, check: str) -> list[str]:
    return [one.verdict for one in report.checks if one.check == check]


def test_a_conversation_is_measured_over_a_sleep_that_keeps_it() -> None:
    server = MemoryServer()
    report, error = run(server, settings=replace(SMALL, cycles=1, conversation=50))
    assert (error, report.verdict) == (None, "passed")
    assert changes(server) == ["sleep 1", "wake_up", "sleep 1 keep", "wake_up"]
    [one] = report.conversations
    assert (one.server, one.tokens, one.frozen_text) == ("A", 7, "equal")
    assert (one.cold_seconds, one.cached_seconds, one.after_seconds) == (0.1, 0.01, 0.01)
    assert one.frozen_seconds is not None
    for check in ("conversation", "frozen stream", "frozen text"):
        assert outcome(report, check) == ["ok"]
    assert json.loads(declared.to_json(report))["conversations"][0]["tokens"] == 7


def test_a_conversation_that_is_lost_is_a_breach() -> None:
    report, error = run(
        MemoryServer(keeps=False), settings=replace(SMALL, cycles=1, conversation=50)
    )
    assert (error, report.verdict) == (None, "breached")
    assert outcome(report, "conversation") == outcome(report, "frozen text") == ["breach"]


def test_two_servers_swap_in_the_middle_of_a_conversation_of_each() -> None:
    servers = [MemoryServer(name="A"), MemoryServer(name="B", level=1)]
    report, error = run(*servers, settings=replace(SMALL, conversation=50))
    assert (error, report.verdict) == (None, "passed")
    assert [one.server for one in report.conversations] == ["A", "B"]
    assert "sleep 1 keep" in servers[0].calls
    assert "sleep 1 keep" in servers[1].calls
    assert [server.asleep for server in servers] == [False, True]
    assert by_hand(report) == []


def test_a_conversation_without_room_leaves_the_server_awake() -> None:
    def full(server: MemoryServer, prompt: str) -> str:
        if len(prompt.split()) == 50:
            raise CallError("400", next_step="", status=400)
        return "a text"

    server = MemoryServer(text=full)
    report, error = run(server, settings=replace(SMALL, conversation=50))
    assert isinstance(error, ServerError)
    assert "--conversation" in error.next_step
    assert (report.verdict, report.conversations, server.asleep) == ("stopped", (), False)


def test_without_it_nothing_is_said_of_a_conversation() -> None:
    report, _ = run(MemoryServer())
    assert report.conversations == ()
    assert outcome(report, "conversation") == []


@pytest.mark.parametrize("levels", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_two_servers_take_turns_and_are_left_as_they_were(levels: tuple[int, int]) -> None:
    servers = [
        MemoryServer(name=name, level=level) for name, level in zip("AB", levels, strict=True)
    ]

    def one_at_a_time(call: str) -> None:
        # Both may be awake before the first turn, and at the end if they were.
        if "complete" in call and levels != (0, 0):
            assert sum(not server.asleep for server in servers) == 1

    for server in servers:
        server.trouble = one_at_a_time
    report, error = run(*servers)
    assert (error, report.verdict) == (None, "passed")
    first = "B" if levels == (1, 0) else "A"
    second = "A" if first == "B" else "B"
    assert [turn.sleeps + turn.wakes for turn in report.turns] == [
        first + second,
        second + first,
    ] * 2
    assert tuple(int(server.asleep) for server in servers) == levels
    assert report.turns[1].swap_seconds == 1.0
    assert {one.server for one in report.stress if one.when == "after"} == {"A", "B"}


def test_a_server_that_slept_is_woken_up_for_the_run_and_sleeps_after_it() -> None:
    server = MemoryServer(level=1)
    report, error = run(server)
    assert error is None
    assert server.asleep
    assert report.servers[0].asleep_at_start
    assert by_hand(report) == []


def test_after_one_rotation_nothing_is_known_of_the_one_that_slept() -> None:
    report, _ = run(
        MemoryServer(),
        MemoryServer(name="B", level=1),
        settings=Settings(cycles=1, requests=2, limits=UNTIMED),
    )
    assert report.verdict == "unknown"


class Trouble:
    """Raises at the nth call of all, and never again."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.left, self.error = at, error
        self.raised = False

    def __call__(self, call: str) -> None:
        self.left -= 1
        if self.left == 0 and not self.raised:
            self.raised = True
            raise self.error()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("levels", [(0,), (1,), (0, 1), (1, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize(
    "error",
    [
        lambda: ServerError("it broke", next_step="mend it"),
        KeyboardInterrupt,
        lambda: ZeroDivisionError("a defect of ours"),
    ],
)
def test_whatever_fails_wherever_every_server_is_left_as_it_was(
    error: Callable[[], BaseException], levels: tuple[int, ...], level: int
) -> None:
    settings = Settings(cycles=2, requests=0, level=level)
    for at in range(1, 1000):
        trouble = Trouble(at, error)
        servers = [
            MemoryServer(name=name, level=one, trouble=trouble)
            for name, one in zip("AB", levels, strict=False)
        ]
        report, ended = run(*servers, settings=settings)
        if not trouble.raised:
            break
        known = by_hand(report)
        for server, one in zip(servers, levels, strict=True):
            # What failed while it was put back is told with the command that does it.
            assert server.asleep == bool(one) or server.name in known, (at, report.left)
            assert server.asleep or not server.gone or server.name in known, (at, report.left)
        assert ended is not None, (at, report.left)
        assert report.verdict == "stopped"
    else:
        raise AssertionError("no run came to its end")
    assert at > 15


def test_partial_results_say_where_it_stopped() -> None:
    def fail(call: str) -> None:
        if call == "A wake_up" and server.wakes == 1:
            raise ServerError("no memory", next_step="free some")

    server = MemoryServer(trouble=fail)
    report, error = run(server)
    assert isinstance(error, ServerError)
    assert report.verdict == "stopped"
    assert report.stopped is not None
    assert report.stopped.during == "cycle 2 of 2: A wakes up"
    assert (report.stopped.why, report.stopped.next_step) == ("no memory", "free some")
    first, second = report.turns
    assert first.answers is not None
    assert (second.sleep_seconds, second.wake_seconds, second.answers) == (0.5, None, None)
    # It was tried again to leave it awake, and failed again.
    assert server.asleep
    assert by_hand(report) == ["A"]
    assert f"'{server.url}/wake_up'" in report.left[0]


def test_a_server_that_is_gone_cannot_be_put_back_and_the_other_is() -> None:
    def dies(call: str) -> None:
        if call.startswith("B") and second.wakes:
            raise CallError("nothing listens there", next_step="start it", gone=True)

    first, second = MemoryServer(), MemoryServer(name="B", level=1, trouble=dies)
    report, error = run(first, second)
    assert isinstance(error, CallError)
    assert not first.asleep
    # No command would be answered by the other.
    assert (len(report.left), by_hand(report)) == (2, [])


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("status", "gone"), [(None, False), (None, True), (502, False)])
def test_a_call_that_got_no_answer_is_followed_by_its_opposite(
    status: int | None, gone: bool, level: int
) -> None:
    """The server falls asleep later, and says until then that it is awake."""

    def late(call: str) -> None:
        if call == f"A sleep {level}":
            server.gone = level == 2
            raise CallError("no answer", next_step="wait", status=status, gone=gone)

    server = MemoryServer(trouble=late)
    report, _ = run(server, settings=Settings(cycles=1, requests=0, level=level))
    opposite = {1: ["wake_up"], 2: ["wake_up weights", "reload_weights", "wake_up kv_cache"]}
    assert changes(server) == [f"sleep {level}", *opposite[level]]
    assert (by_hand(report), server.asleep) == ([], False)

    def late_wake(call: str) -> None:
        if call.startswith("A wake_up"):
            raise CallError("no answer", next_step="wait", status=status, gone=gone)

    server = MemoryServer(level=1, trouble=late_wake)
    report, _ = run(server)
    assert changes(server) == ["wake_up", "sleep 1"]
    assert (by_hand(report), server.asleep) == ([], True)


def test_a_server_that_once_denies_its_sleep_is_woken_up() -> None:
    class Denies(MemoryServer):
        def is_sleeping(self) -> bool:
            return super().is_sleeping() and self.calls.count("is_sleeping") > 1

    server = Denies()
    report, error = run(server)
    assert isinstance(error, ServerError)
    assert "/sleep" in error.message
    assert (by_hand(report), server.asleep) == ([], False)


def test_a_call_of_somebody_else_is_left_alone() -> None:
    def crossed(call: str) -> None:
        if call == "A sleep 1":
            raise CallError("409", next_step="stop it", status=409)

    server = MemoryServer(trouble=crossed)
    report, error = run(server)
    assert isinstance(error, CallError)
    assert changes(server) == ["sleep 1"]
    assert by_hand(report) == []


def test_a_server_at_work_is_left_alone_unless_forced() -> None:
    server = MemoryServer(busy=2)
    report, error = run(server)
    assert isinstance(error, ServerError)
    assert "--force" in error.next_step
    assert changes(server) == []
    assert report.left == ()
    assert run(MemoryServer(busy=2), settings=Settings(cycles=1, requests=0, force=True))[1] is None


@pytest.mark.parametrize("level", [0, 1])
def test_a_server_whose_load_cannot_be_seen_is_left_alone_unless_forced(level: int) -> None:
    hidden = Unseen("GET /metrics is answered with 404")
    server = MemoryServer(busy=hidden, level=level)
    report, error = run(server)
    assert isinstance(error, ServerError)
    assert hidden.why in error.message
    assert "--force" in error.next_step
    assert (changes(server), report.left, report.verdict) == ([], (), "stopped")
    said: list[str] = []
    forced = Run([server], Settings(cycles=1, requests=0, force=True), blind(), tell=said.append)
    assert forced.run() is None
    assert any(hidden.why in line for line in said)


def test_other_text_after_a_wake_up_is_a_breach() -> None:
    server = MemoryServer(text=lambda one, prompt: f"{one.wakes > 1} {prompt[:5]}")
    report, error = run(server)
    assert (error, report.verdict) == (None, "breached")
    assert [answer.verdict for answer in report.turns[1].answers or ()] == ["differs"] * 4


def test_other_text_is_shown_from_where_it_parts() -> None:
    server = MemoryServer(text=lambda one, prompt: f"{'so it went on ' * 30}{one.wakes > 0}")
    report, _ = run(server)
    assert (report.turns[0].answers or ())[0].text == "... it went on True"


def test_text_that_never_is_the_same_twice_cannot_be_compared() -> None:
    server = MemoryServer(text=lambda one, prompt: f"{one.asked} {prompt[:5]}")
    assert run(server)[0].verdict == "unknown"


def test_memory_is_that_of_the_servers_own_process() -> None:
    server = MemoryServer(leak=3 * MIB)
    report, _ = run(server, settings=Settings(cycles=5, requests=0), watch=seeing(gpu_of(server)))
    (trend,) = report.trends
    assert (trend.of_server, trend.sleeps) == (True, 5)
    assert trend.mib_per_cycle == pytest.approx(3)
    growth = next(one for one in report.checks if one.check == "growth")
    assert growth.verdict == "breach"
    assert growth.found == pytest.approx(9)


def test_in_a_rotation_each_server_has_its_own_residue() -> None:
    servers = MemoryServer(leak=5 * MIB), MemoryServer(name="B", level=1)
    report, _ = run(
        *servers, settings=Settings(cycles=5, requests=0), watch=seeing(gpu_of(*servers))
    )
    slopes = {one.server: one.mib_per_cycle for one in report.trends}
    assert slopes == {"A": pytest.approx(5), "B": pytest.approx(0)}


@pytest.mark.parametrize("asleep_in", [range(1), range(2), range(3, 5), range(5)])
def test_a_server_that_sleeps_on_another_gpu_meanwhile_is_not_counted(asleep_in: range) -> None:
    """``asleep_in``: the other server goes to sleep in these cycles, and wakes up after each."""
    server = MemoryServer()
    other = MemoryServer(name="C")
    looks = gpu_of(server), gpu_of(other, index=3)

    def look() -> tuple[Gpu, ...]:
        other.level = int(server.asleep and server.sleeps - 1 in asleep_in)
        return tuple(gpu for one in looks for gpu in one())

    report, _ = run(server, settings=Settings(cycles=6, requests=0), watch=seeing(look))
    assert [(trend.gpu, trend.of_server) for trend in report.trends] == [(0, True)]
    found = {one.check: one.verdict for one in report.checks}
    assert (found["freed"], found["residue"], found["growth"]) == ("ok", "ok", "ok")


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_rank_that_frees_nothing_from_some_sleep_on_is_seen(first: int) -> None:
    """The server has a rank on a second GPU, which stays as it is from the sleep ``first`` on."""
    server = MemoryServer()
    looks = gpu_of(server), gpu_of(server, index=1)

    def look() -> tuple[Gpu, ...]:
        near, far = (gpu for one in looks for gpu in one())
        desktop, rank = processes(far)
        stuck = server.asleep and server.sleeps > first
        rank = replace(rank, pid=1001, memory=40 * GIB if stuck else rank.memory)
        return near, replace(far, processes=(desktop, rank))

    report, _ = run(server, settings=Settings(cycles=4, requests=0), watch=seeing(look))
    residues = {trend.gpu: trend.last_bytes // GIB for trend in report.trends}
    assert residues == {0: 2, 1: 40 if first < 4 else 2}
    found = {one.check: one.verdict for one in report.checks}
    assert found["residue"] == ("breach" if first < 4 else "ok")


def processes(gpu: Gpu) -> tuple[GpuProcess, ...]:
    assert not isinstance(gpu.processes, Unseen)
    return tuple(gpu.processes)


def test_ranks_have_one_parent() -> None:
    assert memory._parent(os.getpid()) == os.getppid()
    assert memory._parent(2**30) == 2**30


def test_memory_that_others_take_on_other_gpus_is_not_counted() -> None:
    server = MemoryServer()
    other = MemoryServer(name="C", leak=900 * MIB)
    looks = gpu_of(server), gpu_of(other, index=1)

    def look() -> tuple[Gpu, ...]:
        other.sleeps += 1
        return tuple(gpu for one in looks for gpu in one())

    report, _ = run(server, settings=Settings(cycles=5, requests=0), watch=seeing(look))
    assert {use.gpu for turn in report.turns for use in turn.asleep or ()} == {0}
    assert report.verdict == "passed"


def test_without_processes_all_memory_is_counted() -> None:
    server = MemoryServer()
    look = gpu_of(server, listed=False)
    report, _ = run(server, settings=Settings(cycles=1, requests=0), watch=seeing(look))
    (trend,) = report.trends
    assert not trend.of_server
    assert trend.last_bytes > server.sleeps


def test_a_prompt_that_is_too_long_is_left_out() -> None:
    def short(call: str) -> None:
        if call == "A complete" and server.asked == 7:
            raise CallError("too long", next_step="ask less", status=400)

    server = MemoryServer(trouble=short)
    report, error = run(server)
    assert (error, report.verdict, report.servers[0].prompts) == (None, "passed", 3)
    assert [answer.prompt for answer in report.turns[0].answers or ()] == [1, 2, 3]
    report, error = run(MemoryServer(trouble=lambda call: short_of(call)))
    assert isinstance(error, CallError)


def short_of(call: str) -> None:
    """A server that takes no prompt at all."""
    if call.endswith("complete"):
        raise CallError("no completions", next_step="ask another", status=400)


@pytest.mark.parametrize("level", [0, 1])
def test_one_server_by_two_names_is_noticed(level: int) -> None:
    first, second = MemoryServer(level=level), MemoryServer(name="B", level=level)

    def same(call: str) -> None:
        first.level = second.level = max(first.level, second.level)
        if "wake_up" in str(first.calls + second.calls) and level:
            first.level = second.level = 0

    first.trouble = second.trouble = same
    _, error = run(first, second)
    assert isinstance(error, ServerError)


def test_acceptance_is_that_of_the_requests() -> None:
    report, _ = run(MemoryServer(speculates=True))
    assert [one.acceptance for one in report.stress] == [0.75, 0.75]


def test_a_server_that_fails_every_request_is_not_sent_all() -> None:
    def broken(call: str) -> None:
        if call == "A complete" and server.asked > 8:
            raise ServerError("it hangs", next_step="wait")

    server = MemoryServer(trouble=broken)
    report, _ = run(server, settings=Settings(cycles=1, requests=50, concurrency=4))
    (burst,) = report.stress
    assert burst.failed == 50
    assert server.asked < 8 + 4 + 4 + 2
    assert burst.faults[0] == "it hangs"
    assert len(burst.faults) == 2


def test_a_terminal_that_is_gone_does_not_leave_a_server_asleep() -> None:
    def closed(doing: str) -> None:
        raise BrokenPipeError

    server = MemoryServer()
    one = Run([server], SMALL, blind(), observe=closed)
    assert one.run() is None
    assert not server.asleep


def test_a_signal_during_a_call_is_raised_after_it_and_the_second_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    done: list[str] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def work(what: str, *signals: int) -> None:
        with interrupts.held(what):
            for number in signals:
                signal.raise_signal(number)
            done.append(what)

    with Interrupts(said.append) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            # The second is the same Ctrl-C, of a wrapper.
            work("the sleep of A", signal.SIGTERM, signal.SIGINT)
        assert done == ["the sleep of A"]
        assert len(said) == 1
        assert "the sleep of A" in said[0]
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            work("putting it back", signal.SIGINT)
    assert done == ["the sleep of A"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lambda said: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

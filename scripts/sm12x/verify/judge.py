"""Compares measurements with the limits. Nothing here calls a server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from sm12x.core.text import GIB, MIB, counted, first_of
from sm12x.verify.report import (
    AFTER,
    BEFORE,
    BREACH,
    BREACHED,
    DIFFERS,
    EQUAL,
    GOOD,
    PASSED,
    UNKNOWN,
    UNSEEN,
    UNSTEADY,
    AnswerReport,
    CheckReport,
    GpuUse,
    Limits,
    ServerReport,
    StressReport,
    TrendReport,
    TurnReport,
)

_ANSWERS = "answers"
# A token that is most of so many tokens or more.
_TOKENS, _SHARE = 8, 0.9
# The same few characters again and again, from the first to the last: "the the the ...".
_AGAIN = re.compile(r"(.{1,16}?)\1{7,}", re.DOTALL)
_BANGS = "!!!!!"
# Characters of a text in the line of a check.
_QUOTED = 40
# Sleeps after the first of which a slope is made.
_FEWEST = 3
# A server on another GPU frees nothing here; small changes by other processes are no sleep.
_TOUCHED = 0.02


@dataclass(frozen=True)
class _Check:
    """What a server is checked for: a value of ``limit`` at most, or at least where not ``most``.

    ``option`` changes the limit, "" for a check without one.
    """

    check: str
    server: str
    limit: float = 0
    unit: str = ""
    option: str = ""
    most: bool = True

    def judge(self, value: float, text: str) -> CheckReport:
        good = value <= self.limit if self.most else value >= self.limit
        if self.option:
            unit = f" {self.unit}" if self.unit else ""
            text += f" (at {'most' if self.most else 'least'} {self.limit:g}{unit})"
        return self._report(GOOD if good else BREACH, float(value), text)

    def unseen(self, why: str) -> CheckReport:
        return self._report(UNSEEN, None, why)

    def _report(self, verdict: str, value: float | None, text: str) -> CheckReport:
        return CheckReport(
            check=self.check,
            server=self.server,
            verdict=verdict,
            found=value,
            limit=None if value is None and not self.option else float(self.limit),
            unit=self.unit,
            option=self.option,
            text=text,
        )


def garbage(text: str, ids: Sequence[int] | None = None) -> str:
    """Return the evidence that a text is garbage; "" without any."""
    words = text.strip()
    if not words:
        return "empty"
    if _BANGS in words:
        return _BANGS
    if ids is not None and len(ids) >= _TOKENS:
        token, times = Counter(ids).most_common(1)[0]
        if times >= _SHARE * len(ids):
            return f"token {token} is {times} of {len(ids)} tokens"
    match = _AGAIN.match(words)
    # The rest after the last whole repetition may be the beginning of another.
    if match and match[1].startswith(words[match.end() :]):
        return f"{match[1]!r} again and again"
    return ""


def compared(text: str, before: Sequence[str]) -> str:
    """``equal``, ``differs``, or ``unsteady`` where the texts before differ among themselves."""
    if text in before:
        return EQUAL
    return UNSTEADY if len(set(before)) > 1 else DIFFERS


def slope(values: Sequence[float]) -> float:
    """The slope of the line through the values by least squares, for each step; 0 of one value."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((n - middle) ** 2 for n in range(len(values)))
    if not spread:
        return 0.0
    return sum((n - middle) * (value - mean) for n, value in enumerate(values)) / spread


def trends(turns: Sequence[TurnReport]) -> tuple[TrendReport, ...]:
    """Return the residue of each server on each GPU; the slope omits its first sleep.

    The residue is the memory of the server's processes, or of all processes where a sample lacks
    the former. A GPU that was not the server's in every sample is omitted: another server slept
    there meanwhile.
    """
    reports = []
    for server in dict.fromkeys(turn.sleeps for turn in turns):
        mine = [turn for turn in turns if turn.sleeps == server and turn.asleep is not None]
        for gpu in sorted(_its_gpus(mine)):
            asleep = [use for turn in mine for use in turn.asleep or () if use.gpu == gpu]
            of_server = all(use.held is not None for use in asleep)
            sizes = [use.held if of_server else use.used for use in asleep]
            readings = [size for size in sizes if size is not None]
            if not readings or len(readings) != len(sizes):
                continue
            later = readings[1:]
            reports.append(
                TrendReport(
                    server=server,
                    gpu=gpu,
                    of_server=of_server,
                    sleeps=len(readings),
                    last_bytes=readings[-1],
                    mib_per_cycle=slope(later) / MIB if len(later) >= _FEWEST else None,
                )
            )
    return tuple(reports)


def checks(
    limits: Limits,
    servers: Sequence[ServerReport],
    turns: Sequence[TurnReport],
    stress: Sequence[StressReport],
    *,
    random_weights: bool,
    memory_unseen: str,
) -> tuple[CheckReport, ...]:
    """Run all checks for which there are measurements."""
    reports: list[CheckReport] = []
    for server in servers:
        name = server.name
        reports += _times(limits, name, turns)
        reports += _memory(limits, name, turns, memory_unseen, len(servers))
        reports.append(_answers(server, turns))
        mine = [one for one in stress if one.server == name]
        if not random_weights:
            reports.append(_garbage(name, turns, mine))
        reports += _stress(limits, name, mine)
    return tuple(reports)


def verdict(reports: Sequence[CheckReport]) -> str:
    """Return ``breached``, ``unknown`` where no answers could be compared, or ``passed``."""
    if any(one.verdict == BREACH for one in reports):
        return BREACHED
    comparable = all(one.verdict == GOOD for one in reports if one.check == _ANSWERS)
    return PASSED if comparable else UNKNOWN


def _times(limits: Limits, name: str, turns: Sequence[TurnReport]) -> Iterator[CheckReport]:
    sleeps = [turn for turn in turns if turn.sleeps == name]
    swaps = [turn for turn in turns if turn.wakes == name and turn.sleeps != name]
    yield _slowest(
        _Check("first sleep", name, limits.max_first_sleep, "s", "--max-first-sleep"),
        [turn.sleep_seconds for turn in sleeps if turn.first_sleep],
    )
    yield _slowest(
        _Check("later sleeps", name, limits.max_sleep, "s", "--max-sleep"),
        [turn.sleep_seconds for turn in sleeps if not turn.first_sleep],
    )
    yield _slowest(
        _Check("wake-ups", name, limits.max_wake, "s", "--max-wake"),
        [turn.wake_seconds for turn in turns if turn.wakes == name],
    )
    if swaps:
        yield _slowest(
            _Check("later swaps to it", name, limits.max_swap, "s", "--max-swap"),
            [turn.swap_seconds for turn in swaps if not turn.first_sleep],
        )


def _slowest(check: _Check, seconds: Sequence[float | None]) -> CheckReport:
    times = [one for one in seconds if one is not None]
    if not times:
        return check.unseen("there was none")
    many = f", slowest of {len(times)}" if len(times) > 1 else ""
    return check.judge(max(times), f"{max(times):.2f} s{many}")


def _memory(
    limits: Limits, name: str, turns: Sequence[TurnReport], unseen: str, servers: int
) -> Iterator[CheckReport]:
    mine = [turn for turn in turns if turn.sleeps == name]
    its = _its_gpus(mine)
    freed = [pair for turn in mine if (pair := _freed(turn, its)) is not None]
    why = unseen or "there was no sleep, or the driver does not say"
    check = _Check("freed", name, limits.min_freed, "", "--min-freed", most=False)
    if not freed:
        yield check.unseen(why)
    else:
        gpu, share = min(freed, key=lambda one: one[1])
        text = f"{share:.0%} of the memory in use on GPU {gpu}, in the sleep that freed least"
        yield check.judge(share, text)
    gpus = _sleepers(mine)
    own = [one for one in trends(turns) if one.server == name and one.gpu in gpus]
    check = _Check("residue", name, limits.max_residue, "GiB", "--max-residue")
    if not own:
        yield check.unseen(why)
    else:
        largest = max(own, key=lambda trend: trend.last_bytes)
        gib = largest.last_bytes / GIB
        # The memory of all processes includes that of every sleeping server.
        if not largest.of_server:
            check = replace(check, limit=limits.max_residue * servers)
        yield check.judge(gib, f"{gib:.2f} GiB on GPU {largest.gpu}{_whose(largest)}")
    sloped = [(one, one.mib_per_cycle) for one in own if one.mib_per_cycle is not None]
    check = _Check("growth", name, limits.max_growth, "MiB", "--max-growth")
    if not sloped:
        yield check.unseen(f"needs {_FEWEST + 1} sleeps with a memory reading" if own else why)
    else:
        worst, each = max(sloped, key=lambda pair: pair[1])
        # From the second sleep to the last.
        growth = each * (worst.sleeps - 2)
        text = (
            f"{growth:+.1f} MiB on GPU {worst.gpu} from sleep 2 to {worst.sleeps} "
            f"({each:+.2f} MiB each){_whose(worst)}"
        )
        yield check.judge(growth, text)


def _whose(trend: TrendReport) -> str:
    return "" if trend.of_server else ", of all processes"


def _freed(turn: TurnReport, its: Collection[int]) -> tuple[int, float] | None:
    """The GPU of ``its`` on which the server freed least, and the share."""
    shares = [one for one in _shares(turn) if one[0] in its]
    touched = [one for one in shares if one[1] > _TOUCHED] or shares
    return min(touched, key=lambda one: one[1], default=None)


def _shares(turn: TurnReport) -> list[tuple[int, float]]:
    shares = []
    for before in turn.before or ():
        asleep = next((use for use in turn.asleep or () if use.gpu == before.gpu), None)
        pair = _pair(before, asleep)
        if pair and pair[0]:
            shares.append((before.gpu, max(0.0, (pair[0] - pair[1]) / pair[0])))
    return shares


def _pair(before: GpuUse, asleep: GpuUse | None) -> tuple[int, int] | None:
    """Bytes before and after: of the server where both are known, else of all processes."""
    pairs = ((before.held, asleep.held), (before.used, asleep.used)) if asleep else ()
    return next(((a, b) for a, b in pairs if a is not None and b is not None), None)


def _sleepers(turns: Sequence[TurnReport]) -> set[int]:
    """The GPUs that a server is on: where a sleep freed something; all where none did."""
    touched = {gpu for turn in turns for gpu, share in _shares(turn) if share > _TOUCHED}
    return touched or _its_gpus(turns)


def _its_gpus(turns: Sequence[TurnReport]) -> set[int]:
    """The GPUs that were the server's in each of its turns with a reading."""
    seen = [{use.gpu for use in turn.asleep} for turn in turns if turn.asleep]
    return set.intersection(*seen) if seen else set()


def _answers(server: ServerReport, turns: Sequence[TurnReport]) -> CheckReport:
    check = _Check(_ANSWERS, server.name)
    answers = _answered(server.name, turns)
    if not answers:
        return check.unseen("no answer after a wake-up could be compared")
    bad = [one for one in answers if one.verdict == DIFFERS]
    equal = sum(one.verdict == EQUAL for one in answers)
    text = f"{equal} of {len(answers)} greedy texts as before the first sleep"
    if bad:
        first = first_of([f"prompt {one.prompt}: {one.text[:_QUOTED]!r}" for one in bad], 1)
        return check.judge(len(bad), f"{text}; {first}")
    if not server.steady:
        return check.unseen(f"{text}; no prompt had the same text twice before")
    if equal < len(answers):
        text += "; the others had several texts before"
    return check.judge(0, text)


def _answered(name: str, turns: Sequence[TurnReport]) -> list[AnswerReport]:
    return [answer for turn in turns if turn.wakes == name for answer in turn.answers or ()]


def _garbage(name: str, turns: Sequence[TurnReport], stress: Sequence[StressReport]) -> CheckReport:
    answers = _answered(name, turns)
    total = len(answers) + sum(one.requests - one.failed for one in stress)
    kinds = [one.garbage for one in answers if one.garbage]
    bad = len(kinds) + sum(one.garbled for one in stress)
    check = _Check("garbage", name)
    if not total:
        return check.unseen("nothing was answered")
    text = f"{bad} of {counted(total, 'text')}"
    if bad:
        before = sum(one.garbled for one in stress if one.when == BEFORE)
        evidence = [*kinds, *(fault for one in stress for fault in one.faults)]
        text += f": {first_of(list(dict.fromkeys(evidence)), 2)}"
        if before:
            text += f"; {before} of them before any sleep"
        text += " (--random-weights if the model has such)"
    return check.judge(bad, text)


def _stress(limits: Limits, name: str, stress: Sequence[StressReport]) -> Iterator[CheckReport]:
    failed = sum(one.failed for one in stress)
    sent = sum(one.requests for one in stress)
    check = _Check("requests", name)
    if not sent:
        yield check.unseen("none was sent")
    else:
        text = f"{failed} of {sent} failed"
        if failed:
            faults = [fault for one in stress if one.failed for fault in one.faults]
            text += f": {first_of(faults, 1)}"
        yield check.judge(failed, text)
    yield _kept(
        _Check("speed", name, limits.min_speed, "", "--min-speed", most=False),
        stress,
        lambda one: one.tokens_per_second,
        "{:.1f}",
        "tokens/s",
        "needs requests with token counts before and after the cycles",
    )
    if any(one.drafted for one in stress):
        yield _kept(
            _Check("acceptance", name, limits.min_acceptance, "", "--min-acceptance", most=False),
            stress,
            lambda one: one.acceptance,
            "{:.0%}",
            "of the drafted tokens",
            "no token was drafted before, or after",
        )


def _kept(
    check: _Check,
    stress: Sequence[StressReport],
    value: Callable[[StressReport], float | None],
    form: str,
    unit: str,
    why: str,
) -> CheckReport:
    """Compare a figure after the cycles with the same figure before them, as a share."""
    before, after = (
        next((value(one) for one in stress if one.when == when), None) for when in (BEFORE, AFTER)
    )
    if not before or after is None:
        return check.unseen(why)
    share = after / before
    text = f"{form.format(after)} {unit}, {form.format(before)} before: {share:.0%} of it"
    return check.judge(share, text)

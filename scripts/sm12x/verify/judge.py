"""Compares measurements with the limits. Nothing here calls a server."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from sm12x.core.text import GIB, MIB, counted, first_of
from sm12x.verify.report import (
    AnswerReport,
    CheckReport,
    CheckVerdict,
    ConversationReport,
    Limits,
    RunVerdict,
    ServerReport,
    StressReport,
    TextVerdict,
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


def compared(text: str, before: Sequence[str]) -> TextVerdict:
    """``equal``, ``differs``, or ``unsteady`` where the texts before differ among themselves."""
    if text in before:
        return "equal"
    return "unsteady" if len(set(before)) > 1 else "differs"


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
            slope = None
            if len(later) >= _FEWEST:
                slope = statistics.linear_regression(range(len(later)), later).slope / MIB
            reports.append(
                TrendReport(
                    server=server,
                    gpu=gpu,
                    of_server=of_server,
                    sleeps=len(readings),
                    last_bytes=readings[-1],
                    mib_per_cycle=slope,
                )
            )
    return tuple(reports)


def _its_gpus(turns: Sequence[TurnReport]) -> set[int]:
    """The GPUs that were the server's in each of its turns with a reading."""
    seen = [{use.gpu for use in turn.asleep} for turn in turns if turn.asleep]
    return set.intersection(*seen) if seen else set()


def checks(
    limits: Limits,
    servers: Sequence[ServerReport],
    turns: Sequence[TurnReport],
    stress: Sequence[StressReport],
    conversations: Sequence[ConversationReport] = (),
    *,
    random_weights: bool,
    memory_unseen: str,
) -> tuple[CheckReport, ...]:
    """Run all checks for which there are measurements."""
    reports: list[CheckReport] = []
    for server in servers:
        judge = _Judge(limits, server, turns, stress)
        reports += judge.times()
        reports += judge.memory(memory_unseen, len(servers))
        reports.append(judge.same_answers())
        if not random_weights:
            reports.append(judge.sense())
        reports += judge.requests()
        for one in conversations:
            if one.server == server.name:
                reports += judge.conversation(one)
    return tuple(reports)


def verdict(reports: Sequence[CheckReport]) -> RunVerdict:
    """Return ``breached``, ``unknown`` where no answers could be compared, or ``passed``."""
    if any(one.verdict == "breach" for one in reports):
        return "breached"
    comparable = all(one.verdict == "ok" for one in reports if one.check == _ANSWERS)
    return "passed" if comparable else "unknown"


class _Judge:
    """The measurements of one server against the limits."""

    def __init__(
        self,
        limits: Limits,
        server: ServerReport,
        turns: Sequence[TurnReport],
        stress: Sequence[StressReport],
    ) -> None:
        self._limits = limits
        self._server = server
        self._sleeps = [turn for turn in turns if turn.sleeps == server.name]
        self._wakes = [turn for turn in turns if turn.wakes == server.name]
        self._stress = [one for one in stress if one.server == server.name]
        self._answers: list[AnswerReport] = [
            answer for turn in self._wakes for answer in turn.answers or ()
        ]

    def _check(
        self,
        check: str,
        value: float | None,
        text: str,
        limit: str = "",
        unit: str = "",
        *,
        times: int = 1,
    ) -> CheckReport:
        """Return the result of a check.

        Args:
            value: what was measured; None where nothing was, and ``text`` is the reason.
            limit: the field of ``Limits``, "" where the value has to be 0.
            times: how often the limit counts.
        """
        bound = float(getattr(self._limits, limit) * times) if limit else 0.0
        least = limit.startswith("min_")
        result: CheckVerdict = "not seen"
        if value is not None:
            good = value >= bound if least else value <= bound
            result = "ok" if good else "breach"
            if limit:
                text += f" (at {'least' if least else 'most'} {f'{bound:g} {unit}'.strip()})"
        return CheckReport(
            check=check,
            server=self._server.name,
            verdict=result,
            found=None if value is None else float(value),
            limit=None if value is None and not limit else bound,
            unit=unit,
            option=f"--{limit.replace('_', '-')}" if limit else "",
            text=text,
        )

    def times(self) -> Iterator[CheckReport]:
        first = [turn.sleep_seconds for turn in self._sleeps if turn.first_sleep]
        later = [turn.sleep_seconds for turn in self._sleeps if not turn.first_sleep]
        swaps = [turn for turn in self._wakes if turn.sleeps != turn.wakes]
        rows = [
            ("first sleep", "max_first_sleep", first),
            ("later sleeps", "max_sleep", later),
            ("wake-ups", "max_wake", [turn.wake_seconds for turn in self._wakes]),
        ]
        if swaps:
            seconds = [turn.swap_seconds for turn in swaps if not turn.first_sleep]
            rows.append(("later swaps to it", "max_swap", seconds))
        for check, limit, measured in rows:
            known = [one for one in measured if one is not None]
            many = f", slowest of {len(known)}" if len(known) > 1 else ""
            text = f"{max(known):.2f} s{many}" if known else "there was none"
            yield self._check(check, max(known, default=None), text, limit, "s")

    def memory(self, unseen: str, servers: int) -> Iterator[CheckReport]:
        why = unseen or "there was no sleep, or the driver does not say"
        its = _its_gpus(self._sleeps)
        freed = [share for turn in self._sleeps if (share := _freed(turn, its))]
        if not freed:
            yield self._check("freed", None, why, "min_freed")
        else:
            gpu, least = min(freed, key=lambda one: one[1])
            text = f"{least:.0%} of the memory in use on GPU {gpu}, in the sleep that freed least"
            yield self._check("freed", least, text, "min_freed")

        # The GPUs that a server is on: where a sleep freed something; all where none did.
        touched = {gpu for turn in self._sleeps for gpu, one in _shares(turn) if one > _TOUCHED}
        own = [one for one in trends(self._sleeps) if one.gpu in (touched or its)]
        largest = max(own, key=lambda trend: trend.last_bytes, default=None)
        if largest is None:
            yield self._check("residue", None, why, "max_residue", "GiB")
        else:
            gib = largest.last_bytes / GIB
            text = f"{gib:.2f} GiB on GPU {largest.gpu}{_whose(largest)}"
            # The memory of all processes includes that of every sleeping server.
            times = 1 if largest.of_server else servers
            yield self._check("residue", gib, text, "max_residue", "GiB", times=times)

        slopes = [(one, one.mib_per_cycle) for one in own if one.mib_per_cycle is not None]
        if not slopes:
            text = f"needs {_FEWEST + 1} sleeps with a memory reading" if own else why
            yield self._check("growth", None, text, "max_growth", "MiB")
        else:
            worst, each = max(slopes, key=lambda pair: pair[1])
            # From the second sleep to the last.
            growth = each * (worst.sleeps - 2)
            text = (
                f"{growth:+.1f} MiB on GPU {worst.gpu} from sleep 2 to {worst.sleeps} "
                f"({each:+.2f} MiB each){_whose(worst)}"
            )
            yield self._check("growth", growth, text, "max_growth", "MiB")

    def same_answers(self) -> CheckReport:
        answers = self._answers
        if not answers:
            return self._check(_ANSWERS, None, "no answer after a wake-up could be compared")
        bad = [one for one in answers if one.verdict == "differs"]
        equal = sum(one.verdict == "equal" for one in answers)
        text = f"{equal} of {len(answers)} greedy texts as before the first sleep"
        if bad:
            first = first_of([f"prompt {one.prompt}: {one.text[:_QUOTED]!r}" for one in bad], 1)
            text += f"; {first}"
        elif not self._server.steady:
            text += "; no prompt had the same text twice before"
            return self._check(_ANSWERS, None, text)
        elif equal < len(answers):
            text += "; the others had several texts before"
        return self._check(_ANSWERS, len(bad), text)

    def sense(self) -> CheckReport:
        total = len(self._answers) + sum(one.requests - one.failed for one in self._stress)
        kinds = [one.garbage for one in self._answers if one.garbage]
        bad = len(kinds) + sum(one.garbled for one in self._stress)
        text = f"{bad} of {counted(total, 'text')}" if total else "nothing was answered"
        if bad:
            before = sum(one.garbled for one in self._stress if one.when == "before")
            evidence = [*kinds, *(fault for one in self._stress for fault in one.faults)]
            text += f": {first_of(list(dict.fromkeys(evidence)), 2)}"
            if before:
                text += f"; {before} of them before any sleep"
            text += " (--random-weights if the model has such)"
        return self._check("garbage", bad if total else None, text)

    def requests(self) -> Iterator[CheckReport]:
        failed = sum(one.failed for one in self._stress)
        sent = sum(one.requests for one in self._stress)
        text = f"{failed} of {sent} failed" if sent else "none was sent"
        if failed:
            faults = [fault for one in self._stress if one.failed for fault in one.faults]
            text += f": {first_of(faults, 1)}"
        yield self._check("requests", failed if sent else None, text)

        was, now = self._figures(lambda one: one.tokens_per_second)
        if was and now is not None:
            text = f"{now:.1f} tokens/s, {was:.1f} before: {now / was:.0%} of it"
            yield self._check("speed", now / was, text, "min_speed")
        else:
            text = "needs requests with token counts before and after the cycles"
            yield self._check("speed", None, text, "min_speed")
        was, now = self._figures(lambda one: one.acceptance)
        if was and now is not None:
            text = f"{now:.0%} of the drafted tokens, {was:.0%} before: {now / was:.0%} of it"
            yield self._check("acceptance", now / was, text, "min_acceptance")
        elif any(one.drafted for one in self._stress):
            text = "no token was drafted before, or after"
            yield self._check("acceptance", None, text, "min_acceptance")

    def conversation(self, one: ConversationReport) -> Iterator[CheckReport]:
        text = (
            f"first token of {one.tokens} tokens after {one.after_seconds:.2f} s; cached "
            f"{one.cached_seconds:.2f}, cold {one.cold_seconds:.2f}"
        )
        share = one.after_seconds / one.cached_seconds if one.cached_seconds else None
        yield self._check("conversation", share, text, "max_conversation", "times")
        frozen = one.frozen_seconds
        text = "its text was complete before the sleep" if frozen is None else f"{frozen:.2f} s"
        yield self._check("frozen stream", frozen, text, "max_frozen", "s")
        wrong = None if one.frozen_text == "unsteady" else float(one.frozen_text == "differs")
        yield self._check("frozen text", wrong, f"{one.frozen_text} to an undisturbed one")

    def _figures(
        self, value: Callable[[StressReport], float | None]
    ) -> tuple[float | None, float | None]:
        """Return a figure of the requests before the cycles, and of those after."""
        figures = {one.when: value(one) for one in self._stress}
        return figures.get("before"), figures.get("after")


def _whose(trend: TrendReport) -> str:
    return "" if trend.of_server else ", of all processes"


def _freed(turn: TurnReport, its: Collection[int]) -> tuple[int, float] | None:
    """The GPU of ``its`` on which the server freed least, and the share."""
    shares = [one for one in _shares(turn) if one[0] in its]
    touched = [one for one in shares if one[1] > _TOUCHED] or shares
    return min(touched, key=lambda one: one[1], default=None)


def _shares(turn: TurnReport) -> Iterator[tuple[int, float]]:
    """Yield each GPU with the share of its memory that the sleep freed.

    The memory is the server's where it is known before and after, else that of all processes.
    """
    asleep = {use.gpu: use for use in turn.asleep or ()}
    for use in turn.before or ():
        later = asleep.get(use.gpu)
        pairs = ((use.held, later.held), (use.used, later.used)) if later else ()
        for was, now in pairs:
            if was and now is not None:
                yield use.gpu, max(0.0, (was - now) / was)
                break

"""A conversation over a swap: its first token before and after, and a stream that is frozen."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator

from sm12x.core.errors import ServerError
from sm12x.verify import judge
from sm12x.verify.client import CallError, Server
from sm12x.verify.report import ConversationReport

# Words that are one token in most vocabularies.
_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
)
# Seconds that the stream takes without a sleep, which has to come meanwhile; its least and most
# tokens, and those that come before it is frozen.
_STREAMING, _LEAST, _MOST, _BEFORE = 4.0, 64, 2048, 16
# Tokens by which the speed of the stream is estimated.
_TRIED = 33
_REPEATS = 3


class _Stream:
    """The pieces of a text that a thread reads as they come, with their times."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.text = ""
        self.times: list[float] = []
        self.error: Exception | None = None
        self._pieces = pieces
        # It ends with the process where the server does not answer after an interrupt.
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, count: int, seconds: float) -> None:
        """Wait for so many pieces, for the end, or for so many seconds."""
        end = time.monotonic() + seconds
        while len(self.times) < count and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.001)

    def finish(self, seconds: float) -> str:
        """Return the whole text. Raises ServerError where it does not end, or with an error."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise ServerError(
                f"a stream that was frozen by mode=keep has not ended {seconds:g} s after the "
                "wake-up",
                next_step="read the server's log",
            )
        if self.error is not None:
            raise self.error
        return self.text

    def _read(self) -> None:
        try:
            for piece in self._pieces:
                self.text += piece
                self.times.append(time.monotonic())
        except Exception as error:
            self.error = error


def measure(
    server: Server,
    tokens: int,
    sleep: Callable[[], None],
    wake: Callable[[], None],
    *,
    seconds: float,
    seed: int | None = None,
) -> ConversationReport:
    """Measure one conversation of about ``tokens`` tokens on a server that is awake.

    Args:
        sleep: puts it to sleep with mode=keep.
        wake: wakes it up again.
        seconds: how long a stream may take after the wake-up.
        seed: makes the prompt; by default one that no server has cached.

    Raises:
        ServerError: the server failed a call, or has no room for so many tokens.
    """
    words = random.Random(time.time_ns() if seed is None else seed)  # noqa: S311 - no secret
    prompt = " ".join(words.choices(_WORDS, k=tokens))
    length = 0
    try:
        cold = server.complete(prompt, 1)
        cached = [server.complete(prompt, 1).seconds for _ in range(_REPEATS)]
        each = (server.complete(prompt, _TRIED).seconds - min(cached)) / (_TRIED - 1)
        length = _MOST if each <= 0 else min(_MOST, max(_LEAST, int(_STREAMING / each)))
        before = [server.complete(prompt, length).text for _ in range(2)]
    except CallError as error:
        if error.status != 400:
            raise
        raise ServerError(
            f"{server} takes no prompt of {tokens} words with {length or 1} tokens more: "
            f"{error.message}",
            next_step="give --conversation fewer TOKENS than its --max-model-len has room for",
        ) from None
    stream = _Stream(server.stream(prompt, length))
    stream.wait(_BEFORE, seconds)
    sleep()
    frozen = len(stream.times)
    wake()
    awake = time.monotonic()
    text = stream.finish(seconds)
    # The next piece may arrive before the answer to /wake_up; a text may have been complete.
    later = [max(0.0, moment - awake) for moment in stream.times[frozen:]]
    after = server.complete(prompt, 1).seconds
    return ConversationReport(
        server=server.name,
        tokens=cold.prompt_tokens or tokens,
        cold_seconds=cold.seconds,
        cached_seconds=statistics.median(cached),
        after_seconds=after,
        frozen_seconds=later[0] if later else None,
        frozen_text=judge.compared(text, before),
    )

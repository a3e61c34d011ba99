"""Progress on stderr: bars on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment

from sm12x.core import text as texts


class _Console(Console):
    """Shows what it is given, and sends the terminal only what rich itself does."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment if segment.control else Segment(texts.visible(segment.text), segment.style)
            )


def stderr_console() -> Console:
    return _Console(stderr=True, highlight=False)


def _progress(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return bars with ``columns`` after each; nothing off a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=transient,
    )


@contextmanager
def bar(label: str, total: int, *, unit: str = "items") -> Iterator[Callable[[int], None]]:
    """Show a bar of ``total`` bytes (``unit="bytes"``) or items, moved by calling with a number."""
    columns: tuple[ProgressColumn, ...] = (
        (DownloadColumn(), TransferSpeedColumn())
        if unit == "bytes"
        else (TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    )
    with _progress(stderr_console(), *columns, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)


@contextmanager
def transfer(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar for a download, moved by calling with (bytes there, whole size or None)."""
    columns = (DownloadColumn(), TransferSpeedColumn())
    with _progress(stderr_console(), *columns, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class Steps(Protocol):
    """Says that ``done`` of ``total`` units of ``label`` are done; ``total`` 0 is not known.

    ``left`` is how long the rest will take, in seconds, where the caller knows better than by
    proportion.
    """

    def __call__(self, label: str, done: int, total: int, left: float | None = None) -> None: ...


# What follows it in a line off a terminal is how far a step is; the reader of the output of such a
# step (a container engine's, say) can show it in one moving line.
MARK = "progress: "
# Without a terminal at most one line per this many seconds.
_EVERY = 10.0


@contextmanager
def steps() -> Iterator[Steps]:
    """Yield a function that draws a bar for each label; without a terminal it prints lines."""
    console = stderr_console()
    tasks: dict[str, TaskID] = {}
    begun: dict[str, float] = {}
    print_times: dict[str, float] = {}
    with _progress(console, TextColumn("{task.fields[count]}"), TimeElapsedColumn()) as progress:

        def step(label: str, done: int, total: int, left: float | None = None) -> None:
            now = time.monotonic()
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total or None, count="")
                begun[label] = print_times[label] = now
                if not console.is_terminal:
                    console.print(label, markup=False, soft_wrap=True)
            if left is None and 0 < done < total:
                left = (now - begun[label]) / done * (total - done)
            count = _counted(done, total, left) if total else ""
            progress.update(tasks[label], completed=done, total=total or None, count=count)
            due = now - print_times[label] >= _EVERY
            if due and count and not console.is_terminal:
                print_times[label] = now
                console.print(f"{MARK}{label}: {count}", markup=False, soft_wrap=True)

        yield step


def _counted(done: int, total: int, left: float | None) -> str:
    """Return "37 of 110, about 12 min left"."""
    if left is None or done >= total:
        return f"{done} of {total}"
    rest = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
    return f"{done} of {total}, about {rest} left"


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """Show a spinner while something of unknown length runs; nothing off a terminal."""
    console = stderr_console()
    if console.is_terminal:
        with console.status(label):
            yield
    else:
        yield


class Reporter(Protocol):
    """Remarks, and phases of the work."""

    def say(self, text: str) -> None: ...

    def phase(
        self, label: str, *, live: bool = True
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Begin a phase of the work; the block is given what shows the step it is at.

        With ``live=False`` the terminal is left to progress bars of the block's own.
        """
        ...

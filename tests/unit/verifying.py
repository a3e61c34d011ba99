"""Servers in memory for the tests of `verify`: no process, no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sm12x.core.errors import ServerError
from sm12x.doctor.host import Unseen
from sm12x.doctor.model import Gpu, GpuProcess
from sm12x.verify.client import ACCEPTED, DRAFTED, Completion, Identity, Server
from sm12x.verify.memory import Watch
from sm12x.verify.report import RankUse

GIB, MIB = 1024**3, 1024**2


@dataclass(kw_only=True)
class MemoryServer(Server):
    """A server with sleep mode. ``trouble`` is called before each call that the run makes.

    ``level`` is that of its sleep, 0 while it is awake; ``gone`` are weights that a wake-up alone
    does not bring back.
    """

    name: str = "A"
    level: int = 0
    trouble: Callable[[str], None] = lambda call: None
    text: Callable[[MemoryServer, str], str] = lambda server, prompt: (
        f"as in {prompt[:9]} and so on"
    )
    busy: int | Unseen = 0
    leak: int = 0
    seconds: float = 0.5
    speculates: bool = False
    gone: bool = False
    sleeps: int = 0
    wakes: int = 0
    asked: int = 0
    calls: list[str] = field(default_factory=list)
    says: tuple[RankUse, ...] | None = None
    # Whether a sleep keeps the KV cache; without it a frozen stream gets another text.
    keeps: bool = True
    _cached: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:800{self.name}"

    @property
    def asleep(self) -> bool:
        return self.level > 0

    def memory(self) -> int:
        return (2 * GIB if self.asleep else 40 * GIB) + self.leak * self.sleeps

    def _call(self, call: str) -> None:
        self.calls.append(call)
        self.trouble(f"{self.name} {call}")

    def identify(self, model: str = "") -> Identity:
        self._call("identify")
        return Identity(version="0.33.0", model=model or "tiny", asleep=self.asleep)

    def is_sleeping(self) -> bool:
        self._call("is_sleeping")
        return self.asleep

    def ranks(self) -> tuple[RankUse, ...] | None:
        return self.says

    def sleep(self, level: int, *, mode: str = "", retry: bool = False) -> float:
        self._call(f"sleep {level} {mode}".strip())
        if not self.keeps:
            self._cached.clear()
        self.level = level
        self.gone |= level == 2
        self.sleeps += 1
        return self.seconds

    def wake_up(self, tag: str = "", *, retry: bool = False) -> float:
        self._call(f"wake_up {tag}".strip())
        if tag != "weights":
            self.level = 0
            self.wakes += 1
        return self.seconds

    def reload_weights(self) -> float:
        self._call("reload_weights")
        self.gone = False
        return self.seconds

    def require_reloading(self) -> None:
        self._call("require_reloading")

    def complete(self, prompt: str, tokens: int) -> Completion:
        self.asked += 1
        self._call("complete")
        if self.asleep:
            raise ServerError("503", next_step="wake it up")
        text = "" if self.gone else self.text(self, prompt)
        seconds = 0.01 if prompt in self._cached else 0.1
        self._cached.add(prompt)
        return Completion(text=text, tokens=len(text), ids=None, seconds=seconds, prompt_tokens=7)

    def stream(self, prompt: str, tokens: int) -> Iterator[str]:
        self._call("stream")
        text, sleeps = self.text(self, prompt), self.sleeps
        yield from text[:-1]
        while self.sleeps == sleeps or self.asleep:
            time.sleep(0.001)
        yield text[-1] if self.keeps else "?"

    def counters(self) -> Mapping[str, float]:
        if not self.speculates:
            return {}
        return {DRAFTED: 4.0 * self.asked, ACCEPTED: 3.0 * self.asked}

    def at_work(self) -> int | Unseen:
        return self.busy

    def shown(self, text: str) -> str:
        return text


def gpu_of(
    *servers: MemoryServer, listed: bool = True, index: int = 0
) -> Callable[[], tuple[Gpu, ...]]:
    """One GPU with what the servers hold and a desktop's 300 MiB; ``listed``: with processes."""

    def look() -> tuple[Gpu, ...]:
        held = [
            GpuProcess(pid=1000 * (index + 1) + 100 * number, memory=server.memory())
            for number, server in enumerate(servers)
        ]
        desktop = GpuProcess(pid=1, memory=300 * MIB)
        processes = (desktop, *held)
        return (
            Gpu(
                index=index,
                name="RTX PRO 6000",
                bus="0000:01:00.0",
                capability=None,
                unified=False,
                hardware="rtx-pro-6000",
                told_by="nvml",
                memory_total=95 * GIB,
                memory_used=sum(one.memory or 0 for one in processes),
                processes=processes if listed else Unseen("a container"),
            ),
        )

    return look


def seeing(look: Callable[[], tuple[Gpu, ...] | Unseen]) -> Watch:
    """A watch of processes that have a parent for each hundred of their numbers."""
    return Watch(look, parent=lambda pid: pid // 100)


def blind() -> Watch:
    return Watch(lambda: (), unseen="a test")

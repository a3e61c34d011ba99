"""Tells each unit when to start, and receives its cost.

ninja starts the launchers of all units at once; each connects here and waits. So the scheduler, not
ninja, knows all remaining units, and orders them by length and memory. The broker runs in a thread
of its own, and touches the scheduler in no other.
"""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sm12x.wheel.compile.schedule import DEFAULT_GIB, DEFAULT_SECONDS, Scheduler, Unit

# Short units may connect before long ones: nothing starts until no request has come for a while, or
# some seconds have passed.
_QUIET = 0.25
_AT_LEAST = 3.0
# Seconds between two ticks, which report how long the running units have taken.
_TICK = 10.0


@dataclass(frozen=True, kw_only=True)
class CompilerRun:
    """One run of a compiler. ``killed``: by the kernel, for memory; ``alone``: nothing beside it.

    ``seconds`` on the clock, ``cpu_seconds`` of it and all it started, ``peak_gib`` of the largest
    process among them.
    """

    unit: Unit
    status: int
    killed: bool
    alone: bool
    seconds: float
    cpu_seconds: float
    peak_gib: float

    @property
    def again(self) -> bool:
        """Whether it is run once more: it was killed while other units ran."""
        return self.killed and not self.alone

    @property
    def failed(self) -> bool:
        return self.status != 0 and not self.again


_OnResult = Callable[[CompilerRun], None]
# Seconds since each unit that runs was started, by its name.
_OnTick = Callable[[Mapping[str, float]], None]


class Broker:
    """A context: between its two ends units get their turns. ``address`` is its socket.

    After a unit has failed no further one starts; running units finish.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        units: Mapping[str, Unit],
        on_result: _OnResult,
        on_tick: _OnTick = lambda _: None,
    ) -> None:
        self._scheduler = scheduler
        self._units = units
        self._on_result = on_result
        self._on_tick = on_tick
        self._ticked = time.monotonic()
        self._stopped = False
        self._error: BaseException | None = None
        self._arrived = 0.0
        self._first: float | None = None
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._current: dict[int, Unit] = {}
        self._started: dict[int, float] = {}
        # Short: a socket's path has about 100 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="sm12x-")
        self.address = Path(self._folder.name) / "s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)

    def __enter__(self) -> Broker:
        self._listener.bind(str(self.address))
        self._listener.listen(1024)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wake.send(b"x")
        self._thread.join()
        for client, _ in self._clients.values():
            client.close()
        for end in (self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()
        self._folder.cleanup()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # No unit would be started any more: end the launchers, and tell in the main thread.
            self._error = error
            self._listener.close()
            for client, _ in self._clients.values():
                client.close()

    def _loop(self) -> None:
        while True:
            waiting = bool(self._scheduler.waiting())
            for key, _ in self._selector.select(_QUIET / 2 if waiting else _TICK):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.fd)
            self._grant()
            self._tick()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._clients[client.fileno()] = (client, bytearray())
        self._selector.register(client, selectors.EVENT_READ)

    def _receive(self, ticket: int) -> None:
        client, buffer = self._clients[ticket]
        try:
            data = client.recv(65536)
        except OSError:
            data = b""
        if not data:
            # The launcher has ended: the unit is done, or it was killed together with ninja.
            self._drop(ticket)
            return
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self._message(ticket, json.loads(line))

    def _message(self, ticket: int, message: dict[str, Any]) -> None:
        if "unit" in message:
            unit = self._units.get(message["unit"]) or _unplanned(message["unit"])
            self._arrived = time.monotonic()
            self._first = self._first or self._arrived
            self._scheduler.wait(ticket, unit)
            self._current[ticket] = unit
            return
        alone = self._scheduler.is_alone(ticket)
        result = CompilerRun(unit=self._current[ticket], alone=alone, **message)
        self._scheduler.leave(ticket)
        self._started.pop(ticket, None)
        if result.again:
            self._scheduler.wait(ticket, result.unit, alone=True)
        else:
            self._send(ticket, "end")
            self._stopped = self._stopped or result.failed
        self._on_result(result)

    def _grant(self) -> None:
        if self._stopped:
            for ticket in self._scheduler.waiting():
                self._scheduler.leave(ticket)
                self._send(ticket, "end")
            return
        now = time.monotonic()
        quiet = now - self._arrived >= _QUIET
        if not quiet and (self._first is None or now - self._first < _AT_LEAST):
            return
        for ticket in self._scheduler.start():
            self._started[ticket] = now
            self._send(ticket, "run")

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            running = self._started.items()
            self._on_tick({self._current[ticket].name: now - since for ticket, since in running})

    def _send(self, ticket: int, order: str) -> None:
        try:
            self._clients[ticket][0].sendall(json.dumps({"do": order}).encode() + b"\n")
        except OSError:
            self._drop(ticket)

    def _drop(self, ticket: int) -> None:
        client, _ = self._clients.pop(ticket)
        self._current.pop(ticket, None)
        self._started.pop(ticket, None)
        self._selector.unregister(client)
        client.close()
        self._scheduler.leave(ticket)


def _unplanned(name: str) -> Unit:
    """A unit that ninja was not asked for by name, but needs."""
    return Unit(
        name=name, source=name, target="", cpu_seconds=DEFAULT_SECONDS, peak_gib=DEFAULT_GIB
    )

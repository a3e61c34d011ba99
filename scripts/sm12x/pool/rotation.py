"""The models of a pool, their queues, and the swaps that change which of them is awake."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sm12x.pool import canaries, policy, proof, state
from sm12x.pool.config import PoolConfig, Spec
from sm12x.pool.engines import Engine, EngineError, RunFolder, Told
from sm12x.pool.gpus import MIB, GpuMemory, Gpus, group
from sm12x.pool.members import FIRST_SWAP, Member, RefusalError, Ticket
from sm12x.pool.metrics import Metrics
from sm12x.pool.state import Phase, Step, StepError

# Seconds between two looks at every server, and until the driver has what a sleep gave back.
_WATCH, _SETTLE = 1.0, 5.0
# Looks after which a server that runs is asked for its state again.
_ASK_EVERY = 5
# Seconds before the next try after the first failure, and at most.
_BACKOFF, _MOST_BACKOFF = 1.0, 60.0
_SWAPS_SHOWN = 50


class Rotation:
    """All models of a pool. ``start`` before the first request, ``stop`` at the end.

    Args:
        tell: is given one JSON line for each swap and each event.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        session: aiohttp.ClientSession,
        folder: RunFolder,
        gpus: Gpus,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None],
    ) -> None:
        self.config = config
        self.members: dict[str, Member] = {}
        self.metrics = metrics
        self.swaps: deque[dict[str, Any]] = deque(maxlen=_SWAPS_SHOWN)
        self.ready = False
        self.closing = False
        self.gpus = gpus
        self.folder = folder
        self._session = session
        self._clock = clock
        self._tell = tell
        self._names: dict[str, str] = {}
        self._rules = config.policy.rules()
        self._ledger = policy.Ledger(rules=self._rules)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._strangers_known: frozenset[int] = frozenset()
        self._looks = 0

    # -- models and names --

    def add(self, spec: Spec, rung: str) -> Member:
        """Add a model, which is asked for its state by ``settle``."""
        devices = ",".join(self.gpus.device(gpu) for gpu in sorted(spec.gpus))
        engine = Engine(spec, self._session, self.folder, devices)
        member = Member(spec=spec, engine=engine, rung=rung, pinned=spec.config.pin)
        record = self.folder.read(f"{spec.key}.canary")
        member.canary = canaries.restored(record, engine.fingerprint())
        member.engine.patience = self.config.limits.ask_seconds
        self.members[spec.key] = member
        self._name_all()
        return member

    def _name_all(self) -> None:
        names: dict[str, str] = {}
        # A name of the configuration goes before one that a server tells.
        for member in self.members.values():
            for name in (member.key, *member.spec.config.aliases):
                names[name] = member.key
        for member in self.members.values():
            for name in (*member.spec.served, *(str(one["id"]) for one in member.names)):
                names.setdefault(name, member.key)
        self._names = names

    def find(self, name: str) -> Member | None:
        """Return the model of a name that a request gives; None for an unknown one."""
        return self.members.get(self._names.get(name, ""))

    def upstream(self, member: Member, name: str) -> str:
        """Return the name to send to the server: its own in the place of an alias."""
        own = {*member.spec.served, *(str(one["id"]) for one in member.names)}
        return name if name in own else member.served

    # -- requests --

    def enter(self, member: Member, priority: int) -> Ticket:
        """Return a ticket: admitted where the model is awake, else in its queue.

        Raises:
            RefusalError: the queue is full (429), or the model cannot be woken up (503).
        """
        now = self._clock()
        ticket = Ticket(member, now, priority)
        if member.phase is Phase.AWAKE and not self.closing:
            ticket.admitted = True
            member.running += 1
            return ticket
        if why := self._cannot_serve(member):
            raise RefusalError(503, "model_unavailable", why, self._retry(member))
        limits = self.config.limits
        if len(member.queue) >= limits.queue_requests:
            raise RefusalError(
                429,
                "queue_full",
                f"{len(member.queue)} requests wait for {member.key} already",
                self._retry(member),
            )
        ticket.future = asyncio.get_running_loop().create_future()
        member.queue[ticket] = None
        self.kick()
        return ticket

    def weigh(self, ticket: Ticket, size: int) -> None:
        """Count bytes of a waiting request's body. Raises RefusalError (429) for too many."""
        member = ticket.member
        if member.held_bytes + size > self.config.limits.queue_mib * MIB:
            raise RefusalError(
                429,
                "queue_full",
                f"the bodies that wait for {member.key} take {self.config.limits.queue_mib} MiB",
                self._retry(member),
            )
        ticket.size += size
        member.held_bytes += size

    async def wait(self, ticket: Ticket) -> None:
        """Wait until a ticket is admitted. Raises RefusalError (503) after the limit."""
        if ticket.future is None or ticket.admitted:
            return
        member = ticket.member
        left = ticket.since + self.config.limits.hold_seconds - self._clock()
        try:
            async with asyncio.timeout(max(0.0, left)):
                await asyncio.shield(ticket.future)
        except TimeoutError:
            if ticket.admitted:
                return
            retry = self._retry(member)
            raise RefusalError(
                503,
                "hold_timeout",
                f"{member.key} is {member.phase}, and was not awake within "
                f"{self.config.limits.hold_seconds:g} s",
                retry,
            ) from None

    def leave(self, ticket: Ticket) -> None:
        """Give a ticket back: its request is answered, refused, or its client has gone."""
        member = ticket.member
        if ticket.admitted:
            ticket.admitted = False
            member.running -= 1
            member.used = self._clock()
            if not member.running:
                member.drained.set()
                if self._is_wanted_elsewhere(member):
                    self.kick()
        elif ticket in member.queue:
            del member.queue[ticket]
            self.kick()
        member.held_bytes -= ticket.size
        ticket.size = 0
        if ticket.future is not None:
            ticket.future.cancel()
            # An error that nobody awaits any more.
            if ticket.future.done() and not ticket.future.cancelled():
                ticket.future.exception()

    def _is_wanted_elsewhere(self, member: Member) -> bool:
        """Whether the end of a model's last request may change who is served next."""
        return member.spec.config.idle_seconds is not None or any(
            other.queue
            or other.spare
            or other.wanted_since is not None
            or other.frozen_since is not None
            for other in self.members.values()
        )

    def _cannot_serve(self, member: Member) -> str:
        if self.closing:
            return "the pool is ending"
        if self.members.get(member.key) is not member:
            return f"{member.key} is not in this pool any more, or starts anew"
        if member.phase is Phase.OUT:
            return f"{member.key} was taken out: {member.reason}"
        gone = member.phase in (Phase.STOPPED, Phase.UNKNOWN) and not member.engine.owned
        if gone and member.asked:
            return f"the server of {member.key} does not answer: {member.reason}"
        blocking = [one.key for one in self._conflicting(member) if one.pinned and one.holds]
        if blocking:
            return f"{', '.join(blocking)} is pinned on the GPUs of {member.key}"
        return ""

    def _retry(self, member: Member) -> float:
        if self.members.get(member.key) is not member:
            return FIRST_SWAP
        now = self._clock()
        return policy.wait_estimate(member.key, now, self._views(now), self._rules)

    def _conflicting(self, member: Member) -> list[Member]:
        return [
            other
            for other in self.members.values()
            if other is not member and other.gpus & member.gpus
        ]

    def _release(self, member: Member) -> None:
        """Admit all requests that wait."""
        now = self._clock()
        member.frozen_since = None
        for ticket in [*member.queue]:
            del member.queue[ticket]
            member.held_bytes -= ticket.size
            ticket.size = 0
            ticket.waited = now - ticket.since
            ticket.admitted = True
            member.running += 1
            self.metrics.held.labels(member.key).observe(ticket.waited)
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_result(None)

    def _refuse(self, member: Member, why: str) -> None:
        """Answer all requests that wait with 503."""
        retry = self._retry(member)
        for ticket in [*member.queue]:
            del member.queue[ticket]
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_exception(RefusalError(503, "wake_failed", why, retry))

    # -- when to swap --

    def kick(self) -> None:
        """Look again at who is to be served."""
        self._wake.set()

    def _views(self, now: float) -> list[policy.View]:
        return [self._view(member, now) for member in self.members.values()]

    def _view(self, member: Member, now: float) -> policy.View:
        first = next(iter(member.queue), None)
        since = [one for one in (member.wanted_since, member.frozen_since) if one is not None]
        since += [first.since] if first else []
        out = member.phase in (Phase.OUT, Phase.UNKNOWN)
        gone = member.phase is Phase.STOPPED and not member.engine.owned
        return policy.View(
            name=member.key,
            gpus=member.gpus,
            awake=member.phase is Phase.AWAKE,
            changing=member.changing,
            waiting_since=None if out or gone else min(since, default=None),
            priority=max((ticket.priority for ticket in member.queue), default=0),
            running=member.running,
            held=len(member.queue),
            awake_since=member.awake_since,
            used=member.used,
            swap_seconds=member.swap_seconds,
            fixed=member.pinned or not member.spec.sleeps,
            blocked_until=member.blocked_until,
            idle_seconds=member.spec.config.idle_seconds,
            spare=member.spare and member.phase is Phase.STOPPED and member.engine.owned,
        )

    async def _schedule(self) -> None:
        """Begin the swaps that are due, and wait until an event, or the time, may change that."""
        self._wake.clear()
        now = self._clock()
        decision = policy.decide(now, self._views(now), self._rules, self._ledger)
        for swap in decision.swaps:
            self.begin(swap)
        limit = None if decision.again is None else max(0.001, decision.again - now)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._wake.wait()

    def begin(self, swap: policy.Swap) -> asyncio.Task[bool]:
        """Begin a swap; the task's result is whether it succeeded."""
        for member in self._parties(swap):
            member.changing = True
        task = asyncio.create_task(self._swap(swap))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _parties(self, swap: policy.Swap) -> list[Member]:
        names = [*swap.victims, *([swap.target] if swap.target else [])]
        return [self.members[name] for name in names]

    # -- a swap --

    async def _swap(self, swap: policy.Swap) -> bool:
        run = SwapRun(
            target=self.members[swap.target] if swap.target else None,
            victims=[self.members[name] for name in swap.victims],
        )
        steps: Mapping[Step, Callable[[SwapRun], Awaitable[None]]] = {
            Step.DRAIN: self._drain,
            Step.SLEEP: self._sleep,
            Step.PROVE: self._prove,
            Step.WAKE: self._wake_up,
            Step.CANARY: self._ask_canary,
            Step.RETREAT: self._retreat,
            Step.RESTORE: self._restore,
        }
        step, began = Step.DRAIN, self._clock()
        if run.target:
            run.held = len(run.target.queue)
        try:
            while step not in state.ENDS:
                at = self._clock()
                try:
                    await steps[step](run)
                    well = True
                except (StepError, EngineError) as error:
                    run.faults.append(f"{step}: {error}")
                    well = False
                    if isinstance(error, StepError) and error.out:
                        run.out = self.members.get(error.out), str(error)
                run.seconds[step] = self._clock() - at
                step = state.following(step, well=well, wakes=run.target is not None)
            self._conclude(run, step, self._clock() - began)
        except Exception as error:
            # A defect of the pool must not leave a model that nobody can use.
            run.faults.append(f"defect: {error!r}")
            for member in self._parties(swap):
                if member.phase not in (Phase.AWAKE, Phase.ASLEEP, Phase.STOPPED):
                    member.phase = Phase.UNKNOWN
            self._conclude(run, Step.FAILED, self._clock() - began)
        finally:
            for member in self._parties(swap):
                member.changing = False
            self.kick()
        return step is Step.DONE

    async def _drain(self, run: SwapRun) -> None:
        """Hold new requests of the models that go to sleep, and let those in flight end."""
        end = self._clock() + self.config.limits.drain_seconds
        for victim in run.victims:
            victim.move(Phase.DRAINING)
        try:
            for victim in run.victims:
                while self._drains(victim):
                    victim.drained.clear()
                    left = end - self._clock()
                    if left <= 0:
                        raise StepError(f"{victim.running} requests of {victim.key} did not end")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left):
                            await victim.drained.wait()
        except StepError:
            for victim in run.victims:
                if victim.phase is Phase.DRAINING:
                    self._serve(victim, since=victim.awake_since)
            raise

    def _drains(self, member: Member) -> bool:
        # One whose server has ended has nothing in flight any more.
        going = member.phase is Phase.DRAINING
        return bool(going and member.running and not self._freezes(member))

    def _freezes(self, member: Member) -> bool:
        return (
            member.spec.keeps_kv
            and member.freezes
            and member.spec.config.running == "freeze"
            and member.rung in ("kv_cache", "level_1")
        )

    async def _sleep(self, run: SwapRun) -> None:
        gpus = sorted({gpu for member in run.victims for gpu in member.gpus})
        run.before = await asyncio.to_thread(self.gpus.memory, gpus)
        frozen = {victim.key: victim.freezes for victim in run.victims}
        done = await asyncio.gather(
            *(self.put_to_sleep(victim) for victim in run.victims), return_exceptions=True
        )
        errors = [one for one in done if isinstance(one, BaseException)]
        if errors:
            # One that turned out not to keep its requests drains in another swap, at once.
            run.again = any(frozen[one.key] and not one.freezes for one in run.victims)
            raise errors[0]

    async def put_to_sleep(self, member: Member) -> None:
        """Put one model to sleep by its rung. Raises EngineError where it is not asleep then."""
        if member.phase is Phase.STOPPED:
            return
        member.move(Phase.FALLING)
        if member.rung == "stop":
            await member.engine.stop()
            self._note(member, Phase.STOPPED, "stopped to make room")
            return
        keep = bool(member.running) and self._freezes(member)
        try:
            answer = await member.engine.sleep(
                member.rung, keep=keep, limit=self.config.limits.sleep_seconds
            )
        except EngineError as error:
            if keep and error.fault == "refused":
                # It cannot keep them after all: later swaps drain.
                member.freezes = False
            answer = await self._state_after(member, error, asleep=True)
            if not answer.asleep:
                raise
        if member.has_ended:
            # It did not tell, and was ended: its memory is free.
            return
        if keep:
            member.frozen_since = self._clock()
        self._note(member, Phase.ASLEEP, "", answer)

    async def _state_after(self, member: Member, error: EngineError, *, asleep: bool) -> Told:
        """Return the state that a server tells after a call that failed.

        A server of the pool that does not tell is ended: its memory is free then, which is what a
        sleep was for. Raises EngineError where nothing is known of the server.
        """
        try:
            answer = await member.engine.state()
        except EngineError as second:
            why = f"{error}; {second}"
            if member.engine.owned:
                await member.engine.stop(grace=0.0)
                self.died(member, why)
                if asleep:
                    return Told(asleep=True)
            else:
                self._note(member, Phase.UNKNOWN, why)
            raise EngineError(second.fault, why) from None
        if answer.asleep is not asleep:
            self._note(member, Phase.ASLEEP if answer.asleep else Phase.AWAKE, str(error), answer)
        return answer

    def _note(self, member: Member, phase: Phase, reason: str, answer: Told | None = None) -> None:
        """Take over what a server has told, or what was seen of its process."""
        if phase is not member.phase:
            member.move(phase)
        member.reason = reason
        if answer is not None:
            member.asked = time.time()
            member.ranks = answer.ranks
            if answer.asleep and answer.ranks:
                member.need = tuple(rank.freed for rank in answer.ranks)
        if phase not in (Phase.AWAKE, Phase.DRAINING):
            member.drained.set()

    async def _prove(self, run: SwapRun) -> None:
        """Prove that each sleep gave its memory back, and that the next model has room.

        By the account of each rank, and by NVML where it can be read. The driver may take a moment
        to give memory back, above all of a process that has ended.
        """
        members = [*run.victims, *([run.target] if run.target else [])]
        gpus = sorted({gpu for member in members for gpu in member.gpus})
        end = self._clock() + _SETTLE
        while True:
            now = await asyncio.to_thread(self.gpus.memory, gpus)
            try:
                for victim in run.victims:
                    run.freed += self._freed(victim, run.before, now)
                target = run.target
                if target is not None and now is not None and target.phase is Phase.ASLEEP:
                    known = self._known(now)
                    proof.require_room(target.key, target.gpus, target.need, now, known)
                return
            except StepError:
                run.freed = 0
                if now is None or self._clock() > end:
                    raise
            await asyncio.sleep(0.05)

    def _freed(
        self,
        member: Member,
        before: Mapping[int, GpuMemory] | None,
        now: Mapping[int, GpuMemory] | None,
    ) -> int:
        """Return the bytes that a sleep has freed. Raises StepError where that is not proved."""
        asleep = member.phase is Phase.ASLEEP
        if now is not None and asleep and member.rung == "level_1" and member.engine.pid:
            own = group([member.engine.pid], now)
            most = self.config.canary.most_residue_gib
            proof.require_residue(member.key, member.gpus, own, now, most)
        return proof.freed(
            member.key,
            member.gpus,
            # The end of its process is a proof of its own.
            member.ranks if asleep else (),
            tag="kv_cache" if member.rung == "kv_cache" else "weights",
            before=before,
            now=now,
            known=self._known(now or {}),
            unseen=self.gpus.fault if asleep and self.config.proof == "require" else None,
        )

    def _known(self, now: Mapping[int, GpuMemory]) -> frozenset[int]:
        """Return the processes that are no strangers: those of the pool's servers."""
        pids = [member.engine.pid for member in self.members.values() if member.engine.pid]
        return group(pids, now) | self._strangers_known

    async def _wake_up(self, run: SwapRun) -> None:
        target = run.target
        assert target is not None  # noqa: S101 - a swap without one has no such step
        await self.wake_up(target, run)

    async def wake_up(self, member: Member, run: SwapRun | None = None) -> None:
        """Wake a model up, or start its server. Raises EngineError where it is not awake then."""
        if member.phase in (Phase.UNKNOWN, Phase.OUT):
            await self.settle(member)
        if member.phase is Phase.WAKING:
            # It was awake already.
            return
        limits = self.config.limits
        if member.phase is Phase.STOPPED:
            if not member.engine.owned:
                raise EngineError("gone", member.reason or "its server does not answer")
            await self._start(member, run)
            return
        member.move(Phase.WAKING)
        try:
            answer = await member.engine.wake(member.rung, limits.wake_seconds)
            if answer.asleep:
                raise EngineError("refused", "it still sleeps after /wake_up")
        except EngineError as error:
            answer = await self._state_after(member, error, asleep=False)
            if answer.asleep:
                raise
        member.asked, member.ranks = time.time(), answer.ranks

    async def _start(self, member: Member, run: SwapRun | None) -> None:
        member.move(Phase.STARTING)
        if run is not None:
            run.started = True
        try:
            member.engine.start()
            self.event("start", model=member.key, pid=member.engine.pid, url=member.spec.url)
            await member.engine.loaded(self.config.limits.load_seconds)
            member.names = tuple(await member.engine.names())
            self._name_all()
        except EngineError as error:
            await member.engine.stop()
            self.died(member, str(error))
            raise
        member.move(Phase.WAKING)
        member.spare = False
        member.asked = time.time()

    async def _ask_canary(self, run: SwapRun) -> None:
        assert run.target is not None  # noqa: S101 - as above
        await self.ask_canary(run.target)

    async def ask_canary(self, member: Member) -> None:
        """Compare the answer of a model with the recorded one, or record it.

        Raises:
            StepError: the answer is another, or the model drafts worse than before.
            EngineError: there is none.
        """
        settings, limits = self.config.canary, self.config.limits
        if not member.names:
            member.names = tuple(await member.engine.names())
            self._name_all()
        try:
            record, fault = await canaries.ask(
                member.engine,
                member.served,
                member.canary,
                settings,
                member.spec.config.canary,
                limits.canary_seconds,
            )
        except EngineError:
            self.metrics.canaries.labels(member.key, "no answer").inc()
            raise
        self.metrics.canaries.labels(member.key, "wrong" if fault else "well").inc()
        if fault:
            raise StepError(f"the canary of {member.key}: {fault}", out=member.key)
        if record is not member.canary:
            member.canary = record
            name = f"{member.key}.canary"
            self.folder.write(name, canaries.stored(record, member.engine.fingerprint()))

    async def _retreat(self, run: SwapRun) -> None:
        """Take the model that was to serve off the GPU again."""
        target = run.target
        assert target is not None  # noqa: S101 - as above
        if target.phase in (Phase.STOPPED, Phase.UNKNOWN, Phase.ASLEEP, Phase.OUT):
            return
        try:
            await self.put_to_sleep(target)
        except EngineError as error:
            if not target.engine.owned:
                raise
            await target.engine.stop(grace=0.0)
            self.died(target, str(error))

    async def _restore(self, run: SwapRun) -> None:
        """Wake up again what was put to sleep, and serve it."""
        for victim in run.victims:
            if victim.phase is Phase.STOPPED:
                # A load takes its own turn.
                victim.wanted_since = self._clock()
                continue
            try:
                if victim.phase is not Phase.AWAKE:
                    await self.wake_up(victim)
                    await self.ask_canary(victim)
                self._serve(victim)
            except (StepError, EngineError) as error:
                run.faults.append(f"{victim.key}: {error}")
                await self._give_up(victim, error)

    async def _give_up(self, member: Member, error: Exception) -> None:
        """Take a model off its GPUs whose canary was wrong; one that failed is tried again."""
        out = isinstance(error, StepError)
        if out:
            try:
                await self.put_to_sleep(member)
            except EngineError:
                if member.engine.owned:
                    await member.engine.stop(grace=0.0)
                    self.died(member, str(error))
        self._failed(member, str(error), out=out)

    def _serve(self, member: Member, since: float | None = None) -> None:
        if member.phase is not Phase.AWAKE:
            member.move(Phase.AWAKE)
        now = self._clock()
        member.awake_since = now if since is None else since
        member.used = max(member.used, member.awake_since)
        member.wanted_since = None
        member.reason = ""
        member.failures = 0
        self._release(member)

    def _failed(self, member: Member, why: str, *, out: bool) -> None:
        """Take a model out, or try again later; its requests are refused."""
        member.failures += 1
        member.wanted_since = None
        seconds = min(_MOST_BACKOFF, _BACKOFF * 2.0 ** (member.failures - 1))
        member.blocked_until = max(member.blocked_until, self._clock() + seconds)
        member.reason = why
        if out:
            member.move(Phase.OUT)
        elif member.phase in (Phase.WAKING, Phase.FALLING, Phase.STARTING, Phase.DRAINING):
            member.move(Phase.UNKNOWN)
        self._refuse(member, f"{member.key} could not be woken up: {why}")

    def _conclude(self, run: SwapRun, end: Step, seconds: float) -> None:
        now = self._clock()
        target = run.target
        why = "; ".join(run.faults)
        if target is not None and end is Step.DONE:
            self._serve(target)
            swap = seconds - run.seconds.get(Step.DRAIN, 0.0)
            if not run.started or target.rung == "stop":
                mean = 0.5 * (target.swap_seconds + swap)
                target.swap_seconds = mean if target.measured else swap
                target.measured = True
            gpus = target.gpus.union(*(victim.gpus for victim in run.victims))
            self._ledger.spend(gpus, now, swap)
        elif target is not None and end is Step.CANCELLED:
            # The requests that were in flight get time to end before the next try.
            again = max(self._rules.residency(one.swap_seconds) for one in run.victims)
            target.blocked_until = now + again
        elif target is not None and not run.again:
            self._failed(target, why, out=run.out is not None and run.out[0] is target)
        member = target or run.victims[0]
        result = {Step.DONE: "done", Step.CANCELLED: "cancelled"}.get(end, "failed")
        entry = {
            "to": target.key if target else "",
            "from": [victim.key for victim in run.victims],
            "rung": member.rung,
            "result": result,
            "why": why,
            "seconds": {step.value: round(took, 4) for step, took in run.seconds.items()},
            "total_seconds": round(seconds, 4),
            "freed_bytes": run.freed,
            "held_requests": run.held,
            "started": run.started,
        }
        for one in [*run.victims, *([target] if target else [])]:
            one.last_swap = {**entry, "at": time.time()}
        self.swaps.append({**entry, "at": time.time()})
        self.metrics.swaps.labels(member.key, result).inc()
        for step, took in run.seconds.items():
            self.metrics.swap_seconds.labels(member.key, step.value).observe(took)
        self.metrics.freed.labels(member.key).inc(run.freed)
        self.event("swap", **entry)

    # -- servers --

    async def settle(self, member: Member) -> None:
        """Ask a server for its state; nothing is taken from a record.

        One that is awake is WAKING then: it is not served before its canary.
        """
        try:
            if why := member.engine.ended():
                raise EngineError("gone", why)
            answer = await member.engine.state()
            if not answer.asleep and not await member.engine.healthy():
                raise EngineError("gone", "/health does not answer 200")
        except EngineError as error:
            member.asked = time.time()
            if member.engine.owned and member.engine.pid:
                await member.engine.stop()
            stopped = member.engine.owned or error.fault == "gone"
            self._note(member, Phase.STOPPED if stopped else Phase.UNKNOWN, error.text)
            return
        self._note(member, Phase.ASLEEP if answer.asleep else Phase.WAKING, "", answer)

    def died(self, member: Member, why: str) -> None:
        """Note that a server has ended; it is started again after a pause that grows."""
        member.failures += 1
        seconds = min(_MOST_BACKOFF, _BACKOFF * 2.0 ** (member.failures - 1))
        member.blocked_until = self._clock() + seconds
        member.spare = True
        member.frozen_since = None
        member.ranks = member.need = ()
        self._note(member, Phase.STOPPED, why)
        self.metrics.ends.labels(member.key).inc()
        self.event("end", model=member.key, why=why, again_in_seconds=seconds)
        self.kick()

    async def _watch(self) -> None:
        """See whether each server runs, and ask now and then for its state."""
        await asyncio.sleep(_WATCH)
        self._looks += 1
        for member in [*self.members.values()]:
            if not member.changing:
                await self.look(member, ask=self._looks % _ASK_EVERY == 0)

    async def look(self, member: Member, *, ask: bool = True) -> None:
        """See whether a server still is in its state, and take over what it tells."""
        if why := member.engine.ended():
            if member.phase not in (Phase.STOPPED, Phase.STARTING) and not member.changing:
                await member.engine.stop()
                self.died(member, why)
            return
        if not (ask or member.phase is Phase.UNKNOWN):
            return
        if member.phase is Phase.OUT:
            await self._clear(member)
            return
        before = member.phase
        try:
            answer = await member.engine.state()
        except EngineError as error:
            if member.changing or member.phase is not before:
                return
            if error.fault != "hung" and not await member.engine.healthy():
                if member.engine.owned:
                    await member.engine.stop()
                    self.died(member, error.text)
                elif before is not Phase.STOPPED:
                    self._note(member, Phase.STOPPED, error.text)
                    self.event("end", model=member.key, why=error.text)
            return
        if member.changing or member.phase is not before:
            return
        now = Phase.ASLEEP if answer.asleep else Phase.AWAKE
        if now is not before:
            self.event("found", model=member.key, before=before.value, now=now.value)
            member.move(Phase.UNKNOWN)
            self._note(member, Phase.ASLEEP if answer.asleep else Phase.WAKING, "", answer)
            if not answer.asleep:
                await self._take_over(member)
            self.kick()
        member.asked = time.time()

    async def _clear(self, member: Member) -> None:
        """Put a model to sleep that was taken out, and could not leave its GPUs then."""
        member.changing = True
        try:
            if member.spec.sleeps and not (await member.engine.state()).asleep:
                limit = self.config.limits.sleep_seconds
                await member.engine.sleep(member.rung, keep=False, limit=limit)
        except EngineError as error:
            self.event("not cleared", model=member.key, why=error.text)
        finally:
            member.changing = False
            self.kick()

    async def _take_over(self, member: Member) -> None:
        """Serve a model whose server was awake already, unless another one is on its GPUs."""
        member.changing = True
        try:
            if any(other.holds for other in self._conflicting(member)):
                await self.put_to_sleep(member)
                return
            await self.ask_canary(member)
            self._serve(member)
        except (StepError, EngineError) as error:
            await self._give_up(member, error)
        finally:
            member.changing = False
            self.kick()

    # -- begin and end --

    async def start(self) -> None:
        """Ask the servers that run, load the others, and begin to take turns.

        They are loaded one after another, so that each takes its memory while the others sleep; the
        model that is to be awake comes last.
        """
        for member in self.members.values():
            if member.engine.owned and not member.engine.adopt():
                await member.engine.stop()
            await self.settle(member)
            self.event("state", model=member.key, state=member.phase.value, why=member.reason)
        self.keep(self._again(self._watch))
        first = self.members[self.config.first()]
        order = [*reversed([one for one in self.members.values() if one is not first]), first]
        for member in order:
            if member.phase is Phase.WAKING:
                await self._take_over(member)
        for member in order:
            alone = member is first and not any(one.holds for one in self._conflicting(member))
            turn = member.spec.config.preload and (alone or member.phase is Phase.STOPPED)
            if turn and member.phase is not Phase.AWAKE:
                await self._load(member)
        self._remember_strangers()
        self.ready = True
        self.event("ready", awake=[one.key for one in self.members.values() if one.holds])
        self.keep(self._again(self._schedule))

    async def _load(self, member: Member) -> None:
        if not member.engine.owned and member.phase is not Phase.ASLEEP:
            return
        victims = tuple(one.key for one in self._conflicting(member) if one.holds)
        task = self.begin(policy.Swap(target=member.key, victims=victims))
        await asyncio.wait({task})

    def _remember_strangers(self) -> None:
        gpus = sorted({gpu for member in self.members.values() for gpu in member.gpus})
        memory = self.gpus.memory(gpus)
        listed = {pid for one in (memory or {}).values() for pid in one.processes}
        # Servers of `url` are among them: which processes are theirs is not known.
        if any(not member.engine.owned for member in self.members.values()):
            self._strangers_known = frozenset(listed)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside everything else, until the pool ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` over and over; a defect in it is told, and ends nothing."""
        while True:
            try:
                await work()
            except Exception as error:
                self.event("defect", why=repr(error))
                await asyncio.sleep(_WATCH)

    async def stop(self) -> None:
        """End the servers that the pool has started; those of ``url`` stay as they are."""
        self.closing = True
        for task in [*self._tasks, *self._running]:
            task.cancel()
        for member in self.members.values():
            self._refuse(member, "the pool is ending")
        await asyncio.gather(*(one.engine.stop() for one in self.members.values()))

    # -- a person's wishes --

    async def command(self, key: str, verb: str) -> dict[str, Any]:
        """Do what a person asks of a model: wake, sleep, pin, unpin or enable.

        Raises:
            RefusalError: there is no such model or verb (404), or it cannot be done now (409).
        """
        member = self.find(key)
        if member is None:
            raise RefusalError(404, "model_not_found", f"the model {key!r} is not in this pool")
        if verb == "wake":
            if why := self._cannot_serve(member):
                raise RefusalError(409, "not_possible", why)
            if member.phase is not Phase.AWAKE:
                member.wanted_since = self._clock()
        elif verb == "sleep":
            if not member.spec.sleeps:
                raise RefusalError(409, "not_possible", f"{member.key} never sleeps")
            if member.changing or member.phase is not Phase.AWAKE:
                raise RefusalError(409, "not_possible", f"{member.key} is {member.phase}")
            member.pinned = False
            await asyncio.wait({self.begin(policy.Swap(target="", victims=(member.key,)))})
        elif verb == "pin":
            member.pinned = True
            if member.phase is not Phase.AWAKE:
                member.wanted_since = self._clock()
        elif verb == "unpin":
            member.pinned = False
        elif verb == "enable":
            if member.changing:
                raise RefusalError(409, "not_possible", f"{member.key} changes its state")
            if member.phase is Phase.OUT:
                # What its server answers from now on is right.
                member.canary = None
                self.folder.forget(f"{member.key}.canary")
                member.blocked_until = 0.0
                member.failures = 0
                await self.settle(member)
                if member.is_found:
                    await self._take_over(member)
        else:
            raise RefusalError(404, "not_found", f"a model cannot be asked to {verb!r}")
        self.event("command", model=member.key, verb=verb)
        self.kick()
        return self.shown(member)

    async def reload(
        self, config: PoolConfig, specs: Mapping[str, Spec], rungs: Mapping[str, str]
    ) -> dict[str, list[str]]:
        """Take over another configuration: only models whose server has changed start anew."""
        changed: dict[str, list[str]] = {"added": [], "removed": [], "restarted": [], "kept": []}
        self.config = config
        self._rules = config.policy.rules()
        self._ledger.rules = self._rules
        for key, member in [*self.members.items()]:
            spec = specs.get(key)
            same = spec is not None and (spec.argv, spec.env, spec.url, spec.gpus) == (
                member.spec.argv,
                member.spec.env,
                member.spec.url,
                member.spec.gpus,
            )
            if spec is not None and same:
                if spec.config.pin != member.spec.config.pin:
                    member.pinned = spec.config.pin
                member.spec = member.engine.spec = spec
                member.engine.patience = config.limits.ask_seconds
                member.rung = rungs.get(key, "never")
                changed["kept"].append(key)
                continue
            await self._retire(member)
            changed["removed" if spec is None else "restarted"].append(key)
        for key, spec in specs.items():
            if key not in self.members:
                member = self.add(spec, rungs.get(key, "never"))
                await self.settle(member)
                if member.phase is Phase.WAKING:
                    await self._take_over(member)
                member.spare = spec.config.preload
                if key not in changed["restarted"]:
                    changed["added"].append(key)
        self._name_all()
        self.event("reload", **changed)
        self.kick()
        return changed

    async def _retire(self, member: Member) -> None:
        """End a model's server after its requests, or after the limit of a drain."""
        while member.changing:
            await asyncio.sleep(0.05)
        member.changing = True
        end = self._clock() + self.config.limits.drain_seconds
        if member.phase is Phase.AWAKE:
            member.move(Phase.DRAINING)
        while member.running and self._clock() < end:
            await asyncio.sleep(0.05)
        self._refuse(member, f"{member.key} is not in this pool any more, or starts anew")
        await member.engine.stop()
        del self.members[member.key]

    # -- what is shown --

    def event(self, kind: str, **facts: Any) -> None:
        """Write one JSON line."""
        line = {"event": kind, "at": round(time.time(), 3), **facts}
        self._tell(json.dumps(line, default=str))

    def shown(self, member: Member) -> dict[str, Any]:
        """Return a model as `GET /pool` has it."""
        return member.shown(self._clock())

    def snapshot(self) -> dict[str, Any]:
        """Return the pool as `GET /pool` has it."""
        gpus = sorted({gpu for member in self.members.values() for gpu in member.spec.gpus})
        memory = self.gpus.memory(gpus)
        return {
            "ready": self.ready,
            "models": [self.shown(member) for member in self.members.values()],
            "gpus": [
                {"gpu": gpu, "total": one.total, "used": one.used, "free": one.free}
                for gpu, one in (memory or {}).items()
            ],
            "memory_unseen": "" if memory else self.gpus.fault or "NVML has no memory of the GPUs",
            "swaps": list(self.swaps),
        }

    def gauge(self) -> None:
        """Set the gauges before they are read."""
        for member in self.members.values():
            for phase in Phase:
                self.metrics.phase.labels(member.key, phase.value).set(phase is member.phase)
            self.metrics.waiting.labels(member.key).set(len(member.queue))
            self.metrics.waiting_bytes.labels(member.key).set(member.held_bytes)
            self.metrics.running.labels(member.key).set(member.running)


@dataclass(kw_only=True)
class SwapRun:
    """A swap in progress; ``out`` is a model to take out, and why.

    With ``again`` it has failed, and is no fault of the model that was to serve.
    """

    target: Member | None
    victims: Sequence[Member]
    seconds: dict[Step, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    before: Mapping[int, GpuMemory] | None = None
    freed: int = 0
    held: int = 0
    started: bool = False
    again: bool = False
    out: tuple[Member | None, str] | None = None

"""Keeps a fleet alive: replaces replicas that died, and gives up on those that die again and again.

A slot is a replica's name. It holds a handle, or nothing while its replica is dead; a successor is
started after a pause that doubles with each death, joins under the same name, and is routable once
it has the current version. A replica that does not answer while the fleet is synced is busy, not dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

import msgspec

from hotbunk.checkpoint_engine.fleet import Fleet
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    ReplicaLost,
    ReplicaRetired,
    TooFewReplicas,
)
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus

log = logging.getLogger(__name__)
Start = Callable[[str], Awaitable[ReplicaHandle]]
CLOSE_WAIT = 30.0  # seconds for what is left of a dead replica to be closed


class Supervision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a fleet puts up with. Times are seconds.

    ``most_deaths``: one more, and the slot is retired. ``minimum``: with fewer slots than that left,
    supervising ends. ``forgive``: a replica that lived so long has its earlier deaths forgotten.
    ``probe``: for a status to come; ``misses`` in a row, outside a sync, are a death.
    """

    most_deaths: int = 3
    minimum: int = 1
    backoff: float = 1.0
    longest_backoff: float = 60.0
    forgive: float = 1800.0
    start: float = 600.0
    probe: float = 10.0
    misses: int = 3
    every: float = 1.0


class SlotState(StrEnum):
    """What a slot holds."""

    ALIVE = "alive"
    BUSY = "busy"  # alive, and not answering: it is being synced, or its engine is at work
    WAITING = "waiting"  # dead; a successor comes after the backoff
    STARTING = "starting"
    RETIRED = "retired"


class _Slot:
    def __init__(self, name: str, handle: ReplicaHandle, now: float) -> None:
        self.name = name
        self.handle: ReplicaHandle | None = handle
        self.state = SlotState.ALIVE
        self.deaths = 0
        self.misses = 0
        self.since = now  # when the present handle came, or the last one died
        self.error: HotbunkError | None = None  # of the last death, with those before it behind it
        self.starting: asyncio.Task[ReplicaHandle] | None = None


class Supervisor:
    """See the module. :meth:`run` supervises until it is cancelled or too few are left.

    :param start: starts a successor under that name; for replicas in processes
        ``lambda name: process.start(specs[name])``.
    :param clock: seconds; anything that never goes back.
    """

    def __init__(
        self,
        fleet: Fleet,
        start: Start,
        rules: Supervision | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._start = start
        self._rules = rules or Supervision()
        self._clock = clock
        self._slots = {h.name: _Slot(h.name, h, clock()) for h in fleet.replicas}

    @property
    def slots(self) -> Mapping[str, ReplicaHandle | None]:
        """The replica of each slot; None while it is dead or when it is retired."""
        return {name: slot.handle for name, slot in self._slots.items()}

    def state(self, name: str) -> SlotState:
        """What the slot of that name holds."""
        return self._slots[name].state

    def why(self, name: str) -> HotbunkError | None:
        """What its last replica died of; earlier deaths are its context."""
        return self._slots[name].error

    async def run(self) -> None:
        """Supervise.

        :raises TooFewReplicas: the minimum cannot be had any more; from the deaths that led there.
        """
        try:
            while True:
                await self.check()
                await asyncio.sleep(self._rules.every)
        finally:
            await self.close()

    async def close(self) -> None:
        """Start nothing more. Replicas that are there stay."""
        starting = [slot.starting for slot in self._slots.values() if slot.starting is not None]
        for task in starting:
            task.cancel()
        done = await asyncio.gather(*starting, return_exceptions=True)
        for handle in done:
            if not isinstance(handle, BaseException):  # it came in the moment of the end
                await _closed(handle)

    async def check(self, *, start: bool = True) -> None:
        """Look at every slot once, and do what is due. Waits for no start.

        :param start: False: only who died is taken out, as where a successor has no room yet.
        :raises TooFewReplicas: see :meth:`run`.
        """
        self._know()
        await asyncio.gather(*(self._check(slot, start) for slot in self._slots.values()))
        left = [s for s in self._slots.values() if s.state is not SlotState.RETIRED]
        if len(left) < self._rules.minimum:
            retired = [s for s in self._slots.values() if s.state is SlotState.RETIRED]
            last = max(retired, key=lambda slot: slot.since, default=None)
            error = TooFewReplicas(len(left), self._rules.minimum)
            raise error from (None if last is None else last.error)

    def _know(self) -> None:
        """Whoever joined the fleet meanwhile has a slot, and who was taken out has none."""
        there = {handle.name: handle for handle in self._fleet.replicas}
        for name, handle in there.items():
            if name not in self._slots:
                self._slots[name] = _Slot(name, handle, self._clock())
        for name, slot in list(self._slots.items()):
            if slot.handle is not None and name not in there:
                del self._slots[name]

    async def _check(self, slot: _Slot, start: bool) -> None:
        if slot.state is SlotState.RETIRED:
            return
        if slot.handle is not None:
            await self._probe(slot, slot.handle)
        elif not start:
            return
        elif slot.starting is not None:
            await self._came(slot, slot.starting)
        elif self._clock() - slot.since >= self._pause(slot.deaths):
            slot.state = SlotState.STARTING
            slot.starting = asyncio.create_task(self._started(slot.name))

    def _pause(self, deaths: int) -> float:
        doubled: float = self._rules.backoff * 2 ** min(deaths - 1, 30)
        return min(doubled, self._rules.longest_backoff)

    # -- of one that is there -----------------------------------------------------------------

    async def _probe(self, slot: _Slot, handle: ReplicaHandle) -> None:
        syncing = self._fleet.syncing
        said = await self._asked(handle)
        if slot.handle is not handle:
            return
        if isinstance(said, ReplicaLost):
            await self._died(slot, said)
        elif isinstance(said, HotbunkError):
            slot.state = SlotState.BUSY
            if not (syncing or self._fleet.syncing):  # else it says nothing about life and death
                slot.misses += 1
            if slot.misses >= self._rules.misses:
                await self._died(slot, said)
        elif said.health is Health.LOST:
            await self._died(slot, await _reason(handle))
        else:
            slot.misses = 0
            slot.state = SlotState.BUSY if said.backend.busy else SlotState.ALIVE
            if self._clock() - slot.since >= self._rules.forgive:
                slot.deaths, slot.error = 0, None

    async def _asked(self, handle: ReplicaHandle) -> ReplicaStatus | HotbunkError:
        try:
            async with asyncio.timeout(self._rules.probe):
                return await handle.status()
        except HotbunkError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded("status", self._rules.probe, where=handle.name)
        # A boundary: handles are anybody's.
        except Exception as error:  # noqa: BLE001
            return engine_failed("status", error)

    async def _died(self, slot: _Slot, error: HotbunkError) -> None:
        handle, slot.handle, slot.starting, slot.misses = slot.handle, None, None, 0
        slot.deaths += 1
        slot.since = self._clock()
        if slot.error is not None and slot.error is not error:
            _behind(error, slot.error)
        slot.error = error
        log.warning("replica %s died (%d): %s", slot.name, slot.deaths, error)
        if handle is not None:
            self._fleet.forget_replica(slot.name)
            await _closed(handle)
        slot.state = SlotState.WAITING
        if slot.deaths > self._rules.most_deaths:
            slot.state = SlotState.RETIRED
            retired = ReplicaRetired(slot.name, slot.deaths)
            retired.__cause__ = error
            slot.error = retired
            log.error("%s", retired)

    # -- of one that comes --------------------------------------------------------------------

    async def _started(self, name: str) -> ReplicaHandle:
        try:
            async with asyncio.timeout(self._rules.start):
                return await self._start(name)
        except TimeoutError as error:
            if isinstance(error, HotbunkError):
                raise
            raise DeadlineExceeded("starting", self._rules.start, where=name) from error

    async def _came(self, slot: _Slot, starting: asyncio.Task[ReplicaHandle]) -> None:
        if not starting.done():
            return
        slot.starting = None
        failure: HotbunkError | None = None
        try:
            slot.handle = starting.result()
            await self._fleet.add_replica(slot.handle)
        except HotbunkError as error:
            failure = error
        # A boundary: starting is anybody's.
        except Exception as error:  # noqa: BLE001
            failure = engine_failed("start", error)
        slot.state, slot.since = SlotState.ALIVE, self._clock()
        if failure is not None:
            await self._died(slot, failure)


async def _reason(handle: ReplicaHandle) -> HotbunkError:
    """Why it is lost, in its own words."""
    try:
        async with asyncio.timeout(CLOSE_WAIT):
            await handle.resume([])  # nothing, which a dead one refuses
    except HotbunkError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a boundary, as above
        return engine_failed("resume", error)
    return ReplicaLost("it says that it is lost", where=handle.name)


async def _closed(handle: ReplicaHandle) -> None:
    """What is left of it goes; a successor may need its device."""
    try:
        async with asyncio.timeout(CLOSE_WAIT):
            await handle.close()
    # A boundary: it is dead, and whatever it says about that changes nothing.
    except Exception:
        log.exception("what is left of replica %s was not closed", handle.name)


def _behind(error: BaseException, earlier: BaseException) -> None:
    """Put an earlier error at the root of this one's chain."""
    seen = {id(error)}
    while True:
        further = error.__cause__ or error.__context__
        if further is None or id(further) in seen:
            break
        seen.add(id(further))
        error = further
    if error is not earlier:
        error.__context__ = earlier

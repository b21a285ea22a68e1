"""One replica's way through one sync."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from hotbunk.checkpoint_engine.held import Held
from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome
from hotbunk.rollout import errors
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.contract import MemoryReport, UpdateReport, Version
from hotbunk.rollout.gate import SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import ReplicaStatus, TimelineEvent

log = logging.getLogger(__name__)
ASK_WAIT = 10.0  # seconds for a replica to say what is left of it


def typed(step: str, error: Exception) -> errors.HotbunkError:
    """Whatever a step raised, as an error of the tree."""
    return error if isinstance(error, errors.HotbunkError) else engine_failed(step, error)


class Run:
    """One replica's way through one sync: what was done, and how to undo it."""

    def __init__(self, handle: ReplicaHandle) -> None:
        self.handle = handle
        self.phases: dict[str, float] = {}
        self.timeline: list[TimelineEvent] = []
        self.undo: list[Callable[[], Awaitable[object]]] = []  # until the commit
        self.opens = False  # the sync holds a pause here, and nobody did before it
        self.fenced = False  # rolled back, and held shut
        self.before: ReplicaStatus | None = None
        self.committed = False
        self.wakes_kv = False  # KV was away before, or is for the time of the sync
        self.updates: list[UpdateReport] = []
        self.outcome: Outcome | None = None
        self.error: errors.HotbunkError | None = None
        self._held = Held(handle)
        self._phase = ""

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Time and memory of what is done inside count as this phase's."""
        self._phase = name
        began = time.perf_counter()
        try:
            async with self._held.during(name):
                yield
        finally:
            seconds = time.perf_counter() - began
            self.phases[name] = self.phases.get(name, 0.0) + seconds
            self.timeline.append(TimelineEvent(name, began, seconds, str(self.error or "")))

    def saw(self, report: MemoryReport) -> None:
        """What a verb of this phase said of memory."""
        self._held.saw(self._phase, report)

    async def look(self) -> None:
        """Measure its memory before something goes."""
        await self._held.now(self._phase)

    def ended(self, outcome: Outcome, error: errors.HotbunkError | None = None) -> None:
        self.outcome, self.error = outcome, error

    async def open(self) -> None:
        """End the sync's pause. Where that fails, the replica is in doubt."""
        try:
            async with asyncio.timeout(ASK_WAIT):
                await self.handle.resume_generation(owner=SYNC)
            self.opens = False
        # A boundary: handles are anybody's.
        except Exception as error:
            log.exception("replica %s is in doubt", self.handle.name)
            self.ended(Outcome.IN_DOUBT, self.error or typed("resume_generation", error))

    def result(self, to: Version, group: str) -> ReplicaOutcome:
        """What came of it, where the last thing sent was version ``to`` of a weight group."""
        assert self.outcome is not None
        version = None
        if self.outcome in (Outcome.COMMITTED, Outcome.FENCED):
            version = to
        elif self.outcome is Outcome.ROLLED_BACK and self.before is not None:
            version = self.before.versions.get(group)
        return ReplicaOutcome(
            self.handle.name,
            self.outcome,
            version,
            self.updates[-1] if self.updates else None,
            str(self.error or ""),
            type(self.error).__name__ if self.error else "",
            self.phases,
            tuple(self.timeline),
            tuple(self.updates),
            self.fenced,
            dict(self._held.peaks),
        )

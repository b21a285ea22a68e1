"""What a replica holds while a phase of a sync goes on: measured by it, never reckoned here.

A replica that counts without asking its hardware (``accounting``), or cannot be asked in time, leaves
a phase without a figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from hotbunk.rollout.contract import MemoryReport
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.handle import ReplicaHandle

BRIEF = 0.5  # seconds that the end of a phase waits for an answer that is under way
EVERY, SELDOM = 0.05, 5.0  # seconds between looks: of a long phase ever fewer
_late: set[asyncio.Task[None]] = set()  # asked, and not answered when the phase had ended


class PeakMemory(msgspec.Struct, frozen=True):
    """The most bytes seen in a phase: of each tag, and of all tags at one moment.

    ``measured_by``: as in :class:`~hotbunk.rollout.contract.MemoryReport`. ``samples``: how many
    looks it is the most of.
    """

    total: int
    tags: Mapping[str, int]
    measured_by: str
    samples: int = 1


def higher(one: PeakMemory | None, report: MemoryReport) -> PeakMemory | None:
    """``one`` raised by one more look, if that measured anything."""
    if report.measured_by == "accounting" or not report.arenas:
        return one
    tags = {arena.tag: report.resident(arena.tag) for arena in report.arenas}
    if one is None:
        return PeakMemory(sum(tags.values()), tags, report.measured_by)
    most = {tag: max(tags.get(tag, 0), one.tags.get(tag, 0)) for tag in {**one.tags, **tags}}
    total = max(one.total, sum(tags.values()))
    return PeakMemory(total, most, report.measured_by, one.samples + 1)


class Held:
    """One replica's peaks, phase by phase."""

    def __init__(self, handle: ReplicaHandle) -> None:
        self.peaks: dict[str, PeakMemory] = {}
        self._handle = handle
        self._measures = handle.capabilities.memory_measured_by != "accounting"

    def saw(self, phase: str, report: MemoryReport) -> None:
        """A look at it in a phase: its own, or what a verb said."""
        peak = higher(self.peaks.get(phase), report)
        if peak is not None:
            self.peaks[phase] = peak

    @asynccontextmanager
    async def during(self, phase: str) -> AsyncIterator[None]:
        """Look at once, and then again and again. Nothing inside waits for it."""
        if not self._measures:
            yield
            return
        looks = _Looks(self, self._handle, phase)
        try:
            yield
        except BaseException:
            looks.over()
            raise
        await looks.end()

    async def now(self, phase: str) -> None:
        """Look before something goes, which a look beside it might miss."""
        if self._measures:
            await _Looks(self, self._handle, phase).end()


class _Looks:
    """Looks in one phase. A timer and a task each: there may be many replicas, and phases of no time."""

    def __init__(self, held: Held, handle: ReplicaHandle, phase: str) -> None:
        self._held = held
        self._handle = handle
        self._phase = phase
        self._counts = True
        self._loop = asyncio.get_running_loop()
        self._pause = EVERY
        self._look()

    def _look(self) -> None:
        self._task = self._loop.create_task(self._ask())
        self._timer = self._loop.call_later(self._pause, self._again)

    async def _ask(self) -> None:
        try:
            report = await self._handle.memory()
        except HotbunkError:  # it is dead, or shut, or busy: no figure
            return
        if self._counts:
            self._held.saw(self._phase, report)

    def _again(self) -> None:
        self._pause = min(2 * self._pause, SELDOM)
        if self._task.done():
            self._look()
        else:  # it takes long; one at a time
            self._timer = self._loop.call_later(self._pause, self._again)

    def over(self) -> None:
        """No more looks. One that is under way may end when it likes."""
        self._counts = False
        self._timer.cancel()
        if not self._task.done():
            _late.add(self._task)
            self._task.add_done_callback(_late.discard)

    async def end(self) -> None:
        """The phase is over; a look that is under way has a moment still."""
        self._timer.cancel()
        await asyncio.sleep(0)  # most have been answered, or are at once
        if not self._task.done():
            await asyncio.wait({self._task}, timeout=BRIEF)
        self.over()

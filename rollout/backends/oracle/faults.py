"""A plan of what goes wrong where: (point, n-th time) -> raise, hang, die, corrupt or delay.

An engine or a transport calls :meth:`FaultPlan.reach` at named points (``update/bucket``); a test
says beforehand what happens there. Times are counted per point from 0. The oracle's points are
listed in :data:`POINTS`; a fake transport may add its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from hotbunk.rollout.errors import UsageError, closest

POINTS = (
    "start",
    "status",
    "digest",
    "memory",
    "generate",
    "step",
    "pause",
    "resume_generation",
    "abort",
    "reset_caches",
    "release/backup",
    "release/unmap",
    "resume/map",
    "resume/restore",
    "update/accept",
    "update/bucket",
    "update/post_load",
    "update/verify",
    "update/commit",
    "update/label",
)


class EngineDied(RuntimeError):
    """The engine's process is gone. Not a hotbunk error: an engine would not raise one either."""


class Action(StrEnum):
    """What happens at a point."""

    RAISE = "raise"
    HANG = "hang"
    DIE = "die"
    CORRUPT = "corrupt"
    DELAY = "delay"


@dataclass(frozen=True)
class Fault:
    """One planned fault.

    ``error`` is raised by RAISE; ``seconds`` (of loop time) is the length of DELAY; ``stubborn``
    makes HANG ignore being cancelled (once: the second time is the event loop's, at its end), and
    makes whatever is asked of a dead engine hang, too.
    """

    action: Action
    error: BaseException | None = None
    seconds: float = 0.0
    stubborn: bool = False


class FaultPlan:
    """Faults by point and count, and whether the engine they belong to is still alive."""

    def __init__(self, points: tuple[str, ...] = POINTS) -> None:
        self.seen: dict[str, int] = {}
        self.dead: Fault | None = None
        self._points = points
        self._plan: dict[tuple[str, int], Fault] = {}
        self._always: dict[str, Fault] = {}

    def at(self, point: str, fault: Fault, *, nth: int | None = 0) -> FaultPlan:
        """Plan ``fault`` for the ``nth`` time from now on that ``point`` is reached (None: every).

        :raises UsageError: nobody ever reaches such a point.
        """
        if point not in self._points:
            raise UsageError(f"no fault point {point!r}{closest(point, self._points)}")
        if nth is None:
            self._always[point] = fault
        else:
            self._plan[point, self.seen.get(point, 0) + nth] = fault
        return self

    def raises(self, point: str, error: BaseException, *, nth: int | None = 0) -> FaultPlan:
        """``error`` comes out of ``point``."""
        return self.at(point, Fault(Action.RAISE, error=error), nth=nth)

    def hangs(self, point: str, *, stubborn: bool = False, nth: int | None = 0) -> FaultPlan:
        """``point`` never returns; ``stubborn``: not even when it is cancelled."""
        return self.at(point, Fault(Action.HANG, stubborn=stubborn), nth=nth)

    def dies(self, point: str, *, silently: bool = False, nth: int | None = 0) -> FaultPlan:
        """The engine is gone from ``point`` on: later calls raise, or (``silently``) hang."""
        return self.at(point, Fault(Action.DIE, stubborn=silently), nth=nth)

    def corrupts(self, point: str, *, nth: int | None = 0) -> FaultPlan:
        """A bit flips at ``point``."""
        return self.at(point, Fault(Action.CORRUPT), nth=nth)

    def delays(self, point: str, seconds: float, *, nth: int | None = 0) -> FaultPlan:
        """``point`` takes ``seconds`` of loop time longer."""
        return self.at(point, Fault(Action.DELAY, seconds=seconds), nth=nth)

    def kill(self) -> None:
        """The engine is dead from now on, unless it was already."""
        self.dead = self.dead or Fault(Action.DIE)

    def clear(self) -> None:
        """Forget what is planned. The dead stay dead."""
        self._plan.clear()
        self._always.clear()

    async def reach(self, point: str) -> bool:
        """Pass ``point``; does not suspend unless a fault makes it. True: corrupt something.

        :raises EngineDied: the engine died here, or before.
        """
        count = self.seen.get(point, 0)
        self.seen[point] = count + 1
        fault = self._plan.pop((point, count), None) or self._always.get(point)
        if fault is not None and fault.action is Action.DIE:
            self.dead = fault
        if self.dead is not None:
            if self.dead.stubborn:
                await self._hang(stubborn=False)
            raise EngineDied(f"the engine is dead (reached {point})")
        if fault is None:
            return False
        if fault.action is Action.RAISE:
            assert fault.error is not None
            raise fault.error
        if fault.action is Action.HANG:
            await self._hang(fault.stubborn)
        if fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)
        return fault.action is Action.CORRUPT

    async def _hang(self, stubborn: bool) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if not stubborn:
                raise
        await asyncio.get_running_loop().create_future()

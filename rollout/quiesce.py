"""An engine brought to stand still, and let go again.

Between the gate (who may pass) and the backend (whose steps run): which pauses were asked of the
engine, whether the last one is over, and when it may run. All of it happens on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from hotbunk.rollout import errors
from hotbunk.rollout.contract import Engine, PauseMode, PauseReport, Support
from hotbunk.rollout.gate import Gate, Stage
from hotbunk.rollout.status import Deadlines, TimelineEvent

T = TypeVar("T")


class Call(Protocol):
    """Calls an engine under a deadline, with typed failures; see ``calls.bounded``."""

    async def __call__(self, verb: str, coro: Awaitable[T], seconds: float) -> T: ...


class EnginePauses:
    """The pauses of one engine.

    :param call: calls the engine; a call that hangs marks the replica lost.
    :param servable: whether the engine has what a token needs.
    :param note: takes an event for the timeline.
    """

    def __init__(
        self,
        backend: Engine,
        gate: Gate,
        deadlines: Deadlines,
        call: Call,
        servable: Callable[[], bool],
        note: Callable[[TimelineEvent], Any],
    ) -> None:
        self.open = True  # the engine may start steps
        self._quiet = False  # its last pause came to an end: no step runs
        self._pausing = 0  # engine pauses under way
        self._opening: asyncio.Event | None = None  # set when the engine's resume has ended
        self._stopped = asyncio.Event()  # a pause that lets nothing finish is complete
        self._backend = backend
        self._gate = gate
        self._deadlines = deadlines
        self._call = call
        self._servable = servable
        self._note = note

    @property
    def standing_still(self) -> bool:
        """No step runs, and none can start."""
        return self._quiet and self._pausing == 0

    async def quiesce(self, verb: str, deadline: float | None) -> None:
        """Stand still for ``verb``. :raises RequestsInFlight: not in time."""
        if self.standing_still:
            return
        # A caller's keep that is under way must not be turned into a drain by our own pause.
        keep = any(pause.mode is PauseMode.KEEP for pause in self._gate.pauses.values())
        await self.pause(verb, PauseMode.KEEP if keep else PauseMode.WAIT, False, deadline)

    async def may_drain(self, lock: asyncio.Lock, deadline: float | None) -> bool:
        """Whether a drain would compute from whole content, once no verb is in progress.

        :raises DeadlineExceeded: the verb in progress did not end in time.
        """
        if not self.standing_still or not self._gate.ids(Stage.RUNNING):
            return True  # nothing that stands would go on
        limit = self._deadlines.drain if deadline is None else deadline
        try:
            async with asyncio.timeout(limit), lock:
                return self._servable()
        except TimeoutError:
            raise errors.DeadlineExceeded("the verb before a drain", limit) from None

    async def pause(
        self, verb: str, mode: PauseMode, clear_cache: bool, deadline: float | None
    ) -> PauseReport:
        """Carry one pause out. Pauses may overlap, and escalate.

        :raises RequestsInFlight: it was not over at the deadline; the engine does not stand still.
        """
        limit = self._deadlines.drain if deadline is None else deadline
        while self._opening is not None:  # a resume must not overtake the pause after it
            await self._opening.wait()
        clear_cache = clear_cache or self._gate.clear_cache
        self.open = self._quiet = False
        self._pausing += 1
        if mode is PauseMode.WAIT:
            self._gate.thaw()
        began = time.perf_counter()
        try:
            native = self._backend.capabilities.pause[mode].support is Support.NATIVE
            if mode is PauseMode.WAIT and not native:
                report = await self._call(verb, self._drain_at_gate(clear_cache), limit)
            else:
                coro = self._backend.pause_generation(mode, clear_cache=clear_cache)
                report = await self._call(verb, coro, limit)
        except errors.DeadlineExceeded as error:
            raise errors.RequestsInFlight(self._gate.ids(Stage.RUNNING), verb, limit) from error
        finally:
            self._pausing -= 1
        self._quiet = not self.open  # unless it was opened again meanwhile
        if mode is not PauseMode.WAIT:
            self._stopped.set()
        if mode is PauseMode.KEEP:
            self._gate.freeze()
        self._note(TimelineEvent(f"pause({mode.value})", began, time.perf_counter() - began))
        return report

    async def _drain_at_gate(self, clear_cache: bool) -> PauseReport:
        """WAIT for an engine that cannot drain by itself: admission is shut, so what runs ends.

        A pause that comes meanwhile and stops the engine ends the drain as well.
        """
        before = self._gate.ids(Stage.RUNNING)
        self._stopped.clear()
        await self._backend.resume_generation()  # frozen requests finish, too
        ends = [
            asyncio.ensure_future(self._gate.drained()),
            asyncio.ensure_future(self._stopped.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        left = self._gate.ids(Stage.RUNNING)
        if not left:
            able = self._backend.capabilities.pause[PauseMode.ABORT]
            still = PauseMode.ABORT if able else PauseMode.KEEP
            await self._backend.pause_generation(still, clear_cache=clear_cache)
        finished = tuple(name for name in before if name not in left)
        return PauseReport(
            PauseMode.WAIT, finished=finished, frozen=left, cleared_cache=clear_cache
        )

    async def reopen(self) -> None:
        """Let the engine run if nobody holds it and there is something to run."""
        if self._gate.closed or self.open:
            return
        if not self._servable():
            return  # frozen requests stay frozen; new ones are told what is missing
        self.open, self._quiet = True, False
        self._gate.thaw()
        opening = self._opening = asyncio.Event()
        try:
            await self._call(
                "resume_generation", self._backend.resume_generation(), self._deadlines.drain
            )
        except BaseException:
            self.open = False  # the next chance to open is taken
            raise
        finally:
            self._opening = None
            opening.set()

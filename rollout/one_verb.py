"""One verb of a replica at a time, and generation standing still around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hotbunk.rollout import errors
from hotbunk.rollout.contract import PauseMode
from hotbunk.rollout.gate import Gate
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.status import Deadlines, TimelineEvent


class OneVerb:
    """The lock that verbs take; status and abort never do. ``note`` takes an event of each."""

    def __init__(
        self,
        line: EngineLine,
        gate: Gate,
        pauses: EnginePauses,
        deadlines: Deadlines,
        note: Callable[[TimelineEvent], object],
    ) -> None:
        self.lock = asyncio.Lock()
        self._line = line
        self._gate = gate
        self._pauses = pauses
        self._deadlines = deadlines
        self._note = note

    @asynccontextmanager
    async def __call__(
        self, verb: str, *, quiesce: bool = True, deadline: float | None = None
    ) -> AsyncIterator[None]:
        """Alone inside, and (``quiesce``) no step runs.

        Waiting for the lock is bounded by the longest verb there is, so a hung one ends in a
        typed error here too.
        """
        line, longest = self._line, self._deadlines.update + self._deadlines.memory
        line.check_alive()
        try:
            async with asyncio.timeout(longest):
                await self.lock.acquire()
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"waiting for the verb before {verb}", longest, where=line.name
            ) from None
        owner, began, failure = f"verb {verb}", time.perf_counter(), ""
        try:
            line.check_alive()
            if quiesce:
                self._gate.hold(owner, PauseMode.WAIT, clear_cache=False)
                await self._pauses.quiesce(verb, deadline)
            yield
        except errors.HotbunkError as error:
            failure = type(error).__name__
            if line.name not in error.where:
                error.at(line.name)
            raise
        finally:
            self._gate.drop(owner)
            self.lock.release()
            self._note(TimelineEvent(verb, began, time.perf_counter() - began, failure))
            await self._pauses.reopen()

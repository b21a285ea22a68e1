"""The one weight session of a server: whose turn it is, and what runs in it."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Any, Protocol

from hotbunk.rollout.calls import abandoned, noted
from hotbunk.rollout.contract import Scope, UpdateReport, Version
from hotbunk.rollout.errors import SessionError


class Step(StrEnum):
    """Where a session is."""

    CLOSED = "closed"  # no init yet
    OPEN = "open"
    STARTED = "started"


class Updated(Protocol):
    """What a session is in front of: of a replica, the verb that takes weights."""

    async def update_weights(
        self, source: Any, *, version: Version, scope: Scope, deadline: float | None
    ) -> UpdateReport: ...


class Session:
    """The one weight session of a replica's server. Its methods answer at once, but for ``update``."""

    def __init__(self, replica: Updated) -> None:
        self._replica = replica
        self.generation = 0
        self.step = Step.CLOSED
        self._number = 0  # of the session
        self.last: UpdateReport | None = None
        self._running: asyncio.Task[UpdateReport] | None = None

    @property
    def busy(self) -> bool:
        """Whether an update runs."""
        return self._running is not None

    async def init(self) -> int:
        """A new generation. What an older client has under way is ended."""
        self.generation += 1
        self._number += 1
        mine = self.generation
        await self._end_running()
        if mine == self.generation:
            self.step, self.last = Step.OPEN, None
        return mine

    def start(self, generation: int | None) -> None:
        """:raises SessionError: nobody has called init, or the last session is not over."""
        self._check(generation, Step.OPEN, "start_weight_update")
        self._number += 1
        self.step, self.last = Step.STARTED, None

    async def update(
        self,
        generation: int | None,
        source: Any,
        version: Version,
        scope: Scope,
        deadline: float | None,
    ) -> UpdateReport:
        """Run one update to its end, also when who asked has gone.

        ``source``: what the replica takes: a ticket, and in its own process a transfer.

        :raises SessionError: out of turn, or another one runs.
        """
        self._check(generation, Step.STARTED, "update_weights")
        mine = self._number
        work = self._replica.update_weights(source, version=version, scope=scope, deadline=deadline)
        report = await self.run(work)
        if mine == self._number:
            self.last = report
        return report

    async def run(self, work: Any) -> UpdateReport:
        """One update at a time. :raises SessionError: another one runs."""
        if self._running is not None:
            work.close()
            raise SessionError("another update of this server is under way")
        task = self._running = asyncio.ensure_future(work)
        task.add_done_callback(self._ran)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SessionError(
                    "the update was aborted", remedy="see /weight_info for what the weights are now"
                ) from None
            raise

    def finish(self, generation: int | None, version: Version | None) -> UpdateReport:
        """:raises SessionError: nothing was committed in this session, or another version."""
        self._check(generation, Step.STARTED, "finish_weight_update")
        if self.busy or self.last is None:
            raise SessionError(
                "an update is still under way" if self.busy else "nothing was updated",
                remedy="wait for update_weights, or call abort_weight_update",
            )
        if version is not None and version != self.last.version:
            raise SessionError(f"the update committed version {self.last.version}, not {version}")
        self.step = Step.OPEN
        return self.last

    async def abort(self, generation: int | None) -> UpdateReport | None:
        """End the session and what runs in it; what was committed before stays, and is returned."""
        self._check(generation, Step.STARTED, "abort_weight_update")
        self.step = Step.OPEN
        await self._end_running()
        return self.last

    def check_idle(self) -> None:
        """:raises SessionError: somebody is in the middle of a session."""
        if self.busy or self.step is Step.STARTED:
            raise SessionError("a weight update was started and is not finished")

    async def close(self) -> None:
        """End what runs."""
        await self._end_running()

    def _ran(self, task: asyncio.Task[UpdateReport]) -> None:
        self._running = None
        noted(task)  # whoever asked may be gone

    async def _end_running(self) -> None:
        if (task := self._running) is not None:
            await abandoned(task)

    def _check(self, generation: int | None, step: Step, verb: str) -> None:
        if self.step is Step.CLOSED:
            raise SessionError(
                f"{verb} before init_weight_transfer_engine", remedy="call it first, once"
            )
        if generation is not None and generation != self.generation:
            raise SessionError(
                f"generation {generation} is over; the present one is {self.generation}",
                remedy="another client came; call init_weight_transfer_engine again",
            )
        if self.step is not step:
            remedy = "call start_weight_update first"
            if step is Step.OPEN:
                remedy = "finish or abort the session under way"
            raise SessionError(f"{verb} while the session is {self.step.value}", remedy=remedy)

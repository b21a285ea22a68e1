"""Replicas of a run that die, and their successors."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncReport
from hotbunk.checkpoint_engine.supervisor import SlotState, Supervision, Supervisor
from hotbunk.rollout.errors import SyncFailed
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.trainer_hooks.recipes.replicas import successor

LOOK = 0.2  # seconds between looks at a successor that is to come


class Successors:
    """Starts them, and counts.

    :param handles: the run's list, which its meters read, too: a successor takes the lost one's place.
    """

    def __init__(self, handles: list[ReplicaHandle], stack: AsyncExitStack) -> None:
        self._handles = handles
        self._last = {handle.name: handle for handle in handles}
        self._stack = stack
        self._started = 0

    async def start(self, name: str) -> ReplicaHandle:
        """One in place of the last of that name.

        :raises HotbunkError: as :func:`~hotbunk.trainer_hooks.recipes.replicas.successor`.
        """
        lost = self._last[name]
        handle = self._last[name] = await successor(lost, self._stack)
        if lost in self._handles:
            self._handles[self._handles.index(lost)] = handle
        else:
            self._handles.append(handle)
        self._started += 1
        return handle

    def take(self) -> int:
        """How many were started since the last call."""
        started, self._started = self._started, 0
        return started


class TurnsKeeper:
    """Supervises at the turns of a recipe. In between nothing is started: the device is full then.

    :param restarts: how often each replica is replaced; then it is retired.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        handles: list[ReplicaHandle],
        stack: AsyncExitStack,
        restarts: int,
    ) -> None:
        self.successors = Successors(handles, stack)
        self._manager = manager
        self._handles = handles
        self._supervisor = Supervisor(
            manager, self.successors.start, Supervision(most_deaths=restarts)
        )
        stack.push_async_callback(self._supervisor.close)

    async def reap(self) -> bool:
        """Take out who is dead, what is left of it closed. Whether there was one.

        :raises TooFewReplicas: the last one is retired.
        """
        before = len(self._manager.replicas)
        await self._supervisor.check(start=False)
        there = self._manager.replicas
        self._handles[:] = [handle for handle in self._handles if handle in there]
        return len(there) < before

    @property
    def missing(self) -> bool:
        """Whether a successor is still to come."""
        coming = (SlotState.WAITING, SlotState.STARTING)
        return any(self._supervisor.state(name) in coming for name in self._supervisor.slots)

    async def replace(self) -> None:
        """Wait until every slot has a replica, or is retired.

        :raises TooFewReplicas: all of them are.
        """
        while self.missing:
            await asyncio.sleep(LOOK)
            await self._supervisor.check()


def only_deaths(failed: SyncFailed) -> bool:
    """Whether nothing but deaths went wrong in a sync."""
    report = failed.report
    assert isinstance(report, SyncReport)
    return {one.outcome for one in report.outcomes} <= {Outcome.COMMITTED, Outcome.LOST}

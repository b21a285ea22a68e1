"""The transactions of one sync, one after another, and what came of all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from hotbunk.checkpoint_engine.members import Members
from hotbunk.checkpoint_engine.observe import Observer
from hotbunk.checkpoint_engine.policy import (
    OnFailure,
    Outcome,
    ReplicaOutcome,
    SyncPolicy,
    SyncReport,
)
from hotbunk.checkpoint_engine.ranks import LetGo
from hotbunk.checkpoint_engine.run import ASK_WAIT, Run
from hotbunk.checkpoint_engine.transaction import Part, Transaction, still_held
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout.contract import ScopeKind, Version
from hotbunk.rollout.gate import SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus

log = logging.getLogger(__name__)


async def resolved(
    one: ReplicaOutcome, version: Version, handle: ReplicaHandle, policy: SyncPolicy
) -> tuple[ReplicaOutcome, ReplicaStatus | None]:
    """An outcome in doubt, by what the replica says now; None: it still cannot be asked.

    One that was rolled back is let out of the sync's pause, unless the policy fences it or its
    memory is not as it was; then it waits for the next sync, ``fenced``.
    """
    try:
        async with asyncio.timeout(ASK_WAIT):
            status = await handle.status()
            outcome = _outcome(status, version)
            keeps = policy.on_failure == OnFailure.KEEP
            if outcome is Outcome.ROLLED_BACK and keeps and still_held(status) and status.servable:
                await handle.resume_generation(owner=SYNC)
                status = await handle.status()
                outcome = _outcome(status, version)
    # A boundary: handles are anybody's.
    except Exception:
        log.exception("replica %s still is in doubt", handle.name)
        return one, None
    held = version if version in status.versions.values() else None
    fenced = outcome is Outcome.ROLLED_BACK and still_held(status)
    return msgspec.structs.replace(one, outcome=outcome, version=held, fenced=fenced), status


def _outcome(status: ReplicaStatus, version: Version) -> Outcome:
    if status.health is Health.LOST:
        return Outcome.LOST
    if status.health is Health.POISONED:
        return Outcome.POISONED
    if version not in status.versions.values():
        return Outcome.ROLLED_BACK
    return Outcome.FENCED if status.is_paused or not status.servable else Outcome.COMMITTED


class Rounds:
    """One sync: all replicas in one transaction, or some at a time.

    :param sleeps, frees: as of :class:`Transaction`.
    """

    def __init__(
        self, policy: SyncPolicy, *, sleeps: bool, frees: bool, observer: Observer
    ) -> None:
        self.runs: list[Run] = []
        self.phases: dict[str, float] = {}
        self._policy = policy
        self._sleeps = sleeps
        self._frees = frees
        self._observer = observer
        self._began = time.perf_counter()

    async def run(
        self,
        handles: Sequence[ReplicaHandle],
        transport: Transport,
        parts: Sequence[Part],
        let_go: LetGo | None,
    ) -> None:
        """Every replica ends in an outcome, also when this is cancelled half-way."""
        k = self._policy.at_once(len(handles))
        try:
            for first in range(0, len(handles), k):
                transaction = Transaction(
                    handles[first : first + k],
                    transport,
                    self._policy,
                    sleeps=self._sleeps,
                    frees=self._frees,
                    observer=self._observer,
                )
                try:
                    await transaction.run(parts, let_go)
                finally:
                    self.runs += transaction.runs
                    for name, seconds in transaction.phases.items():
                        self.took(name, seconds)
        finally:
            await self._settle()

    def took(self, phase: str, seconds: float) -> None:
        """A phase of the whole sync took so long."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def tell(self, members: Members, parts: Sequence[Part]) -> None:
        """Say which replica serves what now."""
        of_base = [p.version for p in parts if p.scope.kind is not ScopeKind.ADAPTER]
        for run in self.runs:
            members.ended(run, of_base[-1] if of_base else None)

    def report(
        self, part: Part, began: float | None = None, more: Sequence[ReplicaOutcome] = ()
    ) -> SyncReport:
        """What came of it; ``more`` are outcomes of replicas that were in no transaction."""
        seconds = time.perf_counter() - (self._began if began is None else began)
        phases = {**self.phases, "other": seconds - sum(self.phases.values())}
        outcomes = (*(run.result(part.version, part.group) for run in self.runs), *more)
        return SyncReport(part.version, outcomes, phases, seconds)

    async def _settle(self) -> None:
        """Under ``fence``: who was rolled back stays shut only where others have the version."""
        shut = [run for run in self.runs if run.opens and run.outcome is Outcome.ROLLED_BACK]
        if any(run.committed for run in self.runs):
            for run in shut:
                run.fenced = True
        else:
            await asyncio.gather(*(run.open() for run in shut))

"""Sleeps, wakes and updates a set of replicas for one trainer.

A sync is a transaction (:mod:`hotbunk.checkpoint_engine.transaction`); this is who starts one, on
which replicas, and what is known of them afterwards. Two paths, one code: colocated, the trainer's
memory and the engine's take turns; elsewhere, generation is paused around the transfer.

    sleep_replicas   pause(sleep's own) -> quiesce -> release(weights + KV)
    update_weights   pause -> make room -> offer, accept, transfer, apply, verify, commit
                     -> the trainer lets go, on all its ranks -> KV comes back, pauses end
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.counters import FleetCounters
from hotbunk.checkpoint_engine.fleet import Fleet
from hotbunk.checkpoint_engine.lazy import Lagging
from hotbunk.checkpoint_engine.members import Adapters
from hotbunk.checkpoint_engine.observe import Observer, Unobserved
from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.ranks import (
    Led,
    LetGo,
    OneRank,
    TrainerRanks,
    follow,
    meet,
    together,
)
from hotbunk.checkpoint_engine.rounds import Rounds, resolved
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transaction import Part
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.checkpoint_engine.turns import Waiting
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FULL,
    Deployment,
    MemoryReport,
    Retention,
    Scope,
    ScopeKind,
    Version,
)
from hotbunk.rollout.handle import ReplicaHandle


class CheckpointEngineManager(Fleet):
    """Sleeps, wakes and updates a set of replicas for one trainer.

    Holds no truth about a replica that the replica does not hold itself: a manager that died is
    replaced by a new one that :meth:`adopt` s what it finds.

    :param free_cache_engine: False: no release and no resume is ever called; updates still work.
    :param frozen_base: only adapters change, so sleep keeps a backup of the weights.
    :param ranks: the trainer's ranks. Each has a manager; those of followers have no replicas.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        transport: Transport,
        *,
        deployment: Deployment = Deployment.HYBRID,
        policy: SyncPolicy | None = None,
        free_cache_engine: bool = True,
        observer: Observer | None = None,
        frozen_base: bool = False,
        ranks: TrainerRanks | None = None,
    ) -> None:
        self.frozen_base = frozen_base
        self.ranks = ranks or OneRank()
        if replicas and not self.ranks.leads:
            raise errors.UsageError("only trainer rank 0 has replicas; give the others none")
        super().__init__(replicas, free_cache_engine=free_cache_engine)
        self.transport = transport
        self.deployment = deployment
        self.policy = policy or SyncPolicy()
        self._observer = observer or Unobserved()
        self._waiting: list[Waiting] = []
        self._syncs = self._failures = self._superseded = 0
        self._adapters = Adapters()
        self._lagging = Lagging(self._members, self._turns, self._take)

    @property
    def _sleeps(self) -> bool:
        return self.free_cache_engine and self.deployment is not Deployment.STANDALONE

    def counters(self) -> FleetCounters:
        """Syncs and versions, at one moment."""
        return FleetCounters(
            self.version,
            self.serves(),
            len(self._waiting),
            self.syncing,
            self._syncs,
            self._failures,
            self._superseded,
        )

    # -- sleep and wake -----------------------------------------------------------------------

    async def sleep_replicas(self) -> dict[str, MemoryReport]:
        """Make room for the other tenant of the device; a report a replica.

        HYBRID discards what a sync brings back, COLOCATED and a frozen base keep a backup; STANDALONE, or with
        ``free_cache_engine=False``, nothing is called and the reports say so in ``emulated``.

        :raises HotbunkError: the first failure, after every replica was tried.
        """
        if not self._sleeps:
            why = (
                "a standalone engine shares its device with nobody"
                if self.free_cache_engine
                else "free_cache_engine is off"
            )
            return {h.name: MemoryReport(emulated=f"no-op: {why}") for h in self.replicas}
        async with self._turns.fleet():
            with self._observer.phase("sleep"):
                reports = await self._all(lambda h: h.sleep(self._level(h), mode=self.policy.pause))
            await meet(self.ranks, "slept")
        return reports

    def _level(self, handle: ReplicaHandle) -> int:
        discards = Retention.DISCARD in handle.capabilities.retentions
        brings_back = self.deployment is Deployment.HYBRID and not self.frozen_base
        return 2 if brings_back and discards else 1

    async def wake_replicas(self) -> dict[str, MemoryReport]:
        """Undo sleep without a sync (COLOCATED: backups are restored).

        After a sleep that discarded, use :meth:`update_weights`: generation would otherwise be
        refused for want of content.
        """
        if not self._sleeps:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        async with self._turns.fleet():
            await meet(self.ranks, "may wake")  # no trainer rank still uses the device
            with self._observer.phase("wake_kv"):
                return await self._all(self._wake)

    async def _wake(self, handle: ReplicaHandle) -> MemoryReport:
        """Awake, and at the newest version that is published, if one is."""
        if self._lagging.shelf is not None:
            status = await handle.status()
            if status.is_sleeping and not self._members.has_current(status):
                report = await self._take([handle], self.policy)
                if not report.ok:
                    raise _failed(report)
                return await handle.memory()
        return await handle.wake_up(None)

    async def add_replica(self, handle: ReplicaHandle) -> None:
        await super().add_replica(handle)
        self._lagging.follow(handle)

    async def remove_replica(self, name: str, *, drain: float = 0.0) -> ReplicaHandle:
        self._lagging.leave(name)
        return await super().remove_replica(name, drain=drain)

    def forget_replica(self, name: str) -> None:
        self._lagging.leave(name)
        super().forget_replica(name)

    async def resolve(self, report: SyncReport) -> SyncReport:
        """The report, with what was in doubt asked again; who was rolled back serves again."""
        outcomes = []
        for one in report.outcomes:
            handle = self._members.get(one.replica)
            if one.outcome is Outcome.IN_DOUBT and handle is not None:
                one, status = await resolved(one, report.version, handle, self.policy)
                if status is not None:
                    self._members.saw(status)
            outcomes.append(one)
        return msgspec.structs.replace(report, outcomes=tuple(outcomes))

    async def close(self) -> None:
        """Close every replica, and let go of what the transport kept."""
        try:
            await self._lagging.close()
            await self._all(lambda h: h.close())
        finally:
            await self.transport.close()

    # -- the transaction ----------------------------------------------------------------------

    async def update_weights(
        self,
        source: WeightSource,
        version: Version,
        *,
        scope: Scope = FULL,
        metadata: Mapping[str, Any] | None = None,
        policy: SyncPolicy | None = None,
        let_go: LetGo | None = None,
        replicas: Collection[str] | None = None,
    ) -> SyncReport:
        """Bring every replica (or those named) to ``version``; what slept is awake afterwards.

        ``let_go`` is called once, after the last byte and before any KV cache is mapped: the
        trainer gives its memory back there. With several trainer ranks all call this together, and
        no KV cache is mapped before all have let go.

        ``lazy``: returns when the version is published and those too far behind have it; the others'
        outcomes are ``deferred``. The source is not read any more after that.

        Syncs are made one at a time. Of several that wait, only the newest full one is made: the
        others return with ``superseded_by`` set, and do not let go.

        Cancelled: what had committed keeps its version, but no KV cache is mapped; every other
        replica is as it was, or poisoned.

        :raises SyncFailed: not every replica committed; carries the report with each outcome.
        :raises UsageError: ``rolling`` or ``lazy`` with a trainer that must let go; ``lazy`` with
            anything but a whole model; or an unknown name.
        :raises Unsupported, VersionRegression, TrainerFailed, TransferFailed: ``lazy``: it cannot be
            published. Nothing changed.
        """
        part = Part(source, version, scope, metadata or {})
        return await self._update([part], policy, let_go, replicas)

    async def update_adapter(
        self,
        name: str,
        adapter: WeightSource,
        version: Version,
        *,
        base: WeightSource,
        base_version: Version,
        metadata: Mapping[str, Any] | None = None,
        policy: SyncPolicy | None = None,
        let_go: LetGo | None = None,
        replicas: Collection[str] | None = None,
    ) -> SyncReport:
        """Bring an adapter to ``version`` over a base that does not change.

        The base goes first, to those that do not hold it: after a sleep that discarded, at the
        first sync, or where its bytes are not what was sent. Where it is resident its digest is
        compared and only the adapter travels. ``adapter`` has tensors of the group
        ``adapter:<name>``; ``metadata`` goes to the engine (``lora_alpha``).

        :raises SyncFailed, UsageError: as :meth:`update_weights`.
        """
        parts = [
            Part(base, base_version),
            Part(adapter, version, Scope.adapter(name, base_version), metadata or {}),
        ]
        report = await self._update(parts, policy, let_go, replicas)
        if self.ranks.leads:
            self._adapters.came(name, report)
        return report

    async def _update(
        self,
        parts: Sequence[Part],
        policy: SyncPolicy | None,
        let_go: LetGo | None,
        replicas: Collection[str] | None,
    ) -> SyncReport:
        if not self.ranks.leads:
            began = time.perf_counter()
            await follow([part.source for part in parts], self.ranks, let_go)
            return SyncReport(Version(), (), {}, time.perf_counter() - began)
        chosen = policy or self.policy
        if let_go is not None and chosen.strategy != "all":
            raise errors.UsageError(
                f"strategy={chosen.strategy} opens replicas before the trainer has let go",
                remedy="use strategy=all where the trainer shares the device",
            )
        began = time.perf_counter()
        mine = Waiting(parts)
        self._waiting.append(mine)
        try:
            mine.meets(self._waiting)
            async with self._turns.fleet():
                if mine.superseded_by is not None:
                    self._superseded += 1
                    return _superseded(mine, began)
                # It is not waiting any more: a later one must come after it.
                self._waiting.remove(mine)
                handles = self._members.handles(replicas)
                self._syncs += 1
                report = await self._sync(parts, chosen, let_go, handles, began)
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        if not report.ok:
            self._failures += 1
            raise _failed(report)
        return report

    async def _sync(
        self,
        parts: Sequence[Part],
        policy: SyncPolicy,
        let_go: LetGo | None,
        handles: Sequence[ReplicaHandle],
        began: float,
    ) -> SyncReport:
        led = Led(self.ranks) if self.ranks.world > 1 else None
        rounds = self._rounds(policy)
        more: list[ReplicaOutcome] = []
        word = "was stopped"
        try:
            if led is not None:
                led_ones = [led.source(n, part.source) for n, part in enumerate(parts)]
                for one in led_ones:
                    await one.ask(policy.deadline)
                parts = [
                    msgspec.structs.replace(part, source=one)
                    for part, one in zip(parts, led_ones, strict=True)
                ]
            if policy.lazy:
                handles, more = await self._publish(parts, policy, handles, rounds)
            elif parts[-1].scope.kind is ScopeKind.FULL:
                self._lagging.forget()
            shelf = self._lagging.shelf if policy.lazy else None
            if shelf is not None:
                await rounds.run(handles, shelf, [shelf.part], None)
            else:
                await rounds.run(
                    handles, self.transport, parts, let_go if led is None else together(led, let_go)
                )
            word = "ended"
        finally:
            if led is not None:
                await asyncio.to_thread(led.end, word)
            rounds.tell(self._members, parts)
        return rounds.report(parts[-1], began, more)

    # -- in their own time --------------------------------------------------------------------

    @property
    def taken(self) -> tuple[SyncReport, ...]:
        """What replicas did of themselves under ``lazy``, the last hundred, oldest first."""
        return tuple(self._lagging.reports)

    async def catch_up(
        self, replicas: Collection[str] | None = None, policy: SyncPolicy | None = None
    ) -> SyncReport:
        """Bring every replica (or those named) to the newest published version now.

        :raises SyncFailed: not every one committed.
        :raises SessionError: nothing is published.
        :raises UsageError: an unknown name.
        """
        async with self._turns.fleet():
            report = await self._take(self._members.handles(replicas), policy or self.policy)
        if not report.ok:
            raise _failed(report)
        return report

    async def _take(self, handles: Sequence[ReplicaHandle], policy: SyncPolicy) -> SyncReport:
        shelf = self._lagging.shelf
        if shelf is None:
            raise errors.SessionError(
                "no version is published", remedy="sync with strategy=lazy first"
            )
        rounds = self._rounds(policy)
        try:
            await rounds.run(handles, shelf, [shelf.part], None)
        finally:
            rounds.tell(self._members, [shelf.part])
        return rounds.report(shelf.part)

    async def _publish(
        self,
        parts: Sequence[Part],
        policy: SyncPolicy,
        handles: Sequence[ReplicaHandle],
        rounds: Rounds,
    ) -> tuple[list[ReplicaHandle], list[ReplicaOutcome]]:
        began = time.perf_counter()
        with self._observer.phase("publish"):
            await self._lagging.publish(self.transport, parts, policy)
        rounds.took("publish", time.perf_counter() - began)
        return await self._lagging.sort(handles)

    def _rounds(self, policy: SyncPolicy) -> Rounds:
        return Rounds(
            policy, sleeps=self._sleeps, frees=self.free_cache_engine, observer=self._observer
        )


def _failed(report: SyncReport) -> errors.SyncFailed:
    return errors.SyncFailed(
        f"version {report.version} did not reach every replica: {report.summary()}", report
    )


def _superseded(waiting: Waiting, began: float) -> SyncReport:
    seconds = time.perf_counter() - began
    return SyncReport(waiting.version, (), {"other": seconds}, seconds, waiting.superseded_by)

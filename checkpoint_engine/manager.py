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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from hotbunk.checkpoint_engine.members import Adapters, Members
from hotbunk.checkpoint_engine.observe import Observer, Unobserved
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.ranks import Led, OneRank, TrainerRanks, follow
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transaction import LetGo, Part, Run, Transaction, trainer_failed
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    Deployment,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    ScopeKind,
    Version,
)
from hotbunk.rollout.gate import CALLER, SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus

T = TypeVar("T")


class CheckpointEngineManager:
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
        self._members = Members(replicas)
        self.transport = transport
        self.deployment = deployment
        self.policy = policy or SyncPolicy()
        self.free_cache_engine = free_cache_engine
        self._observer = observer or Unobserved()
        self._turn = asyncio.Lock()  # verbs that change replicas, one at a time
        self._waiting: list[_Waiting] = []
        self._adapters = Adapters()

    @property
    def replicas(self) -> list[ReplicaHandle]:
        """Every replica there is now."""
        return self._members.handles()

    @property
    def version(self) -> Version | None:
        """The newest version that some replica committed."""
        return self._members.current

    @property
    def _sleeps(self) -> bool:
        return self.free_cache_engine and self.deployment is not Deployment.STANDALONE

    # -- who is there -------------------------------------------------------------------------

    def routable(self) -> tuple[ReplicaHandle, ...]:
        """Replicas that serve the current version. One that was removed never is among them."""
        return self._members.routable()

    async def add_replica(self, handle: ReplicaHandle) -> None:
        """Take one more in. It is routable from the first sync on that brings it up to date.

        :raises UsageError: the name is taken.
        """
        self._members.add(handle)
        self._members.saw(await handle.status())

    async def remove_replica(self, name: str, *, drain: float = 0.0) -> ReplicaHandle:
        """Take one out, and turn away who comes to it still. It is not closed.

        ``drain``: seconds that running requests may take to finish; then they are aborted.

        :raises UsageError: no replica of that name.
        """
        handle = self._members.remove(name)
        mode = PauseMode.WAIT if drain else PauseMode.ABORT
        try:
            await handle.pause_generation(mode, reject=True, deadline=drain or None)
        except errors.RequestsInFlight:
            await handle.pause_generation(PauseMode.ABORT, reject=True)
        except errors.ReplicaLost:
            pass  # nobody comes to it any more
        return handle

    async def adopt(self) -> Version | None:
        """Take the replicas' word for what they hold, as a restarted manager must; the newest."""
        for status in await self.statuses():
            self._members.saw(status)
        return self.version

    def next_version(self, step: int) -> Version:
        """The version of a trainer's step: a new incarnation if the trainer went back."""
        newest = self.version
        if newest is None:
            return Version(0, step)
        return Version(newest.incarnation + (step <= newest.step), step)

    async def statuses(self) -> list[ReplicaStatus]:
        """Every replica's own word. A restarted manager continues from here."""
        return list(await asyncio.gather(*(h.status() for h in self.replicas)))

    async def newest_version(self) -> Version | None:
        """The highest version any replica holds: where a restarted trainer continues."""
        held = [v for s in await self.statuses() for v in s.versions.values()]
        return max(held, default=None)

    async def resolve(self, report: SyncReport) -> SyncReport:
        """The report, with what was in doubt asked again."""
        outcomes = []
        for one in report.outcomes:
            handle = self._members.get(one.replica)
            if one.outcome is Outcome.IN_DOUBT and handle is not None:
                status = await handle.status()
                self._members.saw(status)
                has_it = report.version in status.versions.values()
                one = msgspec.structs.replace(
                    one, outcome=_found(status, has_it), version=report.version if has_it else None
                )
            outcomes.append(one)
        return msgspec.structs.replace(report, outcomes=tuple(outcomes))

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
        async with self._turn:
            with self._observer.phase("sleep"):
                reports = await self._all(lambda h: h.sleep(self._level(h), mode=self.policy.pause))
            await self._meet("slept")
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
        async with self._turn:
            await self._meet("may wake")  # no trainer rank still uses the device
            with self._observer.phase("wake_kv"):
                return await self._all(lambda h: h.wake_up(None))

    # -- the single steps, for loops that sync in their own way -------------------------------

    async def pause_replicas(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        owner: str = CALLER,
        deadline: float | None = None,
    ) -> dict[str, PauseReport]:
        """Hold generation shut everywhere; returns when no step runs anywhere."""
        return await self._all(
            lambda h: h.pause_generation(
                mode, clear_cache=clear_cache, owner=owner, deadline=deadline
            )
        )

    async def resume_generation_replicas(self, *, owner: str = CALLER) -> None:
        """End the owner's pause everywhere."""
        await self._all(lambda h: h.resume_generation(owner=owner))

    async def abort_replicas(
        self, request_ids: Sequence[str] | None = None
    ) -> dict[str, AbortReport]:
        """End these requests wherever they are. Does not wait for a sync, nor hold anybody up."""
        return await self._all(lambda h: h.abort(request_ids))

    async def release_kv_replicas(self, *, keep_kv: bool = False) -> dict[str, MemoryReport]:
        """Give KV memory back, once *every* replica stands still; weights stay."""
        if not self.free_cache_engine:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        async with self._turn, self._still():
            return await self._all(lambda h: h.release_kv_cache(keep_kv=keep_kv))

    async def resume_kv_replicas(self) -> dict[str, MemoryReport]:
        """Map KV memory again, empty."""
        if not self.free_cache_engine:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        async with self._turn:
            return await self._all(lambda h: h.resume_kv_cache())

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Every replica stands still inside; who froze requests finds them frozen."""

        async def pause(handle: ReplicaHandle) -> None:
            held = (await handle.status()).pauses
            keep = any(pause.mode is PauseMode.KEEP for pause in held)
            mode = PauseMode.KEEP if keep else PauseMode.WAIT
            await handle.pause_generation(mode, clear_cache=False, owner=SYNC)

        try:
            await self._all(pause)
            yield
        finally:
            await self._all(lambda h: h.resume_generation(owner=SYNC))

    async def close(self) -> None:
        """Close every replica, and let go of what the transport kept."""
        try:
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

        Syncs are made one at a time. Of several that wait, only the newest full one is made: the
        others return with ``superseded_by`` set, and do not let go.

        Cancelled: what had committed keeps its version, but no KV cache is mapped; every other
        replica is as it was, or poisoned.

        :raises SyncFailed: not every replica committed; carries the report with each outcome.
        :raises UsageError: ``rolling`` with a trainer that must let go, or an unknown name.
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
            return await self._follow([part.source for part in parts], let_go)
        chosen = policy or self.policy
        if let_go is not None and chosen.strategy != "all":
            raise errors.UsageError(
                f"strategy={chosen.strategy} opens replicas before the trainer has let go",
                remedy="use strategy=all where the trainer shares the device",
            )
        began = time.perf_counter()
        mine = _Waiting(parts)
        self._waiting.append(mine)
        try:
            mine.meets(self._waiting)
            async with self._turn:
                if mine.superseded_by is not None:
                    return _superseded(mine, began)
                # It is not waiting any more: a later one must come after it.
                self._waiting.remove(mine)
                handles = self._members.handles(replicas)
                report = await self._sync(parts, chosen, let_go, handles, began)
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        if not report.ok:
            raise errors.SyncFailed(
                f"version {report.version} did not reach every replica: {report.summary()}", report
            )
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
        if led is not None:
            parts = [
                msgspec.structs.replace(part, source=led.source(n, part.source))
                for n, part in enumerate(parts)
            ]
        version = parts[-1].version
        of_base = [p.version for p in parts if p.scope.kind is not ScopeKind.ADAPTER]
        k = policy.at_once(len(handles))
        runs: list[Run] = []
        phases: dict[str, float] = {}
        word = "was stopped"
        try:
            for first in range(0, len(handles), k):
                transaction = Transaction(
                    handles[first : first + k],
                    self.transport,
                    policy,
                    sleeps=self._sleeps,
                    frees=self.free_cache_engine,
                    observer=self._observer,
                )
                try:
                    await transaction.run(parts, self._together(led, let_go))
                finally:
                    runs += transaction.runs
                    for name, seconds in transaction.phases.items():
                        phases[name] = phases.get(name, 0.0) + seconds
            word = "ended"
        finally:
            if led is not None:
                await asyncio.to_thread(led.finish)
                await asyncio.to_thread(self.ranks.tell, word)
            for run in runs:
                self._members.ended(run, of_base[-1] if of_base else None)
        seconds = time.perf_counter() - began
        phases["other"] = seconds - sum(phases.values())
        return SyncReport(version, tuple(r.result(version) for r in runs), phases, seconds)

    # -- several trainer ranks ----------------------------------------------------------------

    def _together(self, led: Led | None, let_go: LetGo | None) -> LetGo | None:
        """The trainer's letting go, on all its ranks."""
        if led is None:
            return let_go

        async def all_of_them() -> None:
            await asyncio.to_thread(led.finish)
            await asyncio.to_thread(self.ranks.tell, "let go")
            if let_go is not None:
                await let_go()
            await self._meet("let go")

        return all_of_them

    async def _follow(self, sources: Sequence[WeightSource], let_go: LetGo | None) -> SyncReport:
        """A follower's part: gather with the leader, let go with it. Its report names no replica.

        :raises TrainerFailed: this rank could not gather or let go, or the leader's sync was
            stopped.
        """
        began = time.perf_counter()
        try:
            word = await asyncio.to_thread(follow, sources, self.ranks)
            if word == "let go" and let_go is not None:
                await let_go()
        except errors.HotbunkError as error:
            self.ranks.fail(str(error))
            raise
        # A boundary: trainers raise what their own libraries raise.
        except Exception as error:
            self.ranks.fail(f"{type(error).__name__}: {error}")
            raise trainer_failed(error) from error
        if word == "let go":
            await self._meet("let go")
            word = await asyncio.to_thread(follow, sources, self.ranks)
        if word != "ended":
            raise errors.TrainerFailed(f"the sync led by trainer rank 0 {word}")
        return SyncReport(Version(), (), {}, time.perf_counter() - began)

    async def _meet(self, name: str) -> None:
        if self.ranks.world > 1:
            await asyncio.to_thread(self.ranks.barrier, name)

    async def _all(self, verb: Callable[[ReplicaHandle], Awaitable[T]]) -> dict[str, T]:
        """The verb on every replica. :raises: the first failure, after every one was tried."""
        handles = self.replicas
        results = await asyncio.gather(*(verb(h) for h in handles), return_exceptions=True)
        done: dict[str, T] = {}
        for handle, result in zip(handles, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            done[handle.name] = result
        return done


class _Waiting:
    """A sync that waits for its turn."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.version = parts[-1].version
        self.kinds = {part.scope.kind for part in parts}
        self.superseded_by: Version | None = None

    def meets(self, waiting: Sequence[_Waiting]) -> None:
        """Of two full ones the older is not made: the newer brings everything it would."""
        for other in waiting:
            if other is self or self.kinds | other.kinds != {ScopeKind.FULL}:
                continue
            older, newer = sorted((self, other), key=lambda w: w.version)
            if older.version < newer.version:
                older.superseded_by = max(newer.version, older.superseded_by or newer.version)


def _superseded(waiting: _Waiting, began: float) -> SyncReport:
    seconds = time.perf_counter() - began
    return SyncReport(waiting.version, (), {"other": seconds}, seconds, waiting.superseded_by)


def _found(status: ReplicaStatus, has_it: bool) -> Outcome:
    if status.health is Health.LOST:
        return Outcome.LOST
    if status.health is Health.POISONED:
        return Outcome.POISONED
    if not has_it:
        return Outcome.ROLLED_BACK
    return Outcome.FENCED if status.is_paused or not status.servable else Outcome.COMMITTED

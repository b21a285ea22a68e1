"""One running engine, with all the rules.

A :class:`Replica` lives in the engine's own process and is the only one that drives its backend:
clients may reach the engine without passing a manager, and the manager may die, so the authority
over pauses, states, versions and the dirty mark is here. Status and abort never wait for its lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TypeVar

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FULL,
    TARGET,
    AbortReport,
    Cache,
    Capabilities,
    Digests,
    Engine,
    GenerateRequest,
    MemoryReport,
    OpensTransfers,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Tag,
    Ticket,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
)
from hotbunk.rollout.gate import CALLER, SLEEP, Gate, Stage
from hotbunk.rollout.lifecycle import Residency
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.looking import check, looked
from hotbunk.rollout.one_verb import OneVerb
from hotbunk.rollout.parking import Parking
from hotbunk.rollout.pausing import Pausing
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.registry import open_transfer
from hotbunk.rollout.serving import Serving
from hotbunk.rollout.status import Deadlines, Health, ReplicaStatus, TimelineEvent
from hotbunk.rollout.updates import Updates

T = TypeVar("T")


class Replica:
    """The gate, the state table, the version and the deadlines in front of one backend.

    :param fed_groups: weight groups that some sync feeds; others are never discarded. Default:
        those the backend declares.
    """

    def __init__(
        self,
        backend: Engine,
        *,
        name: str = "replica0",
        deadlines: Deadlines | None = None,
        fed_groups: Collection[str] | None = None,
    ) -> None:
        self.backend = backend
        self.deadlines = deadlines or Deadlines()
        self.timeline: deque[TimelineEvent] = deque(maxlen=10_000)
        self._fed_groups = fed_groups
        self._gate = Gate(self.deadlines.hold)
        self._line = EngineLine(backend, name, self.deadlines, self._gate.let_go)
        self._pauses = EnginePauses(
            backend,
            self._gate,
            self.deadlines,
            self._line.call,
            self._may_open,
            self.timeline.append,
        )
        self._exclusive = OneVerb(
            self._line, self._gate, self._pauses, self.deadlines, self.timeline.append
        )
        self._updates: Updates
        self._parking: Parking
        self._serving: Serving
        self._pausing: Pausing
        self._residency: Residency

    @property
    def name(self) -> str:
        """Unique in its pool; errors carry it."""
        return self._line.name

    @name.setter
    def name(self, name: str) -> None:
        self._line.name = name

    @property
    def capabilities(self) -> Capabilities:
        """What the backend declares."""
        return self.backend.capabilities

    async def start(self) -> None:
        """Start the backend and take its word for what is loaded."""
        self.backend.on_lost = self._line.lose
        await self.backend.start()
        caps = self.capabilities
        fed = self._fed_groups
        if fed is None:
            fed = [group for group, feedable in caps.groups.items() if feedable]
        said = await self._line.call("status", self.backend.status(), self.deadlines.inspect)
        self._residency = Residency(
            {group: said.versions.get(group) for group in caps.groups},
            fed=fed,
            retentions=caps.retentions,
        )
        self._updates = Updates(self.backend, self._residency, self.deadlines, self._line.call)
        shared = (self.backend, self._line, self._gate, self._residency, self.deadlines)
        self._parking = Parking(*shared)
        self._serving = Serving(*shared, self._poisoned)
        self._pausing = Pausing(
            self.backend, self._line, self._gate, self._pauses, self._exclusive, self._serving
        )
        if not self._residency.servable():
            await self._pauses.quiesce("start", None)  # an engine without content starts no step

    async def close(self) -> None:
        """End every request, then the backend. Idempotent."""
        self._line.lost = self._line.lost or "closed"
        self._gate.let_go("the replica was closed")
        await self.backend.close()

    # -- the five verbs -----------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        """As the contract says; a sleep ends when its last tag is back."""
        wanted = parse_tags(tags)
        async with self._exclusive("resume", quiesce=False):
            return await self._parking.resume(wanted)

    async def resume_kv_cache(self) -> MemoryReport:
        """Map the KV cache again, empty."""
        async with self._exclusive("resume_kv_cache", quiesce=False):
            return await self._parking.resume((Tag.KV_CACHE,))

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        keep_kv: bool = False,
        deadline: float | None = None,
    ) -> MemoryReport:
        """Give memory back, once generation stands still.

        ``keep_kv`` saves the KV of frozen requests (of a ``keep`` pause with ``clear_cache=False``)
        for after the resume, unless the weights change in between.

        :raises RequestsInFlight: requests still ran at the deadline (seconds); nothing released.
        :raises Unsupported: a retention the backend does not have; nothing changed.
        """
        wanted, retention = parse_tags(tags), Retention(retention)
        caps = self.capabilities
        if Tag.WEIGHTS in wanted and retention not in caps.retentions:
            have = ", ".join(sorted(caps.retentions))
            raise errors.Unsupported(f"retention {retention.value!r}", caps.backend, f"has {have}")
        kv_only = wanted == (Tag.KV_CACHE,)
        self._line.require("release_kv_cache" if kv_only else "release")
        if keep_kv:
            self._line.require("keep_kv")
        if not wanted:
            return await self.memory()
        async with self._exclusive("release", deadline=deadline):
            return await self._parking.release(wanted, retention, keep_kv)

    async def release_kv_cache(
        self, *, keep_kv: bool = False, deadline: float | None = None
    ) -> MemoryReport:
        """Give KV memory back; weights and their addresses stay."""
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv, deadline=deadline)

    async def update_weights(
        self,
        source: Transfer | Ticket,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport:
        """Run one update. The first byte sets the dirty mark, only a commit clears it.

        The version already resident is verified and skipped, without a transfer.

        :raises UpdateRefused: before a byte; nothing changed.
        :raises UpdateFailed: after it; the groups written are DIRTY.
        """
        transfer = source
        if isinstance(transfer, Ticket):
            limit = self.deadlines.update if deadline is None else deadline
            transfer = await self._opened(transfer, limit)
        try:
            async with self._exclusive("update_weights", deadline=deadline):
                groups = self._updates.check(transfer.manifest, version, scope)
                skipped = await self._updates.already_there(groups, scope, version)
                if skipped is not None:
                    await transfer.decline()
                    return skipped
                return await self._update(transfer, groups, deadline)
        except BaseException as error:
            await transfer.abort(error)
            raise

    # -- generation ---------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream one request; while a pause is held it waits, at most the hold deadline.

        A request that waited too long, or whose replica was poisoned or lost meanwhile, ends with
        finish reason ``abort`` and a retryable error; the tokens it has had stand.

        :raises WeightsNotLoaded, WeightsPoisoned, KVNotResident: generation is open and something
            is missing.
        :raises RequestRejected: the pinned version is not resident, or the replica turns away.
        """
        return self._serving.generate(request)

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        reject: bool = False,
        owner: str = CALLER,
        deadline: float | None = None,
        min_start_version: Version | None = None,
    ) -> PauseReport:
        """Hold generation shut for ``owner``; returns when no step runs and none can start.

        ``min_start_version`` (with ``keep`` or ``wait``): requests that are there and began before
        that version end now, with an abort that says so; only the others are kept or waited for.

        :raises RequestsInFlight: ``wait`` was not over at the deadline; the pause stays held.
        :raises SessionError: the owner resumed before the pause was complete.
        :raises UsageError: ``min_start_version`` with mode ``abort``; nothing changed.
        :raises Unsupported: the backend has no such mode, or no abort; nothing changed.
        """
        return await self._pausing.pause(
            PauseMode(mode),
            clear_cache=clear_cache,
            reject=reject,
            owner=owner,
            deadline=deadline,
            min_start_version=min_start_version,
        )

    async def resume_generation(self, *, owner: str = CALLER) -> None:
        """End the owner's pause. Generation opens when no owner holds one."""
        self._gate.drop(owner)
        await self._pauses.reopen()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        """End requests wherever they are: held, running or frozen. Never waits for a verb."""
        return await self._serving.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        """Forget caches, once generation stands still.

        :raises Unsupported: a cache the backend does not declare.
        """
        for cache in which or ():
            if cache not in self.capabilities.caches:
                raise errors.Unsupported(f"resetting cache {cache!r}", self.capabilities.backend)
        async with self._exclusive("reset_caches"):
            await self._line.call(
                "reset_caches", self.backend.reset_caches(which), self.deadlines.memory
            )

    # -- sleep: the pair trainers use ---------------------------------------------------------

    async def sleep(
        self,
        level: int = 2,
        *,
        mode: PauseMode = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
        deadline: float | None = None,
    ) -> MemoryReport:
        """Pause on sleep's own account, then release: 0 nothing, 1 to a backup, 2 for good.

        ``keep_kv`` goes with mode ``keep``, ``clear_cache=False`` and level 1: frozen requests get
        their KV back with the weights.

        A sleep that fails undoes its pause, unless the replica already slept.
        """
        if level not in (0, 1, 2):
            raise errors.UsageError(f"sleep level {level!r} is not 0, 1 or 2")
        slept = SLEEP in self._gate.pauses
        try:
            await self.pause_generation(
                mode, clear_cache=clear_cache, owner=SLEEP, deadline=deadline
            )
            report = MemoryReport()
            if level:
                kept = Retention.BACKUP if level == 1 else Retention.DISCARD
                report = await self.release(
                    None, retention=kept, keep_kv=keep_kv, deadline=deadline
                )
        except BaseException:
            if not slept:
                await self.resume_generation(owner=SLEEP)
            raise
        return report

    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport:
        """Undo sleep: map the tags; the pause of sleep ends when everything is back."""
        return await self.resume(tags)

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> ReplicaStatus:
        """What is true now, without waiting for any verb in progress."""
        return await looked(
            self.backend,
            self._line,
            self._gate,
            self._residency,
            self.deadlines,
            lambda: self.health,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        """Fingerprints as the bytes lie in the engine."""
        self._line.require("digest")
        async with self._exclusive("digest", quiesce=False):
            return await self._line.call(
                "digest", self.backend.digest(names), self.deadlines.memory
            )

    async def memory(self) -> MemoryReport:
        """What is resident now."""
        return await self._line.call("memory", self.backend.memory(), self.deadlines.memory)

    @property
    def health(self) -> Health:
        """OK, poisoned (some group is DIRTY), or lost."""
        if self._line.lost:
            return Health.LOST
        return Health.POISONED if self._poisoned() else Health.OK

    async def check_invariants(self) -> None:
        """Everything that must hold whenever no verb is in progress.

        :raises AssertionError: one does not.
        """
        locked = self._exclusive.lock.locked
        await check(self.status, self._line, self._gate, self._residency, self._pauses, locked)

    # -- inside -------------------------------------------------------------------------------

    def _poisoned(self) -> frozenset[str]:
        return self._residency.poisoned() - self._updates.under_way

    async def _opened(self, ticket: Ticket, seconds: float) -> Transfer:
        engine = self.backend
        opened = engine.open_transfer if isinstance(engine, OpensTransfers) else open_transfer
        with self._line.located():
            try:
                async with asyncio.timeout(seconds):
                    return await opened(ticket)
            except TimeoutError:
                raise errors.DeadlineExceeded("opening the transfer", seconds) from None

    async def _update(
        self, transfer: Transfer, groups: frozenset[str], deadline: float | None
    ) -> UpdateReport:
        try:
            report = await self._updates.run(transfer, groups, deadline)
            if TARGET in groups:
                others = self._gate.pinned_to_others(report.version)
                self._gate.let_go("pinned to a version that left", Stage.RUNNING, ids=others)
            return report
        except BaseException:
            broken = self._residency.poisoned() & groups
            if broken:
                self._gate.let_go(
                    "the replica was poisoned by a failed update", ids=self._gate.users_of(broken)
                )
            raise

    def _may_open(self) -> bool:
        return not self._line.lost and self._residency.servable()

"""A sync from verl's driver: our manager here, the weights in trainer ranks, replicas in actors.

:class:`RankTransport` is a transport whose offers are made by a trainer's rank 0; :class:`VerlFleet`
is one manager's work. Neither imports verl.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

import msgspec

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncReport
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.rollout.contract import (
    Manifest,
    PauseMode,
    TensorSpec,
    Ticket,
    Transfer,
    Version,
)
from hotbunk.rollout.errors import (
    HotbunkError,
    ReplicaLost,
    SessionError,
    SyncFailed,
    TrainerFailed,
    Unsupported,
)
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.status import Health
from hotbunk.trainer_hooks.verl import sending
from hotbunk.trainer_hooks.verl.handle import opened
from hotbunk.trainer_hooks.verl.sending import ADAPTERS, WEIGHTS
from hotbunk.trainer_hooks.verl.settings import ADAPTER
from hotbunk.trainer_hooks.verl.versions import version_of

log = logging.getLogger(__name__)
CALL = 60.0  # seconds of a call that moves nothing
Ask = Callable[[str, bytes], Sequence[Awaitable[bytes]]]
_numbers = itertools.count()


class TrainerRanksCall:
    """Asks all trainer ranks the same thing.

    :param ask: sends a verb to every rank; an answer a rank.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def __call__(
        self, message: msgspec.Struct, verb: str, kind: Any = None, *, deadline: float = CALL
    ) -> list[Any]:
        """Every rank's answer. :raises TrainerFailed: a rank is gone, or silent for ``deadline``."""
        try:
            async with asyncio.timeout(deadline):
                answers = await asyncio.gather(
                    *(_awaited(one) for one in self._ask(verb, encode(message)))
                )
        except TimeoutError as error:
            raise TrainerFailed(f"{verb}: some rank did not answer in {deadline:g} s") from error
        except HotbunkError:
            raise
        # A boundary: Ray's own errors are many; they all say that a rank cannot be asked.
        except Exception as error:
            raise TrainerFailed(f"{verb}: {type(error).__name__}: {error}") from error
        return [opened(verb, data, kind) for data in answers]


async def _awaited(one: Awaitable[bytes]) -> bytes:
    return await one


class RankSource:
    """A part of what the trainer's ranks hold: known here by its names, walked only there."""

    def __init__(self, part: str, specs: tuple[TensorSpec, ...]) -> None:
        self.part = part
        self._specs = specs

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def tensors(self) -> Iterator[NoReturn]:
        raise Unsupported("walking a trainer's weights", "verl's driver", "its ranks walk them")


class RankOffer(Offer):
    """An offer that trainer rank 0 has made."""

    def __init__(
        self, call: TrainerRanksCall, tickets: tuple[Ticket, ...], deadline: float
    ) -> None:
        self.tickets = tickets
        self._call = call
        self._deadline = deadline

    async def serve(self) -> None:
        await self._call(sending.Serve(), "serve", deadline=self._deadline + CALL)

    async def drop(self, replica: int) -> None:
        await self._call(sending.Drop(replica), "drop")

    async def close(self) -> None:
        await self._call(sending.Close(), "close")


class RankTransport(Transport):
    """The transport that the trainer's ranks have. See the module."""

    name = "verl"

    def __init__(self, call: TrainerRanksCall, begin: sending.Begin) -> None:
        self._call = call
        self._begin = begin
        self._begun = False

    async def describe(self, part: str, deadline: float) -> tuple[RankSource, sending.Described]:
        """A part of the weights, and what an engine must know of it."""
        await self._ready()
        described = await self._call(
            sending.Describe(part), "describe", sending.Described, deadline=deadline
        )
        return RankSource(part, described[0].specs), described[0]

    async def offer(
        self,
        source: Any,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        await self._ready()
        told = sending.MakeOffer(next(_numbers), source.part, manifest, tuple(ranks), deadline)
        try:
            tickets = await self._call(told, "offer", tuple[Ticket, ...])
        except HotbunkError:
            await self._call(sending.Close(), "close")  # on the ranks that were ready
            raise
        return RankOffer(self._call, tickets[0], deadline)

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        raise Unsupported("opening a ticket", "verl", "tickets are of the ranks' own transport")

    async def let_go(self) -> None:
        """On every rank; returns when all have."""
        await self._call(sending.LetGo(), "let_go")

    async def _ready(self) -> None:
        if self._begun:
            return
        meeting = await self._call(self._begin, "begin", sending.Meet | None)
        if meeting[0] is not None:
            await self._call(meeting[0], "meet")
        self._begun = True


class VerlFleet:
    """One manager of ours, and what verl expects of it.

    :param restart: starts the lost replica of that name anew.
    :param adapts: the policy is an adapter, apart from its base.
    :param shares: the trainer shares the replicas' devices, and lets go of them.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        transport: RankTransport,
        restart: Callable[[str], Awaitable[None]],
        *,
        adapts: bool,
        shares: bool,
        retries: int,
    ) -> None:
        self.manager = manager
        self._transport = transport
        self._restart = restart
        self._adapts = adapts
        self._let_go = transport.let_go if shares else None
        self._shares = shares
        self._retries = retries

    async def abort(self, *, reject: bool) -> None:
        """End what runs everywhere, and hold or turn away what comes, for the caller."""

        async def abort(handle: ReplicaHandle) -> None:
            with suppress(ReplicaLost):  # nothing runs there; the next sync starts it anew
                await handle.pause_generation(PauseMode.ABORT, reject=reject)

        await asyncio.gather(*(abort(handle) for handle in self.manager.replicas))

    async def sleep(self) -> None:
        """Make room for the trainer. Who died has made room: the next sync starts it anew.

        :raises HotbunkError: one that lives could not.
        """
        try:
            await self.manager.sleep_replicas()
        except ReplicaLost as error:
            for status in await self.manager.statuses():
                if not status.is_sleeping and status.health is not Health.LOST:
                    raise
            log.warning("a replica that should sleep is gone: %s", error)

    async def anyone(self) -> None:
        """:raises ReplicaLost: no replica is left, and what requests wait for comes from one."""
        found = await self.manager.statuses()
        if found and all(one.health is Health.LOST for one in found):
            raise ReplicaLost(
                "every engine died between two local updates, whose weights no version stands for",
                where=", ".join(one.name for one in found),
                remedy="resume from the last checkpoint; with parameter_sync_step=1 engines are replaced",
            )

    async def heal(self, step: int | None) -> tuple[str, ...]:
        """Start the lost replicas anew and bring them to ``step``, which the others are at; their names.

        The trainer's ranks hold the weights of that step, and do nothing else meanwhile.

        :raises HotbunkError: one could not be started, or could not be reached.
        """
        found = await self.manager.statuses()
        names = [one.name for one in found if one.health is Health.LOST]
        if names:
            log.warning("lost between syncs, and started anew: %s", ", ".join(names))
            for name in names:
                await self._restart(name)
            await self.update(step, names)
        return tuple(names)

    async def update(
        self, step: int | None, names: Collection[str] | None = None
    ) -> dict[str, float]:
        """Bring every replica (or those named) to the trainer's step; metrics under verl's names.

        A replica that a sync did not reach is sent the whole again; one that was lost is started
        anew before. A standalone replica that still serves its older version after that is left to
        it: its tokens say so. Anything else is an error.

        :raises SyncFailed: some replica cannot serve.
        """
        await self.manager.adopt()
        version = version_of(step, self.manager.version)
        reports: list[SyncReport] = []
        while True:
            try:
                reports.append(await self._sync(version, names))
                break
            except SyncFailed as error:
                reports.append(cast(SyncReport, error.report))
                bad = [o for o in reports[-1].outcomes if o.outcome is not Outcome.COMMITTED]
                log.warning("a sync failed, attempt %d: %s", len(reports), error)
                if len(reports) > self._retries:
                    behind = all(one.outcome is Outcome.ROLLED_BACK for one in bad)
                    if self._shares or not behind:
                        raise
                    break
                for one in bad:
                    if one.outcome is Outcome.LOST:
                        await self._restart(one.replica)
                names = [one.replica for one in bad]
        return _metrics(reports, len(self.manager.replicas))

    async def _sync(self, version: Version, names: Collection[str] | None) -> SyncReport:
        deadline = self.manager.policy.deadline
        if not self._adapts:
            source, _ = await self._transport.describe(WEIGHTS, deadline)
            return await self.manager.update_weights(
                source, version, let_go=self._let_go, replicas=names
            )
        adapter, told = await self._transport.describe(ADAPTERS, deadline)
        source, _ = await self._transport.describe(WEIGHTS, deadline)
        return await self.manager.update_adapter(
            ADAPTER,
            adapter,
            version,
            base=source,
            base_version=Version(),
            metadata=told.metadata,
            let_go=self._let_go,
            replicas=names,
        )


def _metrics(reports: Sequence[SyncReport], replicas: int) -> dict[str, float]:
    """Of a sync and what was sent again after it; the last report is of whom was not reached."""
    left = [o for o in reports[-1].outcomes if o.outcome is not Outcome.COMMITTED]
    phases: dict[str, float] = {}
    for report in reports:
        for name, took in report.phases.items():
            key = f"checkpoint_engine/{name}_seconds"
            phases[key] = phases.get(key, 0.0) + took
    return {
        "checkpoint_engine/seconds": sum(report.seconds for report in reports),
        "checkpoint_engine/bytes": float(sum(report.nbytes for report in reports)),
        "checkpoint_engine/replicas": float(replicas),
        "checkpoint_engine/committed": float(replicas - len(left)),
        "checkpoint_engine/failed_attempts": float(sum(not report.ok for report in reports)),
        **phases,
    }


def lost(name: str) -> SessionError:
    """There is no such replica to restart."""
    return SessionError(f"no server has a replica {name!r}")

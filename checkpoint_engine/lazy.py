"""The ``lazy`` strategy: a version is published, and each replica takes it when it stands still.

Nothing a replica does is interrupted. The manager looks at those that are behind now and then, and
the first time one runs no request it takes the newest published version; so does one that wakes, and
whoever is told to (``catch_up``). Versions published in between are never taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from hotbunk.checkpoint_engine.members import Members
from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.ranks import trainer_failed
from hotbunk.checkpoint_engine.transaction import Part
from hotbunk.checkpoint_engine.transports.base import Offer, Published, Transport
from hotbunk.checkpoint_engine.turns import Turns
from hotbunk.rollout.contract import (
    TARGET,
    Manifest,
    PauseMode,
    ScopeKind,
    TensorSpec,
    Ticket,
    Transfer,
)
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    SessionError,
    UsageError,
    VersionRegression,
)
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SOONEST, LATEST = 0.05, 0.5  # seconds between two looks at a replica that is behind
TRIES = 3  # of one replica and version; then it waits for the next version
KEPT = 100  # reports of what was taken

Take = Callable[[Sequence[ReplicaHandle], SyncPolicy], Awaitable[SyncReport]]


class Shelf(Transport):
    """A published set as a transport: nobody sends, and every receiver reads by itself."""

    name = "published"

    def __init__(self, found: Published) -> None:
        self._found = found

    @property
    def part(self) -> Part:
        """What a transaction brings from here."""
        manifest = self._found.manifest
        return Part(_Shelved(manifest), manifest.version, manifest.scope, manifest.metadata)

    async def offer(
        self, source: object, manifest: Manifest, *, ranks: Sequence[int] = (1,), **_: object
    ) -> Offer:
        return _Lent([self._found.ticket] * len(ranks))

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        raise SessionError("the transport that published opens these tickets")


class _Lent(Offer):
    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self.tickets = tuple(tickets)

    async def serve(self) -> None:
        """The receivers help themselves."""

    async def close(self) -> None:
        """Nothing is held: the set is its publisher's."""


class _Shelved:
    """A source whose tensors are published: only what they are is known here."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._manifest.tensors

    def tensors(self) -> Iterator[torch.Tensor]:
        raise SessionError("a published source is read by its receivers")


class Lagging:
    """Replicas that are behind the newest published version, and the tasks that watch them.

    :param take: brings replicas to the published version; called in a turn.
    """

    def __init__(self, members: Members, turns: Turns, take: Take) -> None:
        self.shelf: Shelf | None = None
        self.reports: deque[SyncReport] = deque(maxlen=KEPT)
        self._members = members
        self._turns = turns
        self._take = take
        self._policy = SyncPolicy()
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def publish(
        self, transport: Transport, parts: Sequence[Part], policy: SyncPolicy
    ) -> None:
        """Publish what is the newest version from now on.

        :raises UsageError: it is no whole model. :raises VersionRegression: it is older.
        :raises TrainerFailed, TransferFailed, DeadlineExceeded, Unsupported: it cannot be published.
            Nothing changed.
        """
        part, current = parts[-1], self._members.current
        if len(parts) > 1 or part.scope.kind is not ScopeKind.FULL:
            raise UsageError(
                "strategy=lazy brings whole models only", remedy="use strategy=all for this sync"
            )
        if current is not None and part.version < current:
            raise VersionRegression(current, part.version)
        try:
            async with asyncio.timeout(policy.deadline):
                found = await transport.publish(part.source, part.manifest(policy))
        except HotbunkError:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("publishing", policy.deadline) from error
        # A boundary: trainers raise what their own libraries raise.
        except Exception as error:
            raise trainer_failed(error) from error
        self.shelf = Shelf(found)
        # Who runs nothing is paused for the time of the update; who slipped in may finish.
        self._policy = msgspec.structs.replace(policy, pause=PauseMode.WAIT, strategy="all")
        self._members.published(part.version, policy.max_lag)

    async def sort(
        self, handles: Sequence[ReplicaHandle]
    ) -> tuple[list[ReplicaHandle], list[ReplicaOutcome]]:
        """Who must have the version at once, and the outcomes of all others, which are watched."""
        said = await asyncio.gather(*(h.status() for h in handles), return_exceptions=True)
        at_once: list[ReplicaHandle] = []
        others: list[ReplicaOutcome] = []
        for handle, status in zip(handles, said, strict=True):
            if isinstance(status, BaseException) or not self._members.may_wait(status):
                at_once.append(handle)
                continue
            self._members.saw(status)
            done = self._members.has_current(status) and not status.is_sleeping
            outcome = Outcome.COMMITTED if done else Outcome.DEFERRED
            others.append(ReplicaOutcome(handle.name, outcome, status.versions.get(TARGET)))
            if not done:
                self.follow(handle)
        return at_once, others

    def forget(self) -> None:
        """A sync went past what is published: nobody is behind it."""
        self.shelf = None
        self._stop(self._watching)

    def follow(self, handle: ReplicaHandle) -> None:
        """Let it take what is published as soon as it stands still."""
        if self.shelf is None or handle.name in self._watching:
            return
        task = asyncio.create_task(self._follow(handle))
        self._watching[handle.name] = task
        task.add_done_callback(lambda task: self._ended(handle.name, task))

    def leave(self, name: str) -> None:
        """It is no member any more."""
        self._stop([name])

    async def close(self) -> None:
        """Watch nobody. What was being taken is led back, or at its commit."""
        tasks = list(self._watching.values())
        self._stop(self._watching)
        if tasks:
            await asyncio.wait(tasks, timeout=self._policy.longest)

    def _stop(self, names: Iterable[str]) -> None:
        for name in list(names):
            if name in self._watching:
                self._watching[name].cancel()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._watching.get(name) is task:
            del self._watching[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("replica %s is not watched any more: %s", name, error)

    async def _follow(self, handle: ReplicaHandle) -> None:
        pause, tries = SOONEST, 0
        while self._members.get(handle.name) is handle and tries < TRIES:
            try:
                status = await handle.status()
            except HotbunkError as error:  # it may be busy, or away for a moment
                log.debug("replica %s did not say how it is: %s", handle.name, error)
            else:
                if status.health is Health.LOST or status.is_sleeping:
                    return  # one that wakes takes it then
                if self._members.has_current(status):
                    self._members.saw(status)
                    return
                if _stands_still(status):
                    tries += not await self._took(handle)
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LATEST)
        if tries:
            log.warning(
                "replica %s did not take the version published; see the reports of `taken`",
                handle.name,
            )

    async def _took(self, handle: ReplicaHandle) -> bool:
        async with self._turns.single():
            if self._members.get(handle.name) is not handle:
                return True
            report = await self._take([handle], self._policy)
        self.reports.append(report)
        return all(one.outcome is Outcome.COMMITTED for one in report.outcomes)


def _stands_still(status: ReplicaStatus) -> bool:
    """Whether an update now would interrupt nothing: no request has begun that has not ended."""
    return not status.running and not status.backend.running and not status.backend.busy

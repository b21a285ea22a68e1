"""New weights on their way to engines while the trainer trains on.

The trainer leaves a copy of its weights and goes on; one task sends the newest copy. There are two
copies: one is being sent, or was sent last (a replica that joins late gets it, too), the other
waits. If training outpaces syncs, the one that waits is overwritten: its version is superseded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec
import torch
from torch import nn

from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome, SyncReport
from hotbunk.checkpoint_engine.source import TensorSource
from hotbunk.rollout.contract import TARGET, Version
from hotbunk.rollout.errors import SyncFailed, UsageError
from hotbunk.rollout.status import Health
from hotbunk.trainer_hooks.hooks import TrainerHooks
from hotbunk.trainer_hooks.recipes.threads import in_thread

log = logging.getLogger(__name__)
LOOK = 0.5  # seconds between looks at what replicas hold


class WeightCopy:
    """A module's parameters, copied; ties stay ties."""

    def __init__(self, module: nn.Module) -> None:
        self.version = Version()
        self._theirs: list[torch.Tensor] = []
        self._ours: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}
        self._named: list[tuple[str, torch.Tensor]] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in copies:
                copies[id(parameter)] = torch.empty_like(parameter, requires_grad=False)
                self._theirs.append(parameter.detach())
                self._ours.append(copies[id(parameter)])
            self._named.append((name, copies[id(parameter)]))
        self.source = TensorSource(lambda: self._named)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the module's weights as they are now."""
        torch._foreach_copy_(self._ours, self._theirs)


class Sent(msgspec.Struct):
    """What syncs did since the last look."""

    syncs: int = 0
    superseded: int = 0
    resent: int = 0  # to a replica that had not committed, or joined late
    nbytes: int = 0
    buckets: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, report: SyncReport) -> None:
        """One more sync."""
        self.syncs += 1
        self.seconds += report.seconds
        self.nbytes += report.nbytes
        self.buckets += sum(u.buckets for o in report.outcomes for u in o.updates)
        for name, seconds in report.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds


class Publisher:
    """Sends the newest weights, and the last sent ones to whoever has not got them.

    Replicas that die are a :class:`Supervisor`'s to replace; their successors join without weights.

    :param sent: told of the version that every replica which serves has reached.
    """

    def __init__(
        self, hooks: TrainerHooks, module: nn.Module, *, sent: Callable[[Version], object]
    ) -> None:
        self._hooks = hooks
        self._manager = hooks.manager
        self._told = sent
        self._last, self._spare = WeightCopy(module), WeightCopy(module)
        self._waiting: Version | None = None  # the spare copy's, when it is whole
        self._busy = False
        self._some = asyncio.Event()
        self._failed: set[str] = set()  # those that did not commit when they were last sent to
        self._sent = Sent()

    # -- the trainer's side -------------------------------------------------------------------

    async def begin(self, version: Version) -> None:
        """Bring the first version to every replica.

        :raises SyncFailed: one did not commit.
        """
        await in_thread(self._last.refresh)
        self._last.version = version
        await self._hooks.on_weights_ready(self._last.source, version)

    async def publish(self, version: Version) -> None:
        """Copy the weights and go on; they are sent as soon as may be. One call at a time."""
        if self._waiting is not None:
            self._waiting = None  # nobody may send it while it is overwritten
            self._sent.superseded += 1
        await in_thread(self._spare.refresh)
        self._spare.version = self._waiting = version
        self._some.set()

    def take(self) -> Sent:
        """What was done since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent

    @property
    def idle(self) -> bool:
        """Nothing waits, and nothing is under way."""
        return self._waiting is None and not self._busy

    # -- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Send until cancelled, after :meth:`begin`.

        :raises SyncFailed: a replica that lives did not commit, and neither when it was sent again.
        """
        while True:
            await self._woken()
            self._busy = True
            if self._waiting is not None:
                await self._send()
            await self._look()
            self._busy = False

    async def _woken(self) -> None:
        """Until something waits, or it is time for a look."""
        self._some.clear()
        if self._waiting is None:
            try:
                async with asyncio.timeout(LOOK):
                    await self._some.wait()
            except TimeoutError:
                pass

    async def _send(self) -> None:
        self._waiting = None
        self._last, self._spare = self._spare, self._last
        try:
            report = await self._hooks.on_weights_ready(self._last.source, self._last.version)
        except SyncFailed as error:
            report = cast(SyncReport, error.report)
            log.warning("%s", error)
        self._sent.add(report)
        self._failed = {one.replica for one in report.outcomes if _went_wrong(one)}

    async def _look(self) -> None:
        """What replicas hold, in their own words; those without the last version get it."""
        behind, served = [], []
        for status in await self._manager.statuses():
            version = status.versions.get(TARGET)
            if status.health is Health.LOST:
                continue
            if version is None or not status.servable or self._is_behind(status.name, version):
                behind.append(status.name)
            else:
                served.append(version)
        if served:
            self._told(min(served))
        for name in behind:
            await self._send_again(name)

    def _is_behind(self, name: str, version: Version) -> bool:
        """Whether one that serves must be sent to: it failed, or came with weights of its own."""
        last = self._last.version
        if self._manager.policy.lazy and version.incarnation == last.incarnation:
            return name in self._failed
        return name in self._failed or version != last

    async def _send_again(self, name: str) -> None:
        """Bring the last sent version to one replica. :raises SyncFailed: see :meth:`run`."""
        copy = self._last
        self._sent.resent += 1
        try:
            report = await self._manager.update_weights(copy.source, copy.version, replicas=[name])
        except SyncFailed as error:
            report = cast(SyncReport, error.report)
            if name in self._failed and any(_went_wrong(one) for one in report.outcomes):
                raise
        except UsageError:
            return  # it was taken out meanwhile
        self._failed.discard(name)
        self._failed.update(one.replica for one in report.outcomes if _went_wrong(one))
        self._sent.add(report)


def _went_wrong(one: ReplicaOutcome) -> bool:
    """Whether it lives, and has not got what was sent."""
    return one.outcome not in (Outcome.COMMITTED, Outcome.DEFERRED, Outcome.LOST)

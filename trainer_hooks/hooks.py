"""When a trainer calls what. The only door between a training loop and the rollout side.

A loop calls these in order; each checks what it needs, so a wrong order is a typed error and not
an out-of-memory three steps later::

    on_rollout_begin -> generate -> on_rollout_end          the engine gives its memory back
    on_train_begin   -> compute  -> on_train_end            the trainer has the device
    on_weights_ready(source, version)                       sync; the trainer lets go; KV returns
"""

from __future__ import annotations

from typing import Protocol

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import SessionError
from hotbunk.rollout.lifecycle import KV, Weights
from hotbunk.rollout.status import ReplicaStatus


class TrainerShare(Protocol):
    """The trainer's part of the device, as far as it can be given away."""

    async def offload(self) -> None:
        """Give it back; returns when all trainer ranks have. Idempotent."""
        ...

    async def restore(self) -> None:
        """Take it again, contents as before. Idempotent."""
        ...


class TrainerHooks:
    """Drives a :class:`CheckpointEngineManager` and the trainer's share at a loop's turns.

    :param share: None: a trainer that gives nothing away.
    """

    def __init__(self, manager: CheckpointEngineManager, share: TrainerShare | None = None) -> None:
        self.manager = manager
        self._share = share
        self._last: tuple[WeightSource, Version] | None = None
        self._trained = True  # the trainer's weights may be newer than what was synced

    async def on_rollout_begin(self) -> None:
        """Before generation. :raises SessionError: some replica cannot serve."""
        for status in await self.manager.statuses():
            if not status.servable or status.is_sleeping:
                raise SessionError(
                    f"replica {status.name} does not serve (weights {dict(status.groups)}, KV "
                    f"{status.kv.value})",
                    remedy="call on_weights_ready first",
                )

    async def on_rollout_end(self) -> None:
        """After generation: the engines give their memory back."""
        await self.manager.sleep_replicas()

    async def on_train_begin(self) -> None:
        """Before the trainer needs the device, whatever came before (a validation, say)."""
        if any(map(_holds_memory, await self.manager.statuses())):
            await self.manager.sleep_replicas()
        if self._share is not None:
            await self._share.restore()

    async def on_train_end(self, *, updated: bool = True) -> None:
        """After the trainer's step. ``updated=False``: it left the weights as they were."""
        self._trained = self._trained or updated

    async def on_weights_ready(self, source: WeightSource, version: Version) -> SyncReport:
        """Bring every replica to ``version`` and wake it; the trainer's share goes in between.

        The version an engine already holds is verified and not sent again.

        :raises SyncFailed: a replica did not commit; its report says which and why.
        """
        let_go = None
        if self._share is not None:
            await self._share.restore()  # weights are read from it
            let_go = self._share.offload
        report = await self.manager.update_weights(source, version, let_go=let_go)
        self._last, self._trained = (source, version), False
        return report

    async def on_validation_begin(self) -> None:
        """Before a validation: engines serve the last synced version, sent again where needed.

        :raises SessionError: nothing was ever synced, or the trainer has moved on since.
        """
        if all(s.servable and not s.is_sleeping for s in await self.manager.statuses()):
            return
        if self._last is None or self._trained:
            raise SessionError(
                "the engines sleep and the trainer's weights are not the last synced ones",
                remedy="call on_weights_ready before validating",
            )
        await self.on_weights_ready(*self._last)

    async def on_validation_end(self) -> None:
        """After a validation, as after any rollout."""
        await self.on_rollout_end()

    async def on_shutdown(self) -> None:
        """At the end, also after a failure. Engines are closed."""
        await self.manager.close()


def _holds_memory(status: ReplicaStatus) -> bool:
    """Awake, or asleep with something mapped: a sync that was fenced leaves that behind."""
    away = (Weights.BACKED_UP.value, Weights.DISCARDED.value)
    weights = all(state.startswith(away) for state in status.groups.values())
    return not (status.is_sleeping and weights and status.kv is KV.RELEASED)

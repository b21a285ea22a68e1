"""verl's CheckpointEngineManager, with ours inside: what its trainers call, as transactions.

verl calls from a thread without an event loop. Ours lives on a loop of its own (``LoopThread``), so
handles, pauses and streams go on between calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngineManager as VerlManager
from verl.utils.ray_utils import auto_await

from hotbunk.checkpoint_engine.blocking import LoopThread
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.rollout.contract import Deployment
from hotbunk.rollout.errors import ConfigError, ReplicaLost
from hotbunk.trainer_hooks.verl import sending, settings
from hotbunk.trainer_hooks.verl.fleet import RankTransport, TrainerRanksCall, VerlFleet, lost
from hotbunk.trainer_hooks.verl.handle import RayHandle
from hotbunk.trainer_hooks.verl.replica import HotbunkReplica


class HotbunkManager(VerlManager):  # type: ignore[misc]
    """See the module. Takes the place of verl's, with the same methods.

    :param rollout: verl's rollout configuration, :param model: and its model's.
    :param defaults: the trainer mode's own keys of the sync policy.
    :raises ConfigError: the replicas are not hotbunk's.
    """

    def __init__(
        self,
        config: Any,
        actor_wg: Any,
        replicas: Sequence[Any],
        *,
        rollout: Any,
        model: Any,
        deployment: Deployment,
        defaults: Mapping[str, Any],
    ) -> None:
        for one in replicas:
            if not isinstance(one, HotbunkReplica):
                raise ConfigError(
                    f"rollout.name={rollout.name!r} under a trainer mode of hotbunk's",
                    remedy="use rollout.name=hotbunk_reference, say, or a trainer mode of verl's",
                )
        backend = rollout.checkpoint_engine.backend
        super().__init__(replace(config, backend="naive"), actor_wg, list(replicas))
        self._loop = LoopThread()
        call = TrainerRanksCall(actor_wg.hotbunk)
        begin = sending.Begin(
            settings.transport_of(backend), settings.transport_options(rollout.checkpoint_engine)
        )
        told = settings.settings(rollout)
        adapts = settings.adapts(model)

        async def make() -> VerlFleet:
            transport = RankTransport(call, begin)
            manager = CheckpointEngineManager(
                [await RayHandle.of(one.server_handle) for one in replicas],
                transport,
                deployment=deployment,
                policy=settings.sync_policy(rollout, defaults),
                free_cache_engine=bool(rollout.free_cache_engine),
                frozen_base=adapts,
            )
            await manager.adopt()
            return VerlFleet(
                manager,
                transport,
                self._restart,
                adapts=adapts,
                shares=deployment is Deployment.HYBRID,
                retries=told.retries,
            )

        self.fleet = self._loop.run(make)
        self._metrics: dict[str, float] = {}

    def take_metrics(self) -> dict[str, float]:
        """Of the syncs since the last call; the newest of each."""
        taken, self._metrics = self._metrics, {}
        return taken

    async def _restart(self, name: str) -> None:
        for replica in self.replicas:
            if replica.name == name:
                try:
                    await replica.server_handle.restart.remote()
                except RayActorError as error:
                    raise ReplicaLost(f"its server's actor is dead: {error}", where=name) from error
                return
        raise lost(name)

    async def _run(self, call: Any) -> Any:
        return await asyncio.to_thread(self._loop.run, call)

    # -- verl's methods -----------------------------------------------------------------------

    def add_replicas(self, replicas: list[Any]) -> None:
        """Take more in; they serve from the next sync on."""
        super().add_replicas(replicas)

        async def add() -> None:
            for one in replicas:
                await self.fleet.manager.add_replica(await RayHandle.of(one.server_handle))

        self._loop.run(add)

    def remove_replicas(self, replicas: list[Any]) -> None:
        """Take some out; they turn requests away."""
        super().remove_replicas(replicas)

        async def remove() -> None:
            for one in replicas:
                await self.fleet.manager.remove_replica(one.name)

        self._loop.run(remove)

    @auto_await  # type: ignore[untyped-decorator]
    async def sleep_replicas(self) -> None:
        """Make room for the trainer."""
        await self._run(self.fleet.manager.sleep_replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def wake_up_replicas(self) -> None:
        """Undo sleep without a sync."""
        await self._run(self.fleet.manager.wake_replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """End what runs; hold what comes, or turn it away."""
        await self._run(lambda: self.fleet.abort(reject=reject_request))

    @auto_await  # type: ignore[untyped-decorator]
    async def resume_generation_replicas(self) -> None:
        """End the pause of :meth:`abort_replicas`."""
        await self._run(self.fleet.manager.resume_generation_replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def release_kv_cache_replicas(self) -> None:
        """Give KV memory back everywhere."""
        await self._run(self.fleet.manager.release_kv_replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def resume_kv_cache_replicas(self) -> None:
        """Map KV memory again everywhere."""
        await self._run(self.fleet.manager.resume_kv_replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """A sync, as a transaction.

        :raises SyncFailed: some replica cannot serve, after ``hotbunk.retries``.
        """
        metrics: dict[str, float] = await self._run(lambda: self.fleet.update(global_steps))
        self._metrics.update(metrics)
        return metrics

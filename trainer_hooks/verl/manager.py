"""verl's CheckpointEngineManager, with ours inside: what its trainers call, as transactions.

verl calls from a thread without an event loop. Ours lives on a loop of its own (``LoopThread``), so
handles, pauses and streams go on between calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
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

RESTART = 300.0  # seconds for an actor to come back and its engine to start


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
        self._step: int | None = None  # of the last sync
        self._healed = 0  # replicas, since then

    def take_metrics(self) -> dict[str, float]:
        """Of the syncs since the last call; the newest of each."""
        taken, self._metrics = self._metrics, {}
        return taken

    async def _restart(self, name: str) -> None:
        """Start a lost replica anew; where its actor died, too, once Ray has started that anew."""
        for replica in self.replicas:
            if replica.name == name:
                break
        else:
            raise lost(name)
        error: RayActorError | None = None
        try:
            async with asyncio.timeout(RESTART):
                while True:
                    try:
                        await replica.server_handle.restart.remote()
                        return
                    except ActorUnavailableError as said:
                        error = said
                        await asyncio.sleep(1.0)
        except (RayActorError, TimeoutError) as said:
            raise ReplicaLost(
                f"its server's actor is dead, and did not come back in {RESTART:g} s: {error or said}",
                where=name,
                remedy="look for why in Ray's logs (`ray logs`): its node is gone, or has no memory left; "
                "then resume from the last checkpoint",
            ) from said

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
        await self._run(self.fleet.sleep)

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
        metrics["checkpoint_engine/healed"] = float(self._healed)
        self._step, self._healed = global_steps, 0
        self._metrics.update(metrics)
        return metrics

    def heal(self, *, between: bool = False) -> None:
        """Replace the replicas that died since the last sync. Only while the trainer's ranks are idle.

        ``between``: they do not hold what that sync sent. Then the next one replaces them.

        :raises ReplicaLost: one could not be replaced; or none is left, and none can be before that sync.
        :raises SyncFailed: one was, and cannot serve.
        """
        if between:
            self._loop.run(self.fleet.anyone)
        else:
            self._healed += len(self._loop.run(lambda: self.fleet.heal(self._step)))

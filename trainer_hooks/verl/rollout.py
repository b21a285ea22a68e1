"""verl's BaseRollout: what a worker of verl's does to a replica of ours.

verl's own trainers drive rollouts through this, step by step; the update alone is a transaction
here. Under a ``hotbunk_*`` trainer mode the whole sync is (``manager.py``), and this stands by.

verl hands weights over as a generator that can be walked once, so the leading rank makes a host
copy of them first: nothing is written anywhere before all of them have come.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.contract import Deployment, Scope, Version
from hotbunk.rollout.errors import Unsupported
from hotbunk.trainer_hooks.verl import settings
from hotbunk.trainer_hooks.verl.handle import RayHandle
from hotbunk.trainer_hooks.verl.replica import server_name
from hotbunk.trainer_hooks.verl.sources import adapter_group, staged
from hotbunk.trainer_hooks.verl.versions import version_of


class HotbunkRollout(BaseRollout):  # type: ignore[misc]
    """See the module. One in every worker; that of a replica's first rank acts, the others follow.

    :param replica_rank: of the replica, where verl knows it; else it follows from the worker's.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kw: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % size
        self.is_leader_rank = self.rollout_rank == 0
        self._server: Any = None
        self._manager: CheckpointEngineManager | None = None
        self._base: Version | None = None

    @property
    def server(self) -> Any:
        """The replica's server actor."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: Sequence[str]) -> None:
        """Map weights or KV again, where sleep released them."""
        if self.is_leader_rank:
            await self.server.wake_up.remote(list(tags))

    async def release(self) -> None:
        """Sleep."""
        if self.is_leader_rank:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = False,
        **kw: Any,
    ) -> None:
        """Bring the replica to what the generator yields, wholly or not at all.

        :raises Unsupported: another wire format than full tensors.
        :raises SyncFailed: the replica did not commit; says what is left of it.
        """
        adapter = peft_config is not None and base_sync_done
        group = adapter_group(settings.ADAPTER) if adapter else "target"
        source = await staged(weights, group=group, keep=self.is_leader_rank)
        if wire_format != "named_tensors":
            raise Unsupported(f"wire_format={wire_format}", self.config.name, "send full tensors")
        if source is None:
            return
        manager = await self._managed()
        version = version_of(global_steps, manager.version)
        if not adapter:
            await manager.update_weights(source, version)
            self._base = version
            return
        base = self._base or await self._held(manager)
        await manager.update_weights(
            source,
            version,
            scope=Scope.adapter(settings.ADAPTER, base),
            metadata={"lora_alpha": float(peft_config.lora_alpha)},
        )

    async def _managed(self) -> CheckpointEngineManager:
        """A manager of one replica. verl wakes and opens it, so ours leaves memory as it is."""
        if self._manager is None:
            self._manager = CheckpointEngineManager(
                [await RayHandle.of(self.server)],
                ShmTransport(),
                deployment=Deployment.STANDALONE,
                policy=settings.sync_policy(self.config, {}),
                free_cache_engine=False,
            )
            await self._manager.adopt()
        return self._manager

    async def _held(self, manager: CheckpointEngineManager) -> Version:
        """The version of the base that the replica loaded by itself."""
        (status,) = await manager.statuses()
        return status.versions["target"]

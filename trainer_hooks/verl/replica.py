"""verl's RolloutReplica: one replica of ours, behind one server actor."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from hotbunk.rollout.contract import Deployment
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.process.messages import encode
from hotbunk.trainer_hooks.verl import settings
from hotbunk.trainer_hooks.verl.server import RolloutServer, ServerOptions

DEPLOYMENTS = {
    RolloutMode.HYBRID: Deployment.HYBRID,
    RolloutMode.COLOCATED: Deployment.COLOCATED,
    RolloutMode.STANDALONE: Deployment.STANDALONE,
}


def server_name(rank: int, *, kind: str = "", suffix: str = "") -> str:
    """The actor's name in its Ray job. ``kind``: reward or teacher, of those that verl also has."""
    return f"hotbunk_server_{kind}{'_' if kind else ''}{rank}_0{suffix}"


def _where(worker: Any) -> tuple[str, str]:
    """In a worker: its node, and its device there."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


def _address(server: Any) -> str:
    """In an actor: its node's address."""
    return str(ray.util.get_node_ip_address()).strip("[]")


class HotbunkReplica(RolloutReplica):  # type: ignore[misc]
    """See the module. Everything verl asks of a replica goes to its server by verl's own base."""

    async def launch_servers(self) -> None:
        """Start the server and, in it, the replica.

        :raises Unsupported: it would span nodes.
        :raises HotbunkError: what kept it from starting.
        """
        if self.nnodes > 1:
            raise Unsupported(
                f"a replica over {self.nnodes} nodes", self.config.name, "give it fewer ranks"
            )
        places = await asyncio.gather(*(w.__ray_call__.remote(_where) for w in self.workers))
        platform = get_platform()
        env = {
            **dict.fromkeys(platform.ray_noset_envvars(), "1"),
            **platform.rollout_env_vars(),
            platform.visible_devices_envvar(): ",".join(device for _, device in places),
        }
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        self.name = server_name(self.replica_rank, kind=kind, suffix=self.name_suffix)
        spec, options = self._told(kind)
        actor = ray.remote(RolloutServer).options(
            name=self.name,
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            max_restarts=-1,  # it comes back empty: a sync fills it
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False),
            runtime_env={"env_vars": env},
        )
        server = actor.remote(encode(spec), encode(options))
        await server.start.remote()
        self.servers = [server]
        self._server_handle = server
        # verl asks a judge by HTTP. Nobody connects to others, and verl's balancer needs a name of them.
        self._server_address = self.name
        if self.is_reward_model:
            host = await server.__ray_call__.remote(_address)
            self._server_address = await server.listen.remote(host)

    def _told(self, kind: str) -> tuple[Any, ServerOptions]:
        config, model = self.config, omega_conf_to_dataclass(self.model_config)
        deployment = DEPLOYMENTS[self.rollout_mode]
        device = get_device_name()
        spec = settings.replica_spec(
            config,
            model,
            name=self.name,
            deployment=deployment,
            device="cpu" if device == "cpu" else f"{device}:0",
        )
        options = ServerOptions(
            deployment,
            bool(config.free_cache_engine),
            int(config.prompt_length),
            int(config.response_length),
            bool(config.ignore_eos),
            int(config.seed) + self.replica_rank if config.full_determinism else None,
            settings.ADAPTER if not kind and settings.adapts(model) else None,
        )
        return spec, options

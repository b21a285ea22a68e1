"""verl's V1 trainers, with our manager: ``trainer.v1.trainer_mode=hotbunk_sync``, and the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from hotbunk.rollout import registry
from hotbunk.rollout.contract import Deployment, PauseMode
from hotbunk.trainer_hooks.verl import surfaces
from hotbunk.trainer_hooks.verl.settings import SECTION, backend_of, sync_policy, transport_of

ACTORS = frozenset({"actor", "actor_rollout", "actor_rollout_ref"})


def prepared(config: Any, mode: str) -> Any:
    """verl's configuration as its own trainer of that mode reads it.

    verl looks at the mode's name for the sampler and for the mode's section, so it is set back to
    the one ours stands on; what is under ``hotbunk`` goes where rollouts find it.

    :raises ConfigError: an unknown key under ``hotbunk``, or a rollout that is not hotbunk's.
    :raises BackendNotFound: there is no such backend or transport.
    """
    with open_dict(config):
        config.trainer.v1.trainer_mode = mode
        rollout = config.actor_rollout_ref.rollout
        section = config.pop(SECTION, None)
        if section is not None:
            custom = OmegaConf.to_container(rollout.get("custom") or OmegaConf.create({}))
            rollout.custom = {**dict(custom or {}), SECTION: section}  # type: ignore[arg-type]
    sync_policy(rollout, {})
    registry.find(registry.BACKENDS, backend_of(rollout))
    registry.find(registry.TRANSPORTS, transport_of(rollout.checkpoint_engine.backend))
    return config


class _Synced:
    """Mixed into verl's trainers: their workers and their managers are ours."""

    mode: ClassVar[str]
    checkpoint_manager: Any
    _between = False  # whether the trainer is between local updates, and no engine has its weights
    pauses: ClassVar[Mapping[str, Any]] = MappingProxyType({"pause": PauseMode.ABORT})

    def __init__(self, config: Any) -> None:
        surfaces.check()
        super().__init__(prepared(config, self.mode))  # type: ignore[call-arg]

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        from hotbunk.trainer_hooks.verl.worker import with_sync

        mapping: dict[Any, Any] = self.role_worker_mapping  # type: ignore[attr-defined]
        for role, worker in mapping.items():
            if str(role) in ACTORS:
                mapping[role] = ray.remote(with_sync(worker.__ray_metadata__.modified_class))

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        self.checkpoint_manager = self._ours(self.checkpoint_manager, Deployment.HYBRID)
        self._look_while_waiting()

    def _ours(
        self, manager: Any, deployment: Deployment, pauses: Mapping[str, Any] | None = None
    ) -> Any:
        """Our manager of the same replicas."""
        from hotbunk.trainer_hooks.verl.manager import HotbunkManager

        config: Any = self.config.actor_rollout_ref  # type: ignore[attr-defined]
        return HotbunkManager(
            manager.config,
            manager.actor_wg,
            manager.replicas,
            rollout=omega_conf_to_dataclass(config.rollout),
            model=config.model,
            deployment=deployment,
            defaults=pauses or self.pauses,
        )

    def _look_while_waiting(self) -> None:
        """Replace engines that died, whenever verl looks in vain for responses: its trainer ranks wait then.

        A sampler of the user's own, which waits in its own way, has what died replaced by the next sync.
        """
        buffer: Any = self.replay_buffer  # type: ignore[attr-defined]
        waits = getattr(buffer, "_wait_for_next_poll", None)
        if waits is None:
            return

        def wait(*args: Any, **kw: Any) -> Any:
            self._serving.heal(between=self._between)
            return waits(*args, **kw)

        buffer._wait_for_next_poll = wait

    @property
    def _serving(self) -> Any:
        """The manager of the engines that requests go to."""
        return self.checkpoint_manager

    def on_sample_begin(self) -> None:
        super().on_sample_begin()  # type: ignore[misc]
        self._between = self.local_trigger_step > 0  # type: ignore[attr-defined]

    def on_step_end(self) -> None:
        super().on_step_end()  # type: ignore[misc]
        self._between = False
        taken = {**(getattr(self, "_pending_sync_metrics", None) or {})}
        self._pending_sync_metrics = {**taken, **self.checkpoint_manager.take_metrics()}


@register_trainer("hotbunk_sync")
class HotbunkSync(_Synced, PPOTrainerSync):  # type: ignore[misc]
    """verl's ``sync``: trainer and engines take turns on the same devices."""

    mode = "sync"

    def get_llm_client(self) -> Any:
        from hotbunk.trainer_hooks.verl.client import HotbunkClient

        return self.llm_server_manager.get_client(client_cls=HotbunkClient)


@register_trainer("hotbunk_colocate_async")
class HotbunkColocateAsync(_Synced, PPOTrainerColocateAsync):  # type: ignore[misc]
    """verl's ``colocate_async``: as ``sync``, and unfinished responses go on after the turn."""

    mode = "colocate_async"

    def get_llm_client(self) -> Any:
        from hotbunk.trainer_hooks.verl.client import HotbunkClient

        return self.llm_server_manager.get_client(client_cls=HotbunkClient)


@register_trainer("hotbunk_separate_async")
class HotbunkSeparateAsync(_Synced, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """verl's ``separate_async``: engines elsewhere. Requests in flight are frozen for a sync and go on.

    ``hotbunk.policy.pause=abort`` ends them instead, as verl does.
    """

    mode = "separate_async"
    standalone_checkpoint_manager: Any

    def _setup(self) -> None:
        with _sober_logger():
            super()._setup()
        self.standalone_checkpoint_manager = self._ours(
            self.standalone_checkpoint_manager, Deployment.STANDALONE, {"pause": PauseMode.KEEP}
        )

    @property
    def _serving(self) -> Any:
        return self.standalone_checkpoint_manager

    def get_llm_client(self) -> Any:
        from hotbunk.trainer_hooks.verl.client import HotbunkClient

        return self.standalone_server_manager.get_client(client_cls=HotbunkClient)


@contextmanager
def _sober_logger() -> Iterator[None]:
    """verl 0.9.1 logs ``info(..., flush=True)`` there, a TypeError where that level is on."""
    logger = logging.getLogger(PPOTrainerSeparateAsync.__module__)
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)

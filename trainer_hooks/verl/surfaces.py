"""What of verl the plugin stands on, recorded from the versions it was tested with.

A verl that moved something is named before a job starts, instead of failing deep inside one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hotbunk.rollout.errors import Unsupported
from hotbunk.trainer_hooks.verl.tested import TESTED

_ROLLOUT = "verl.workers.rollout"
_ENGINE = "verl.checkpoint_engine.base"
_V1 = "verl.trainer.ppo.v1"

# module:name -> parameters that we pass or are passed; None: anything that is there.
SURFACES: Mapping[str, tuple[str, ...] | None] = {
    f"{_ROLLOUT}.base:_ROLLOUT_REGISTRY": None,
    f"{_ROLLOUT}.base:BaseRollout.__init__": ("config", "model_config", "device_mesh"),
    f"{_ROLLOUT}.base:BaseRollout.resume": ("tags",),
    f"{_ROLLOUT}.base:BaseRollout.release": (),
    f"{_ROLLOUT}.base:BaseRollout.update_weights": ("weights", "wire_format"),
    f"{_ROLLOUT}.replica:RolloutReplicaRegistry.register": ("name", "loader"),
    f"{_ROLLOUT}.replica:RolloutReplica.__init__": (
        "replica_rank",
        "config",
        "model_config",
        "is_reward_model",
        "is_teacher_model",
        "name_suffix",
    ),
    f"{_ROLLOUT}.replica:RolloutReplica.launch_servers": (),
    f"{_ROLLOUT}.replica:RolloutReplica.max_concurrency": None,
    f"{_ROLLOUT}.replica:RolloutMode.HYBRID": None,
    f"{_ROLLOUT}.replica:RolloutMode.COLOCATED": None,
    f"{_ROLLOUT}.replica:RolloutMode.STANDALONE": None,
    f"{_ROLLOUT}.replica:TokenOutput": (
        "token_ids",
        "log_probs",
        "routed_experts",
        "stop_reason",
        "num_preempted",
        "extra_fields",
    ),
    f"{_ROLLOUT}.llm_server:LLMServerClient.generate": (
        "request_id",
        "prompt_ids",
        "sampling_params",
    ),
    f"{_ROLLOUT}.llm_server:FullyAsyncLLMServerClient.generate": ("request_id",),
    f"{_ENGINE}:CheckpointEngineRegistry.register": ("backend",),
    f"{_ENGINE}:CheckpointEngine.prepare": (),
    f"{_ENGINE}:CheckpointEngine.build_topology": (
        "actor_wg_world_size",
        "rollout_world_size",
        "metadata",
    ),
    f"{_ENGINE}:CheckpointEngine.init_process_group": (),
    f"{_ENGINE}:CheckpointEngine.send_weights": ("weights", "global_steps"),
    f"{_ENGINE}:CheckpointEngine.receive_weights": ("global_steps",),
    f"{_ENGINE}:CheckpointEngine.finalize": (),
    f"{_ENGINE}:CheckpointEngineManager.__init__": ("config", "actor_wg", "replicas"),
    f"{_ENGINE}:CheckpointEngineManager.update_weights": ("global_steps",),
    f"{_ENGINE}:CheckpointEngineManager.sleep_replicas": (),
    f"{_ENGINE}:CheckpointEngineManager.wake_up_replicas": (),
    f"{_ENGINE}:CheckpointEngineManager.abort_replicas": ("reject_request",),
    f"{_ENGINE}:CheckpointEngineManager.resume_generation_replicas": (),
    f"{_ENGINE}:CheckpointEngineManager.release_kv_cache_replicas": (),
    f"{_ENGINE}:CheckpointEngineManager.resume_kv_cache_replicas": (),
    f"{_ENGINE}:CheckpointEngineManager.add_replicas": ("replicas",),
    f"{_ENGINE}:CheckpointEngineManager.remove_replicas": ("replicas",),
    f"{_V1}.trainer_base:register_trainer": ("name",),
    f"{_V1}.trainer_base:PPOTrainer._setup": (),
    f"{_V1}.trainer_base:PPOTrainer._init_resource_pool_mgr": (),
    f"{_V1}.trainer_base:PPOTrainer._consume_sync_metrics": (),
    f"{_V1}.trainer_base:PPOTrainer.on_step_end": (),
    f"{_V1}.trainer_base:PPOTrainer.on_sample_begin": (),
    f"{_V1}.replay_buffer:ReplayBuffer._wait_for_next_poll": ("partition_id",),
    f"{_V1}.trainer_sync:PPOTrainerSync": ("config",),
    f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync": ("config",),
    f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync": ("config",),
    "verl.workers.engine_workers:ActorRolloutRefWorker.__init__": ("config", "role"),
    "verl.experimental.separation.engine_workers:DetachActorWorker": ("config", "role"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param": (
        "layered_summon",
        "base_sync_done",
    ),
    "verl.workers.engine.base:BaseEngine.is_param_offload_enabled": None,
    "verl.utils.fsdp_utils:merged_lora_context": ("actor", "backup_adapters"),
    "verl.utils.fsdp_utils:normalize_peft_param_name": ("params",),
    "verl.utils.model:convert_weight_keys": ("state_dict", "model"),
    "verl.utils.ray_utils:auto_await": ("func",),
    "verl.utils.config:omega_conf_to_dataclass": ("config",),
    "verl.utils.device:set_expandable_segments": ("enable",),
    "verl.plugin.platform.platform_manager:PlatformRegistry.register": ("platform",),
    "verl.plugin.platform.platform_base:PlatformBase": None,
    "verl.single_controller.base.decorator:register": ("dispatch_mode", "blocking"),
    "verl.single_controller.base.decorator:Dispatch.ONE_TO_ALL": None,
}


def moved(surfaces: Mapping[str, tuple[str, ...] | None] = SURFACES) -> list[str]:
    """What is not where it was, or does not take what it took; one line each."""
    return [line for name, wanted in surfaces.items() for line in _looked(name, wanted)]


def _looked(name: str, wanted: tuple[str, ...] | None) -> list[str]:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        return [f"{name}: {error}"]
    for part in path.split("."):
        found = inspect.getattr_static(found, part, None)
        if found is None:
            return [f"{name} is gone: there is no {part}"]
    if wanted is None:
        return []
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    known = inspect.signature(found).parameters
    return [f"{name} takes no {one!r}" for one in wanted if one not in known]


def check() -> None:
    """:raises Unsupported: this verl was not tested, and something moved; says what."""
    import verl

    if verl.__version__ in TESTED:
        return
    if lines := moved():
        raise Unsupported(
            f"verl {verl.__version__}: {'; '.join(lines)}",
            "hotbunk",
            f"use verl {TESTED[-1]}, or a hotbunk that knows this one",
        )

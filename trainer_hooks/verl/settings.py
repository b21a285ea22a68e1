"""verl's configuration as ours. verl's keys keep their meaning; what verl has no key for is ``hotbunk.*``.

rollout.name                      hotbunk_<backend>
rollout.engine_kwargs.<name>.*    options of that backend, over everything below
rollout.free_cache_engine         False: memory is never released, updates still work
rollout.load_format               dummy: room for the weights, the first sync brings them
checkpoint_engine.backend         hotbunk_<transport>
checkpoint_engine.engine_kwargs   options of that transport, under its name
update_weights_bucket_megabytes   bytes of a bucket
hotbunk.*                         :class:`Settings`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.rollout.contract import Deployment
from hotbunk.rollout.errors import ConfigError, Unsupported
from hotbunk.rollout.options import convert
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.status import Deadlines

PREFIX = "hotbunk_"
ADAPTER = "policy"  # the name of the one adapter that verl trains
SECTION = "hotbunk"
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_HOST_KV_TOKENS = 1 << 16  # on a host nobody says how much memory is for KV


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is under ``hotbunk`` in verl's configuration (``+hotbunk.policy.pause=keep``).

    ``policy``: how a sync is done, key by key over the trainer mode's own
    (:class:`~hotbunk.checkpoint_engine.policy.SyncPolicy`). ``deadlines``: of every replica.
    ``retries``: how often replicas that a sync did not reach are sent the whole once more.
    ``rollout_python``: the interpreter of another environment for the engine, in which hotbunk and
    the engine are installed; verl need not be. ``env``: added to the engine's environment.
    ``setup``: ``module:function``, called in the engine's process before anything is built.
    """

    policy: Mapping[str, Any] = msgspec.field(default_factory=dict)
    deadlines: Deadlines = Deadlines()
    retries: int = 1
    rollout_python: str | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    setup: str = ""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"hotbunk.retries={self.retries} must be 0 or more")


def plain(value: Any) -> Any:
    """OmegaConf's containers as dicts and lists."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def settings(rollout: Any) -> Settings:
    """Of verl's rollout configuration, where the trainer mode put them (``rollout.custom``).

    :raises ConfigError: an unknown key, or a bad value.
    """
    custom = plain(getattr(rollout, "custom", None)) or {}
    said = {**(custom.get(SECTION) or {})}
    if isinstance(deadlines := said.get("deadlines"), Mapping):
        said["deadlines"] = convert(deadlines, Deadlines, "hotbunk.deadlines")
    return convert(said, Settings, SECTION)


def sync_policy(rollout: Any, defaults: Mapping[str, Any]) -> SyncPolicy:
    """How syncs are done: the user's keys, over ``defaults``, over ours.

    :raises ConfigError: an unknown key, or a bad value.
    """
    megabytes = int(rollout.checkpoint_engine.update_weights_bucket_megabytes)
    chosen = {"bucket_bytes": megabytes << 20, **defaults, **settings(rollout).policy}
    return convert(chosen, SyncPolicy, "hotbunk.policy")


def transport_of(backend: str) -> str:
    """The transport of a ``checkpoint_engine.backend``; verl's default, naive, leaves it to us."""
    if backend in ("naive", None):
        return "shm"
    if not backend.startswith(PREFIX):
        raise ConfigError(
            f"checkpoint_engine.backend={backend!r} is none of hotbunk's",
            remedy="use hotbunk_shm, hotbunk_collective or hotbunk_disk, or a trainer mode of verl's",
        )
    return backend.removeprefix(PREFIX)


def transport_options(engine: Any) -> dict[str, Any]:
    """What ``checkpoint_engine.engine_kwargs`` says to the transport."""
    said: dict[str, Any] = plain(engine.engine_kwargs) or {}
    return dict(said.get(engine.backend) or {})


def backend_of(rollout: Any) -> str:
    """The backend of a ``rollout.name``. :raises ConfigError: it is none of ours."""
    name = str(rollout.name)
    if not name.startswith(PREFIX):
        raise ConfigError(
            f"rollout.name={name!r} is none of hotbunk's", remedy="use hotbunk_reference, say"
        )
    return name.removeprefix(PREFIX)


def adapter_rank(model: Any) -> int:
    """The rank of the adapter that is trained; 0: none is, or (``lora_adapter_path``) it says so itself."""
    lora = plain(getattr(model, "lora", None)) or {}
    return int(lora.get("rank") or 0) or int(getattr(model, "lora_rank", 0) or 0)


def adapts(model: Any) -> bool:
    """Whether the policy is an adapter that stays apart from its base."""
    lora = plain(getattr(model, "lora", None)) or {}
    path = getattr(model, "lora_adapter_path", None)
    return (adapter_rank(model) > 0 or bool(path)) and not lora.get("merge", False)


def replica_spec(
    rollout: Any, model: Any, *, name: str, deployment: Deployment, device: str
) -> ReplicaSpec:
    """What a replica of this rollout is started from.

    :param model: verl's model configuration, with ``local_path``.
    :param device: torch's name of what it runs on.
    :raises ConfigError, Unsupported: it cannot be had.
    """
    backend = backend_of(rollout)
    told = settings(rollout)
    options = OPTIONS.get(backend, _plain_options)(rollout, model, deployment, device)
    said = plain(rollout.engine_kwargs) or {}
    return ReplicaSpec(
        backend,
        {**options, **(plain(said.get(rollout.name)) or {})},
        name,
        told.deadlines,
        data_parallel=int(rollout.data_parallel_size),
        # vLLM's own processes hold the shards of one engine.
        tensor_parallel=1 if backend == "vllm" else int(rollout.tensor_model_parallel_size),
        pipeline_parallel=int(rollout.pipeline_model_parallel_size),
        python=told.rollout_python,
        env=told.env,
        setup=told.setup,
    )


def _dtype(rollout: Any) -> str:
    return _DTYPES.get(str(rollout.dtype), str(rollout.dtype))


def _context(rollout: Any) -> int:
    """Tokens of the longest request: ``prompt_length`` + ``response_length``, or what is said."""
    return int(rollout.max_model_len or rollout.prompt_length + rollout.response_length)


def _waits_for_weights(rollout: Any, deployment: Deployment) -> bool:
    """``load_format=dummy``: a sync brings the weights. A judge or teacher is never sent any."""
    return deployment is not Deployment.COLOCATED and "dummy" in str(rollout.load_format)


def _reference(rollout: Any, model: Any, deployment: Deployment, device: str) -> dict[str, Any]:
    wanted = _context(rollout) * int(rollout.max_num_seqs)
    return {
        "model": model.local_path,
        "load": "empty" if _waits_for_weights(rollout, deployment) else "disk",
        "device": device,
        "dtype": _dtype(rollout),
        "kv_cache_tokens": max(min(wanted, _kv_room(rollout, model, device)), _context(rollout)),
        "max_num_batched_tokens": int(rollout.max_num_batched_tokens),
        "max_num_seqs": int(rollout.max_num_seqs),
        "enable_prefix_caching": bool(rollout.enable_prefix_caching),
    }


def _kv_room(rollout: Any, model: Any, device: str) -> int:
    """Tokens of KV in ``gpu_memory_utilization`` of the device, beside the weights."""
    if device == "cpu":
        return _HOST_KV_TOKENS
    import torch

    weights = sum(file.stat().st_size for file in Path(model.local_path).glob("*.safetensors"))
    total = torch.cuda.get_device_properties(0).total_memory
    config = model.hf_config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = 4 if _dtype(rollout) == "float32" else 2
    token = 2 * config.num_hidden_layers * heads * size * item
    left = int(total * float(rollout.gpu_memory_utilization)) - weights
    return max(left, 0) // int(token)


def _vllm(rollout: Any, model: Any, deployment: Deployment, device: str) -> dict[str, Any]:
    if "dummy" not in str(rollout.load_format) and str(rollout.load_format) != "auto":
        raise Unsupported(f"load_format={rollout.load_format}", "vllm", "use dummy or auto")
    args = {"max_num_batched_tokens": int(rollout.max_num_batched_tokens)}
    if adapts(model) and deployment is not Deployment.COLOCATED:
        args["enable_lora"] = True
        if rank := adapter_rank(model):
            args["max_lora_rank"] = next((one for one in _LORA_RANKS if one >= rank), rank)
    if device != "cpu":
        args["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return {
        "model": model.local_path,
        "dtype": _dtype(rollout),
        "max_model_len": _context(rollout),
        "max_num_seqs": int(rollout.max_num_seqs),
        "tensor_parallel_size": int(rollout.tensor_model_parallel_size),
        "enforce_eager": bool(rollout.enforce_eager) or device == "cpu",
        "enable_prefix_caching": bool(rollout.enable_prefix_caching),
        "seed": int(rollout.seed),
        "engine_args": args,
    }


def _plain_options(rollout: Any, model: Any, deployment: Deployment, device: str) -> dict[str, Any]:
    """Of a backend that this module does not know: ``engine_kwargs`` says the rest."""
    return {"model": model.local_path}


OPTIONS: Mapping[str, Callable[[Any, Any, Deployment, str], dict[str, Any]]] = {
    "reference": _reference,
    "vllm": _vllm,
}

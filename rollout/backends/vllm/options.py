"""What a vLLM engine can be told, and what vLLM must find in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import msgspec

from hotbunk.rollout import native
from hotbunk.rollout.backends.vllm.plugin import BACKEND
from hotbunk.rollout.errors import ConfigError, closest
from hotbunk.rollout.process.grid import Grid

# Options of vLLM that this adapter sets itself, or cannot keep its promises under yet.
_RESERVED = {
    "worker_extension_cls": "it carries the adapter's part in the worker",
    "logprobs_mode": "log-probs are at the request's temperature, before truncation",
    "weight_transfer_config": "weights come through update_weights",
    "worker_cls": "on CPUs it keeps weights and KV in a pool that gives memory back",
    "pipeline_parallel_size": "ranks of a pipeline are not mapped yet",
    "speculative_config": "a draft model would keep its old weights",
    "default_mm_loras": "adapters come through update_weights",
    "quantization": "quantised weights are not what the trainer sends",
    "load_format": "names and shapes are read from the checkpoint",
}

POOLED = "hotbunk.rollout.backends.vllm.pooled_worker.PooledCPUWorker"
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_KV_BYTES = 1 << 30


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the vLLM backend. Names and meanings are those of vLLM's engine arguments.

    ``model``: a model directory (or a name that vLLM can load). ``kv_cache_memory_bytes``: bytes of
    KV cache; None leaves it to vLLM (on CPU: 1 GiB). ``skip_tokenizer_init``: None skips it where
    the model directory holds no tokenizer. ``enable_sleep_mode``: memory can be given back (on CPUs
    weights and KV then lie in a pool of ours; elsewhere in vLLM's own). ``engine_args``: anything else vLLM takes, by name.
    """

    model: str
    dtype: str = "auto"
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = True
    skip_tokenizer_init: bool | None = None
    seed: int = 0
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        own = [f.name for f in msgspec.structs.fields(VllmOptions) if f.name != "engine_args"]
        for name in self.engine_args:
            if name in own:
                raise ConfigError(f"engine_args names {name!r}, which is an option of its own")
            if name in _RESERVED:
                raise ConfigError(f"engine_args must not set {name!r}: {_RESERVED[name]}")

    @property
    def adapter_rank(self) -> int:
        """The largest rank of an adapter; 0: there are none."""
        asked = self.engine_args.get("enable_lora")
        return int(self.engine_args.get("max_lora_rank", 16)) if asked else 0

    @property
    def grid(self) -> Grid:
        """Its workers: each a receiver rank of an update."""
        return Grid(data=self.data_parallel_size, tensor=self.tensor_parallel_size)

    def to_engine_args(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for vLLM's ``AsyncEngineArgs``, whose fields are ``known``.

        :raises ConfigError: one that this vLLM does not have, or would not listen to.
        """
        skip = self.skip_tokenizer_init
        if skip is None:
            skip = os.path.isdir(self.model) and not any(
                name.startswith("tokenizer") for name in os.listdir(self.model)
            )
        kv_bytes = self.kv_cache_memory_bytes
        if is_cpu_build():
            if _KV_SPACE not in os.environ:
                kv_bytes = kv_bytes or _CPU_KV_BYTES  # else most of the machine's memory
            elif kv_bytes is not None:
                raise ConfigError(
                    f"{_KV_SPACE} is set, and vLLM would take it instead of kv_cache_memory_bytes",
                    where="backend vllm",
                    remedy="unset one of them",
                )
        chosen = {
            **{n: getattr(self, n) for n in self.__struct_fields__ if n != "engine_args"},
            "kv_cache_memory_bytes": kv_bytes,
            "skip_tokenizer_init": skip,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": BACKEND},
            "use_tqdm_on_load": False,
            **self.engine_args,
        }
        # vLLM has no sleep on CPUs; ours needs nothing of it but the worker.
        if is_cpu_build() and chosen.pop("enable_sleep_mode") and native.path().is_file():
            chosen["worker_cls"] = POOLED
        for name in chosen:
            if name not in known:
                raise ConfigError(
                    f"this vLLM has no engine argument {name!r}{closest(name, known)}",
                    where="backend vllm",
                )
        return chosen


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed was built for CPUs."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or found.version.endswith("+cpu")
    return False


def prepare_environment(options: VllmOptions) -> None:
    """Defaults without which a user trips, for this process and those that vLLM starts.

    Whatever is set already stays as it is.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is the caller's
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve every other process
    }
    if os.path.isdir(options.model):
        defaults["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build():
        defaults |= {
            # The worker lives in the engine core: one process less, and no second copy of it all.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if options.enforce_eager:
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)

"""What a reference engine can be told."""

from __future__ import annotations

import re

import msgspec

from hotbunk.rollout.errors import ConfigError


class ReferenceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the reference engine, checked when it is built.

    ``model``: a directory with ``config.json`` and safetensors. ``load``: ``disk`` reads the
    weights, ``empty`` only makes room for them (the first sync brings them). ``device``: ``cpu``,
    ``cuda`` or ``cuda:N`` (or ``fake``: simulated, memory of the host behind a fake driver). ``dtype``: element type of weights and KV. ``kv_cache_tokens``: how many
    tokens of KV the pool holds, over all requests. ``block_size``: tokens a KV block.
    ``max_num_batched_tokens``: tokens a step at most. ``max_num_seqs``: requests that run at once.
    ``enable_prefix_caching``: whether KV of one request may serve another with the same beginning.
    ``backup_dir``: where backups go (default: the system's temporary folder; on a GPU: memory of
    the host). ``quantization``: ``int8`` keeps linear layers in eight bits; syncs carry them as
    they are. ``share_weights``: a trainer may write weights straight into this engine's memory. On a
    CPU that lies in files without names, which a trainer of this host maps (transport ``shm``); on a
    device a trainer of the same device is given a handle (transport ``ipc``). Needs the native library.
    """

    model: str
    load: str = "disk"
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_tokens: int = 8192
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    backup_dir: str | None = None
    quantization: str | None = None
    share_weights: bool = False

    def __post_init__(self) -> None:
        if self.load not in ("disk", "empty"):
            raise ConfigError(f"load={self.load!r} is neither 'disk' nor 'empty'")
        if not re.fullmatch(r"cpu|cuda(:\d+)?|fake(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} is not cpu, cuda or cuda:N")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype={self.dtype!r} is not float32, bfloat16 or float16")
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization={self.quantization!r} is not int8")
        sizes = ("kv_cache_tokens", "block_size", "max_num_batched_tokens", "max_num_seqs")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.kv_cache_tokens < self.block_size:
            raise ConfigError(
                f"kv_cache_tokens={self.kv_cache_tokens} is less than one block "
                f"(block_size={self.block_size})"
            )

"""How many bytes a run's parts take, from the model's shapes alone: nothing is allocated.

Shapes come from ``config.json`` on torch's meta device, so a directory without weights will do.
Each tensor is counted as its arena counts it: once for all its tied names, padded, whole pages.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from hotbunk.checkpoint_engine.bucket import bucket_size
from hotbunk.checkpoint_engine.transports.protocol import HALVES
from hotbunk.checkpoint_engine.transports.shm.memory import packed_bytes
from hotbunk.rollout.arena import ALIGN, PAGE
from hotbunk.rollout.binding import dtype_from, dtype_name, named_state
from hotbunk.rollout.contract import TensorSpec
from hotbunk.rollout.errors import ConfigError, Unsupported
from hotbunk.trainer_hooks.recipes.config import RolloutConfig, RunConfig
from hotbunk.trainer_hooks.recipes.models import build_tiny, ensure_smollm2, load_config

_TRAINED_AS = torch.float32
_VLLM_ROWS = 64  # vLLM pads the vocabulary of embedding and head to a multiple of it
_HUGE = 2 << 20  # of huge tmpfs: memory that others map, on hosts, comes in whole pages


class Shape(msgspec.Struct, frozen=True):
    """One tensor of a model: ``elements`` once for all its names. ``own_dtype``: one that no choice
    of element type changes (a buffer's)."""

    name: str
    shape: tuple[int, ...]
    parameter: bool
    own_dtype: str | None = None

    def nbytes(self, dtype: torch.dtype) -> int:
        """Its bytes where parameters are of ``dtype``."""
        kind = dtype_from(self.own_dtype) if self.own_dtype else dtype
        return torch.Size(self.shape).numel() * kind.itemsize


class ModelShapes(msgspec.Struct, frozen=True):
    """A model's tensors, and what its KV cache is made of."""

    tensors: tuple[Shape, ...]
    linear: frozenset[str]  # weights of linear layers within the decoder's blocks
    vocabulary: frozenset[str]  # tensors with a row a token
    kv_elements: int  # of one token, over all layers, keys and values
    dtype: str  # the checkpoint's own
    hidden: int  # width of what a head sees

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(torch.Size(one.shape).numel() for one in self.tensors if one.parameter)

    def arena(self, dtype: torch.dtype, *, state: bool = True) -> int:
        """Bytes of an arena that holds parameters of ``dtype``, and all other ``state``."""
        return in_arena(one.nbytes(dtype) for one in self.tensors if state or one.parameter)


class EngineSizes(msgspec.Struct, frozen=True):
    """Bytes of one rank of a replica, over all workers that the backend has in it (vLLM's TP and DP)."""

    weights: int
    kv_cache: int


class Parts(msgspec.Struct, frozen=True):
    """Bytes of everything that takes turns. Engines' are over all replicas and ranks.

    ``reference_policy``: the copy that ``trainer.kl_coef`` asks for. ``bucket``: on the way between
    trainer and engines. ``trainer_backup``: what stays on the host of a trainer whose memory is
    given back; its gradients do not. ``critic``: PPO's, with gradients and moments like the trainer's.
    ``judge``: a generative reward model's weights and KV.
    """

    weights: int
    kv_cache: int
    trainer: int
    reference_policy: int
    bucket: int
    trainer_backup: int
    critic: int = 0
    critic_backup: int = 0
    judge: int = 0
    judge_backup: int = 0


def in_arena(sizes: Iterator[int]) -> int:
    """Bytes of an arena with regions of these sizes."""
    whole = sum(-(-size // ALIGN) * ALIGN for size in sizes)
    return -(-whole // PAGE) * PAGE


@contextmanager
def model_directory(config: RunConfig) -> Iterator[Path]:
    """The run's model; a tiny one is made for the while."""
    if config.model == "smollm2":
        yield ensure_smollm2()
    elif config.model == "tiny":
        tiny = config.tiny
        with tempfile.TemporaryDirectory(prefix="hotbunk-plan-") as folder:
            yield build_tiny(
                folder,
                family=tiny.family,
                hidden=tiny.hidden,
                layers=tiny.layers,
                context=tiny.context,
            )
    else:
        yield Path(config.model)


def shapes_of(directory: Path) -> ModelShapes:
    """What a model directory's ``config.json`` says; weights are not looked at.

    :raises ConfigError: there is none, or transformers cannot read it.
    :raises Unsupported: the model is no causal language model of transformers.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(directory)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=_TRAINED_AS)
    except ValueError as error:
        raise Unsupported(f"a plan for model type {config.model_type!r}", "transformers") from error
    linear = {
        id(layer.weight)
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and ".layers." in path
    }
    text = config.get_text_config()
    tensors: list[Shape] = []
    seen: set[Hashable] = set()
    chosen: set[str] = set()
    for name, tensor, parameter in named_state(model):
        storage: Hashable = tensor.untyped_storage()._cdata
        if storage in seen:
            continue
        seen.add(storage)
        own = None if parameter else dtype_name(tensor.dtype)
        tensors.append(Shape(name, tuple(tensor.shape), parameter, own))
        if id(tensor) in linear:
            chosen.add(name)
    rows = {one.name for one in tensors if one.parameter and one.shape[:1] == (text.vocab_size,)}
    heads = text.num_key_value_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShapes(
        tuple(tensors),
        frozenset(chosen),
        frozenset(rows),
        2 * text.num_hidden_layers * heads * dim,
        dtype_name(config.dtype or _TRAINED_AS),
        text.hidden_size,
    )


def parts_of(
    config: RunConfig, model: ModelShapes, memory: int, judge: ModelShapes | None = None
) -> Parts:
    """The bytes of each part of a run on devices of ``memory`` bytes.

    :param judge: the shapes of a generative reward model, where the run has one.

    :raises Unsupported: nobody knows how this backend divides its memory.
    """
    rollout = config.rollout
    engine = engine_sizes(rollout, model, memory)
    ranks = rollout.replicas * rollout.data_parallel
    parameters = _parameters(model)
    trained = model.arena(_TRAINED_AS)
    speaks = EngineSizes(0, 0)
    if judge is not None:
        options = {"dtype": "float32", **config.judge.options}
        speaks = engine_sizes(RolloutConfig(config.judge.backend, options=options), judge, memory)
    values = values_of(model) if config.trainer.has_critic else None
    return Parts(
        weights=engine.weights * ranks,
        kv_cache=engine.kv_cache * ranks,
        trainer=trained + 3 * parameters,  # gradients, and AdamW's two moments
        reference_policy=trained if config.trainer.kl_coef > 0 else 0,
        bucket=_buckets(config, model),
        trainer_backup=trained + 2 * parameters if config.trainer.offload else 0,
        critic=values.arena(_TRAINED_AS) + 3 * _parameters(values) if values else 0,
        critic_backup=(
            values.arena(_TRAINED_AS) + 2 * _parameters(values)
            if values and config.trainer.offload
            else 0
        ),
        judge=speaks.weights + speaks.kv_cache,
        judge_backup=speaks.weights,
    )


def _parameters(model: ModelShapes) -> int:
    return in_arena(one.nbytes(_TRAINED_AS) for one in model.tensors if one.parameter)


def values_of(model: ModelShapes) -> ModelShapes:
    """The critic beside such a policy: its decoder, and a head of one output."""
    body = tuple(one for one in model.tensors if not one.name.startswith("lm_head."))
    head = (Shape("head.weight", (1, model.hidden), True), Shape("head.bias", (1,), True))
    return msgspec.structs.replace(model, tensors=body + head)


def _buckets(config: RunConfig, model: ModelShapes) -> int:
    if config.transport.name == "shm" and _written_in_place(config.rollout):
        return 0
    dtype = _TRAINED_AS
    if config.rollout.name == "reference":  # it says what it wants, and casts happen at the source
        dtype = dtype_from(str(config.rollout.options.get("dtype", "float32")))
    specs = [
        TensorSpec(one.name, one.shape, dtype_name(dtype), one.nbytes(dtype))
        for one in model.tensors
        if one.parameter
    ]
    most = config.sync.bucket_bytes
    if config.transport.name == "shm":
        most = packed_bytes(most)
    one = -(-bucket_size(most, specs, None) // PAGE) * PAGE
    streams = config.rollout.replicas * config.rollout.data_parallel
    if config.transport.name == "naive":
        return one * streams  # each receiver takes its buckets in its own time
    # collective: the sender's, and each receiver's; disk: each reader's own.
    counts = {"collective": 1 + streams, "disk": streams}
    return one * counts.get(config.transport.name, HALVES)


def buckets_stay(config: RunConfig) -> bool:
    """Whether buckets lie in the memory that engines use, from sync to sync: shm keeps its halves."""
    return config.transport.name == "shm" and not torch.cuda.is_available()


def _written_in_place(rollout: RolloutConfig) -> bool:
    """Whether a sender of this host writes straight into the engine's memory: vLLM's on CPUs, in our pool."""
    pooled = bool(rollout.options.get("enable_sleep_mode", True)) and not torch.cuda.is_available()
    return rollout.name == "vllm" and pooled


# -- engines ----------------------------------------------------------------------------------


def engine_sizes(rollout: RolloutConfig, model: ModelShapes, memory: int) -> EngineSizes:
    """Bytes of a rank of that backend with these options.

    :raises Unsupported: nobody knows how this backend divides its memory.
    """
    known = _ENGINES.get(rollout.name)
    if known is None:
        hint = f"sizes are known of {', '.join(sorted(_ENGINES))}"
        raise Unsupported("a plan of its memory", rollout.name, hint)
    return known(rollout.options, model, memory)


def _reference(options: Mapping[str, Any], model: ModelShapes, _: int) -> EngineSizes:
    dtype = dtype_from(str(options.get("dtype", "float32")))
    sizes = [one.nbytes(dtype) for one in model.tensors]
    if options.get("quantization") == "int8":
        sizes = []
        for one in model.tensors:
            if one.name in model.linear:
                sizes += [one.nbytes(torch.int8), 4 * one.shape[0]]  # and a scale a row
            else:
                sizes.append(one.nbytes(dtype))
    block = int(options.get("block_size", 16))
    tokens = int(options.get("kv_cache_tokens", 8192)) // block * block
    kv = tokens * model.kv_elements * dtype.itemsize
    return EngineSizes(in_arena(iter(sizes)), -(-kv // PAGE) * PAGE)


def _vllm(options: Mapping[str, Any], model: ModelShapes, memory: int) -> EngineSizes:
    said = str(options.get("dtype", "auto"))
    dtype = dtype_from(model.dtype if said == "auto" else said)
    ranks = int(options.get("tensor_parallel_size", 1))
    sizes = []
    for one in model.tensors:
        rows = one.shape
        if one.name in model.vocabulary:
            rows = (-(-rows[0] // _VLLM_ROWS) * _VLLM_ROWS, *rows[1:])
        if one.parameter:
            sizes.append(torch.Size(rows).numel() * dtype.itemsize)
    weights = in_arena(size // ranks for size in sizes)
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    kv = options.get("kv_cache_memory_bytes")
    if kv is None and torch.cuda.is_available():
        share = float(options.get("engine_args", {}).get("gpu_memory_utilization", 0.9))
        kv = max(int(share * memory) - weights, 0)
    elif kv is None:
        kv = int(float(space) * (1 << 30)) if space else 1 << 30
    if not torch.cuda.is_available():
        weights = -(-weights // _HUGE) * _HUGE
    workers = ranks * int(options.get("data_parallel_size", 1))
    return EngineSizes(weights * workers, int(kv) * workers)


_ENGINES: dict[str, Callable[[Mapping[str, Any], ModelShapes, int], EngineSizes]] = {
    "reference": _reference,
    "vllm": _vllm,
}


# -- the device -------------------------------------------------------------------------------


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``80GiB``, ``512M``, ``1073741824``: units are binary.

    :raises ConfigError: it is none of these.
    """
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = plain.rstrip("kmgt"), plain[len(plain.rstrip("kmgt")) :]
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no size", remedy="write 80GiB, 512MiB or bytes") from None
    if size <= 0:
        raise ConfigError(f"a device of {text!r} holds nothing")
    return size


def device_memory() -> tuple[str, int]:
    """The device that engines use here by themselves, and its bytes in use by nobody."""
    if torch.cuda.is_available():
        return "cuda:0", int(torch.cuda.mem_get_info(0)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            free = min(free, int(Path(path).read_text()))
        except (OSError, ValueError):  # another version of control groups, or no limit
            continue
    return "this host's memory", free

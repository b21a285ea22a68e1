"""Model directories: what is in one, how to read one, and how to make a tiny one.

A model directory holds ``config.json``, safetensors weights and a tokenizer; the trainer and the
engine each load their own copy from it. torch and transformers are imported where they are used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hotbunk.rollout.errors import ConfigError, MissingExtra, closest, shown
from hotbunk.trainer_hooks.recipes.smollm2 import ensure_smollm2
from hotbunk.trainer_hooks.recipes.tasks import Sample
from hotbunk.trainer_hooks.recipes.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    Tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "ByteTokenizer",
    "HFTokenizer",
    "ModelBundle",
    "Tokenizer",
    "build_tiny",
    "encode_sample",
    "ensure_smollm2",
    "load_bundle",
    "load_config",
    "load_model",
    "load_state",
    "load_tokenizer",
]

_FAMILIES = ("llama", "qwen2", "qwen3")
_INIT_STD = 0.02


@dataclass(frozen=True)
class ModelBundle:
    """A model directory with its tokenizer; weights stay on disk until someone loads them."""

    model_dir: Path
    tokenizer: Tokenizer

    @property
    def config(self) -> Any:
        """A fresh transformers config at each access.

        Never one object for two owners: an engine that sets its attention implementation writes
        it into the config, and a trainer with the same object would switch along.
        """
        return load_config(self.model_dir)


def load_bundle(model_dir: str | Path) -> ModelBundle:
    """The model directory's tokenizer and configuration, checked; no weights are read.

    :raises ConfigError: something is missing, or the tokenizer has more ids than the model.
    """
    bundle = ModelBundle(Path(model_dir), load_tokenizer(_directory(model_dir)))
    rows = bundle.config.vocab_size
    if bundle.tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer in {model_dir} has {bundle.tokenizer.vocab_size} ids and the model {rows}"
        )
    return bundle


def encode_sample(tokenizer: Tokenizer, sample: Sample) -> list[int]:
    """The prompt's token ids: through the chat template where the prompt is a conversation."""
    if sample.messages is not None:
        return tokenizer.encode_chat(sample.messages)
    return tokenizer.encode(sample.prompt)


def load_config(model_dir: str | Path) -> Any:
    """A new transformers config object from ``config.json``.

    :raises ConfigError: no such directory, no ``config.json``, or not one transformers can read.
    """
    path = _directory(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model directory {model_dir} has no config.json")
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error


def load_state(model_dir: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model's safetensors file or shards, by name, on the CPU.

    A tied tensor is there once, under the name the file has it.

    :raises ConfigError: no weights, a shard that is missing, or a file that is not safetensors.
    """
    directory = _directory(model_dir)
    _transformers()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for name in _weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise ConfigError(f"model directory {directory} lacks its weight file {name}")
        try:
            state.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"weight file {path} cannot be read: {error}") from error
    return state


def load_model(model_dir: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """A causal LM with its own config object, in ``dtype`` (the file's where None), on the CPU.

    :raises ConfigError: the directory is not whole, or the weights are not this model's.
    """
    config = load_config(model_dir)
    state = load_state(model_dir)
    wanted = dtype or next(iter(state.values())).dtype
    model = _transformers().AutoModelForCausalLM.from_config(config, dtype=wanted)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"the weights in {model_dir} do not fit its config: {error}") from error
    model.tie_weights()
    own = model.state_dict()
    filled = {own[name].data_ptr() for name in state if name in own}
    lost = [name for name in missing if own[name].data_ptr() not in filled]
    for names, what in ((lost, "lack"), (unexpected, "have unknown")):
        if names:
            raise ConfigError(f"the weights in {model_dir} {what} tensors: {shown(names)}")
    return model.eval()


def build_tiny(
    model_dir: str | Path,
    *,
    family: str = "llama",
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 1024,
    tied: bool = False,
    scale: float = 1.0,
) -> Path:
    """Write an untrained byte-level model (float32) into ``model_dir``; return the directory.

    The defaults (0.36M parameters) learn the built-in tasks on two cores in about a minute. Equal
    arguments give equal bytes; torch's global random state is neither read nor changed. Matrices
    are normal with standard deviation ``0.02 * scale``. A test that compares tokens wants ``scale``
    of about 4: at 1, and still more when ``tied``, untrained models repeat one token whatever
    their weights, and stale weights would go unseen.

    :raises ConfigError: an unknown family, or sizes that do not divide.
    """
    if family not in _FAMILIES:
        raise ConfigError(f"there is no tiny family {family!r}{closest(family, _FAMILIES)}")
    if min(hidden, layers, heads, kv_heads, context) < 1:
        raise ConfigError("a tiny model's hidden, layers, heads, kv_heads, context are 1 or more")
    if hidden % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"hidden {hidden} must be a multiple of 2 x heads ({heads}), and heads of kv_heads "
            f"({kv_heads})"
        )
    transformers = _transformers()
    import torch
    from safetensors.torch import save_file

    directory = Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        dtype="float32",
    )
    # On the meta device: only names and shapes are wanted, and no global random number is drawn.
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(shapes).__name__]
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in shapes.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * (_INIT_STD * scale)
        # Norms and biases get noise too: all ones or zeros, a sync could lose them unseen.
        state[name] = 1.0 + noise if name.endswith("norm.weight") else noise
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(directory)
    config.save_pretrained(directory)
    return directory


def _transformers() -> Any:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingExtra(
            f"{error.name or 'torch'} is not installed", remedy="pip install 'hotbunk[reference]'"
        ) from error
    return transformers


def _directory(model_dir: str | Path) -> Path:
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(
            f"there is no model directory {directory}",
            remedy="give the path of a directory with config.json, weights and a tokenizer",
        )
    return directory


def _weight_files(directory: Path) -> list[str]:
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise ConfigError(f"model directory {directory} has no safetensors weights")
    try:
        content = msgspec.json.decode(index.read_bytes(), type=_ShardIndex)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    names = sorted(set(content.weight_map.values()))
    # A name with a folder in it could point outside the model directory.
    foreign = [name for name in names if os.path.basename(name) != name]
    if foreign or not names:
        raise ConfigError(f"{index} names no usable weight files: {shown(foreign)}")
    return names


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]

"""Tiny deterministic models whose versions tell each other apart on every prompt.

Untrained models of the usual scale repeat one token whatever their weights, so stale weights would
pass for fresh ones; these are scaled until they do not, and :func:`distinct` checks it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hotbunk.rollout.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {  # of families whose name ends in ``_moe``
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_SCALE = 5.0  # of matrices; twice that where head and embedding are one


def make_model(family: str, version: int, *, tied: bool = False, **sizes: int) -> Any:
    """The model of a version, in float32 on the CPU: the same bits every time.

    ``sizes`` replace some of :data:`SIZES`.
    """
    experts = EXPERTS if family.endswith("_moe") else {}
    sizes = {**SIZES, **experts, **sizes}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(1000 + version)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(_SCALE * (2.0 if tied else 1.0))
                else:  # norms and biases differ, too: a lost vector must show
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(False)


def brought(model: str | Path) -> Path:
    """A model directory that a user brings.

    :raises ConfigError: it is none.
    """
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"{model} is no model directory: it has no config.json")
    return Path(model)


def check_told_apart(
    model: Path, prompts: Sequence[Sequence[int]], golden: Callable[[Sequence[int], int], list[int]]
) -> None:
    """Whether stale weights of a model that was brought would show: ``golden(prompt, version)``.

    :raises ConfigError: they would not, or its vocabulary has not the tokens of these prompts.
    """
    config = AutoConfig.from_pretrained(model)
    if max(map(max, prompts)) >= config.vocab_size:
        raise ConfigError(f"{model} knows {config.vocab_size} tokens, too few for these prompts")
    if not distinct([[golden(prompt, version) for prompt in prompts] for version in range(4)]):
        raise ConfigError(f"versions of {model} go on alike: nothing could be told apart")


@torch.no_grad()
def version_of(directory: Path, version: int) -> Any:
    """A model directory as a trainer has it at a version, in float32: 0 is what lies there."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1000 + version)
    for parameter in model.parameters() if version else ():
        noise = torch.randn(parameter.shape, generator=draw)
        # Far enough that every prompt goes on otherwise; a constant vector moves, too.
        parameter.add_(
            noise * (parameter.std() if parameter.numel() > 1 else 0) * 0.5 + noise * 1e-3
        )
    return model.eval().requires_grad_(False)


def save_model(
    family: str, version: int, directory: Path, *, tied: bool = False, **sizes: int
) -> Path:
    """The version as a model directory (config.json and safetensors)."""
    make_model(family, version, tied=tied, **sizes).save_pretrained(directory)
    return directory


def text_of(tokens: Sequence[int]) -> str:
    """What the tokenizer of :func:`save_tokenizer` makes of tokens: two hexadecimal digits each."""
    return bytes(tokens).hex()


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer beside a model; the text of any tokens is :func:`text_of`."""
    from tokenizers import Tokenizer, decoders, models

    words = {f"{token:02x}": token for token in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="00"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def make_adapter(model: Any, name: str, version: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """An adapter on some of a model's layers, as PEFT names its tensors; scale 1."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()) * 1000 + version)
        tensors: dict[str, torch.Tensor] = {}
        for path, layer in model.named_modules():
            if path.rsplit(".", 1)[-1] in ("q_proj", "v_proj", "down_proj"):
                at = f"base_model.model.{path}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(rank, layer.in_features)
                tensors[f"{at}.lora_B.weight"] = torch.randn(layer.out_features, rank) * 0.3
    return tensors


@torch.no_grad()
def merged(model: Any, adapter: dict[str, torch.Tensor]) -> Any:
    """A copy of the model with the adapter in its weights: the oracle for adapters."""
    copied = copy.deepcopy(model)
    layers = dict(copied.named_modules())
    for name, a in adapter.items():
        if ".lora_A." in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            layers[path].weight += adapter[name.replace(".lora_A.", ".lora_B.")] @ a
    return copied


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """What transformers' own ``generate`` says: the oracle for tokens."""
    if n == 0:
        return []
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def distinct(goldens: Sequence[Sequence[Sequence[int]]]) -> bool:
    """Whether any two versions' goldens (version -> prompt -> tokens) differ on every prompt."""
    return all(
        list(a) != list(b)
        for one, version in enumerate(goldens)
        for other in goldens[one + 1 :]
        for a, b in zip(version, other, strict=True)
    )

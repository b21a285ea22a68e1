"""Getting weights into the model's memory: from disk at the start, from buckets afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.attention import NAME
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.binding import content_key, dtype_from
from hotbunk.rollout.contract import Bucket, Manifest
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import as_bytes, copy_many, fingerprints

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class Writer:
    """Writes one update's buckets into the arena."""

    def __init__(self, manifest: Manifest, tensor_of: Callable[[str], torch.Tensor]) -> None:
        self._manifest = manifest
        # Each entry's places, and which name's content is there already (ties), or nothing.
        self._targets: list[list[tuple[torch.Tensor, str]]] = []
        taken: dict[Hashable, str] = {}
        for spec in manifest.tensors:
            tensors = {name: tensor_of(name) for name in spec.names}
            places = {content_key(name, tensor): tensor for name, tensor in tensors.items()}
            self._targets.append([(as_bytes(t), taken.get(key, "")) for key, t in places.items()])
            for key in places:
                taken.setdefault(key, spec.name)
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.numel())
            for places in self._targets
            for t, earlier in places
            if not earlier and t.numel()
        )
        self._nested = any(low < end for (_, end), (low, _) in itertools.pairwise(spans))
        self.intake = Intake(manifest, [places[0][0].numel() for places in self._targets])

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Copy a bucket's pieces in.

        :raises TransferFailed: a broken table.
        :raises TiedMismatch: one tied tensor, two contents.
        """
        data = bucket.data
        if data is None:  # the sender wrote it
            self.intake.check(bucket, None)
            return
        if not isinstance(data, torch.Tensor):
            view = memoryview(data).cast("B")
            if view.readonly:  # torch wants buffers it could write to
                view = memoryview(bytearray(view))
            data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        ties: list[tuple[torch.Tensor, torch.Tensor, set[str]]] = []
        for entry in self.intake.check(bucket, data.numel()):
            piece = data[entry.offset : entry.offset + entry.nbytes]
            for target, earlier in self._targets[entry.index]:
                place = target[entry.start : entry.start + entry.nbytes]
                if earlier:
                    name = self._manifest.tensors[entry.index].name
                    ties.append((place, piece, {name, earlier}))
                else:
                    copies.append((place, piece))
        if self._nested:  # parts of one another: the last one wins
            for place, piece in copies:
                place.copy_(piece)
        else:
            copy_many(copies)
        for place, piece, names in ties:
            if not torch.equal(place, piece):
                raise errors.TiedMismatch(names)

    def differing(self, expected: Mapping[str, int]) -> list[str]:
        """Names whose content in the arena is not what was sent."""
        held = self._held()
        found = fingerprints([(target, 0) for _, target in held])
        pairs = zip(held, found, strict=True)
        return list(dict.fromkeys(name for (name, _), one in pairs if one != expected.get(name)))

    def _held(self) -> list[tuple[str, torch.Tensor]]:
        """What lies in the arena as it was sent."""
        return [
            (spec.name, target)
            for spec, targets in zip(self._manifest.tensors, self._targets, strict=True)
            for target, _ in targets
        ]


def load_model(options: ReferenceOptions) -> Any:
    """The model, on this engine's attention.

    :raises ConfigError: the directory is no model.
    :raises Unsupported: a family or a kind of layer that this engine does not run.
    """
    path = Path(options.model)
    if not (path / "config.json").is_file():
        raise errors.ConfigError(f"no model at {options.model!r}: config.json is missing")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        raise errors.Unsupported(
            f"model type {config.model_type!r}", "reference", f"it runs {', '.join(FAMILIES)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise errors.Unsupported(f"layers of kind {sorted(kinds)}", "reference")
    dtype = dtype_from(options.dtype)
    build: Callable[[], Any]
    if options.load == "empty":
        build = lambda: AutoModelForCausalLM.from_config(config, dtype=dtype)  # noqa: E731
    else:
        if not any(path.glob("*.safetensors")):
            raise errors.ConfigError(f"no weights at {options.model!r}: no *.safetensors file")
        build = lambda: AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)  # noqa: E731
    with torch.random.fork_rng():  # building draws numbers; the caller's stream is not ours
        model = build()
    model = model.eval().requires_grad_(False)
    model.set_attn_implementation(NAME)
    return model

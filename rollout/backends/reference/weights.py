"""Getting weights into the model's memory: from disk at the start, from buckets afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.attention import NAME
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.binding import ModuleBinding, content_key, dtype_from, parameters_on_meta
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
            if not torch.equal(place, piece.to(place.device)):
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


def build_model(options: ReferenceOptions, *, whole: bool = False) -> Any:
    """The model on this engine's attention, its parameters on ``meta``; see :func:`load_weights`.

    ``whole``: with its weights instead, for whoever makes something else of them before they go
    into the arena.

    :raises ConfigError: the directory is no model, or has no weights where some are wanted.
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
    if options.load != "empty" and not any(path.glob("*.safetensors")):
        raise errors.ConfigError(f"no weights at {options.model!r}: no *.safetensors file")
    dtype = dtype_from(options.dtype)
    # Building draws numbers; the caller's stream is not ours.
    with torch.random.fork_rng(devices=[]), nullcontext() if whole else parameters_on_meta():
        if whole and options.load != "empty":
            model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    model.set_attn_implementation(NAME)
    return model


@torch.no_grad()
def load_weights(options: ReferenceOptions, binding: ModuleBinding) -> None:
    """Read the weights into the arena, one tensor at a time.

    A checkpoint with other names than the model's (experts one by one, say) is transformers' to
    read; the weights then exist twice for a moment.

    :raises ConfigError: a file cannot be read, or tensors do not fit the model.
    """
    try:
        if _read_by_name(Path(options.model), binding):
            return
        dtype = dtype_from(options.dtype)
        with torch.random.fork_rng(devices=[]):
            read = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    except (SafetensorError, OSError) as error:
        raise errors.ConfigError(f"no weights at {options.model!r}: {error}") from error
    for name, parameter in read.named_parameters():
        binding.tensor(name).copy_(parameter)


def _read_by_name(directory: Path, binding: ModuleBinding) -> bool:
    """False, and nothing read: the files do not hold exactly the model's parameters."""
    places: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), path))
    known = binding.parameters
    if not places.keys() <= known.keys():
        return False
    if not all(names & places.keys() for names in binding.required()):
        return False
    for path in sorted(set(places.values())):
        with safe_open(path, framework="pt") as file:
            for name in (n for n, at in places.items() if at == path):
                tensor = file.get_tensor(name)
                if tensor.shape != known[name].shape:
                    raise errors.ConfigError(
                        f"{path.name} has {name!r} as {tuple(tensor.shape)}, "
                        f"and the model as {tuple(known[name].shape)}"
                    )
                known[name].copy_(tensor)
    return True

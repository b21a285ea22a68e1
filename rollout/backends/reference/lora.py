"""Adapters: low-rank additions to the model's linear layers, chosen per request.

``y = W x + (alpha / r) B A x`` (Hu et al., LoRA, 2021). Several adapters and none may share a step:
each token's row takes its own request's addition. Matrices lie in the pool, an arena an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotbunk.rollout import errors
from hotbunk.rollout.arena import ALIGN, Arena, MemoryPool
from hotbunk.rollout.backends.reference.quantize import Int8Linear
from hotbunk.rollout.binding import dtype_name, tensor_over
from hotbunk.rollout.contract import ADAPTER_PREFIX, Manifest, Placement, Tag

_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight$")


@dataclass
class Adapter:
    """One adapter's matrices: ``pairs`` maps a layer to A [r, in] and B [out, r]."""

    arena: Arena
    tensors: dict[str, torch.Tensor]
    pairs: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    alpha: float | None = None

    def addition(self, layer: str, x: torch.Tensor) -> torch.Tensor | None:
        """What it adds for inputs ``x`` [tokens, in]; None where it leaves the layer alone."""
        pair = self.pairs.get(layer)
        if pair is None:
            return None
        rank = pair["A"].shape[0]
        scale = 1.0 if self.alpha is None else self.alpha / rank
        return (x @ pair["A"].T) @ pair["B"].T * scale


class AdapterBank:
    """All adapters of a model, by name, and which rows of the step use which."""

    def __init__(self, model: nn.Module, pool: MemoryPool, dtype: torch.dtype) -> None:
        self._pool = pool
        self._dtype = dtype
        self._adapters: dict[str, Adapter] = {}
        self._rows: list[tuple[Adapter, torch.Tensor]] = []
        self._layers = {
            n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Int8Linear)
        }
        self._hooked = False  # a model without adapters pays nothing for them

    def placements(self, manifest: Manifest) -> dict[str, Placement]:
        """What this adapter's tensors would be here, by the names offered.

        :raises UnknownNames: a tensor that is no half of an addition to a linear layer.
        :raises ShapeMismatch: a half that does not fit its layer, or the other half.
        :raises IncompleteUpdate: one half without the other.
        """
        halves: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        unknown: set[str] = set()
        for spec in manifest.tensors:
            found = _NAME.match(spec.name)
            if found is None or found[1] not in self._layers or len(spec.shape) != 2:
                unknown.add(spec.name)
                continue
            halves.setdefault(found[1], {})[found[2]] = (spec.name, spec.shape)
        if unknown:
            raise errors.UnknownNames(unknown)
        for layer, pair in halves.items():
            if len(pair) != 2:
                raise errors.IncompleteUpdate({f"{layer}.lora_{'AB'.strip(*pair)}.weight"})
            linear, rank = self._layers[layer], pair["A"][1][0]
            for half, want in (
                ("A", (rank, linear.in_features)),
                ("B", (linear.out_features, rank)),
            ):
                name, shape = pair[half]
                if shape != want:
                    raise errors.ShapeMismatch(name, str(list(want)), str(list(shape)))
        dtype = dtype_name(self._dtype)
        return {s.name: Placement(dtype, s.shape) for s in manifest.tensors}

    def prepare(self, name: str, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Room for the adapter: the same as before where the shapes are the same."""
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        old = self._adapters.get(name)
        if old is None or {n: tuple(t.shape) for n, t in old.tensors.items()} != shapes:
            if old is not None:
                self._pool.drop(old.arena)
            old = self._adapters[name] = self._make(name, shapes)
        if not self._hooked:
            for path, layer in self._layers.items():
                layer.register_forward_hook(self._hook(path))
            self._hooked = True
        alpha = manifest.metadata.get("lora_alpha")
        old.alpha = None if alpha is None else float(alpha)
        return old.tensors

    def _make(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
        item = self._dtype.itemsize
        sizes = {n: item * shape[0] * shape[1] for n, shape in shapes.items()}
        room = sum(-(-size // ALIGN) * ALIGN for size in sizes.values())
        arena = self._pool.arena(Tag.WEIGHTS, room, ADAPTER_PREFIX + name)
        adapter = Adapter(arena, {})
        for tensor_name, shape in shapes.items():
            region = arena.add(tensor_name, sizes[tensor_name])
            tensor = tensor_over(self._pool, arena, region, self._dtype).view(shape)
            adapter.tensors[tensor_name] = tensor
            found = _NAME.match(tensor_name)
            assert found is not None
            adapter.pairs.setdefault(found[1], {})[found[2]] = tensor
        return adapter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every adapter's tensors, as ``adapter:<name>/<tensor>``."""
        return {
            f"{ADAPTER_PREFIX}{name}/{tensor_name}": tensor
            for name, adapter in self._adapters.items()
            for tensor_name, tensor in adapter.tensors.items()
        }

    def use(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Which rows of the coming step belong to which adapter."""
        device = self._pool.device
        self._rows = [
            (self._adapters[name], torch.tensor(at).to(device)) for name, at in rows.items()
        ]

    def _hook(self, layer: str) -> Any:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> Any:
            for adapter, rows in self._rows:
                extra = adapter.addition(layer, args[0].reshape(-1, args[0].shape[-1])[rows])
                if extra is not None:
                    out.view(-1, out.shape[-1]).index_add_(0, rows, extra.to(out.dtype))
            return out

        return add

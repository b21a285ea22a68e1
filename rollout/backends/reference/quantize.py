"""Weight-only int8: linear layers keep eight bits an element, and a scale a row.

``W[o, :] ~ q[o, :] * s[o]`` with ``s[o] = max |W[o, :]| / 127`` and ``q`` rounded half to even
(symmetric, per output channel; Jacob et al., 2018). Checkpoints and syncs carry the weights as they
are: each is quantised once, when the last byte of it is here, and the staged copy goes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional

from hotbunk.rollout.backends.reference.weights import Writer
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import Bucket, Manifest, Placement
from hotbunk.rollout.kernels import fingerprints

SCALE = "weight_scale"


class Int8Linear(nn.Module):
    """A linear layer [in] -> [out]; ``weight`` is int8 [out, in], ``weight_scale`` float32 [out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(torch.empty_like(weight, dtype=torch.int8), requires_grad=False)
        scale = torch.empty(self.out_features, dtype=torch.float32)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.quantise(weight)

    @torch.no_grad()
    def quantise(self, weight: torch.Tensor) -> None:
        """Take ``weight`` [out, in]. A row of zeros has the scale 1."""
        wide = weight.float()
        most = wide.abs().amax(1)
        scale = torch.where(most > 0, most / 127, torch.ones_like(most))
        self.weight_scale.copy_(scale)
        self.weight.copy_((wide / scale[:, None]).round().clamp(-127, 127))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in] -> [..., out], in the element type of ``x``."""
        weight = self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)[:, None]
        return functional.linear(x, weight, self.bias)


def quantise_model(model: nn.Module) -> None:
    """Replace the linear layers of the decoder's blocks; embeddings and head stay as they are."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Int8Linear(layer.weight, layer.bias))


def quantised(model: nn.Module) -> dict[str, Int8Linear]:
    """Quantised layers by the name of their weight."""
    return {
        f"{path}.weight": layer
        for path, layer in model.named_modules()
        if isinstance(layer, Int8Linear)
    }


def as_offered(
    known: Mapping[str, Placement], layers: Mapping[str, Int8Linear], dtype: torch.dtype
) -> dict[str, Placement]:
    """Placements as a sync sees them: unquantised, nowhere in the arena, and without scales."""
    scales = {name.removesuffix("weight") + SCALE for name in layers}
    seen = {name: place for name, place in known.items() if name not in scales}
    for name, layer in layers.items():
        seen[name] = Placement(dtype_name(dtype), tuple(layer.weight.shape))
    return seen


class QuantisingWriter(Writer):
    """Writes an update; what is to be quantised is staged a tensor at a time.

    Staged memory is not touched before its first byte arrives and is given back with its last.
    ``processed`` counts post-load processing: once a layer and update.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensor_of: Callable[[str], torch.Tensor],
        layers: Mapping[str, Int8Linear],
        dtype: torch.dtype,
    ) -> None:
        self.processed = 0
        self._layers = layers
        self._staged: dict[str, torch.Tensor] = {}
        self._sums: dict[str, int] = {}

        def place(name: str) -> torch.Tensor:
            if name not in layers:
                return tensor_of(name)
            staged = torch.empty(layers[name].weight.shape, dtype=dtype)
            self._staged[name] = staged
            return staged

        super().__init__(manifest, place)

    def write(self, bucket: Bucket) -> None:
        super().write(bucket)
        for name in self._complete(bucket):
            staged = self._staged.pop(name)
            self._sums[name] = fingerprints([(staged, 0)])[0]
            self._layers[name].quantise(staged)
            staged.untyped_storage().resize_(0)
            self.processed += 1

    def _complete(self, bucket: Bucket) -> Iterator[str]:
        for entry in bucket.entries:
            for name in self._manifest.tensors[entry.index].names:
                staged = self._staged.get(name)
                if staged is not None and entry.start + entry.nbytes == staged.nbytes:
                    yield name

    def differing(self, expected: Mapping[str, int]) -> list[str]:
        """Of quantised tensors, what arrived is compared; of the others, what lies in the arena."""
        arrived = [name for name, one in self._sums.items() if one != expected.get(name, one)]
        return super().differing(expected) + arrived

    def _held(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in super()._held() if name not in self._layers]

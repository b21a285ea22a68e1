"""What may be sent as an adapter: pairs of matrices for layers that vLLM can add to.

The names are PEFT's (``base_model.model.<layer>.lora_A.weight``, with or without that prefix); A is
[r, in] and B [out, r]. Nothing of vLLM is imported here: workers tell what they have, and both
ends check with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.contract import ADAPTER_PREFIX, Manifest, Placement
from hotbunk.rollout.intake import check_offer

PATH = "hotbunk:"  # before an adapter's name, where vLLM would have a directory's
_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight$")


class Adaptable(msgspec.Struct, frozen=True):
    """What adapters of one engine may be: by checkpoint name, [out, in] of each layer."""

    layers: Mapping[str, tuple[int, int]]
    rank: int  # the largest
    dtype: str

    def placements(self, manifest: Manifest) -> dict[str, Placement]:
        """What this adapter's tensors would be here, by the names offered.

        :raises UnknownNames: a tensor that is no half of an addition to a layer of this model.
        :raises ShapeMismatch: a half that does not fit its layer, its other half, or the rank.
        :raises IncompleteUpdate: one half without the other.
        :raises DuplicateName: two names for one half.
        :raises UpdateRefused: ``lora_alpha`` is no number.
        """
        alpha_of(manifest)
        halves: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        unknown, twice = set(), set()
        for spec in manifest.tensors:
            found = parsed(spec.name)
            if found is None or found[0] not in self.layers or len(spec.shape) != 2:
                unknown.add(spec.name)
            elif found[1] in halves.setdefault(found[0], {}):
                twice.add(spec.name)
            else:
                halves[found[0]][found[1]] = (spec.name, spec.shape)
        if unknown:
            raise errors.UnknownNames(unknown)
        if twice:
            raise errors.DuplicateName(twice)
        for layer, pair in halves.items():
            if len(pair) != 2:
                raise errors.IncompleteUpdate({f"{layer}.lora_{'AB'.strip(*pair)}.weight"})
            (a, a_shape), (b, b_shape) = pair["A"], pair["B"]
            rank, (out, into) = a_shape[0], self.layers[layer]
            if not 0 < rank <= self.rank:
                raise errors.ShapeMismatch(
                    a, f"of rank 1 to {self.rank}", f"of rank {rank}", remedy="set max_lora_rank"
                )
            for name, shape, want in ((a, a_shape, (rank, into)), (b, b_shape, (out, rank))):
                if shape != want:
                    raise errors.ShapeMismatch(name, str(list(want)), str(list(shape)))
        known = {spec.name: Placement(self.dtype, spec.shape) for spec in manifest.tensors}
        check_offer(manifest, known, [])
        return known


def parsed(name: str) -> tuple[str, str] | None:
    """The layer, and which half (``A`` or ``B``); None: it is no adapter's tensor."""
    found = _NAME.match(name)
    return None if found is None else (found[1], found[2])


def alpha_of(manifest: Manifest) -> float | None:
    """What the adapter is scaled with, over its rank; None: it is not scaled.

    :raises UpdateRefused: that is no number.
    """
    said: Any = manifest.metadata.get("lora_alpha")
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise errors.UpdateRefused(f"lora_alpha is {said!r} and no number")
    return float(said)


def group_of(name: str) -> str:
    """An adapter's weight group."""
    return ADAPTER_PREFIX + name


def slots(name: str) -> bool:
    """Whether a tensor of the model is what vLLM copies adapters into before a step needs them."""
    return "lora_a_stacked" in name or "lora_b_stacked" in name

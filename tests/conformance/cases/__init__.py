"""The cases. Importing this package registers them all."""

from hotbunk.conformance.cases import (
    adapters,
    broken,
    declared,
    goldens,
    inflight,
    pauses,
    sampling,
    states,
    updates,
    waiting,
)

__all__ = [
    "adapters",
    "broken",
    "declared",
    "goldens",
    "inflight",
    "pauses",
    "sampling",
    "states",
    "updates",
    "waiting",
]

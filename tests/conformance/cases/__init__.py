"""The cases. Importing this package registers them all."""

from hotbunk.conformance.cases import (
    adapters,
    arrival,
    broken,
    colocate,
    declared,
    goldens,
    inflight,
    pauses,
    phases,
    sampling,
    states,
    steps,
    updates,
    waiting,
)

__all__ = [
    "adapters",
    "arrival",
    "broken",
    "colocate",
    "declared",
    "goldens",
    "inflight",
    "pauses",
    "phases",
    "sampling",
    "states",
    "steps",
    "updates",
    "waiting",
]

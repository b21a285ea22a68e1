"""The cases. Importing this package registers them all."""

from hotbunk.conformance.cases import broken, goldens, inflight, pauses, states, updates, waiting

__all__ = ["broken", "goldens", "inflight", "pauses", "states", "updates", "waiting"]

"""The drilled engine in a process that has torch from the start, as real engines do."""

from hotbunk.conformance.drill.engine import create

__all__ = ["PRELOAD", "create"]

PRELOAD = ("torch", "torch.distributed")

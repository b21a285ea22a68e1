"""The blocking facade: everything that has a coroutine, for scripts that have no event loop."""

from __future__ import annotations

from hotbunk.checkpoint_engine.blocking import BlockingManager, LoopThread

__all__ = ["BlockingManager", "LoopThread"]

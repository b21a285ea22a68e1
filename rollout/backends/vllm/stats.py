"""What an engine core does, counted as its outputs come."""

from __future__ import annotations

from typing import Any


class Stats:
    """A stat logger of vLLM's shape: counts the core's steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.kv_usage = 0.0
        self.preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called once an output of the engine core."""
        self.steps += 1
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is logged."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_sleep_state(self, *_: Any) -> None:
        """Sleep does not pass vLLM's own verbs."""

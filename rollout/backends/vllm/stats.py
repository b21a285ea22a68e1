"""What the engine cores of one engine do, counted as their outputs come."""

from __future__ import annotations

from typing import Any


class Stats:
    """A stat logger of vLLM's shape: counts the steps of all ``cores``, which hold as many blocks each."""

    def __init__(self, cores: int = 1) -> None:
        self.steps = 0
        self.preemptions = 0
        self._cores = cores
        self._usage: dict[int, float] = {}

    @property
    def kv_usage(self) -> float:
        """Of the blocks of all cores together, as each said last."""
        return sum(self._usage.values()) / self._cores

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *_: Any, engine_idx: int = 0, **__: Any
    ) -> None:
        """Called once an output of an engine core."""
        self.steps += 1
        if scheduler_stats is not None:
            self._usage[engine_idx] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is logged."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_sleep_state(self, *_: Any) -> None:
        """Sleep does not pass vLLM's own verbs."""

"""vLLM's CPU worker, with weights and KV in a pool that gives memory back.

The stock one answers sleep with success and frees nothing. Named in ``worker_cls``; the model is
loaded as ever and then moved into the pool, so it exists twice for a moment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from hotbunk.rollout.backends.vllm.parked import Pooled
from hotbunk.rollout.contract import Retention, Tag


class PooledCPUWorker(CPUWorker):  # type: ignore[misc]
    """Also what vLLM's own sleep and wake_up end in: levels 1 and 2, and KV alone."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.hotbunk_pool = Pooled()
        super().load_model(*args, **kwargs)
        self.hotbunk_pool.take_weights(self.model_runner.get_model())

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return self.hotbunk_pool.caches() if tag == Tag.KV_CACHE.value else nullcontext()

    def sleep(self, level: int = 1) -> None:
        kept = Retention.BACKUP if level == 1 else Retention.DISCARD
        self.hotbunk_pool.release(tuple(Tag), kept, {})

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.hotbunk_pool.resume([tag for tag in Tag if tags is None or tag.value in tags])

    def discard(self, tags: tuple[str, ...]) -> None:
        self.hotbunk_pool.release([Tag(tag) for tag in tags], Retention.DISCARD, {})

"""Memory of a vLLM worker that can be taken away, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hotbunk.rollout.backends.vllm.parked import Own, Pooled
from hotbunk.rollout.contract import Retention, Tag


def test_every_kv_pool_of_a_hybrid_model_comes_back_once_and_zeroed_g23() -> None:
    """Its layers have several tensors each, of several types: all are released, none is stale."""
    parked = Pooled()
    with parked.caches():
        attention = torch.zeros(2, 4096, dtype=torch.bfloat16)
        state = [torch.zeros(8192), torch.empty((16, 512), dtype=torch.float32)]
    flat = [attention, *state]
    sizes = [arena.resident for arena in parked.memory().arenas]  # whole pages
    assert len(sizes) == len(flat)
    addresses = [one.data_ptr() for one in flat]
    for _ in range(3):
        for number, one in enumerate(flat):
            one.fill_(number + 1)
        released = parked.release([Tag.KV_CACHE], Retention.DISCARD, {})
        assert (released.freed, released.resident(Tag.KV_CACHE)) == (sum(sizes), 0)
        back = parked.resume([Tag.KV_CACHE])
        assert [arena.resident for arena in back.arenas] == sizes, "each once"
        assert [one.data_ptr() for one in flat] == addresses
        assert not any(one.any() for one in flat)


class _Worker:
    """What a GPU's worker has, as far as :class:`Own` asks it. It counts what is called."""

    def __init__(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        shared = torch.zeros(64)  # two layers, one pool
        caches: list[Any] = [shared[:32], [shared[32:], torch.zeros(16, dtype=torch.int8)]]
        self.model_runner = SimpleNamespace(get_model=lambda: model, kv_caches=caches)
        self.woken: list[list[str] | None] = []

    def sleep(self, level: int) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.woken.append(tags)


def test_a_hybrid_models_kv_is_counted_once_and_woken_once_g23() -> None:
    """vLLM's own hook after a wake runs with it, so once; and never for what was awake."""
    worker = _Worker()
    own = Own(worker)
    assert own.memory().resident(Tag.KV_CACHE) == 64 * 4 + 16
    own.release([Tag.KV_CACHE], Retention.DISCARD, {})
    own.resume([Tag.KV_CACHE])
    own.resume(list(Tag))
    assert worker.woken == [["kv_cache"]]

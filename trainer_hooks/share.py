"""A torch trainer's memory in a pool: parameters, gradients and optimizer state under ``trainer``.

While the engine generates, the share is released: parameters and optimizer state into a backup,
gradients for good (they come back as zeros). Addresses stay, so the optimizer notices nothing.
"""

from __future__ import annotations

import asyncio
import threading

import torch
from torch import nn

from hotbunk.rollout.arena import ALIGN, MemoryPool, Survival
from hotbunk.rollout.binding import ModuleBinding, tensor_over
from hotbunk.rollout.contract import MemoryReport, Retention
from hotbunk.rollout.errors import Unsupported

TAG = "trainer"
_KEPT = {
    "params": Retention.BACKUP,
    "optimizer": Retention.BACKUP,
    "grads": Retention.DISCARD,
}


class PooledTrainer:
    """Binds a module and its AdamW state into ``pool`` and gives them away on demand.

    ``optimizer.zero_grad`` must be called with ``set_to_none=False``: gradients stay in place.

    :raises Unsupported: an optimizer variant whose state would not lie in the pool.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.AdamW,
        pool: MemoryPool,
        *,
        offload: bool,
        tag: str = TAG,
    ) -> None:
        self._pool = pool
        self._tag = tag
        self._offload = offload
        self._away = False
        # One at a time, also when an earlier one was cancelled and its thread goes on.
        self._lock = threading.Lock()
        if any(group["amsgrad"] for group in optimizer.param_groups):
            raise Unsupported("AdamW with amsgrad", "pooled trainer")
        ModuleBinding(module, pool, tag, "params")
        parameters = [p for p in module.parameters() if p.requires_grad]
        whole = sum(_padded(p) for p in parameters)
        grads = pool.arena(tag, whole, "grads")
        moments = pool.arena(tag, 2 * whole, "optimizer")

        def zeros(arena_name: str, like: torch.Tensor, name: str) -> torch.Tensor:
            if not like.numel():
                return torch.zeros_like(like)
            arena, survival = moments, Survival.CONTENT
            if arena_name == "grads":
                arena, survival = grads, Survival.ZERO
            region = arena.add(name, like.numel() * like.element_size(), survival)
            return tensor_over(pool, arena, region, like.dtype).view(like.shape)

        for index, parameter in enumerate(parameters):
            parameter.grad = zeros("grads", parameter, f"{index}")
            # AdamW's own state, made before its first step so that it lies in the pool.
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": zeros("optimizer", parameter, f"{index}.exp_avg"),
                "exp_avg_sq": zeros("optimizer", parameter, f"{index}.exp_avg_sq"),
            }

    async def offload(self) -> None:
        await asyncio.to_thread(self._give_away)

    async def restore(self) -> None:
        await asyncio.to_thread(self._take_back)

    def _give_away(self) -> None:
        with self._lock:
            if self._offload and not self._away:
                self._pool.release([self._tag], _KEPT)
                self._away = True

    def _take_back(self) -> None:
        with self._lock:
            if self._away:
                self._pool.resume([self._tag])
                self._away = False

    def memory(self) -> MemoryReport:
        """What the trainer holds now."""
        return self._pool.memory()


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN

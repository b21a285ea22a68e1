"""Memory of one vLLM worker that can be taken away: in our pool on CPUs, in vLLM's own elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hotbunk.rollout import errors
from hotbunk.rollout.arena import Survival
from hotbunk.rollout.backends.vllm.adapters import slots
from hotbunk.rollout.binding import ModuleBinding, tensor_over
from hotbunk.rollout.contract import TARGET, ArenaReport, MemoryReport, Retention, Tag
from hotbunk.rollout.device_pool import device_pool

_LARGE = 1 << 12  # bytes; what is smaller is bookkeeping


class Parked(ABC):
    """The memory verbs of one worker."""

    @abstractmethod
    def release(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> MemoryReport:
        """See :meth:`RolloutBackend.release`."""

    @abstractmethod
    def resume(self, tags: Collection[Tag]) -> MemoryReport:
        """See :meth:`RolloutBackend.resume`."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is resident."""


class Pooled(Parked):
    """Weights and KV in arenas of one pool, whose memory other processes may map.

    :raises NativeUnavailable: hotbunk was installed pure.
    """

    def __init__(self) -> None:
        self.pool = device_pool("cpu", share=True)
        self.binding: ModuleBinding | None = None
        self._caches = 0

    def take_weights(self, model: nn.Module) -> None:
        """Move every tensor of the loaded model into an arena; the objects stay the same."""
        self.binding = ModuleBinding(model, self.pool, Tag.WEIGHTS, TARGET, rebuilt=slots)

    @contextmanager
    def caches(self) -> Iterator[None]:
        """Inside, ``torch.zeros`` and ``torch.empty`` of some size are memory of the KV cache."""
        with _Diverted(self._cache):
            yield

    def _cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        name = f"cache{self._caches}" if self._caches else ""
        self._caches += 1
        arena = self.pool.arena(Tag.KV_CACHE, nbytes, name)
        region = arena.add("kv", nbytes, Survival.ZERO)  # never read undefined after a wake
        return tensor_over(self.pool, arena, region, dtype).view(shape)

    def release(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> MemoryReport:
        # Adapters have groups of their own; the KV cache is in none, and is never kept.
        groups = {a.group: retention for a in self.pool.arenas() if a.tag == Tag.WEIGHTS}
        return self.pool.release(tags, {**groups, **overrides})

    def resume(self, tags: Collection[Tag]) -> MemoryReport:
        return self.pool.resume(tags)

    def memory(self) -> MemoryReport:
        return self.pool.memory()


class Counted(Parked):
    """A worker whose memory stays: what it holds is counted, nothing is given back."""

    def __init__(self, worker: Any, why: str) -> None:
        self._worker = worker
        self._why = why

    def release(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> MemoryReport:
        raise errors.Unsupported("release", "vllm", self._why)

    def resume(self, tags: Collection[Tag]) -> MemoryReport:
        return self.memory()  # nothing ever left

    def memory(self) -> MemoryReport:
        weights, kv = storages(self._worker)
        sizes = {Tag.WEIGHTS: sum(weights.values()), Tag.KV_CACHE: sum(kv.values())}
        return MemoryReport(
            tuple(
                ArenaReport(tag, TARGET if tag is Tag.WEIGHTS else "", size, size)
                for tag, size in sizes.items()
            ),
            measured_by="accounting",
        )


class Own(Counted):
    """vLLM's own sleep in the worker (``enable_sleep_mode``): both tags, or KV alone.

    The worker's methods are called past the engine core, so nothing resumes its scheduler.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker, "")
        self._away: set[Tag] = set()

    def release(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> MemoryReport:
        wanted = set(tags) - self._away
        if Tag.WEIGHTS in wanted and Tag.KV_CACHE not in wanted | self._away:
            raise errors.Unsupported("releasing weights alone", "vllm", "release KV, too")
        if Tag.WEIGHTS in wanted and self._away:
            self._worker.wake_up([tag.value for tag in self._away])
        before = self.memory().resident()
        if Tag.WEIGHTS in wanted:
            self._worker.sleep(1 if retention is Retention.BACKUP else 2)
            wanted = set(Tag)
        elif wanted:
            self._worker.discard((Tag.KV_CACHE.value,))
        self._away |= wanted
        report = self.memory()
        return MemoryReport(
            report.arenas, freed=before - report.resident(), measured_by=report.measured_by
        )

    def resume(self, tags: Collection[Tag]) -> MemoryReport:
        back = self._away & set(tags)
        if back:
            self._worker.wake_up([tag.value for tag in back])
            self._away -= back
        return self.memory()

    def memory(self) -> MemoryReport:
        report = super().memory()
        arenas = tuple(
            ArenaReport(a.tag, a.group, a.reserved, 0 if Tag(a.tag) in self._away else a.resident)
            for a in report.arenas
        )
        return MemoryReport(arenas, measured_by=report.measured_by)


class _Diverted(TorchFunctionMode):
    """Sends allocations on the host elsewhere."""

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros, torch.empty):
            size = kwargs.get("size", args[0] if len(args) == 1 else args)
            shape = (size,) if isinstance(size, int) else tuple(size)
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            nbytes = dtype.itemsize
            for one in shape:
                nbytes *= one
            if device.type == "cpu" and nbytes >= _LARGE:
                return self._make(shape, dtype)
        return func(*args, **kwargs)


def storages(worker: Any) -> tuple[dict[int, int], dict[int, int]]:
    """Address -> bytes of every storage of the weights and of the KV cache, each once."""
    model = worker.model_runner.get_model()
    return _behind([*model.parameters(), *model.buffers()]), _behind(worker.model_runner.kv_caches)


def _behind(tensors: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        for one in tensor if isinstance(tensor, (list, tuple)) else (tensor,):
            storage = one.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found

"""Weights that verl hands over, as a :class:`~hotbunk.checkpoint_engine.source.WeightSource`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotbunk.checkpoint_engine.source import TensorSource
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import ADAPTER_PREFIX, TARGET, TensorSpec
from hotbunk.rollout.errors import TransferFailed

Named = Iterable[tuple[str, torch.Tensor]]


def plain_name(name: str) -> str:
    """A parameter's name as engines know it: without what peft wraps around a base layer."""
    return name.replace(".base_layer.", ".").removeprefix("base_model.model.")


def adapter_group(name: str) -> str:
    """The weight group of an adapter."""
    return ADAPTER_PREFIX + name


class EngineSource:
    """A training engine's parameters: each walk asks the engine for them anew.

    verl's engines say neither names nor shapes beforehand, so the first :meth:`specs` walks once.
    Every walk is a collective of all trainer ranks.

    :param named: a fresh generator of the engine, one full tensor at a time.
    """

    def __init__(self, named: Callable[[], Named], *, group: str = TARGET) -> None:
        self._named = named
        self._group = group
        self._specs: tuple[TensorSpec, ...] | None = None

    def specs(self) -> tuple[TensorSpec, ...]:
        if self._specs is None:
            self._specs = tuple(
                TensorSpec(
                    self._rename(name),
                    tuple(tensor.shape),
                    dtype_name(tensor.dtype),
                    tensor.numel() * tensor.element_size(),
                    self._group,
                )
                for name, tensor in self._named()
            )
        return self._specs

    def tensors(self) -> Iterator[torch.Tensor]:
        """:raises TransferFailed: the engine yields other names than it did."""
        specs = iter(self.specs())
        with ending(self._named()) as named:
            for name, tensor in named:
                spec = next(specs, None)
                if spec is None or spec.name != self._rename(name):
                    raise TransferFailed(
                        f"the trainer yields {name!r} where it yielded "
                        f"{spec.name if spec else 'nothing'!r} before"
                    )
                yield tensor.detach()

    def _rename(self, name: str) -> str:
        return plain_name(name) if self._group == TARGET else name


@contextmanager
def ending(named: Named) -> Iterator[Named]:
    """A generator that ends here, wherever it is: one that merged an adapter takes it out again."""
    try:
        yield named
    finally:
        if isinstance(named, Generator):
            named.close()


async def staged(
    weights: AsyncIterator[tuple[str, torch.Tensor]] | Named, *, group: str = TARGET, keep: bool
) -> TensorSource | None:
    """A generator that can be walked once, as a source that can be walked again: a host copy.

    ``keep=False``: walked to its end all the same, as a collective must be, and forgotten.
    """
    held: dict[str, torch.Tensor] = {}
    async for name, tensor in _asynchronous(weights):
        if keep:
            key = plain_name(name) if group == TARGET else name
            held[key] = tensor.detach().to("cpu", copy=True)
    return TensorSource(held.items, group=group) if keep else None


async def _asynchronous(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one

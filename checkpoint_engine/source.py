"""Where weights come from: re-iterable named tensors, with what is tied known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import TARGET, TensorSpec
from hotbunk.rollout.errors import DuplicateName

Rename = Callable[[str], str | None]


class WeightSource(Protocol):
    """Named tensors that can be walked again and again, each time as they are then."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """What will come, in order; nothing is gathered for it."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, in the order of :meth:`specs`. One at a time: earlier ones may be freed."""
        ...


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two names the same content: same memory, looked at in the same way."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def specs_of(named: Iterable[tuple[str, torch.Tensor]], group: str) -> dict[str, TensorSpec]:
    """One spec a content, under its first name; tied names become its aliases.

    :raises DuplicateName: a name comes twice with different contents.
    """
    first: dict[tuple[object, ...], str] = {}
    names: dict[str, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[str, tuple[object, ...]] = {}
    for name, tensor in named:
        key = _identity(tensor) if tensor.numel() else (name,)
        if name in seen:
            if seen[name] != key:
                raise DuplicateName([name])
            continue
        seen[name] = key
        owner = first.setdefault(key, name)
        if owner == name:
            names[name], tensors[name] = [], tensor
        else:
            names[owner].append(name)
    return {
        name: TensorSpec(
            name,
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            tensor.numel() * tensor.element_size(),
            group,
            tuple(names[name]),
        )
        for name, tensor in tensors.items()
    }


class TensorSource:
    """Named tensors that exist: a state dict, or ``module.named_parameters()`` called anew.

    ``named`` is called for each walk, so the source follows an optimizer that replaces tensors.
    """

    def __init__(
        self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]], *, group: str = TARGET
    ) -> None:
        self._named = named
        self._group = group

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(specs_of(self._named(), self._group).values())

    def tensors(self) -> Iterator[torch.Tensor]:
        named = dict(self._named())
        for name in specs_of(named.items(), self._group):
            yield named[name].detach()


def module_source(
    module: nn.Module, *, rename: Rename | None = None, group: str = TARGET
) -> TensorSource:
    """A module's parameters, tied ones included. ``rename`` maps a name; None drops it."""

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            mapped = rename(name) if rename else name
            if mapped is not None:
                yield mapped, parameter

    return TensorSource(named, group=group)


def state_dict_source(state: Mapping[str, torch.Tensor], *, group: str = TARGET) -> TensorSource:
    """A state dict, as it is when walked."""
    return TensorSource(state.items, group=group)

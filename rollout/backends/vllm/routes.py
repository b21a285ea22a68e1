"""Where a model's own loader puts each tensor of a checkpoint, found by watching it load.

An engine keeps weights under names of its own: fused (q, k and v in one matrix), sharded over
ranks, padded. Only its loader knows how. So the checkpoint that the engine was started from is
loaded once more, under watch: every copy out of a checkpoint tensor into a parameter is noted and
compared instead of made. What is noted is enough to write a tensor where it belongs, all of it or
one of three that share a matrix, and to read it back; what is compared proves that nothing was
transformed after loading. Only torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Named = Iterable[tuple[str, torch.Tensor]]


class Piece(NamedTuple):
    """A part of a checkpoint tensor, and the part of a parameter that holds it.

    ``offset``, ``shape`` and ``stride`` cut it out of the contiguous tensor (in elements).
    """

    into: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, as a view of a contiguous tensor of the checkpoint's shape."""
        return tensor.as_strided(self.shape, self.stride, self.offset)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two pieces that lie in the same place."""
        return (self.into.data_ptr(), tuple(self.into.shape), tuple(self.into.stride()))


@dataclass
class Route:
    """Where one checkpoint tensor lies. ``intact``: its bytes are those of the checkpoint."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
    intact: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Element type in the engine."""
        return self.pieces[0].into.dtype

    @cached_property
    def elements(self) -> int:
        """How many elements of the tensor this rank holds."""
        count = 1
        for size in self.shape:
            count *= size
        seen = torch.zeros(count, dtype=torch.bool)
        for piece in self.pieces:
            piece.of(seen).fill_(True)
        return int(seen.sum())

    def write(self, tensor: torch.Tensor) -> None:
        """Put a contiguous tensor of the checkpoint's shape where it belongs."""
        for piece in self.pieces:
            piece.into.copy_(piece.of(tensor))

    def read(self) -> torch.Tensor:
        """The tensor as it lies in the engine; zeros where another rank holds it."""
        tensor = torch.zeros(self.shape, dtype=self.dtype)
        for piece in self.pieces:
            piece.of(tensor).copy_(piece.into)
        return tensor


class Routes(Mapping[str, Route]):
    """Routes by checkpoint name; also by other names that the model ties to the same parameter.

    :param load: the model's own loader.
    :param checkpoint: what the model was loaded from. Tensors must be contiguous.
    """

    def __init__(
        self, model: nn.Module, load: Callable[[Named], object], checkpoint: Named
    ) -> None:
        with _Watch() as watch:
            load(watch.over(checkpoint))
        # Without pieces are those that the loader passes over (rotary caches of old checkpoints).
        self._routes: dict[str, Route] = {n: r for n, r in watch.routes.items() if r.pieces}
        ties: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # vLLM puts a layer that takes adapters around its own, which checkpoints know nothing of.
            ties.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
        for names in ties.values():
            known = [self._routes[name] for name in names if name in self._routes]
            for name in names if known else ():
                self._routes.setdefault(name, known[0])

    def __getitem__(self, name: str) -> Route:
        return self._routes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._routes)

    def __len__(self) -> int:
        return len(self._routes)

    def transformed(self) -> list[str]:
        """Names whose bytes are no longer those of the checkpoint."""
        return sorted(name for name, route in self._routes.items() if not route.intact)

    def uncovered(self, model: nn.Module) -> list[str]:
        """The model's parameters that no checkpoint tensor reaches."""
        reached = {
            piece.into.untyped_storage().data_ptr()
            for route in self._routes.values()
            for piece in route.pieces
        }
        return sorted(
            name
            for name, parameter in model.named_parameters()
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in reached
        )

    def ties(self, names: Collection[str] | None = None) -> list[list[str]]:
        """The names, those that lie in the same place together."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name in self._routes if names is None else names:
            key = tuple(piece.key for piece in self._routes[name].pieces)
            groups.setdefault(key, []).append(name)
        return list(groups.values())


class _Watch(TorchFunctionMode):
    """Notes copies out of the tensor that is being loaded, and compares instead of copying."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, Route] = {}
        self._tensor: torch.Tensor | None = None
        self._route = Route(())

    def over(self, checkpoint: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint, tensor by tensor: what a loader takes, it puts away at once."""
        for name, tensor in checkpoint:
            self._tensor = tensor
            self._route = self.routes[name] = Route(tuple(tensor.shape))
            yield name, tensor
        self._tensor = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.copy_ and len(args) > 1 and self._is_part(args[1]):
            into, part = args[0].detach(), args[1].detach()
            whole = self._tensor
            assert whole is not None
            offset = part.storage_offset() - whole.storage_offset()
            part = part.expand_as(into)  # a scalar may be spread over many
            self._route.pieces.append(Piece(into, offset, tuple(part.shape), part.stride()))
            self._route.intact &= _same_bytes(into, part.to(into.dtype))
            return args[0]
        return func(*args, **kwargs)

    def _is_part(self, tensor: Any) -> bool:
        """Whether it is a view of the tensor that is being loaded."""
        return (
            isinstance(tensor, torch.Tensor)
            and self._tensor is not None
            and tensor.device == self._tensor.device
            and tensor.dtype == self._tensor.dtype
            and tensor.untyped_storage().data_ptr() == self._tensor.untyped_storage().data_ptr()
        )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, and zeros have signs."""
    flat = [t.to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)

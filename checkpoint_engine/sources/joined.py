"""Several sources as one: each has some of the names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.rollout.contract import TensorSpec
from hotbunk.rollout.errors import DuplicateName, TransferFailed
from hotbunk.rollout.kernels import fingerprint


class JoinedSource:
    """The union of ``sources``, one behind another.

    A name that several of them have is sent once if its bytes are the same everywhere, which is
    looked at when specs are asked for: only then are tensors read for it. ``deduplicated`` counts
    such names.

    :raises DuplicateName: one name with different contents, or ties that differ.
    """

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self._sources = tuple(sources)
        self.deduplicated = 0

    def specs(self) -> tuple[TensorSpec, ...]:
        found, skipped = self._look()
        self.deduplicated = sum(len(one) for one in skipped)
        if self.deduplicated:
            self._compare(found, skipped)
        return tuple(
            spec
            for specs, left_out in zip(found, skipped, strict=True)
            for spec in specs
            if spec.name not in left_out
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        found, skipped = self._look()
        for source, specs, left_out in zip(self._sources, found, skipped, strict=True):
            walk = source.tensors()
            for spec in specs:  # not by zip, which keeps a tensor until it has the next one
                tensor = _next(walk)
                if spec.name not in left_out:
                    yield tensor
                del tensor

    def _look(self) -> tuple[list[tuple[TensorSpec, ...]], list[set[str]]]:
        """The specs of each source, and which of them an earlier source has already."""
        found = [source.specs() for source in self._sources]
        seen: dict[str, TensorSpec] = {}
        skipped: list[set[str]] = []
        for specs in found:
            left_out = set()
            for spec in specs:
                known = [seen[name] for name in spec.names if name in seen]
                if any(one != spec for one in known):
                    raise DuplicateName([name for name in spec.names if name in seen])
                if known:
                    left_out.add(spec.name)
                seen.update(dict.fromkeys(spec.names, spec))
            skipped.append(left_out)
        return found, skipped

    def _compare(self, found: Sequence[Sequence[TensorSpec]], skipped: Sequence[set[str]]) -> None:
        names = set().union(*skipped)
        sums: dict[str, int] = {}
        differing = set()
        for source, specs in zip(self._sources, found, strict=True):
            if not any(spec.name in names for spec in specs):
                continue
            walk = source.tensors()
            for spec in specs:
                tensor = _next(walk)
                if spec.name in names:
                    one = fingerprint(tensor)
                    if sums.setdefault(spec.name, one) != one:
                        differing.add(spec.name)
                del tensor
        if differing:
            raise DuplicateName(differing)


def _next(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    found = next(tensors, None)
    if found is None:  # a StopIteration would end the walk in silence
        raise TransferFailed("a source yields fewer tensors than it said")
    return found


def with_group(source: WeightSource, group: str) -> WeightSource:
    """The same tensors, as those of another weight group (a draft model's, say)."""
    return _Grouped(source, group)


class _Grouped:
    def __init__(self, source: WeightSource, group: str) -> None:
        self._source, self._group = source, group

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            msgspec.structs.replace(spec, group=self._group) for spec in self._source.specs()
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        return self._source.tensors()

"""A trainer's names as an engine's: renamed, dropped, fused, or kept, and all of it counted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import TensorSpec
from hotbunk.rollout.errors import (
    ConfigError,
    DuplicateName,
    IncompleteUpdate,
    ShapeMismatch,
    TransferFailed,
    UnknownNames,
)


@dataclass(frozen=True)
class Keep:
    """Names that match ``pattern`` (a regular expression, over the whole name) stay as they are."""

    pattern: str


@dataclass(frozen=True)
class Rename:
    """Names that match become ``to``, in which ``\\1`` stands for the first group."""

    pattern: str
    to: str


@dataclass(frozen=True)
class Drop:
    """Tensors of these names are not sent."""

    pattern: str


@dataclass(frozen=True)
class Fuse:
    """One tensor of several, one behind another along ``dim``: query, key and value, say.

    ``parts`` are patterns, in the order of the result; groups in ``to`` are those of the part.
    """

    parts: tuple[str, ...]
    to: str
    dim: int = 0


Rule = Keep | Rename | Drop | Fuse


@dataclass
class MapReport:
    """What became of the names: how many each rule matched, in the rules' order."""

    matched: dict[Rule, int] = field(default_factory=dict)
    kept: int = 0
    renamed: int = 0
    dropped: int = 0
    fused: int = 0  # parts
    sent: int = 0  # tensors that go out


@dataclass
class _Fused:
    """A tensor being put together."""

    spec: TensorSpec
    dim: int
    starts: tuple[int, ...]  # along ``dim``, of each part
    missing: set[int]
    out: torch.Tensor | None = None

    def put(self, part: int, tensor: torch.Tensor) -> bool:
        """Whether this was the last part."""
        if self.out is None:
            self.out = torch.empty(
                self.spec.shape, dtype=dtype_from(self.spec.dtype), device=tensor.device
            )
        size = tensor.shape[self.dim]
        self.out.narrow(self.dim, self.starts[part], size).copy_(tensor)
        self.missing.discard(part)
        return not self.missing


@dataclass
class _Plan:
    specs: list[TensorSpec]
    # For each tensor of the source: whether it goes out itself, and into which others.
    goes: list[bool]
    into: list[list[tuple[str, int]]]
    fused: dict[str, tuple[TensorSpec, int, tuple[int, ...]]]
    report: MapReport


class MappedSource:
    """A source whose names are another's, by rules; of several that match a name the first counts.

    A tensor of several names (tied ones) is one under what becomes of each of them. Fused tensors
    come when their last part has; until then each holds the memory of the whole.

    :raises UnknownNames: names that no rule matches.
    :raises IncompleteUpdate: nothing is left to send, or a fused tensor lacks a part.
    :raises DuplicateName: two tensors under one name.
    :raises ShapeMismatch: parts that do not fit together.
    """

    def __init__(self, source: WeightSource, rules: Sequence[Rule]) -> None:
        self._source = source
        self._rules = tuple(rules)
        try:
            self._patterns = [[re.compile(p) for p in _patterns_of(rule)] for rule in self._rules]
        except re.error as error:
            raise ConfigError(f"{error.pattern!r} is no regular expression: {error}") from error

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._plan().specs)

    def report(self) -> MapReport:
        """What becomes of the source's names."""
        return self._plan().report

    def tensors(self) -> Iterator[torch.Tensor]:
        plan = self._plan()
        open_: dict[str, _Fused] = {}
        tensors = self._source.tensors()
        # Not by zip, which keeps a tensor until it has the next one.
        for goes, into in zip(plan.goes, plan.into, strict=True):
            tensor = _next(tensors)
            if goes:
                yield tensor
            done = []
            for name, part in into:
                if name not in open_:
                    spec, dim, starts = plan.fused[name]
                    open_[name] = _Fused(spec, dim, starts, set(range(len(starts))))
                if open_[name].put(part, tensor.detach()):
                    done.append(name)
            del tensor
            for name in done:
                whole = open_.pop(name).out
                assert whole is not None
                yield whole
                del whole

    def _match(self, name: str) -> tuple[Rule, re.Match[str], int] | None:
        for rule, patterns in zip(self._rules, self._patterns, strict=True):
            for part, pattern in enumerate(patterns):
                found = pattern.fullmatch(name)
                if found is not None:
                    return rule, found, part
        return None

    def _plan(self) -> _Plan:
        report = MapReport(dict.fromkeys(self._rules, 0))
        unknown: set[str] = set()
        goes: list[bool] = []
        into: list[list[tuple[str, int]]] = []
        own: dict[int, list[str]] = {}  # source's index -> names it goes out under
        parts: dict[str, dict[int, tuple[int, TensorSpec]]] = {}  # target -> part -> where
        rules: dict[str, Fuse] = {}
        for index, spec in enumerate(self._source.specs()):
            goes.append(False)
            into.append([])
            for name in spec.names:
                found = self._match(name)
                if found is None:
                    unknown.add(name)
                    continue
                rule, match, part = found
                report.matched[rule] += 1
                if isinstance(rule, Drop):
                    report.dropped += 1
                elif isinstance(rule, Fuse):
                    report.fused += 1
                    target = match.expand(rule.to)
                    if part in parts.setdefault(target, {}) or rules.get(target, rule) != rule:
                        raise DuplicateName([target])
                    parts[target][part] = (index, spec)
                    rules[target] = rule
                    into[index].append((target, part))
                else:
                    renamed = name if isinstance(rule, Keep) else match.expand(rule.to)
                    report.kept += isinstance(rule, Keep)
                    report.renamed += isinstance(rule, Rename)
                    own.setdefault(index, []).append(renamed)
                    goes[index] = True
        if unknown:
            raise UnknownNames(
                unknown, where="name map", remedy="add a rule: Keep, Rename, Drop or Fuse"
            )
        fused = {target: _fused(target, rules[target], found) for target, found in parts.items()}
        specs = self._in_order(goes, into, own, fused)
        names = Counter(name for spec in specs for name in spec.names)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise DuplicateName(twice, where="name map")
        if not specs:
            raise IncompleteUpdate({"any tensor at all"}, where="name map")
        report.sent = len(specs)
        return _Plan(specs, goes, into, fused, report)

    def _in_order(
        self,
        goes: Sequence[bool],
        into: Sequence[Sequence[tuple[str, int]]],
        own: Mapping[int, Sequence[str]],
        fused: Mapping[str, tuple[TensorSpec, int, tuple[int, ...]]],
    ) -> list[TensorSpec]:
        """Specs in the order in which the tensors will come."""
        specs: list[TensorSpec] = []
        left = {target: len(starts) for target, (_, _, starts) in fused.items()}
        for index, spec in enumerate(self._source.specs()):
            if goes[index]:
                name, *aliases = own[index]
                specs.append(
                    TensorSpec(
                        name, spec.shape, spec.dtype, spec.nbytes, spec.group, tuple(aliases)
                    )
                )
            for target, _ in into[index]:
                left[target] -= 1
                if not left[target]:
                    specs.append(fused[target][0])
        return specs


def _next(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    found = next(tensors, None)
    if found is None:
        raise TransferFailed("the source yields fewer tensors than it said")
    return found


def _patterns_of(rule: Rule) -> tuple[str, ...]:
    return rule.parts if isinstance(rule, Fuse) else (rule.pattern,)


def _fused(
    target: str, rule: Fuse, parts: Mapping[int, tuple[int, TensorSpec]]
) -> tuple[TensorSpec, int, tuple[int, ...]]:
    """The spec of the whole, and where along ``dim`` each part starts."""
    absent = [rule.parts[n] for n in range(len(rule.parts)) if n not in parts]
    if absent:
        raise IncompleteUpdate({f"{target} (part {one})" for one in absent}, where="name map")
    specs = [parts[n][1] for n in range(len(rule.parts))]
    first = specs[0]
    dim = rule.dim

    def others(spec: TensorSpec) -> tuple[object, ...]:
        shape = list(spec.shape)
        if not -len(shape) <= dim < len(shape):
            raise ShapeMismatch(target, f"fused along dimension {dim}", f"{shape} in {spec.name!r}")
        del shape[dim]
        return (*shape, spec.dtype, spec.group)

    for spec in specs[1:]:
        if others(spec) != others(first):
            raise ShapeMismatch(
                target,
                f"{first.dtype}{list(first.shape)} in {first.name!r}",
                f"{spec.dtype}{list(spec.shape)} in {spec.name!r}",
            )
    others(first)
    starts, size = [], 0
    for spec in specs:
        starts.append(size)
        size += spec.shape[dim]
    shape = list(first.shape)
    shape[dim] = size
    element = sum(s.nbytes for s in specs) // max(math.prod(shape), 1)
    nbytes = math.prod(shape) * element
    return (
        TensorSpec(target, tuple(shape), first.dtype, nbytes, first.group),
        dim,
        tuple(starts),
    )

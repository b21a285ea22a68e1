"""Receiving weights in the adapter's own process, for transfers that are open there already.

They go into one host buffer, and from there into vLLM's parameters where they lie: two hops. A
ticket is opened in the workers instead (:mod:`.inside`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.adapters import Adaptable, alpha_of
from hotbunk.rollout.backends.vllm.landing import open_groups
from hotbunk.rollout.contract import (
    ITEMSIZE,
    Manifest,
    Placement,
    ReceiverLayout,
    Scope,
    ScopeKind,
    TensorSpec,
    Transfer,
    UpdateReport,
    Version,
    digest_name,
)
from hotbunk.rollout.intake import check_offer
from hotbunk.rollout.staging import WholeUpdate

if TYPE_CHECKING:
    from hotbunk.rollout.backends.vllm.engine import VllmEngine

_ALIGN = 64


class Bound(msgspec.Struct, frozen=True):
    """What the ranks of an engine hold between them, by checkpoint name."""

    placements: Mapping[str, Placement]
    ties: Sequence[frozenset[str]]
    adaptable: Adaptable | None = None


def merged(said: Sequence[Mapping[str, Any]], shards: int) -> Bound:
    """The answers of all ranks as one. ``shards`` of them hold a copy of the model.

    :raises ConfigError: some tensor is out of reach, or not what was loaded any more.
    """
    transformed = {name for rank in said for name in rank["transformed"]}
    uncovered = {name for rank in said for name in rank["uncovered"]}
    held: dict[str, int] = {}
    placements: dict[str, Placement] = {}
    for rank in said[:shards]:
        for name, (dtype, shape, elements) in rank["tensors"].items():
            placements[name] = Placement(dtype, tuple(shape))
            held[name] = held.get(name, 0) + elements
    partly = {name for name, it in placements.items() if held[name] < math.prod(it.shape)}
    for names, what in (
        (transformed, "transforms these tensors after loading"),
        (uncovered, "holds parameters that the checkpoint does not name"),
        (partly, "copies only parts of these tensors in a way that can be followed"),
    ):
        if names:
            raise errors.ConfigError(
                f"vLLM {what}, so they cannot be updated: {errors.shown(names)}",
                where="backend vllm",
                remedy="use an unquantised dense model",
            )
    if not placements:
        raise errors.ConfigError("vLLM loaded nothing that can be updated", where="backend vllm")
    # A tie on one rank is a tie; another rank of a pipeline may hold only one of the two.
    ties = {frozenset(names) for rank in said for names in rank["ties"]}
    largest = [tie for tie in ties if not any(tie < other for other in ties)]
    able = said[0]["adaptable"]
    return Bound(placements, largest, able and msgspec.convert(able, Adaptable))


class Receiver:
    """One engine's receiving end."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound

    async def receive(
        self, engine: VllmEngine, transfer: Transfer, version: Version, scope: Scope
    ) -> UpdateReport:
        """One update, as :meth:`RolloutBackend.update_weights` describes it."""
        manifest = transfer.manifest
        known = self._known(manifest, scope)
        with Staging(manifest, known) as staging:
            layout = {name: known[name] for spec in manifest.tensors for name in spec.names}
            await transfer.accept(ReceiverLayout(layout))
            async for bucket in transfer.buckets():
                staging.write(bucket)
            applied = staging.intake.finish()
            self._check_ties(manifest, staging)
            expected = dict(await transfer.fingerprints())
            found = await self._load(engine, staging, manifest)
        wrong = {
            spec.name
            for spec in manifest.tensors
            for name in spec.names
            if spec.name in expected and found[digest_name(spec.group, name)] != expected[spec.name]
        }
        if wrong:
            raise errors.VerifyFailed(wrong)
        # KV is keyed by version, so what frozen requests hold may stay; the rest is dead weight.
        await engine.forget_old_versions()
        await transfer.commit()
        await engine.label(version, scope)
        return UpdateReport(
            version,
            applied=applied,
            nbytes=staging.intake.nbytes,
            buckets=staging.intake.buckets,
            verified="applied" if expected else "none",
        )

    def _known(self, manifest: Manifest, scope: Scope) -> Mapping[str, Placement]:
        """What the tensors on offer would be here. :raises UpdateRefused: they have no place."""
        if scope.kind is ScopeKind.ADAPTER and self._bound.adaptable is not None:
            return self._bound.adaptable.placements(manifest)
        open_groups(manifest, scope)
        check_offer(manifest, self._bound.placements, self._bound.ties)
        return self._bound.placements

    async def _load(
        self, engine: VllmEngine, staging: Staging, manifest: Manifest
    ) -> Mapping[str, int]:
        """Into every worker, and read back from every one. :raises EngineFailed: some could not."""
        if manifest.scope.kind is ScopeKind.ADAPTER:
            its = (manifest.scope.name, alpha_of(manifest))
            await engine.everywhere("hotbunk_load_adapter", staging.path, staging.table(), *its)
        else:
            await engine.everywhere("hotbunk_load", staging.path, staging.table())
        names = [digest_name(spec.group, name) for spec in staging.specs for name in spec.names]
        return (await engine.ranks.digest(names)).values

    def _check_ties(self, manifest: Manifest, staging: Staging) -> None:
        """:raises TiedMismatch: two contents for tensors that lie in the same place."""
        for tie in self._bound.ties:
            sent = [n for n, spec in enumerate(manifest.tensors) if tie & set(spec.names)]
            if any(staging.view(n) != staging.view(sent[0]) for n in sent[1:]):
                raise errors.TiedMismatch(sorted(tie))


class Staging(WholeUpdate):
    """See :class:`~hotbunk.rollout.staging.WholeUpdate`; sizes are those of vLLM's element types."""

    def __init__(self, manifest: Manifest, known: Mapping[str, Placement]) -> None:
        self._dtypes = [known[spec.name].dtype for spec in manifest.tensors]
        sizes = [
            ITEMSIZE[dtype] * math.prod(spec.shape)
            for dtype, spec in zip(self._dtypes, manifest.tensors, strict=True)
        ]
        ends = list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes))
        total = ends[-1] if ends else 0
        super().__init__(manifest, sizes, [0, *ends][: len(sizes)], total, "hotbunk-update")

    def view(self, index: int) -> bytes:
        """The bytes of one tensor."""
        at = self.offsets[index]
        return bytes(self.memory[at : at + self.sizes[index]])

    def table(self) -> list[list[Any]]:
        """Names, element type, shape and offset of every tensor."""
        rows: zip[tuple[TensorSpec, str, int]] = zip(
            self.specs, self._dtypes, self.offsets, strict=True
        )
        return [[list(s.names), dtype, list(s.shape), offset] for s, dtype, offset in rows]

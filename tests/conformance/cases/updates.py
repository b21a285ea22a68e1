"""Updates that succeed, are skipped, or are refused before a byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import NotApplicable, Rig, expect
from hotbunk.conformance.transfers import MemoryTransfer, RefusedElsewhere, untied, without
from hotbunk.conformance.under_test import Tensors
from hotbunk.rollout.contract import Retention, Scope, Tag, TensorSpec, Version
from hotbunk.rollout.errors import (
    BaseMismatch,
    DuplicateName,
    IncompleteUpdate,
    SessionError,
    ShapeMismatch,
    UnknownNames,
    UnsupportedTarget,
    UpdateFailed,
    UpdateRefused,
    VersionRegression,
    WeightsNotResident,
)


async def _refused(rig: Rig, error: type[UpdateRefused], transfer: MemoryTransfer) -> UpdateRefused:
    """The offer is refused, the sender is told, and nothing at all changed."""
    before = await rig.snapshot()
    label = await rig.label()
    raised = await expect(error, rig.send(transfer))
    assert not transfer.bytes_moved, "bytes moved before the refusal"
    assert transfer.aborted_with, "the sender was not told"
    assert await rig.snapshot() == before, "a refused update changed something"
    assert await rig.label() == label
    return raised


@case(level=Level.SYNC)
async def any_bucket_size(rig: Rig) -> None:
    """Tensors larger than a bucket, odd sizes, empty and 0-d tensors: all arrive (B1, B2, G10)."""
    for n, size in enumerate(rig.ut.bucket_sizes, 1):
        transfer = rig.transfer(n, bucket_bytes=size)
        report = await rig.send(transfer)
        total = len(transfer.manifest.tensors)
        assert report.applied == total, f"applied {report.applied} of {total}"
        assert report.nbytes == transfer.manifest.total_bytes, "bytes were miscounted"
        assert report.version == Version(0, n)
        for spec, content in rig.ut.weights(n):
            assert rig.ut.read_weight(spec.name) == content, f"{spec.name} with buckets of {size}"
        await rig.check_golden(n)


@case(level=Level.SYNC)
async def order_of_names_does_not_matter(rig: Rig) -> None:
    """Tensors in any order make the same weights."""
    tensors = list(rig.ut.weights(1))
    rig.rng.shuffle(tensors)
    await rig.send(rig.transfer(1, tensors=tensors))
    await rig.check_golden(1)


@case(level=Level.SYNC)
async def without_fingerprints(rig: Rig) -> None:
    """A sender that sends none is taken at its word, and the report says so."""
    report = await rig.send(rig.transfer(1, fingerprint="none"))
    assert report.verified == "none", f"verified {report.verified} without anything to compare"
    report = await rig.send(rig.transfer(2))
    assert report.verified == "applied", f"verified {report.verified}"
    await rig.check_golden(2)


@case(level=Level.SYNC)
async def updating_many_times(rig: Rig) -> None:
    """The fifth update is as good as the first: post-load runs once for each (G7, G8, G9)."""
    for version in range(1, 6):
        await rig.load(version)
    await rig.check_golden(5)


@case(level=Level.SYNC, smoke=True)
async def same_version_is_skipped(rig: Rig) -> None:
    """The resident version again: verified, no transfer, the sender is told (H19)."""
    await rig.load(1)
    again = rig.transfer(1)
    report = await rig.send(again)
    assert report.skipped
    assert again.events == ["decline"], f"the sender saw {again.events}"
    await rig.check_golden(1)


@case(level=Level.SYNC, capability="pause.abort release retention.discard")
async def same_version_is_sent_where_content_is_missing(rig: Rig) -> None:
    """After a discard, the same version is sent: replicas are woken that way (H19)."""
    await rig.load(1)
    await rig.replica.sleep(2)
    await rig.replica.wake_up([Tag.WEIGHTS])
    report = await rig.load(1)
    assert not report.skipped, "skipped although there was no content"
    await rig.replica.wake_up([Tag.KV_CACHE])
    await rig.check_golden(1)


@case(level=Level.SYNC)
async def versions_only_rise(rig: Rig) -> None:
    """A lower step is refused, a new incarnation is not (V11, V16)."""
    await rig.load(3)
    await _refused(rig, VersionRegression, rig.transfer(2))
    await rig.check_golden(3)
    back = Version(1, 1)
    await rig.send(rig.transfer(1, label=back))
    assert await rig.label() == back
    for spec, content in rig.ut.weights(1):
        assert rig.ut.read_weight(spec.name) == content
    await _refused(rig, VersionRegression, rig.transfer(4))
    done = await rig.complete(rig.ut.prompts[0])
    assert {span.version for span in done.spans} == {back}


@case(level=Level.SYNC, capability="release retention.discard")
async def a_discard_does_not_open_the_door(rig: Rig) -> None:
    """A stale sender does not get in through an empty engine (V11)."""
    await rig.load(3)
    await rig.replica.release([Tag.WEIGHTS])
    await rig.replica.resume([Tag.WEIGHTS])
    await _refused(rig, VersionRegression, rig.transfer(2))
    await rig.load(4)
    await rig.check_golden(4)


@case(level=Level.SYNC, capability="release")
async def released_weights_take_no_update(rig: Rig) -> None:
    """WeightsNotResident before any byte moves, after every retention (G13)."""
    await rig.load(1)
    rig.off_device()
    for retention in (Retention.BACKUP, Retention.DISCARD):
        if retention not in rig.caps.retentions:
            continue
        await rig.replica.release([Tag.WEIGHTS], retention=retention)
        before = await rig.snapshot()
        transfer = rig.transfer(2)
        await expect(WeightsNotResident, rig.send(transfer))
        assert transfer.events == ["abort"], f"the sender saw {transfer.events}"
        assert await rig.snapshot() == before
        await rig.replica.resume()
    await rig.load(2)
    await rig.check_golden(2)


def _renamed(tensors: Tensors) -> Tensors:
    spec, content = tensors[0]
    return [(msgspec.structs.replace(spec, name="no.such.weight", aliases=()), content), *tensors]


def _reshaped(tensors: Tensors) -> Tensors:
    spec, content = max(tensors, key=lambda t: t[0].nbytes)
    bad = msgspec.structs.replace(spec, shape=(*spec.shape, 2), nbytes=spec.nbytes * 2)
    return [(bad, content * 2), *without(tensors, spec.name)]


def _short(tensors: Tensors) -> Tensors:
    spec, content = max(tensors, key=lambda t: t[0].nbytes)
    bad = msgspec.structs.replace(spec, nbytes=spec.nbytes - 1)
    return [(bad, content[:-1]), *without(tensors, spec.name)]


def _doubled(tensors: Tensors) -> Tensors:
    return [*tensors, tensors[0]]


_PART = re.compile(r"\.(q|k|v|gate|up)(_proj)?\.weight$")
"""Names of what engines fuse into one matrix, in the models of this suite."""


def _lost(rig: Rig, tensors: Tensors, *, part: bool = False) -> str:
    """A name to leave out, by the run's seed. ``part``: of a fused matrix, where there is one."""
    names = [spec.name for spec, _ in tensors]
    parts = [name for name in names if _PART.search(name)] if part else []
    return rig.rng.choice(parts or names)


@case(level=Level.SYNC, smoke=True)
async def bad_offers_are_refused(rig: Rig) -> None:
    """Unknown, missing, doubled or misshapen tensors: refused whole (B16, G19, G22, G24).

    What is missing is drawn by the seed: any tensor, and a part of a matrix that engines fuse.
    """
    await rig.load(1)
    some, part = (_lost(rig, rig.ut.weights(2), part=part) for part in (False, True))
    bad: Sequence[tuple[type[UpdateRefused], Callable[[Tensors], Tensors]]] = (
        (UnknownNames, _renamed),
        (IncompleteUpdate, lambda tensors: without(tensors, some)),
        (IncompleteUpdate, lambda tensors: without(tensors, part)),
        (IncompleteUpdate, lambda tensors: []),
        (DuplicateName, _doubled),
        (ShapeMismatch, _reshaped),
        (ShapeMismatch, _short),
    )
    for error, spoil in bad:
        await _refused(rig, error, rig.transfer(2, tensors=spoil(rig.ut.weights(2))))
        await rig.check_golden(1)
    await rig.load(2)
    await rig.check_golden(2)


@case(level=Level.SYNC)
async def bad_offers_name_the_names(rig: Rig) -> None:
    """The error lists what is missing or unknown (G22)."""
    tensors = rig.ut.weights(1)
    lost = _lost(rig, tensors)
    half = rig.transfer(1, tensors=without(tensors, lost))
    error = await expect(IncompleteUpdate, rig.send(half))
    assert lost in error.names, f"{lost} is missing, and the error names {error.names}"
    unknown = await expect(UnknownNames, rig.send(rig.transfer(1, tensors=_renamed(tensors))))
    assert unknown.names == ("no.such.weight",), f"the error names {unknown.names}"


@case(level=Level.SYNC)
async def refused_by_another_rank(rig: Rig) -> None:
    """One rank refuses: no rank writes (N6)."""
    await rig.load(1)
    await _refused(rig, UpdateRefused, rig.sender(RefusedElsewhere, 2))
    await rig.check_golden(1)


@case(level=Level.SYNC)
async def label_and_offer_must_agree(rig: Rig) -> None:
    """An offer of another version or scope than asked for is refused (V10)."""
    await rig.load(1)
    transfer = rig.transfer(2)
    await expect(SessionError, rig.replica.update_weights(transfer, version=Version(0, 3)))
    assert transfer.events == ["abort"]
    await rig.check_golden(1)


@case(level=Level.SYNC, capability="partial")
async def partial_updates(rig: Rig) -> None:
    """Some tensors over the resident base; the rest stays (B17)."""
    await rig.load(1)
    old, new = rig.ut.weights(1), rig.ut.weights(2)
    some = new[: max(1, len(new) // 2)]
    report = await rig.send(rig.transfer(2, tensors=some, scope=Scope.partial(Version(0, 1))))
    assert report.applied == len(some)
    touched = {spec.group for spec, _ in some}
    said = await rig.replica.status()
    assert all(said.versions[group] == Version(0, 2) for group in touched)
    for spec, content in [*some, *old[len(some) :]]:
        assert rig.ut.read_weight(spec.name) == content, f"{spec.name} is wrong"
    rest = new[len(some) :]
    if {spec.group for spec, _ in rest} <= touched:
        await rig.send(rig.transfer(3, tensors=rest, scope=Scope.partial(Version(0, 2))))
        for spec, content in new:
            assert rig.ut.read_weight(spec.name) == content, f"{spec.name} is wrong"


@case(level=Level.SYNC, capability="partial")
async def partial_updates_need_their_base(rig: Rig) -> None:
    """Another base, no base, unknown names or none at all: refused (B17)."""
    await rig.load(2)
    some = rig.ut.weights(3)[:1]
    wrong = Scope.partial(Version(0, 1))
    await _refused(rig, BaseMismatch, rig.transfer(3, tensors=some, scope=wrong))
    right = Scope.partial(Version(0, 2))
    unknown = _renamed(some)[:1]
    await _refused(rig, UnknownNames, rig.transfer(3, tensors=unknown, scope=right))
    await _refused(rig, UpdateRefused, rig.transfer(3, tensors=[], scope=right))
    await rig.check_golden(2)


@case(level=Level.SYNC, capability="partial release retention.discard")
async def nothing_partial_over_nothing(rig: Rig) -> None:
    """After a discard, only a full update will do (G22)."""
    await rig.load(1)
    await rig.replica.release([Tag.WEIGHTS])
    await rig.replica.resume([Tag.WEIGHTS])
    scope = Scope.partial(Version(0, 1))
    await _refused(rig, BaseMismatch, rig.transfer(2, tensors=rig.ut.weights(2)[:1], scope=scope))
    await _refused(rig, BaseMismatch, rig.transfer(2, scope=scope))
    await rig.load(2)
    await rig.check_golden(2)


@case(level=Level.SYNC)
async def tied_tensors(rig: Rig) -> None:
    """One name is enough; both with equal content are fine; different contents are not (G18)."""
    tensors = rig.ut.weights(1)
    ties = [spec for spec, _ in tensors if spec.aliases]
    if not ties:
        raise NotApplicable("no tied tensors")
    await rig.send(rig.transfer(1, tensors=untied(tensors)))
    await rig.check_golden(1)

    def alone(spec: TensorSpec) -> TensorSpec:
        return msgspec.structs.replace(spec, aliases=())

    await rig.send(rig.transfer(2, tensors=[(alone(s), c) for s, c in rig.ut.weights(2)]))
    await rig.check_golden(2)
    for spec, content in rig.ut.weights(2):
        for name in spec.names:
            assert rig.ut.read_weight(name) == content, f"{name} did not follow {spec.name}"
    alias = ties[0].aliases[0]
    different = [
        (spec, bytes(b ^ 1 for b in content) if spec.name == alias else content)
        for spec, content in untied(rig.ut.weights(3))
    ]
    await expect(UpdateFailed, rig.send(rig.transfer(3, tensors=different)))
    await rig.load(3)
    await rig.check_golden(3)


@case(level=Level.SYNC)
async def ties_that_the_engine_does_not_have(rig: Rig) -> None:
    """One content for several names reaches them all, whether or not the engine ties them (G18)."""
    tensors = rig.ut.weights(1)
    for n, (first, content) in enumerate(tensors):
        like = [
            spec
            for spec, _ in tensors[n + 1 :]
            if (spec.shape, spec.dtype, spec.group) == (first.shape, first.dtype, first.group)
        ]
        if like and content:
            break
    else:
        raise NotApplicable("no two tensors of one shape")
    both = msgspec.structs.replace(first, aliases=(*first.aliases, *like[0].names))
    rest = without(tensors, first.name, like[0].name)
    await rig.send(rig.transfer(1, tensors=[(both, content), *rest]))
    for name in both.names:
        assert rig.ut.read_weight(name) == content, f"{name} did not get what it is bound to"
    await rig.load(2)
    await rig.check_golden(2)


@case(level=Level.SYNC)
async def groups_that_take_no_update(rig: Rig) -> None:
    """A group the backend declares unfeedable: UnsupportedTarget, never silence (G16)."""
    unfed = [group for group, feedable in rig.caps.groups.items() if not feedable]
    if not unfed:
        raise NotApplicable("every group takes updates")
    await rig.load(1)
    tensors = rig.ut.weights(2)
    spec = TensorSpec("x", (1,), "float32", 4, group=unfed[0])
    await _refused(rig, UnsupportedTarget, rig.transfer(2, tensors=[*tensors, (spec, bytes(4))]))
    await rig.check_golden(1)

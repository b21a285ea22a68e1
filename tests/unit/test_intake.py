"""The receiving side's checks: bad offers before a byte, hostile tables before a write."""

from __future__ import annotations

from math import prod

import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    ITEMSIZE,
    Bucket,
    BucketEntry,
    Manifest,
    Placement,
    Scope,
    TensorSpec,
    Version,
)
from hotbunk.rollout.intake import Intake, check_offer

KNOWN = {
    "embed": Placement("float32", (4, 2)),
    "head": Placement("float32", (4, 2)),
    "norm": Placement("bfloat16", (2,)),
    "count": Placement("int64", ()),
}
REQUIRED = [{"embed", "head"}, {"norm"}]  # embed and head are tied; count is a buffer


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32", *aliases: str) -> TensorSpec:
    return TensorSpec(name, shape, dtype, ITEMSIZE.get(dtype, 0) * prod(shape), aliases=aliases)


EMBED, HEAD, NORM = spec("embed", (4, 2)), spec("head", (4, 2)), spec("norm", (2,), "bfloat16")


def offer(*tensors: TensorSpec, scope: Scope | None = None, castable: bool = True) -> None:
    manifest = Manifest(Version(), tensors, scope or Scope())
    check_offer(manifest, KNOWN, REQUIRED, castable=castable)


# -- offers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    [
        (EMBED, HEAD, NORM),
        (EMBED, NORM),
        (HEAD, NORM),
        (spec("head", (4, 2), "float32", "embed"), NORM),
        (EMBED, NORM, spec("count", (), "int64")),
        (EMBED, spec("norm", (2,), "float32")),
        (spec("embed", (4, 2), "float16"), spec("norm", (2,), "float64")),
    ],
)
def test_offers_that_cover_every_content_are_accepted_g18(
    tensors: tuple[TensorSpec, ...],
) -> None:
    offer(*tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        (EMBED, EMBED, NORM),
        (spec("embed", (4, 2), "float32", "head"), HEAD, NORM),
        (spec("embed", (4, 2), "float32", "embed"), NORM),
        (EMBED, spec("head", (4, 2), "float32", "norm"), NORM),
    ],
)
def test_a_name_offered_twice_is_refused_g19(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(errors.DuplicateName):
        offer(*tensors)


def test_unknown_names_are_refused_with_all_of_them_b16() -> None:
    with pytest.raises(errors.UnknownNames) as caught:
        offer(EMBED, NORM, spec("x", (1,)), spec("head", (4, 2), "float32", "y"))
    assert caught.value.names == ("x", "y")


def test_missing_contents_are_refused_g22() -> None:
    with pytest.raises(errors.IncompleteUpdate) as caught:
        offer(NORM)
    assert set(caught.value.names) >= {"embed"}
    with pytest.raises(errors.IncompleteUpdate):
        offer()


@pytest.mark.parametrize(
    "bad",
    [
        spec("embed", (2, 4)),
        spec("embed", (8,)),
        spec("embed", (4, 2, 1)),
        spec("embed", ()),
        spec("embed", (4, 2), "int8"),  # a quantised content needs scales, not a cast
        spec("embed", (4, 2), "float8_e4m3fn"),
        spec("embed", (4, 2), "complex64"),
        spec("embed", (4, 2), "no such type"),
        spec("head", (2,), "bfloat16", "norm"),
    ],
)
def test_other_shapes_and_types_that_do_not_convert_are_refused(bad: TensorSpec) -> None:
    rest = () if "norm" in bad.names else (NORM,)
    with pytest.raises(errors.ShapeMismatch) as caught:
        offer(bad, *rest)
    assert caught.value.name in bad.names


def test_sizes_that_do_not_follow_from_the_shape_are_refused() -> None:
    for nbytes in (0, 31, 33, 64):
        with pytest.raises(errors.ShapeMismatch, match="embed"):
            offer(TensorSpec("embed", (4, 2), "float32", nbytes), NORM)


def test_buffers_do_not_change_their_type() -> None:
    with pytest.raises(errors.ShapeMismatch, match="count"):
        offer(EMBED, NORM, spec("count", (), "float32"))


def test_an_engine_that_cannot_cast_takes_its_own_types_only() -> None:
    offer(EMBED, NORM, castable=False)
    with pytest.raises(errors.ShapeMismatch, match="norm"):
        offer(EMBED, spec("norm", (2,)), castable=False)


def test_a_part_may_be_any_part_but_nothing_b17() -> None:
    part = Scope.partial(Version())
    offer(NORM, scope=part)
    with pytest.raises(errors.IncompleteUpdate):
        offer(scope=part)
    with pytest.raises(errors.UnknownNames):
        offer(spec("x", (1,)), scope=part)


# -- buckets ----------------------------------------------------------------------------------


def intake(*sizes: int) -> Intake:
    specs = tuple(spec(f"t{n}", (size,)) for n, size in enumerate(sizes))
    return Intake(Manifest(Version(), specs), sizes)


def bucket(*entries: tuple[int, int, int, int]) -> Bucket:
    return Bucket(None, tuple(BucketEntry(*entry) for entry in entries))


def test_what_arrives_is_counted_byte_by_byte() -> None:
    box = intake(10, 0, 4)
    box.check(bucket((0, 0, 6, 0)), 6)
    box.check(bucket((0, 6, 4, 0), (1, 0, 0, 64), (2, 0, 4, 64)), 68)
    assert (box.finish(), box.nbytes, box.buckets) == (3, 14, 2)


def test_pieces_of_one_tensor_may_share_a_bucket_in_order() -> None:
    box = intake(10)
    box.check(bucket((0, 0, 5, 0), (0, 5, 5, 64)), 69)
    assert box.finish() == 1


HOSTILE = {
    "an index beyond the manifest": (2, 0, 1, 0),
    "a negative index": (-1, 0, 1, 0),
    "a gap": (0, 1, 1, 0),
    "a negative start": (0, -1, 1, 0),
    "a negative length": (0, 0, -1, 0),
    "more than the tensor has": (0, 0, 11, 0),
    "a negative offset": (0, 0, 1, -1),
    "an offset behind the bucket": (0, 0, 1, 100),
    "an end behind the bucket": (0, 0, 2, 99),
    "numbers that overflow": (0, 0, 1, 2**63),
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_tables_are_refused_whole(entry: tuple[int, int, int, int]) -> None:
    box = intake(10, 10)
    with pytest.raises(errors.TransferFailed):
        box.check(bucket((1, 0, 10, 0), entry), 100)
    # Nothing of that bucket counts: what was good in it may still come.
    assert (box.nbytes, box.buckets) == (0, 0)
    box.check(bucket((0, 0, 10, 0), (1, 0, 10, 10)), 100)
    assert box.finish() == 2


def test_a_byte_never_arrives_twice() -> None:
    box = intake(10)
    box.check(bucket((0, 0, 10, 0)), 10)
    for again in ((0, 0, 10, 0), (0, 9, 1, 0), (0, 10, 1, 0)):
        with pytest.raises(errors.TransferFailed):
            box.check(bucket(again), 20)
    with pytest.raises(errors.TransferFailed):
        intake(10).check(bucket((0, 0, 6, 0), (0, 5, 5, 6)), 20)


def test_a_stream_that_ends_early_names_what_is_missing() -> None:
    box = intake(10, 10, 0)
    box.check(bucket((0, 0, 10, 0), (1, 0, 9, 10)), 100)
    with pytest.raises(errors.TransferFailed, match="t1"):
        box.finish()

"""Copies and casts equal their definitions bit for bit, in every variant and in torch."""

from __future__ import annotations

import os
import threading
from array import array
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.rollout import fallbacks, kernels
from hotbunk.rollout.errors import KernelFailed
from hotbunk.rollout.kernels import CopyPlan, copy_many
from hotbunk.rollout.native_kernels import Code, DType, Kernels, Run, Variant, beside, copy_entry

needs_native = pytest.mark.skipif(
    kernels.native_kernels() is None, reason="installed without the native library"
)
FLOATS = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
PAIRS = [(a, b) for a in FLOATS for b in FLOATS]


def found() -> Kernels:
    native = kernels.native_kernels()
    assert native is not None
    return native


def variants() -> list[Variant]:
    native = kernels.native_kernels()
    return [v for v in Variant if v and native is not None and native.has(v)]


@pytest.fixture(params=["native", "torch"])
def face(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing the work, under the one face."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "native_kernels", lambda: None)
    elif kernels.native_kernels() is None:
        pytest.skip("installed without the native library")
    return str(request.param)


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Elements of any bits, NaNs and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    elements = raw.view(dtype)
    # Every kind of number, however rare among random bits.
    special = torch.tensor(
        [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 6e-8, 65519.0, 65520.0]
    )
    every = torch.arange(0, count, 7)
    elements[every] = special[every % 10].to(dtype)
    return elements


def bits_of(tensor: torch.Tensor) -> bytes:
    return kernels.as_bytes(tensor.contiguous()).numpy().tobytes()


# -- casts ------------------------------------------------------------------------------------


def nearest(value: Fraction, mantissa: int, smallest: int, largest: Fraction) -> Fraction | None:
    """Round to ``mantissa`` bits and multiples of ``2**smallest``; None: to infinity."""
    if not value:
        return value
    exponent = smallest
    while Fraction(2) ** (exponent + mantissa) <= abs(value):
        exponent += 1
    unit = Fraction(2) ** exponent
    rounded = round(value / unit) * unit  # to even, exactly
    return None if abs(rounded) > largest else rounded


@pytest.mark.parametrize(
    "dtype, mantissa, smallest, largest",
    [
        (torch.bfloat16, 8, -133, Fraction(torch.finfo(torch.bfloat16).max)),
        (torch.float16, 11, -24, Fraction(65504)),
    ],
)
def test_narrowing_rounds_to_nearest_even(
    face: str, dtype: torch.dtype, mantissa: int, smallest: int, largest: Fraction
) -> None:
    source = random_bits(4000, torch.float32, seed=3)
    # Near the edges of both types, and ties.
    source[1000:1500] = random_bits(500, torch.float16, seed=4).float()
    source[1500:2000] = torch.randint(-40, 40, (500,)) * 2.0**-25
    source.view(torch.int32)[2000:2500].bitwise_and_(0x807FFFFF)  # denormals
    source.view(torch.int32)[2500:3000].bitwise_and_(-0x8000)
    target = torch.empty(4000, dtype=dtype)
    copy_many([(target, source)])
    for x, y in zip(source.tolist(), target.double().tolist(), strict=True):
        if x != x:
            assert y != y
            continue
        want = (
            None
            if x in (float("inf"), float("-inf"))
            else nearest(Fraction(x), mantissa, smallest, largest)
        )
        assert (abs(y) == float("inf")) if want is None else Fraction(y) == want, x
        assert (y < 0 or str(y) == "-0.0") == (x < 0 or str(x) == "-0.0")


@pytest.mark.parametrize("source, target", PAIRS)
def test_not_a_number_keeps_its_sign_and_payload(
    face: str, source: torch.dtype, target: torch.dtype
) -> None:
    wide = torch.tensor([0x7F800001, 0x7FC12345, -0x7FFFFF, 0x7FFFFFFF, 0x7FA0E000])
    nans = wide.to(torch.int32).view(torch.float32)
    if source != torch.float32:
        step = (wide >> 16 | 1) if source == torch.bfloat16 else (wide >> 13 & 0x3FF) | 0x7C01
        nans = step.to(torch.int16).view(source)
    out = torch.empty(5, dtype=target)
    copy_many([(out, nans)])
    assert out.isnan().all()
    if source == target:
        assert bits_of(out) == bits_of(nans)
        return
    half = torch.int16 if target != torch.float32 else torch.int32
    quiet = {torch.float32: 0x400000, torch.bfloat16: 0x40, torch.float16: 0x200}[target]
    if source != torch.bfloat16 or target != torch.float32:  # that one only appends zeros
        assert (out.view(half) & quiet).ne(0).all()


@pytest.mark.parametrize("source, target", PAIRS)
def test_torch_does_the_same(source: torch.dtype, target: torch.dtype) -> None:
    if kernels.native_kernels() is None:
        pytest.skip("installed without the native library")
    data = random_bits(1 << 16, source, seed=9)
    if source.itemsize == 2:  # all there are
        data = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(source)
    ours, theirs = torch.empty(1 << 16, dtype=target), torch.empty(1 << 16, dtype=target)
    copy_many([(ours, data)])
    fallbacks.copy(theirs, data)
    assert bits_of(ours) == bits_of(theirs)


@needs_native
@settings(max_examples=150, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    count=st.integers(0, 400) | st.sampled_from([4096, 70_001]),
    offsets=st.tuples(st.integers(0, 67), st.integers(0, 67)),
    threads=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)
def test_every_variant_copies_alike(
    pair: tuple[torch.dtype, torch.dtype],
    count: int,
    offsets: tuple[int, int],
    threads: int,
    seed: int,
) -> None:
    from_, to = pair
    source = random_bits(count, from_, seed)
    want = torch.empty(count, dtype=to)
    fallbacks.copy(want, source)
    # At any address: the tensors above are aligned, this memory need not be.
    raw = torch.frombuffer(bytearray(bits_of(source) + bytes(68)), dtype=torch.uint8).roll(
        offsets[0]
    )
    size = count * to.itemsize
    for variant in variants():
        out = torch.full((size + 136,), 0x5A, dtype=torch.uint8)
        entry = copy_entry(
            raw.data_ptr() + offsets[0],
            out.data_ptr() + offsets[1],
            count,
            FLOATS[from_],
            FLOATS[to],
        )
        found().copy_many(array("q", entry), Run(variant=variant, threads=threads))
        inner = out[offsets[1] : offsets[1] + size]
        assert bits_of(inner) == bits_of(want), variant
        assert (out[: offsets[1]] == 0x5A).all(), "before"
        assert (out[offsets[1] + size :] == 0x5A).all(), "behind"


def test_other_types_and_layouts_go_through_torch(face: str) -> None:
    base = torch.randn(6, 8, dtype=torch.float64)
    pairs = [
        (torch.empty(6, 8), base),
        (torch.empty(8, 6, dtype=torch.float64), base.t()),
        (torch.empty(24, dtype=torch.bfloat16), base[::2].float()),
        (torch.empty(4, dtype=torch.int8), torch.arange(4)),
        (torch.empty((), dtype=torch.bool), torch.tensor(True)),
        (torch.empty(0, 3), torch.empty(3, 0)),
    ]
    copy_many(pairs)
    for target, source in pairs:
        assert torch.equal(target.flatten(), source.to(target.dtype).flatten())


def test_a_plan_copies_what_is_there_when_it_runs(face: str) -> None:
    sources = [torch.randn(n) for n in (1, 100, 70_000)]
    targets = [
        torch.empty_like(sources[0]),
        torch.empty(100, dtype=torch.float16),
        torch.empty(70_000),
    ]
    plan = CopyPlan(zip(targets, sources, strict=True))
    for _ in range(2):
        for source in sources:
            source.normal_()
        plan.run()
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.to(target.dtype))


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 10, 0)],  # onto itself
        [(9, 10, 0)],
        [(50, 10, 0), (59, 10, 20)],  # two targets
        [(50, 10, 0), (80, 10, 55)],  # a target that another reads
    ],
)
@pytest.mark.parametrize("extra", [False, True])
def test_overlaps_are_refused_before_the_first_byte(
    face: str, ranges: list[tuple[int, int, int]], extra: bool
) -> None:
    data = random_bits(100, torch.uint8)
    before = data.clone()
    pairs = [(data[t : t + n], data[s : s + n]) for t, n, s in ranges]
    if extra:  # one that only torch can do makes the call a mixed one
        pairs.append((torch.empty(2, dtype=torch.int64), torch.ones(2)))
    with pytest.raises(KernelFailed) as caught:
        copy_many(pairs)
    assert caught.value.code == Code.OVERLAP
    assert torch.equal(data, before)


def test_many_targets_in_any_order_and_sources_between_them(face: str) -> None:
    data = random_bits(40 * 64, torch.uint8).view(40, 64)
    before = data.clone()
    order = torch.randperm(20).tolist()
    copy_many([(data[2 * n], data[2 * n + 1]) for n in order])  # neighbours, not overlaps
    assert torch.equal(data[::2], before[1::2])
    assert torch.equal(data[1::2], before[1::2])


def test_pairs_that_do_not_fit(face: str) -> None:
    for target, source in (
        (torch.empty(3), torch.empty(4)),
        (torch.empty(3), torch.empty(4, dtype=torch.bfloat16)),
        (torch.empty(4, 4).t(), torch.empty(4, 4)),
    ):
        with pytest.raises(KernelFailed):
            copy_many([(target, source)])


@needs_native
def test_refusals_say_what_is_wrong() -> None:
    data = random_bits(64, torch.uint8)
    at = data.data_ptr()
    for words, code, text in (
        ((at, at + 32, 4, 0 | 1 << 32), Code.BAD_DTYPE, "type 0 to type 1"),
        ((at, at + 32, -4, 0), Code.BAD_ARGUMENT, "-4 elements"),
        ((0, at + 32, 4, 0), Code.BAD_ARGUMENT, "null"),
    ):
        with pytest.raises(KernelFailed, match=text) as caught:
            found().copy_many(array("q", words))
        assert caught.value.code == code
    with pytest.raises(KernelFailed, match="does not run here") as caught:
        found().copy_many(array("q"), Run(variant=9))  # type: ignore[arg-type]
    assert caught.value.code == Code.UNAVAILABLE
    with pytest.raises(KernelFailed, match="65 threads"):
        found().set_threads(65)


@needs_native
def test_writes_that_stay_in_the_cache_are_the_same_writes() -> None:
    for nbytes in (100, (5 << 20) + 3):
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        target = torch.zeros(nbytes + 1, dtype=torch.uint8)
        CopyPlan([(target[1:], source)], cached=True).run()
        assert torch.equal(target[1:], source)
        assert target[0] == 0


@needs_native
def test_a_thread_that_copies_beside_another_process_leaves_half_of_the_processors() -> None:
    """And only that thread, and only meanwhile."""
    runs: list[tuple[int, int]] = []
    native = found()

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(native._lib, name)

        def hb_copy_many(self, address: int, count: int, run: Run | None) -> int:
            runs.append((run.threads, run.flags) if run else (0, 0))
            return 0

    spied = Kernels(Spy())  # type: ignore[arg-type]
    half = min(max(1, len(os.sched_getaffinity(0)) // 2), native.threads)
    empty = array("q")
    with beside():
        spied.copy_many(empty)
        spied.copy_many(empty, cached=True)
        with beside():
            pass
        spied.copy_many(empty)
        other = threading.Thread(target=spied.copy_many, args=(empty,))
        other.start()
        other.join()
    spied.copy_many(empty)
    assert runs == [(half, 0), (half, 1), (half, 0), (0, 0), (0, 0)]

"""Packing is exact for everything a model can hold, and holds one bucket and one tensor at most."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.checkpoint_engine import bucket
from hotbunk.checkpoint_engine.bucket import (
    ALIGN,
    SMALLEST,
    Packer,
    bucket_size,
    check_bucket_bytes,
    pack_plan,
)
from hotbunk.checkpoint_engine.source import specs_of
from hotbunk.rollout.binding import dtype_from, dtype_name
from hotbunk.rollout.contract import (
    Bucket,
    Manifest,
    Placement,
    ReceiverLayout,
    TensorSpec,
    Version,
)
from hotbunk.rollout.errors import ConfigError, ShapeMismatch, TransferFailed
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import as_bytes, fingerprint, materialized

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex128,
]
Named = dict[str, torch.Tensor]


def specs_for(named: Named) -> list[TensorSpec]:
    return list(specs_of(named.items(), "target").values())


def layout_of(named: Named, dtype: torch.dtype) -> ReceiverLayout:
    return ReceiverLayout(
        {n: Placement(dtype_name(dtype), tuple(t.shape)) for n, t in named.items()}
    )


def run(
    named: Named,
    bucket_bytes: int,
    layout: ReceiverLayout | None = None,
    *,
    each: Callable[[Bucket], None] = lambda bucket: None,
) -> tuple[Named, Packer, list[int]]:
    """Pack, check and unpack; the tensors as they arrived, under every name, and bucket sizes."""
    specs = specs_for(named)

    def dtype_of(spec: TensorSpec) -> torch.dtype:
        return dtype_from(layout.tensors[spec.name].dtype if layout else spec.dtype)

    arrived = [torch.empty(s.shape, dtype=dtype_of(s)) for s in specs]
    raw = [as_bytes(t) for t in arrived]
    for data in raw:
        data.fill_(0xEE)
    intake = Intake(Manifest(Version(), tuple(specs)), [d.numel() for d in raw])
    buffer = torch.full((bucket_size(bucket_bytes, specs, layout),), 0xAA, dtype=torch.uint8)
    packer = Packer(
        specs, iter([named[s.name] for s in specs]), buffer, layout=layout, fingerprints=True
    )
    sizes = []
    while (bucket := packer.next()) is not None:
        sizes.append(bucket.data.numel())
        for entry in intake.check(bucket, bucket.data.numel()):
            piece = bucket.data[entry.offset : entry.offset + entry.nbytes]
            raw[entry.index][entry.start : entry.start + entry.nbytes] = piece
        each(bucket)
        buffer.fill_(0x55)  # a receiver keeps no view into a bucket
    assert intake.finish() == len(specs)
    assert intake.nbytes == packer.payload == sum(d.numel() for d in raw)
    for spec, tensor in zip(specs, arrived, strict=True):
        assert packer.fingerprints[spec.name] == fingerprint(tensor)
    out = {n: t for s, t in zip(specs, arrived, strict=True) for n in s.names}
    return out, packer, sizes


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN and minus zero, too."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(as_bytes(left.contiguous()), as_bytes(right.contiguous()))
    )


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 20).to(dtype)


# -- the cases by name ------------------------------------------------------------------------


def test_tensors_around_the_bucket_size_b1() -> None:
    kib = 1024
    named = {str(n): random((n,), torch.int8) for n in (kib // 2, kib, kib + 1, 5 * kib)}
    arrived, _, sizes = run(named, kib)
    assert all(same(arrived[n], t) for n, t in named.items())
    assert max(sizes) <= kib


def test_rows_scalars_and_nothing_b2() -> None:
    named = {
        "a row wider than a bucket": random((1, 5000)),
        "0-d": torch.tensor(3.5),
        "0-d int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 9, dtype=torch.bfloat16),
        "empty columns": torch.empty(9, 0),
        "last": random((3,)),
    }
    for size in (64, 1000, 1 << 20):
        arrived, _, _ = run(named, size)
        assert all(same(arrived[n], t) for n, t in named.items())


def test_an_empty_stream_has_no_bucket_b2() -> None:
    arrived, packer, sizes = run({}, 100)
    assert (arrived, packer.payload, sizes) == ({}, 0, [])


@pytest.mark.parametrize("place", ["first", "last", "at a full bucket"])
def test_empty_tensors_are_counted_wherever_they_lie(place: str) -> None:
    full = random((64,), torch.int8)
    named = {
        "first": {"e": torch.empty(0), "x": full},
        "last": {"x": full, "e": torch.empty(0)},
        "at a full bucket": {"x": full, "e": torch.empty(0), "y": full.clone()},
    }[place]
    arrived, _, _ = run(named, 64)
    assert all(same(arrived[n], t) for n, t in named.items())


def test_views_of_any_stride_b5() -> None:
    whole = random((12, 10))
    named = {
        "transposed": whole.t(),
        "sliced": whole[2:9:3, 1:7],
        "offset": whole.view(-1)[3:50],
        "one row expanded": whole[0].expand(40, 10),
        "a scalar expanded": torch.tensor(1.5).expand(33, 3),
        "flipped": whole.flip(0),
        "permuted": random((2, 3, 4, 5)).permute(3, 1, 0, 2),
        "channels last": random((2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(50, dtype=torch.complex128).conj(),
        "negated": torch._neg_view(random((40, 3))),
        "imaginary part": torch.randn(1, dtype=torch.complex64).conj().imag,
    }
    for size in (64, 130, 4096):
        arrived, _, _ = run(named, size)
        for name, tensor in named.items():
            assert torch.equal(arrived[name], tensor.contiguous().resolve_conj()), name


def test_a_strided_tensor_is_laid_out_once_however_many_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.numel())
        return materialized(tensor)

    monkeypatch.setattr(bucket, "materialized", counted)
    whole = random((100, 90)).t()
    arrived, _, sizes = run({"whole": whole}, 1000)
    assert same(arrived["whole"], whole.contiguous())
    assert (len(sizes), made) == (36, [9000])


def test_the_plan_is_made_once_for_all_syncs_and_addresses_may_change() -> None:
    pack_plan.cache_clear()
    shapes = [(3,), (1000,), (0,), (7, 5)]
    for _ in range(3):
        named = {str(n): random(shape) for n, shape in enumerate(shapes)}
        arrived, _, _ = run(named, 512)
        assert all(same(arrived[n], t) for n, t in named.items())
    assert (pack_plan.cache_info().misses, pack_plan.cache_info().hits) == (1, 2)


def test_an_empty_tensor_behind_a_bucket_of_odd_size_is_not_lost() -> None:
    named = {"x": random((70,), torch.int8), "e": torch.empty(0), "y": random((3,), torch.int8)}
    arrived, _, sizes = run(named, 70)
    assert all(same(arrived[n], t) for n, t in named.items())
    assert len(sizes) == 2


@pytest.mark.parametrize("size", [64, 65, 100, 127, 1001, 4099])
def test_mixed_element_types_in_any_order_are_aligned(size: int) -> None:
    named = {
        f"{i}-{dtype_name(d)}": random((n,), d)
        for i, (d, n) in enumerate((d, n) for n in (1, 3, 17) for d in (*DTYPES, *reversed(DTYPES)))
    }
    offsets: list[int] = []
    arrived, _, _ = run(named, size, each=lambda b: offsets.extend(e.offset for e in b.entries))
    assert all(same(arrived[n], t) for n, t in named.items())
    assert all(offset % ALIGN == 0 for offset in offsets)


def test_tied_tensors_are_sent_once_and_arrive_under_every_name() -> None:
    weight = random((50, 7))
    arrived, packer, _ = run({"embed": weight, "head": weight, "again": weight.view(50, 7)}, 512)
    assert packer.payload == weight.numel() * 4
    assert all(same(arrived[n], weight) for n in ("embed", "head", "again"))


def test_bytes_on_the_wire_are_payload_and_padding_b7() -> None:
    named = {str(n): random((n,), torch.int8) for n in (10, 100, 3000, 7)}
    _, packer, sizes = run(named, 1024)
    assert packer.payload == 3117
    assert packer.payload <= sum(sizes) < packer.payload + ALIGN * (len(named) + len(sizes))
    assert sizes[-1] < 1024, "the last bucket is as long as what is in it"
    _, _, sizes = run({"small": random((3,))}, 1 << 30)
    assert sizes == [12]


def test_casts_happen_at_the_source_and_piece_by_piece() -> None:
    named = {"wide": random((999,)), "narrow": random((999,), torch.bfloat16)}
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        arrived, packer, _ = run(named, 256, layout_of(named, dtype))
        assert all(same(arrived[n], t.to(dtype)) for n, t in named.items())
        assert packer.payload == 2 * 999 * dtype.itemsize


def test_values_that_have_no_order_travel_bit_for_bit() -> None:
    odd = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-42, 0.0])
    signalling = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    named = {"odd": odd, "signalling": signalling, "half": odd.to(torch.bfloat16)}
    arrived, _, _ = run(named, 64)
    assert all(same(arrived[n], t) for n, t in named.items())


def test_parameters_with_gradients_are_packed_without_autograd() -> None:
    parameter = torch.nn.Parameter(random((5, 5)))
    arrived, _, _ = run({"p": parameter}, 64)
    assert same(arrived["p"], parameter.detach())


@pytest.mark.parametrize("size", [0, 1, SMALLEST - 1, -5])
def test_buckets_too_small_for_an_element_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="too small"):
        check_bucket_bytes(size)
    check_bucket_bytes(SMALLEST)


def test_a_bucket_is_never_larger_than_the_whole_stream() -> None:
    named = {"a": random((10,)), "b": random((3,), torch.bfloat16)}
    assert bucket_size(1 << 40, specs_for(named), None) == ALIGN + 6
    assert bucket_size(1 << 40, specs_for(named), layout_of(named, torch.float64)) == 128 + 24
    assert bucket_size(100, specs_for({"a": random((1000,))}), None) == 100
    assert bucket_size(100, [], None) == SMALLEST


# -- a source that does not keep its word -----------------------------------------------------


def packed(specs: list[TensorSpec], tensors: Iterator[torch.Tensor]) -> None:
    packer = Packer(specs, tensors, torch.empty(64, dtype=torch.uint8))
    while packer.next() is not None:
        pass


def test_sources_that_yield_something_else_than_they_said_are_typed_errors() -> None:
    named = {"a": random((4, 4)), "b": random((2,))}
    specs = specs_for(named)
    with pytest.raises(TransferFailed, match="ended before 'b'"):
        packed(specs, iter([named["a"]]))
    with pytest.raises(TransferFailed, match="more than the 2"):
        packed(specs, iter([*named.values(), random((1,))]))
    with pytest.raises(ShapeMismatch, match="'b'"):
        packed(specs, iter([named["a"], random((3,))]))
    with pytest.raises(ShapeMismatch, match="float32 in the offer"):
        packed(specs, iter([named["a"], random((2,), torch.int8)]))


# -- live bytes -------------------------------------------------------------------------------


def test_live_bytes_of_a_gathering_source_are_one_tensor_m5() -> None:
    """The source gathers when asked and counts what is still alive of what it gave away."""
    live: dict[int, int] = {}
    peak = 0
    specs = specs_for({str(n): torch.empty(1000) for n in range(20)})

    def gather() -> Iterator[torch.Tensor]:
        nonlocal peak
        for number in range(len(specs)):
            memory = (ctypes.c_char * 8000)()  # lives as long as any view of it
            live[number] = 8000
            weakref.finalize(memory, live.pop, number)
            peak = max(peak, sum(live.values()))
            tensor = torch.frombuffer(memory, dtype=torch.float64)  # cast on its way
            del memory
            yield tensor
            del tensor

    layout = ReceiverLayout({s.name: Placement("float32", s.shape) for s in specs})
    packer = Packer(
        specs, gather(), torch.empty(2048, dtype=torch.uint8), layout=layout, fingerprints=True
    )
    count = 0
    while packer.next() is not None:
        count += 1
    assert count > 20
    assert peak == 8000
    assert not live


def test_an_oversized_tensor_is_alive_until_its_last_piece_b4() -> None:
    tensor = random((5000,))
    expected, held = tensor.clone(), weakref.ref(tensor)
    specs = specs_for({"big": tensor})
    packer = Packer(specs, iter([tensor]), torch.empty(1024, dtype=torch.uint8))
    del tensor
    parts = []
    while (bucket := packer.next()) is not None:
        parts.append(bucket.data.clone())
        assert held() is not None or len(parts) == 20
    assert torch.equal(torch.cat(parts).view(torch.float32), expected)
    assert held() is None


# -- anything at all --------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    tensor = random(shape, draw(st.sampled_from(DTYPES)))
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "offset"]))
    if how == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if how == "strided" and tensor.dim():
        return tensor[::2]
    if how == "expanded":
        return tensor.expand(draw(st.integers(0, 4)), *shape)
    if how == "offset" and tensor.dim():
        return tensor[1:]
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), max_size=8), st.integers(SMALLEST, 700))
def test_any_tensors_in_any_bucket_arrive_bit_for_bit(drawn: list[torch.Tensor], size: int) -> None:
    named = {str(n): t for n, t in enumerate(drawn)}
    arrived, _, sizes = run(named, size)
    assert all(same(arrived[n], t) for n, t in named.items())
    assert all(0 <= s <= size for s in sizes)

"""The fast fingerprint is the defined one, bit for bit, and composes over any cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.rollout import fallbacks, kernels
from hotbunk.rollout.fingerprint import BLOCK, MASK, fingerprint_bytes
from hotbunk.rollout.kernels import as_bytes, fingerprint

BLOCK_BYTES = 4 * BLOCK
SIZES = [0, 1, 2, 3, 4, 5, 7, 4095, 4096, 4097, 3 * 4096 - 1, 5 * 4096 + 6]
STARTS = [0, 1, 2, 3, 4, 4095, 4096, 4097, 10 * 4096 + 2]


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_its_definition_for_any_size_and_start(size: int, start: int) -> None:
    data = random_bytes(size)
    assert fingerprint(data, start) == fingerprint_bytes(data.numpy().tobytes(), start)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_data_that_is_not_aligned_in_memory(offset: int) -> None:
    data = random_bytes(9001)[offset:]
    assert fingerprint(data, 5) == fingerprint_bytes(data.numpy().tobytes(), 5)


@pytest.mark.parametrize("start", [0, 1, 4098])
def test_more_than_one_round_of_scratch(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    monkeypatch.setattr(fallbacks, "_BLOCKS_AT_ONCE", 2)
    data = random_bytes(7 * BLOCK_BYTES + 3)
    assert fingerprint(data, start) == fingerprint_bytes(data.numpy().tobytes(), start)


def test_rounds_of_scratch_do_not_show_in_a_real_tensor() -> None:
    data = random_bytes(17 << 20)
    half = (9 << 20) + 1
    whole = fingerprint(data)
    assert whole == (fingerprint(data[:half]) + fingerprint(data[half:], half)) & MASK


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (3, 5), (1031,)])
def test_every_element_type_and_shape_by_its_bytes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    raw = as_bytes(tensor)
    assert raw.numel() == tensor.numel() * tensor.element_size()
    assert raw.shape == (raw.numel(),)
    assert fingerprint(tensor) == fingerprint_bytes(raw.numpy().tobytes())


def test_views_count_as_their_contiguous_form() -> None:
    whole = torch.randn(6, 8)
    for view in (whole.t(), whole[:, 1:3], whole[::2], whole[0].expand(4, 8), whole[2, 3]):
        assert fingerprint(view) == fingerprint_bytes(view.contiguous().numpy().tobytes())


def test_views_of_one_element_or_none_may_have_any_stride() -> None:
    nothing, one = torch.randn(5).expand(0, 5), torch.randn(()).expand(1, 1)
    assert as_bytes(nothing).shape == (0,)
    assert fingerprint(nothing) == 0
    assert fingerprint(one) == fingerprint(one.clone())
    as_bytes(one).zero_()
    assert one.item() == 0, "it is a view"


def test_parameters_are_read_without_autograd() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert fingerprint(parameter) == fingerprint(parameter.detach().clone())


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 9000), cuts=st.lists(st.integers(0, 9000), max_size=5))
def test_pieces_cut_anywhere_add_up_to_the_whole(size: int, cuts: list[int]) -> None:
    data = random_bytes(size, seed=size)
    edges = [0, *sorted(min(c, size) for c in cuts), size]
    pieces = [fingerprint(data[a:b], a) for a, b in itertools.pairwise(edges)]
    assert sum(pieces) & MASK == fingerprint(data)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_shows(size: int, at: int, bit: int) -> None:
    data = random_bytes(size, seed=at)
    before = fingerprint(data)
    data[at % size] ^= 1 << bit
    assert fingerprint(data) != before


def test_two_swapped_words_show_wherever_they_lie() -> None:
    data = random_bytes(3 * BLOCK_BYTES).view(torch.int32)
    before = fingerprint(data)
    for a, b in ((0, 1), (5, 5 + BLOCK), (0, 3 * BLOCK - 1)):
        swapped = data.clone()
        swapped[a], swapped[b] = data[b], data[a]
        assert fingerprint(swapped) != before


def test_tensors_that_torch_negates_or_conjugates_when_it_reads_them() -> None:
    """Their bytes are not their values: copies and fingerprints go by the values."""
    for tensor in (
        torch.randn(33, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(33)),
        torch._neg_view(torch.randn(33).to(torch.bfloat16)),
        torch.randn(1, dtype=torch.complex128).conj().imag,
    ):
        plain = tensor.clone().resolve_conj().resolve_neg()
        target = torch.empty_like(plain)
        kernels.copy_many([(target, tensor)])
        assert torch.equal(target, plain)
        assert kernels.fingerprint(tensor) == kernels.fingerprint(plain)
    wide = torch.empty(33)
    kernels.copy_many([(wide, torch._neg_view(torch.ones(33, dtype=torch.bfloat16)))])
    assert wide.eq(-1).all()

"""The fingerprint's definition: vectors, composition, sensitivity."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbunk.rollout.fingerprint import BLOCK, MASK, fingerprint_bytes, inner_keys, mix, outer_key


def by_definition(data: bytes) -> int:
    """The formula, word by word, without any of the module's shortcuts."""
    data += bytes(-len(data) % 4)
    total = 0
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little")
        total += word * (mix(i % 1024) * (mix(2**32 + i // 1024) | 1))
    return total % 2**64


def test_mix_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0, as published."""
    assert [mix(i) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


VECTORS = [
    (b"", 0),
    (bytes(4096), 0),
    (b"\x01", by_definition(b"\x01")),
    (bytes(range(256)), by_definition(bytes(range(256)))),
    (bytes(range(256)) * 33, by_definition(bytes(range(256)) * 33)),
]


@pytest.mark.parametrize("data, want", VECTORS, ids=range(len(VECTORS)))
def test_vectors(data: bytes, want: int) -> None:
    assert fingerprint_bytes(data) == want
    assert 0 <= want <= MASK


def test_frozen_vectors() -> None:
    """These numbers travel between versions of this package: they must never change."""
    assert fingerprint_bytes(b"\x01") == FROZEN[0]
    assert fingerprint_bytes(bytes(range(256))) == FROZEN[1]
    assert fingerprint_bytes(b"\xff" * 5000) == FROZEN[2]


FROZEN = (
    0xA53925166C099B8B,
    0xBAF6E438B310FE28,
    0x4F90D5278B7E2DBF,
)


def test_keys() -> None:
    assert len(inner_keys()) == BLOCK == 1024
    assert all(outer_key(block) % 2 == 1 for block in range(100))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 9000))
def test_pieces_cut_at_any_byte_add_up(data: bytes, cuts: list[int], start: int) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = itertools.pairwise(edges)
    total = sum(fingerprint_bytes(data[a:b], start + a) for a, b in pieces)
    assert total & MASK == fingerprint_bytes(data, start)


@given(st.binary(min_size=1, max_size=300), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_seen(data: bytes, at: int, bit: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    assert fingerprint_bytes(changed) != fingerprint_bytes(data)


@given(st.lists(st.binary(min_size=4, max_size=4), min_size=2, max_size=60, unique=True), st.data())
def test_swapped_words_are_seen(words: list[bytes], data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    assert fingerprint_bytes(b"".join(swapped)) != fingerprint_bytes(b"".join(words))


def test_swapped_blocks_are_seen() -> None:
    one, two = b"\x01" * (4 * BLOCK), b"\x02" * (4 * BLOCK)
    assert fingerprint_bytes(one + two) != fingerprint_bytes(two + one)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_will_do(kind: type) -> None:
    assert fingerprint_bytes(kind(b"hotbunk")) == by_definition(b"hotbunk")

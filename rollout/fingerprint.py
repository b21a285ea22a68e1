"""The fingerprint that verifies a sync: 64 bits, position-mixed, and a sum.

For bytes read as little-endian 32-bit words ``w[i]`` (the tail padded with zeros)::

    F = sum(w[i] * h(i))  mod 2**64
    h(i) = mix(i mod 1024) * (mix(2**32 + i div 1024) | 1)  mod 2**64

where ``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, OOPSLA 2014) applied to ``(x + 1) * 0x9E3779B97F4A7C15``. It is a multilinear
hash over 32-bit words with 64-bit keys (Lemire, Kaser: Strongly universal string hashing is fast,
2014), so two different contents collide with a chance of about 2**-32, and, being a sum, the
fingerprint of a tensor is the sum of those of its pieces, in any order and cut at any byte, each
taken at its own position: buckets, slices and shards compose. Words of zero add nothing: compare
sizes, too. This file is the definition, in plain Python; :mod:`hotbunk.rollout.kernels` is fast.
"""

from __future__ import annotations

from functools import lru_cache

KIND = "multilinear64"
BLOCK = 1024  # words that share an outer key
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64 of ``x`` (0 <= x < 2**64)."""
    z = ((x + 1) * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=1)
def inner_keys() -> tuple[int, ...]:
    """``mix(j)`` for the 1024 words of a block."""
    return tuple(mix(j) for j in range(BLOCK))


@lru_cache(maxsize=4096)
def outer_key(block: int) -> int:
    """The odd key of block ``block``."""
    return mix((1 << 32) + block) | 1


def fingerprint_bytes(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """The fingerprint of ``data`` lying at byte ``start`` of its tensor."""
    inner = inner_keys()
    lead = start % 4
    padded = bytes(lead) + bytes(data)
    padded += bytes(-len(padded) % 4)
    total = 0
    for n, word in enumerate(memoryview(padded).cast("I"), start // 4):
        if word:
            total += word * inner[n % BLOCK] * outer_key(n // BLOCK)
    return total & MASK

"""Tokens that tell: which weights, which KV and which encoder output made them, under which label.

A token is a 63-bit integer, so it travels like any other token id. Digests are short (12 bits for
weights and KV): two different contents look alike once in 4096 times.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hotbunk.rollout.contract import Version

_INCARNATION, _STEP, _DIGEST, _ENCODER, _CONTEXT = 3, 10, 12, 7, 6


class Stamp(NamedTuple):
    """Which weights computed something: their label and their digest. Older ones sort first."""

    version: Version
    digest: int


class TokenInfo(NamedTuple):
    """What one token says.

    ``weights`` is the digest of every weight group that was in use; ``kv`` the stamp of the oldest
    KV that its context was read from; ``encoder`` the digest of the encoder that saw the request's
    media (0 without media); ``context`` six bits of a hash of all tokens before it.
    """

    version: Version
    weights: int
    kv: Stamp
    encoder: int
    context: int


def encode_token(info: TokenInfo) -> int:
    """Pack what a token says into its id."""
    token = 0
    for value, bits in (
        (info.version.incarnation, _INCARNATION),
        (info.version.step, _STEP),
        (info.weights, _DIGEST),
        (info.kv.version.incarnation, _INCARNATION),
        (info.kv.version.step, _STEP),
        (info.kv.digest, _DIGEST),
        (info.encoder, _ENCODER),
        (info.context, _CONTEXT),
    ):
        token = token << bits | value & ((1 << bits) - 1)
    return token


def decode_token(token: int) -> TokenInfo:
    """Unpack a token id made by the oracle."""
    values = []
    for bits in (_CONTEXT, _ENCODER, _DIGEST, _STEP, _INCARNATION, _DIGEST, _STEP, _INCARNATION):
        values.append(token & ((1 << bits) - 1))
        token >>= bits
    context, encoder, kv, kv_step, kv_incarnation, weights, step, incarnation = values
    stamp = Stamp(Version(kv_incarnation, kv_step), kv)
    return TokenInfo(Version(incarnation, step), weights, stamp, encoder, context)


def extend(context: int, tokens: Iterable[int]) -> int:
    """A running hash of a context (start with 0, or with a seed)."""
    for token in tokens:
        context = zlib.crc32(token.to_bytes(8, "little"), context)
    return context


def digest_of(state: Mapping[str, bytes]) -> int:
    """A digest of named contents (order of names does not matter)."""
    total = 0
    for name, content in state.items():
        total = (total + zlib.crc32(content, zlib.crc32(name.encode()))) & 0xFFFFFFFF
    return total


def weights_bits(digests: Iterable[int]) -> int:
    """What a token shows of the digests of the groups in use, in their order."""
    mixed = 0
    for digest in digests:
        mixed = zlib.crc32(digest.to_bytes(4, "little"), mixed)
    return mixed & ((1 << _DIGEST) - 1)


def encoder_bits(digest: int, payload: int) -> int:
    """What a token shows of an encoder's output: never 0."""
    mixed = zlib.crc32(payload.to_bytes(4, "little"), digest)
    return mixed & ((1 << _ENCODER) - 1) or 1


def continuation(
    prompt: Sequence[int],
    weights: int,
    version: Version,
    n: int,
    *,
    encoder: int = 0,
    seed: int = 0,
) -> list[int]:
    """The ``n`` tokens that follow ``prompt`` when everything was computed by the same weights.

    ``weights`` is :func:`weights_bits` of them, ``encoder`` is :func:`encoder_bits` or 0.
    """
    out: list[int] = []
    context = extend(seed, prompt)
    stamp = Stamp(version, weights)
    for _ in range(n):
        token = encode_token(TokenInfo(version, weights, stamp, encoder, context))
        out.append(token)
        context = extend(context, (token,))
    return out

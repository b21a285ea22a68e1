"""What the two ends of the shm transport say besides :mod:`hotbunk.checkpoint_engine.transports.protocol`.

A full bucket ``number`` lies in half ``number % 2`` of the sender's memory, or in place.
"""

from __future__ import annotations

import msgspec


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Accept.data`: the receiver's arena; its descriptor travels with the frame."""

    kind: str
    nbytes: int


class Way(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Go.data`. ``room``: bytes of one half of the memory that travels with the frame."""

    in_place: bool
    room: int

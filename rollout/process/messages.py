"""What travels between a handle and the process of its replica. Frames, never pickles.

A frame is the length of its body (4 bytes, little-endian) and a body of msgpack: one message.
"""

from __future__ import annotations

import msgspec

from hotbunk.rollout.contract import Capabilities, ReceiverLayout, TokenChunk
from hotbunk.rollout.errors import UsageError
from hotbunk.rollout.process.spec import ReplicaSpec
from hotbunk.rollout.process.wire_errors import WireError

MAX_FRAME = 64 << 20  # bytes of a body
HEADER = 4
WINDOW = 64  # chunks of one stream on their way, at most


class BrokenFrame(ValueError):
    """The other side sent what is no frame, or no message. The connection ends."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Begin(_Message, frozen=True):
    """The first message to a new process."""

    spec: ReplicaSpec


class Call(_Message, frozen=True):
    """Run a verb; ``args`` are that verb's own (see verbs.py)."""

    id: int
    verb: str
    args: msgspec.Raw


class Cancel(_Message, frozen=True):
    """Cancel that call or stream. It is answered all the same."""

    id: int


class Credit(_Message, frozen=True):
    """``count`` chunks of the stream were taken: as many more may be sent."""

    id: int
    count: int


class Go(_Message, frozen=True):
    """The answer to :class:`Ask`: go on, or fail with ``error``."""

    id: int
    error: WireError | None = None


class Ping(_Message, frozen=True):
    """Is anybody there?"""


class Ready(_Message, frozen=True):
    """The replica has started."""

    capabilities: Capabilities


class Result(_Message, frozen=True):
    """A call ended well."""

    id: int
    value: msgspec.Raw


class Failed(_Message, frozen=True):
    """A call, a stream or (``id`` 0) the start ended in an error."""

    id: int
    error: WireError


class Chunks(_Message, frozen=True):
    """Some chunks of a stream."""

    id: int
    items: list[TokenChunk]


class Ended(_Message, frozen=True):
    """A stream came to its end, or was cancelled; so was a call."""

    id: int


class Ask(_Message, frozen=True):
    """An update under way in a rank waits for all ranks before it goes on past ``step``.

    ``fingerprints`` are of what it was sent, in a sharded engine of what it holds, each at its place
    in the whole tensor (``slices``: of which part). ``layout`` is what it accepted.
    """

    id: int
    update: int
    step: str
    fingerprints: dict[str, int]
    slices: dict[str, tuple[tuple[int, int], ...]] = {}
    layout: ReceiverLayout | None = None


class Pong(_Message, frozen=True):
    """Yes."""


ToChild = Begin | Call | Cancel | Credit | Go | Ping
FromChild = Ready | Result | Failed | Chunks | Ended | Ask | Pong

_encoder = msgspec.msgpack.Encoder()


def encode(value: object) -> bytes:
    """Plain data and structs as msgpack. :raises UsageError: something in it is neither."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"only plain data can travel to another process: {error}") from error


def frame(message: ToChild | FromChild) -> bytes:
    """A message as a frame. :raises UsageError: it cannot travel, or is too large."""
    body = encode(message)
    if len(body) > MAX_FRAME:
        raise UsageError(
            f"a message of {len(body)} bytes is too large for another process (at most {MAX_FRAME})"
        )
    return len(body).to_bytes(HEADER, "little") + body

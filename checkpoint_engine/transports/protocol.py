"""What the two ends of a sync say to each other, whatever way the bytes take.

    receiver                                    sender
    Hello(token, rank)                    ->
                                          <-    Welcome(manifest, ...) | Abort
    Accept(layout, data) | Decline        ->
                                          <-    Go(data)              once all ranks have accepted
    Ready                                 ->                          where the way must be built
                                          <-    Full(number, used, entries) ...
    Ack(number) ...                       ->
                                          <-    End(fingerprints)
    Vote                                  ->
                                          <-    Committed             once all ranks have voted

Either side says Abort at any point, and the sender says Beat while it has nothing else to say. A
peer is told by the random token of its ticket and by its rank, over a Unix socket by its user, too.

``Accept.data`` and ``Go.data`` are the transport's own messages, as bytes (:func:`packed`,
:func:`unpacked`); a descriptor may travel with either. Whether Ready, Full, Ack and End are said is
the transport's business.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from hotbunk.rollout.contract import Manifest, ReceiverLayout
from hotbunk.rollout.errors import HotbunkError, TransferFailed

PROTOCOL = 2
HELLO_BYTES = 4 << 10  # most of a frame from somebody who has not shown a token
FRAME_BYTES = 64 << 20  # most of any frame: layouts and manifests of a few hundred thousand names
HALVES = 2  # buckets that one receiver may have at a time: one is packed, one is copied out
_TRACEBACK = 16 << 10  # characters kept of one

T = TypeVar("T")
Piece = tuple[int, int, int, int]  # a BucketEntry: index, start, nbytes, offset


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels."""

    kind: str
    text: str
    traceback: str = ""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """With the traceback of where it was raised, and the one it carries itself."""
        own = "".join(traceback.format_exception(error))
        told = error.remote_traceback if isinstance(error, HotbunkError) else ""
        both = f"{told}\n{own}" if told else own
        return Failure(type(error).__name__, str(error), both[-_TRACEBACK:])

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Hello(_Message, frozen=True):
    """``process`` names the receiver's process among all that ever were; ``holds`` what it kept."""

    token: str
    rank: int
    process: str = ""
    holds: tuple[str, ...] = ()
    protocol: int = PROTOCOL


class Welcome(_Message, frozen=True):
    """``deadline``: seconds until the offer ends; ``stall``: silence after which a peer is given up."""

    manifest: Manifest
    deadline: float
    stall: float


class Accept(_Message, frozen=True):
    layout: ReceiverLayout | None
    data: bytes = b""


class Decline(_Message, frozen=True):
    pass


class Go(_Message, frozen=True):
    """All ranks of the replica accepted."""

    data: bytes


class Ready(_Message, frozen=True):
    """From now on bytes may come."""


class Full(_Message, frozen=True):
    """Bucket ``number`` comes next, or is there: ``used`` bytes."""

    number: int
    used: int
    entries: tuple[Piece, ...]


class Ack(_Message, frozen=True):
    number: int


class End(_Message, frozen=True):
    fingerprints: Mapping[str, int]


class Vote(_Message, frozen=True):
    pass


class Committed(_Message, frozen=True):
    pass


class Beat(_Message, frozen=True):
    """The sender lives."""


class Abort(_Message, frozen=True):
    """``refused``: before anything was written anywhere."""

    failure: Failure
    refused: bool = False


FromReceiver = Hello | Accept | Decline | Ready | Ack | Vote | Abort
FromSender = Welcome | Go | Full | End | Committed | Beat | Abort
Message = FromReceiver | FromSender

from_receiver = msgspec.msgpack.Decoder(FromReceiver)
from_sender = msgspec.msgpack.Decoder(FromSender)
#: A transport's own message, as bytes.
packed = msgspec.msgpack.Encoder().encode


def unpacked(data: bytes, kind: type[T]) -> T:
    """A transport's own message. :raises TransferFailed: it makes no sense."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferFailed(f"the peer's {kind.__name__} makes no sense: {error}") from error


def frame(message: Message) -> bytes:
    """A message as bytes on the wire. :raises TransferFailed: it is too large for a frame."""
    body = packed(message)
    if len(body) > FRAME_BYTES:
        raise TransferFailed(
            f"a {type(message).__name__} of {len(body)} bytes is more than {FRAME_BYTES}"
        )
    return len(body).to_bytes(4, "little") + body

"""A transport for tests whose ticket says everything: which weights, in what buckets, how broken.

``register()`` makes it known in a process; a replica in a process of its own does so with
``setup="hotbunk.conformance.tickets:register"``. Nothing is sent: each end makes its own bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.conformance import transfers
from hotbunk.conformance.transfers import MemoryTransfer, Tensors
from hotbunk.rollout.contract import FULL, Scope, TensorSpec, Ticket, Version
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.registry import TRANSPORTS
from hotbunk.rollout.registry import register as register_factory

NAME = "told"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Told(msgspec.Struct, frozen=True):
    """What a ticket's address says, as JSON.

    ``weights`` is ``oracle`` (those of ``step``), or a safetensors file. ``sender`` is a class of
    :mod:`hotbunk.conformance.transfers`; ``at`` is for those that go wrong at some bucket, and only
    in rank ``rank`` (-1: in every rank).
    """

    weights: str
    step: int
    version: Version
    scope: Scope = FULL
    bucket_bytes: int = 1 << 20
    fingerprint: str = KIND
    sender: str = "MemoryTransfer"
    at: int | None = None
    rank: int = -1


def ticket(step: int, *, ranks: int = 1, weights: str = "oracle", **more: Any) -> Ticket:
    """A ticket for the weights of ``step``, as version 0.``step`` unless told otherwise."""
    more.setdefault("version", Version(0, step))
    told = Told(weights, step, **more)
    return Ticket(NAME, msgspec.json.encode(told).decode(), ranks=ranks)


def register() -> None:
    """Make the transport known in this process."""
    register_factory(TRANSPORTS, NAME, f"{__name__}:TicketTransport")


class TicketTransport:
    """The receiving side."""

    @staticmethod
    async def open(ticket: Ticket) -> MemoryTransfer:
        told = msgspec.json.decode(ticket.address, type=Told)
        sender, options = MemoryTransfer, {}
        if told.rank in (-1, ticket.rank):
            sender = getattr(transfers, told.sender)
            options = {} if told.at is None else {"at": told.at}
        return sender(
            _tensors(told),
            version=told.version,
            scope=told.scope,
            bucket_bytes=told.bucket_bytes,
            fingerprint=told.fingerprint,
            **options,
        )


def _tensors(told: Told) -> Tensors:
    if told.weights == "oracle":
        from hotbunk.rollout.backends.oracle.model import weights_at

        return weights_at(told.step)
    return read_safetensors(Path(told.weights))


def read_safetensors(path: Path) -> list[tuple[TensorSpec, bytes]]:
    """The tensors of a file, without torch."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: Mapping[str, Any] = json.loads(data[8:start])
    found = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        spec = TensorSpec(name, tuple(about["shape"]), _DTYPES[about["dtype"]], last - first)
        found.append((spec, data[start + first : start + last]))
    return found

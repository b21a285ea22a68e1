"""Ranks of an engine on one event loop, and offers to them whose ends can be looked at."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from hotbunk.conformance.transfers import MemoryTransfer, Tensors
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import OracleEngine
from hotbunk.rollout.contract import Capabilities, GenerateRequest, Ticket, TokenChunk, Version
from hotbunk.rollout.process.messages import Ask
from hotbunk.rollout.process.rank import Asking, RankTarget
from hotbunk.rollout.process.wire_errors import from_wire, to_wire
from hotbunk.rollout.registry import TRANSPORTS, register

OPENED: list[tuple[Ticket, MemoryTransfer]] = []  # every end that was opened, in order
MAKE: dict[str, Any] = {}  # by rank: another transfer than MemoryTransfer
_offers: list[tuple[Tensors, dict[str, Any]]] = []


class LocalRank:
    """A rank on this event loop, which answers late."""

    def __init__(
        self, number: int, engine: OracleEngine, draw: random.Random, *, sharded: bool = False
    ) -> None:
        self.number = number
        self.engine = engine
        self.draw = draw
        self.asked: asyncio.Queue[Ask] = asyncio.Queue()
        self.asking = Asking(self.asked.put_nowait)
        self.target = RankTarget(engine, self.asking.barrier, sharded=sharded)
        self.on_lost: Any = None

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    async def late(self) -> None:
        await asyncio.sleep(self.draw.uniform(0.0, 0.2))

    async def call(self, verb: str, args: msgspec.Struct | None = None) -> Any:
        more = {} if args is None else {n: getattr(args, n) for n in args.__struct_fields__}
        await self.late()
        try:
            result = await getattr(self.target, verb)(**more)
        except Exception as error:  # a boundary between processes, as the real one
            raise from_wire(to_wire(verb, error)) from error  # as over a wire
        await self.late()
        return result

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self.engine.generate(request)

    async def at_barrier(self, update: int) -> Ask:
        while True:
            asked = await self.asked.get()
            if asked.update == update:
                return asked

    def go(self, asked: Ask, error: errors.HotbunkError | None = None) -> None:
        self.asking.told(asked.id, error)


def offer(tensors: Tensors, version: Version, ranks: int, **more: Any) -> Ticket:
    """A ticket for ``ranks`` ranks of this process; each gets an end of its own in ``OPENED``."""
    register(TRANSPORTS, "recorded", f"{__name__}:Recorded")
    _offers.append((tensors, {"version": version, **more}))
    return Ticket("recorded", str(len(_offers) - 1), ranks=ranks)


class Recorded:
    """The transport of these tickets."""

    @staticmethod
    async def open(ticket: Ticket) -> MemoryTransfer:
        tensors, more = _offers[int(ticket.address)]
        transfer: MemoryTransfer = MAKE.get(str(ticket.rank), MemoryTransfer)(tensors, **more)
        OPENED.append((ticket, transfer))
        return transfer

"""One rank of an engine in a process of its own: an engine's verbs, without a replica's rules.

The rules are the replica's, which drives all ranks as one engine (see ranked.py). An update is one
call whose rank stops at three barriers, ``accept``, ``write`` (its first bytes have come) and
``commit``, until it is told to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    Capabilities,
    Digests,
    Engine,
    GenerateRequest,
    Manifest,
    ReceiverLayout,
    Scope,
    TensorSpec,
    Ticket,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    digest_name,
)
from hotbunk.rollout.errors import HotbunkError, SessionError
from hotbunk.rollout.process.grid import Slices
from hotbunk.rollout.process.messages import Ask, Go
from hotbunk.rollout.process.remote import Remote
from hotbunk.rollout.process.spec import ReplicaSpec
from hotbunk.rollout.process.verbs import RANK_VERBS
from hotbunk.rollout.process.wire_errors import to_wire
from hotbunk.rollout.registry import open_transfer
from hotbunk.rollout.transfer import Begin, Run, Write

ACCEPT, WRITE, COMMIT = "accept", "write", "commit"


class Said(msgspec.Struct, frozen=True):
    """What a rank tells at a barrier; see :class:`Ask`."""

    fingerprints: Mapping[str, int] = msgspec.field(default_factory=dict)
    slices: Mapping[str, Slices] = msgspec.field(default_factory=dict)
    layout: ReceiverLayout | None = None


Barrier = Callable[[int, str, Said], Awaitable[None]]


class Rank(Protocol):
    """One rank, wherever it is."""

    on_lost: Callable[[str], object]

    @property
    def capabilities(self) -> Capabilities:
        """Of its engine, once started."""
        ...

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def call(self, verb: str, args: msgspec.Struct | None = None) -> Any:
        """Run a verb of ``RANK_VERBS``."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...

    async def at_barrier(self, update: int) -> Ask:
        """Until update number ``update`` stops at its next barrier there."""
        ...

    def go(self, asked: Ask, error: HotbunkError | None = None) -> None:
        """Let it go on from there, or fail with ``error``."""
        ...


class RankProcess(Remote):
    """A rank in a process of its own."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec, RANK_VERBS)

    async def at_barrier(self, update: int) -> Ask:
        while True:
            asked = await self._asked.get()
            if asked.update == update:  # else: one that was cancelled as it asked
                return asked

    def go(self, asked: Ask, error: HotbunkError | None = None) -> None:
        wire = None if error is None else to_wire("update_weights", error)
        self._connection.send(Go(asked.id, wire))


class RankTarget:
    """What the process of a rank serves: its engine's verbs, and updates that stop at barriers.

    :param barrier: called where an update must not go on alone; raises what another rank met.
    :param sharded: this rank holds a part of the model.
    """

    def __init__(self, engine: Engine, barrier: Barrier, *, sharded: bool = False) -> None:
        self._engine = engine
        self._barrier = barrier
        self._sharded = sharded
        self._transfer: Transfer | None = None

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)

    async def open_update(self, ticket: Ticket) -> Manifest:
        """Open this rank's end. :raises TransferFailed: see the transport."""
        await self.abort_update("another update was opened")
        self._transfer = await open_transfer(ticket)
        return self._transfer.manifest

    async def decline_update(self) -> None:
        """The offered version is already here."""
        await self._opened().decline()

    async def abort_update(self, reason: str) -> None:
        """Give an opened update up, if there is one."""
        if self._transfer is not None:
            await self._opened().abort(SessionError(reason))

    async def update_weights(self, number: int, version: Version, scope: Scope) -> UpdateReport:
        """Run the opened update, as far as all ranks go."""
        transfer = self._opened()
        try:
            return await self._engine.update_weights(
                _WithBarriers(
                    transfer,
                    partial(self._barrier, number),
                    self._engine.digest if self._sharded else None,
                ),
                version=version,
                scope=scope,
            )
        except BaseException as error:
            await transfer.abort(error)
            raise

    def _opened(self) -> Transfer:
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            raise SessionError("no update was opened in this rank")
        return transfer


class _WithBarriers(Transfer):
    """A rank's transfer: no rank writes before all have accepted, none commits before all can.

    Before its first byte is written the rank says so, for the replica's dirty mark.
    """

    def __init__(
        self,
        inner: Transfer,
        barrier: Callable[[str, Said], Awaitable[None]],
        digest: Callable[[list[str]], Awaitable[Digests]] | None,
    ) -> None:
        self.manifest = inner.manifest
        self._inner = inner
        self._barrier = barrier
        self._digest = digest  # of a rank that holds a part
        self._layout: ReceiverLayout | None = None
        self._expected: Mapping[str, int] = {}
        self._in_place = False

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        self._in_place = await self._inner.accept(layout, arena)
        self._layout = layout if self._digest is not None else None
        await self._barrier(ACCEPT, Said(layout=self._layout))
        return self._in_place

    async def buckets(self) -> AsyncIterator[Bucket]:
        said = False
        if self._in_place:  # asked for, they are written
            await self._barrier(WRITE, Said())
            said = True
        async for bucket in self._inner.buckets():
            if not said:
                await self._barrier(WRITE, Said())
                said = True
            yield bucket

    async def take(
        self, write: Write, *, begin: Begin | None = None, run: Run = asyncio.to_thread
    ) -> None:
        if self._in_place:
            await self._barrier(WRITE, Said())

        async def first() -> None:
            if not self._in_place:
                await self._barrier(WRITE, Said())
            if begin is not None:
                await begin()

        await self._inner.take(write, begin=first, run=run)

    async def fingerprints(self) -> Mapping[str, int]:
        self._expected = dict(await self._inner.fingerprints())
        return self._expected

    async def commit(self) -> None:
        said = Said(self._expected)
        if self._digest is not None and self._expected:
            # What was sent is known by a part's own content; to add up it must be told by place.
            mine = {
                digest_name(spec.group, spec.name): spec.name
                for spec in self.manifest.tensors
                if self._has(spec)
            }
            held = await self._digest([*mine])
            said = Said(
                {mine[name]: value for name, value in held.values.items()},
                {mine[name]: part for name, part in held.slices.items()},
            )
        await self._barrier(COMMIT, said)
        await self._inner.commit()

    def _has(self, spec: TensorSpec) -> bool:
        return self._layout is None or any(name in self._layout.tensors for name in spec.names)

    async def decline(self) -> None:
        await self._inner.decline()

    async def abort(self, error: BaseException) -> None:
        await self._inner.abort(error)


class Asking:
    """The barriers of a rank's process: asks its owner, and waits for the word."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def barrier(self, update: int, step: str, said: Said) -> None:
        """Until the owner says go. Bounded by the update, which its owner cancels.

        :raises HotbunkError: what the owner says instead.
        """
        self._number += 1
        word = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        try:
            self._send(
                Ask(
                    self._number,
                    update,
                    step,
                    dict(said.fingerprints),
                    dict(said.slices),
                    said.layout,
                )
            )
            await word
        finally:
            del self._waiting[self._number]

    def told(self, number: int, error: HotbunkError | None) -> None:
        """The owner's word. One that comes late is for nobody."""
        word = self._waiting.get(number)
        if word is None or word.done():
            return
        if error is None:
            word.set_result(None)
        else:
            word.set_exception(error)

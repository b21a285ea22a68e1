"""A process of an engine, seen from its owner: started, called, watched, closed.

Whatever happens to the process, nothing that waits for it is left waiting: calls end in
``ReplicaLost``, streams with finish reason ``abort`` and a retryable error.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from hotbunk.rollout.calls import noted
from hotbunk.rollout.contract import Capabilities, GenerateRequest, TokenChunk, Version
from hotbunk.rollout.errors import DeadlineExceeded, EngineFailed, HotbunkError, ReplicaLost
from hotbunk.rollout.process.connection import Connection
from hotbunk.rollout.process.launch import spawn
from hotbunk.rollout.process.messages import (
    Ask,
    Begin,
    BrokenFrame,
    Call,
    Cancel,
    Chunks,
    Credit,
    Ended,
    Failed,
    FromChild,
    Ping,
    Pong,
    Ready,
    Result,
    encode,
)
from hotbunk.rollout.process.spec import REPLICA, ReplicaSpec
from hotbunk.rollout.process.stream import Stream
from hotbunk.rollout.process.verbs import GENERATE, Generate, Nothing, Verb
from hotbunk.rollout.process.watch import REAPED, Watched
from hotbunk.rollout.process.wire_errors import from_wire

log = logging.getLogger(__name__)
TICKS = 10  # in which a silent process is given its time: a loop of ours that stood counts as one
CLOSED = "closed"


class Remote:
    """One process. Made by :meth:`start`; holds no truth about what is in it."""

    capabilities: Capabilities

    def __init__(self, spec: ReplicaSpec, verbs: Mapping[str, Verb]) -> None:
        self.spec = spec
        self.lost = ""  # why nothing can be asked any more
        self.on_lost: Callable[[str], object] = lambda why: None
        self._verbs = verbs
        self._limit = spec.deadlines.inspect + spec.deadlines.grace
        self._number = 0
        self._calls: dict[int, asyncio.Future[msgspec.Raw | None]] = {}
        self._streams: dict[int, Stream] = {}
        self._asked: asyncio.Queue[Ask] = asyncio.Queue()
        self._ready: asyncio.Future[Capabilities] = asyncio.get_running_loop().create_future()
        self._connection = Connection(self._receive, self._disconnected, FromChild)
        self._process: Watched
        self._pulse: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._version = Version()

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process, and what is in it.

        :raises DeadlineExceeded: not within ``deadlines.start``; says what stderr said last.
        :raises EngineFailed: the process ended instead; likewise.
        :raises HotbunkError: what starting a replica raises there.
        """
        seconds, name = self.spec.deadlines.start, self.spec.name
        if (
            self.spec.role == REPLICA and self.spec.grid.size > 1
        ):  # its ranks have that time, and are told of one by one
            seconds += 2 * self.spec.deadlines.grace
        self._process = Watched(spawn(self.spec), name, self._died)
        try:
            async with asyncio.timeout(seconds):
                await self._process.started()
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: self._connection, sock=self._process.sock)
                self._connection.send(Begin(self.spec))
                self.capabilities = await self._ready
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # its own word, about one of its ranks
                await self._lose("it did not start")
                raise
            await self._lose(f"it did not start within {seconds:g} s")
            said = self._process.last_words()
            raise DeadlineExceeded("starting", seconds, where=name, remedy=said) from None
        except BaseException as error:
            await self._lose("it did not start")
            if isinstance(error, ReplicaLost):
                said = self._process.last_words()
                raise EngineFailed(error.what, where=name, remedy=said) from None
            raise
        self._pulse = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    async def close(self) -> None:
        """End the process: by SIGTERM, and after the grace by SIGKILL. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self.lost:
            self.lost = CLOSED  # nothing new; what is under way is ended by the replica itself
            self._process.signal(signal.SIGTERM)
            await self._process.ended(self.spec.deadlines.grace)
        await self._lose(CLOSED)

    async def _lose(self, why: str) -> None:
        """Nothing can be asked any more. Returns when the process is no more."""
        self._end(why)
        assert self._burial is not None
        await asyncio.shield(self._burial)

    def _end(self, why: str) -> None:
        """End everything that waits, at once, and the process with it."""
        if self._burial is not None:
            return
        unasked = not self.lost and self._pulse is not None
        self.lost = self.lost or why
        error = self._gone()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._gone())
                call.exception()  # nobody may be waiting any more
        self._calls.clear()
        for stream in self._streams.values():
            stream.lose(f"the replica was lost: {self.lost}", self._version)
        self._streams.clear()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        if self._pulse is not None and self._pulse is not asyncio.current_task():
            self._pulse.cancel()
        self._burial = asyncio.create_task(self._buried())
        if unasked:
            log.warning("replica %s was lost: %s", self.spec.name, self.lost)
            self.on_lost(self.lost)

    async def _buried(self) -> None:
        self._connection.abort(CLOSED)
        await self._process.buried()

    def _gone(self) -> ReplicaLost:
        return ReplicaLost(self.lost, where=self.spec.name, remedy="start the replica anew")

    def check_alive(self) -> None:
        """:raises ReplicaLost: nothing can be asked any more."""
        if self.lost:
            raise self._gone()

    # -- asking -------------------------------------------------------------------------------

    async def call(self, verb: str, args: msgspec.Struct | None = None) -> Any:
        """Run a verb there. Cancelled here, it is cancelled there, and has ended when this ends.

        :raises ReplicaLost: the process is gone, or went meanwhile, or hangs.
        """
        self.check_alive()
        kind = self._verbs[verb]
        number = self._next()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send_call(number, verb, args or Nothing())
            await self._connection.drained()
            raw = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(noted)
            self._connection.send(Cancel(number))
            await asyncio.wait({answer}, timeout=self._limit)
            raise
        finally:
            if answer.done():
                self._calls.pop(number, None)
        if raw is None:
            raise EngineFailed(f"{verb} was cancelled in its own process", where=self.spec.name)
        return self._decoded(verb, raw, kind.result)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream one request. Dropping the iterator ends it there."""
        self.check_alive()
        number = self._next()
        stream = self._streams[number] = Stream(request)
        try:
            self._send_call(number, GENERATE, Generate(request))
            while (chunk := await stream.next()) is not None:
                self._version = max(self._version, chunk.version)
                yield chunk
                if taken := stream.taken():
                    self._connection.send(Credit(number, taken))
        finally:
            if not stream.over:
                self._connection.send(Cancel(number))
                await stream.until_over(self._limit)
            self._streams.pop(number, None)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _send_call(self, number: int, verb: str, args: msgspec.Struct) -> None:
        try:
            self._connection.send(Call(number, verb, msgspec.Raw(encode(args))))
        except HotbunkError:
            self._calls.pop(number, None)
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.over = True
            raise

    def _decoded(self, verb: str, raw: msgspec.Raw, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            self._end(f"it answered {verb} with nonsense: {error}")
            raise self._gone() from error

    # -- being told ---------------------------------------------------------------------------

    def _receive(self, message: object) -> None:
        match message:
            case Ready() if not self._ready.done():
                self._ready.set_result(message.capabilities)
            case Failed(id=0) if not self._ready.done():
                self._ready.set_exception(from_wire(message.error))
                self._ready.exception()
            case Result():
                self._answer(message.id, message.value, None)
            case Failed() if message.id in self._streams:
                self._streams[message.id].fail(from_wire(message.error))
            case Failed():
                self._answer(message.id, None, from_wire(message.error))
            case Chunks() if message.id in self._streams:
                self._streams[message.id].put(message.items)
            case Ended() if message.id in self._streams:
                self._streams[message.id].end()
            case Ended():
                self._answer(message.id, None, None)
            case Chunks():
                self._known(message.id)
            case Ask():
                self._asked.put_nowait(message)
            case Pong():
                pass
            case _:
                raise BrokenFrame(f"a {type(message).__name__} came out of turn")

    def _answer(self, number: int, value: msgspec.Raw | None, error: HotbunkError | None) -> None:
        self._known(number)
        call = self._calls.pop(number, None)
        if call is None or call.done():
            return  # who asked has gone
        if error is None:
            call.set_result(value)
        else:
            call.set_exception(error)
            call.exception()

    def _known(self, number: int) -> None:
        if not 0 < number <= self._number:
            raise BrokenFrame(f"an answer came to call {number}, which was never made")

    # -- watching -----------------------------------------------------------------------------

    def _disconnected(self, reason: str) -> None:
        """The socket ended: the process speaks nonsense, or is ending, and the watch says how."""
        if self._connection.broken:
            self._died(reason)
        else:
            asyncio.get_running_loop().call_later(REAPED, self._died, reason)

    def _died(self, reason: str) -> None:
        if self._burial is None and self.lost != CLOSED:
            self._end(f"the engine's process {reason}")

    async def _watch(self) -> None:
        """Ask now and then whether anybody is there, while somebody waits for an answer."""
        while True:
            await asyncio.sleep(self.spec.deadlines.inspect)
            if not self._calls and not self._streams:
                continue
            seen, began = self._connection.received, time.monotonic()
            self._connection.send(Ping())
            for _ in range(TICKS):
                await asyncio.sleep(self._limit / TICKS)
                if self._connection.received != seen:
                    break
            else:
                seconds = time.monotonic() - began
                self._end(f"the engine's process hangs: no word for {seconds:.1f} s")
                return

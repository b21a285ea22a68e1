"""The verbs of one object, served over one connection: calls, streams, and their cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from hotbunk.rollout.errors import HotbunkError, UsageError
from hotbunk.rollout.process.connection import Connection
from hotbunk.rollout.process.messages import (
    WINDOW,
    BrokenFrame,
    Call,
    Cancel,
    Chunks,
    Credit,
    Ended,
    Failed,
    Go,
    Ping,
    Pong,
    Result,
    encode,
)
from hotbunk.rollout.process.verbs import GENERATE, Verb
from hotbunk.rollout.process.wire_errors import from_wire, to_wire


class Service:
    """Runs each call as a task of its own, so that a status is answered while a verb runs.

    :param told: takes the owner's word about a barrier.
    """

    def __init__(
        self,
        target: Any,
        verbs: Mapping[str, Verb],
        connection: Connection,
        told: Callable[[int, HotbunkError | None], None],
    ) -> None:
        self._target = target
        self._verbs = verbs
        self._connection = connection
        self._told = told
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._credits: dict[int, _Credits] = {}

    def receive(self, message: object) -> None:
        """A message came. :raises BrokenFrame: it makes no sense here."""
        match message:
            case Call():
                if message.id in self._tasks or message.id < 1:
                    raise BrokenFrame(f"call {message.id} is under way already")
                work = self._stream(message) if message.verb == GENERATE else self._call(message)
                task = self._tasks[message.id] = asyncio.create_task(work)
                task.add_done_callback(partial(self._done, message.id))
            case Cancel():
                if message.id in self._tasks:
                    self._tasks[message.id].cancel()
            case Credit():
                if message.id in self._credits:
                    self._credits[message.id].add(message.count)
            case Go():
                self._told(message.id, None if message.error is None else from_wire(message.error))
            case Ping():
                self._connection.send(Pong())
            case _:
                raise BrokenFrame(f"a {type(message).__name__} came out of turn")

    async def close(self, seconds: float) -> None:
        """Let what ended by itself say so, and cancel the rest; ``seconds`` at most for each."""
        tasks = set(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=seconds)

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._credits.pop(number, None)
        if task.cancelled():  # perhaps before its first step, so not even its own end can tell
            self._connection.send(Ended(number))

    def _args(self, call: Call) -> dict[str, Any]:
        verb = self._verbs.get(call.verb)
        if verb is None:
            raise UsageError(f"there is no verb {call.verb!r}")
        try:
            args = msgspec.msgpack.decode(call.args, type=verb.args)
        except msgspec.DecodeError as error:
            raise UsageError(f"{call.verb}: {error}") from error
        return {name: getattr(args, name) for name in args.__struct_fields__}

    async def _call(self, call: Call) -> None:
        try:
            result = await getattr(self._target, call.verb)(**self._args(call))
            self._connection.send(Result(call.id, msgspec.Raw(encode(result))))
        # A boundary between processes: whatever is raised goes to who asked.
        except Exception as error:  # noqa: BLE001
            self._connection.send(Failed(call.id, to_wire(call.verb, error)))

    async def _stream(self, call: Call) -> None:
        credits_left = self._credits[call.id] = _Credits(WINDOW)
        try:
            async with aclosing(self._target.generate(**self._args(call))) as stream:
                async for chunk in stream:
                    await credits_left.take()
                    self._connection.send(Chunks(call.id, [chunk]))
            self._connection.send(Ended(call.id))
        # A boundary between processes, as above.
        except Exception as error:  # noqa: BLE001
            self._connection.send(Failed(call.id, to_wire(GENERATE, error)))


class _Credits:
    """How many chunks may still be sent. A slow reader holds the stream back, not the memory."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._some = asyncio.Event()

    def add(self, count: int) -> None:
        if count < 1:
            raise BrokenFrame(f"a credit of {count} chunks")
        self._left += count
        self._some.set()

    async def take(self) -> None:
        while self._left < 1:
            self._some.clear()
            await self._some.wait()
        self._left -= 1

"""The process of a replica: builds it, serves it, and goes when its trainer goes.

Forked by a server that calls :func:`run`, or executed by another interpreter as
``python -m hotbunk.rollout.process.child FD``, with a connected socket as that descriptor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from hotbunk.rollout.errors import ConfigError, HotbunkError
from hotbunk.rollout.process.connection import Connection
from hotbunk.rollout.process.messages import Begin, BrokenFrame, Failed, Ping, Pong, Ready, ToChild
from hotbunk.rollout.process.rank import Asking, RankProcess, RankTarget
from hotbunk.rollout.process.ranked import RankedEngine
from hotbunk.rollout.process.service import Service
from hotbunk.rollout.process.spec import RANK, REPLICA, ReplicaSpec, rank_specs
from hotbunk.rollout.process.verbs import RANK_VERBS, REPLICA_VERBS
from hotbunk.rollout.process.wire_errors import to_wire
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica

CLOSE_WAIT = 2.0  # seconds for streams to say their last word, and for it to be read


def run(sock: socket.socket) -> int:
    """Serve until the other side ends it; the exit code of the process.

    The event loop is not taken down step by step: the process ends with it, and an engine's thread
    that hangs must not hold it up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the trainer decides

    async def serve() -> int:
        return await _Child().serve(sock)

    return asyncio.new_event_loop().run_until_complete(serve())


class _Child:
    """One replica and one connection."""

    def __init__(self) -> None:
        self._connection = Connection(self._receive, self._closed, ToChild)
        self._begun: asyncio.Future[ReplicaSpec] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._service: Service | None = None
        self._asking = Asking(self._connection.send)

    async def serve(self, sock: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        await loop.create_connection(lambda: self._connection, sock=sock)
        stopping = asyncio.create_task(self._stop.wait())
        working = asyncio.create_task(self._started())
        await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working}, timeout=CLOSE_WAIT)
            return 0
        replica, spec = working.result()
        if replica is None:
            await self._connection.close(CLOSE_WAIT)
            return 1
        await stopping
        await self._ended(replica, spec)
        return 0

    async def _started(self) -> tuple[Any, ReplicaSpec]:
        spec = await self._begun
        target: Any = None
        try:
            if spec.setup:
                _load(spec.setup)()
            target = self._built(spec)
            await target.start()
        # A boundary between processes: an engine may raise anything while it starts.
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, HotbunkError):
                sys.excepthook(type(error), error, error.__traceback__)
            self._connection.send(Failed(0, to_wire("start", error)))
            return None, spec
        served = REPLICA_VERBS if spec.role == REPLICA else RANK_VERBS
        self._service = Service(target, served, self._connection, self._asking.told)
        self._connection.send(Ready(target.capabilities))
        return target, spec

    def _built(self, spec: ReplicaSpec) -> Any:
        """A replica, its engine's ranks in processes of their own where there are several; or one
        such rank."""
        if spec.role == RANK:
            engine = create_backend(spec.backend, **spec.options)
            return RankTarget(engine, self._asking.barrier, sharded=spec.grid.shards > 1)
        if spec.grid.size > 1:
            engine = RankedEngine([RankProcess(one) for one in rank_specs(spec)], spec.grid)
        else:
            engine = create_backend(spec.backend, **spec.options)
        return Replica(engine, name=spec.name, deadlines=spec.deadlines, fed_groups=spec.fed_groups)

    async def _ended(self, replica: Any, spec: ReplicaSpec) -> None:
        """End every request and the engine, within the grace its owner gives."""
        assert self._service is not None
        closing = asyncio.create_task(replica.close())
        done, _ = await asyncio.wait({closing}, timeout=spec.deadlines.grace)
        if done and (error := closing.exception()) is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        await self._service.close(CLOSE_WAIT)
        await self._connection.close(CLOSE_WAIT)

    def _receive(self, message: object) -> None:
        if isinstance(message, Begin) and not self._begun.done():
            self._begun.set_result(message.spec)
        elif self._service is not None:
            self._service.receive(message)
        elif isinstance(message, Ping):
            self._connection.send(Pong())
        else:
            raise BrokenFrame(f"a {type(message).__name__} came before the replica was ready")

    def _closed(self, reason: str) -> None:
        self._stop.set()


def _load(name: str) -> Any:
    """What ``module:function`` names. :raises ConfigError: nothing."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"setup={name!r} cannot be loaded: {error}") from error


def main(argv: list[str]) -> None:
    """Of an interpreter that was executed."""
    sock = socket.socket(fileno=int(argv[1]))
    os.set_inheritable(sock.fileno(), False)
    code = run(sock)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv)

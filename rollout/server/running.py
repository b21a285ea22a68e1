"""A server that ends well: what is in flight ends with a retryable abort, within a bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from hotbunk.rollout.contract import PauseMode
from hotbunk.rollout.errors import ConfigError, HotbunkError
from hotbunk.rollout.server.guard import Punctual
from hotbunk.rollout.server.plane import Plane

log = logging.getLogger(__name__)
LEAVING = "shutdown"  # whose pause it is
DRAIN_SECONDS = 5.0  # for requests to end, and again for their clients to read that
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, not yet listening: nobody connects before there is an answer.

    :raises ConfigError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


async def drain(plane: Plane) -> None:
    """Turn new requests away, and end those in flight with what they have."""
    plane.leaving = True
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await plane.replica.pause_generation(
                PauseMode.ABORT, clear_cache=False, reject=True, owner=LEAVING
            )
    except (HotbunkError, TimeoutError) as error:
        log.warning("requests in flight could not be ended: %s", error)


class _Server(uvicorn.Server):
    """uvicorn, but for how it ends: requests first, and no signal raised again afterwards."""

    def __init__(self, config: uvicorn.Config, plane: Plane, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._plane = plane
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGTERM, signal.SIGINT)
        try:
            for kind in kinds:
                loop.add_signal_handler(kind, self.stop)
        except (ValueError, RuntimeError):  # not the main thread: its owner calls stop
            yield
            return
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)

    def stop(self) -> None:
        """End; called again: at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await drain(self._plane)
        await super().shutdown(sockets)


def make_server(app: FastAPI, ready: Callable[[], object] = lambda: None) -> _Server:
    """A server of the application; ``await server.serve([sock])``, and ``server.stop()`` ends it."""
    config = uvicorn.Config(
        app,
        http=Punctual,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
        ws="none",
        server_header=False,
    )
    return _Server(config, app.state.plane, ready)

"""Asking for a process: which fork server, and what comes back."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import msgspec

from hotbunk.rollout import registry
from hotbunk.rollout.errors import EngineFailed, UsageError
from hotbunk.rollout.process import spawning
from hotbunk.rollout.process.spawning import Exited, Spawn, Started
from hotbunk.rollout.process.spec import ReplicaSpec

CHILD = "hotbunk.rollout.process.child"
SERVER = "hotbunk.rollout.process.forkserver"
SERVER_EXIT = 5.0  # seconds


class _Server:
    """A fork server of this process, with certain modules loaded."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.owner = os.getpid()
        self.made: set[Spawned] = set()  # those whose owner has not closed them
        self.control, its = spawning.pair()
        with its:
            # -P: the folder it is started in may hold other packages of our names.
            command = [sys.executable, "-P", "-m", SERVER, str(its.fileno()), str(self.owner)]
            self._process = subprocess.Popen(
                [*command, *modules],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def usable(self) -> bool:
        """Whether it lives, and is this very process's own (not that of one it was forked from)."""
        return self.owner == os.getpid() and self._process.poll() is None

    def stop(self) -> None:
        """End it, and every process it made."""
        self.control.close()
        if self.owner != os.getpid():
            return
        try:
            self._process.wait(SERVER_EXIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[tuple[str, ...], _Server] = {}
_lock = threading.Lock()
_asking: socket.socket | None = None  # in a forked process: its line to the server it came from


def ask_on(control: socket.socket) -> None:
    """This process was forked by a server: ask that one from now on."""
    global _asking  # noqa: PLW0603 - a process has one origin
    _asking = control
    _servers.clear()


def shutdown() -> None:
    """End the fork servers of this process, and with them every process they made.

    They end by themselves when this process does; the next start makes new ones.
    """
    with _lock:
        while _servers:
            _servers.popitem()[1].stop()


def trim() -> None:
    """End the fork servers of this process that made nothing which still is."""
    with _lock:
        for modules, server in list(_servers.items()):
            if not server.made:
                _servers.pop(modules).stop()


atexit.register(shutdown)


class Spawned:
    """A new process, from this side: its socket, its stderr, its pidfd, and its monitor."""

    def __init__(self, sock: socket.socket, stderr: int, monitor: socket.socket) -> None:
        self.sock = sock
        self.stderr = stderr
        self.monitor = monitor
        self.pid = 0
        self.pidfd = -1
        self.server: _Server | None = None

    async def started(self) -> None:
        """Until it runs. :raises EngineFailed: the server could not make it."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.monitor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.monitor)
        data, fds = spawning.receive(self.monitor)
        if not data:
            raise EngineFailed("no process could be made: its fork server failed; see its stderr")
        self.pid = msgspec.msgpack.decode(data, type=Started).pid
        [self.pidfd] = fds

    def exited(self) -> int | None:
        """The wait status it ended with; None: the server has not said, or is gone."""
        data, _ = spawning.receive(self.monitor)
        return msgspec.msgpack.decode(data, type=Exited).status if data else None

    def close(self) -> None:
        """Let go of what is left. The process, if it still runs, is the server's to kill."""
        if self.server is not None:
            self.server.made.discard(self)
        self.sock.close()
        self.monitor.close()
        for fd in (self.stderr, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.stderr = self.pidfd = -1


def spawn(spec: ReplicaSpec) -> Spawned:
    """Have a process made for ``spec``; see :meth:`Spawned.started`.

    :raises UsageError: its ``env`` is too large.
    :raises EngineFailed: there is no fork server.
    """
    argv = [] if spec.python is None else [spec.python, "-P", "-m", CHILD]
    request = Spawn(argv, dict(spec.env))
    if len(msgspec.msgpack.encode(request)) > spawning.PACKET:
        raise UsageError("env is too large")
    modules = () if argv else _preload(spec.backend)
    sock, its_sock = socket.socketpair()
    monitor, its_monitor = spawning.pair()
    stderr, its_stderr = os.pipe()
    spawned = Spawned(sock, stderr, monitor)
    try:
        server = spawned.server = _send(
            request, modules, [its_sock.fileno(), its_stderr, its_monitor.fileno()]
        )
    except OSError as error:
        spawned.close()
        raise EngineFailed(f"the fork server cannot be reached: {error}") from error
    finally:
        its_sock.close()
        its_monitor.close()
        os.close(its_stderr)
    if server is not None:
        server.made.add(spawned)
    return spawned


def _send(request: Spawn, modules: tuple[str, ...], fds: list[int]) -> _Server | None:
    """The server that was asked; None: the one this process came from."""
    if _asking is not None:
        spawning.send(_asking, request, fds)
        return None
    with _lock:
        server = _servers.get(modules)
        if server is None or not server.usable:
            if server is not None:
                server.stop()
            server = _servers[modules] = _Server(modules)
        spawning.send(server.control, request, fds)
        return server


def _preload(backend: str) -> tuple[str, ...]:
    """What a backend wants loaded before the fork: ``PRELOAD`` of the module of its factory."""
    with suppress(UsageError, ImportError):  # whoever builds it says so better
        module = import_module(registry.find(registry.BACKENDS, backend).module)
        return tuple(getattr(module, "PRELOAD", ()))
    return ()

"""The workers of one vLLM, from outside: a socket each, in a folder that is nobody else's.

Each worker is a rank, as a process of its own would be; what is asked of all of them together is
:class:`~hotbunk.rollout.process.ranked.RankedEngine`'s business.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotbunk.rollout.errors import EngineFailed
from hotbunk.rollout.process.grid import Grid
from hotbunk.rollout.process.rank import RankProcess
from hotbunk.rollout.process.ranked import RankedEngine
from hotbunk.rollout.process.remote import CLOSED
from hotbunk.rollout.process.spec import RANK, ReplicaSpec

_PREFIX = "hotbunk-vllm-"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_LONGEST = 107  # bytes of a socket's name, by sockaddr_un
_NAME = 40  # of one of vLLM's own in our folder: a UUID
_ELSEWHERE = "/tmp"  # where the usual place has too long a name
CONNECT = 30.0  # seconds for a worker that was told where, to come


class Link(RankProcess):
    """One worker. Its process is vLLM's to start and to end."""

    def __init__(self, number: int, listener: socket.socket) -> None:
        super().__init__(ReplicaSpec("vllm", name=f"vllm worker {number}", role=RANK))
        self._listener = listener

    async def start(self) -> None:
        """Take the worker's connection. :raises EngineFailed: it does not come."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT):
                sock, _ = await loop.sock_accept(self._listener)
                await loop.create_connection(lambda: self._connection, sock=sock)
                self.capabilities = await self._ready
        except TimeoutError:
            raise EngineFailed(f"{self.spec.name} did not connect within {CONNECT:g} s") from None
        finally:
            self._listener.close()
        self._pulse = asyncio.create_task(self._watch())

    async def _close(self) -> None:
        self.lost = self.lost or CLOSED
        await self._lose(CLOSED)

    async def _buried(self) -> None:
        self._connection.abort(CLOSED)
        self._listener.close()


class Links:
    """The folder with the sockets, and what comes of them. Also vLLM's own sockets go there."""

    def __init__(self, grid: Grid) -> None:
        _sweep()
        self.folder = _folder()
        listeners = []
        for number in range(grid.size):
            listener = socket.socket(socket.AF_UNIX)
            listener.setblocking(False)
            listener.bind(str(self.folder / str(number)))
            listener.listen(1)
            listeners.append(listener)
        self.ranks = RankedEngine([Link(n, one) for n, one in enumerate(listeners)], grid)

    async def close(self) -> None:
        """Let the workers go. Idempotent."""
        self.remove()
        await self.ranks.close()

    @contextmanager
    def sockets(self) -> Iterator[None]:
        """vLLM names its sockets after ``VLLM_RPC_BASE_PATH``, in /tmp else, and never removes them."""
        before = os.environ.get(_SOCKETS)
        os.environ[_SOCKETS] = str(self.folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_SOCKETS]
            else:
                os.environ[_SOCKETS] = before

    def remove(self) -> None:
        """Remove the folder; what is connected stays so. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder() -> Path:
    """A new one, for its owner alone (0700), in which a socket's name is not too long."""
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    if len(os.fsencode(made)) + _NAME <= _LONGEST:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_ELSEWHERE))


def _sweep() -> None:
    """Remove what processes left here that were killed."""
    for place in {tempfile.gettempdir(), _ELSEWHERE}:
        for path in Path(place).glob(f"{_PREFIX}*-*"):
            pid = path.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)

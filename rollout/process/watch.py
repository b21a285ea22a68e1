"""A process under watch: its end and how it ended, and what it said on stderr."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from hotbunk.rollout.process.launch import Spawned
from hotbunk.rollout.process.linux import ending

log = logging.getLogger(__name__)
KEPT = 8 << 10  # bytes of stderr
SHOWN = 5  # lines of it
REAPED = 0.5  # seconds for the fork server to say how a process ended
KILLED = 10.0  # seconds for a killed process to be gone


class Watched:
    """One spawned process.

    :param died: called once, with how it ended, when it ends unasked.
    """

    def __init__(self, spawned: Spawned, name: str, died: Callable[[str], object]) -> None:
        self._spawned = spawned
        self._name = name
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._said = b""
        self._line = b""
        self._dead = asyncio.Event()
        self._how = ""
        os.set_blocking(spawned.stderr, False)
        self._loop.add_reader(spawned.stderr, self._hear)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._spawned.pid

    @property
    def sock(self) -> socket.socket:
        """Our end of its socket."""
        return self._spawned.sock

    async def started(self) -> None:
        """Until it runs. :raises EngineFailed: it could not be made."""
        await self._spawned.started()
        self._loop.add_reader(self._spawned.monitor, self._told)
        self._loop.add_reader(self._spawned.pidfd, self._ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, to this very process or to nobody."""
        if self._spawned.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._spawned.pidfd, number)
            except ProcessLookupError:
                pass

    async def ended(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        except TimeoutError:
            return False
        return True

    async def buried(self) -> None:
        """Kill it, if it still lives; returns when it is reaped and everything of it is closed."""
        self._died = lambda how: None
        if self._spawned.pidfd >= 0:
            self.signal(signal.SIGKILL)
            if not await self.ended(KILLED):
                log.error("process %d of replica %s does not end", self.pid, self._name)
        self._hear()
        for fd in (self._spawned.monitor, self._spawned.pidfd, self._spawned.stderr):
            if isinstance(fd, socket.socket) or fd >= 0:
                self._loop.remove_reader(fd)
        self._spawned.close()

    def last_words(self) -> str:
        """The end of its stderr, or nothing."""
        lines = self._said.decode(errors="replace").strip().splitlines()[-SHOWN:]
        return "its stderr said last: " + " | ".join(lines) if lines else "its stderr said nothing"

    # -- called by the loop -------------------------------------------------------------------

    def _ended(self) -> None:
        """The pidfd says that it has ended; the fork server will say how."""
        self._loop.remove_reader(self._spawned.pidfd)
        self._loop.call_later(REAPED, self._gone, "ended")

    def _told(self) -> None:
        self._loop.remove_reader(self._spawned.monitor)
        status = self._spawned.exited()
        if status is None:  # the server went, and everything it made goes with it
            self._loop.call_later(REAPED, self._gone, "ended, and its fork server with it")
        else:
            self._gone(ending(status))

    def _gone(self, how: str) -> None:
        if not self._dead.is_set():
            self._how = how
            self._dead.set()
            self._died(how)

    def _hear(self) -> None:
        """Pass its stderr on to ours, with its name, and keep the end of it."""
        fd = self._spawned.stderr
        if fd < 0:
            return
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(fd)
        self._said = (self._said + data)[-KEPT:]
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            sys.stderr.write(f"[{self._name}] {line.decode(errors='replace')}\n")

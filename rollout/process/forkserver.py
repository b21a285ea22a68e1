"""A process that has loaded what is heavy, and makes engines' processes by forking itself.

It has one thread and no event loop. It is the parent of every process it makes: it reaps them,
tells their monitors how they ended, and kills whatever they leave behind. Whoever asked for a
process owns it, and when the owner is gone, so is the process; when the first owner is gone, so is
the server. None of this needs the owner's help: it may have been killed.

Run as ``python -m hotbunk.rollout.process.forkserver FD PARENT MODULE...``.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

import msgspec

from hotbunk.rollout.process import spawning
from hotbunk.rollout.process.linux import adopt_orphans, die_with, kill_group
from hotbunk.rollout.process.spawning import Exited, Spawn, Started

CLOSE_WAIT = 2.0  # seconds for processes that were killed to end


class _Child(NamedTuple):
    pid: int
    monitor: socket.socket
    owner: int  # descriptor of the connection it was asked for on


class Server:
    """See the module. ``parent`` is a pidfd of the first owner."""

    def __init__(self, first: socket.socket, parent: int) -> None:
        self._first = first.fileno()
        self._parent = parent
        self._owners = {first.fileno(): first}
        self._children: dict[int, _Child] = {}  # by process
        self._ended, waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._waking = waking
        self._poll = select.poll()
        for fd in (self._first, parent, self._ended):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Until the first owner is gone."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._parent:
                    return
                if fd == self._ended:
                    self._reap()
                elif fd in self._owners and not self._serve(self._owners[fd]):
                    if fd == self._first:
                        return
                    self._disown(fd)

    def close(self) -> None:
        """Nobody is left."""
        for child in self._children.values():
            kill_group(child.pid)
        until = time.monotonic() + CLOSE_WAIT
        while self._children and time.monotonic() < until:
            self._reap()
            time.sleep(0.002)

    def _serve(self, owner: socket.socket) -> bool:
        """Answer one request; False: the owner is gone."""
        data, fds = spawning.receive(owner)
        if not data:
            return False
        try:
            request = msgspec.msgpack.decode(data, type=Spawn)
            sock, stderr, monitor = fds
        except (msgspec.DecodeError, ValueError):
            for fd in fds:
                os.close(fd)
            return False
        watching = socket.socket(fileno=monitor)
        try:
            self._spawn(request, owner.fileno(), sock, stderr, watching)
        except OSError:  # no process, or no descriptor, is left: the monitor ends, and says so
            traceback.print_exc()
            watching.close()
        finally:
            os.close(sock)
            os.close(stderr)
        return True

    def _spawn(
        self, request: Spawn, owner: int, sock: int, stderr: int, monitor: socket.socket
    ) -> None:
        mine, its = spawning.pair()  # on which it may ask for processes of its own
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            mine.close()
            self._become(request, server, sock, stderr, its)
        its.close()
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        self._children[pid] = _Child(pid, monitor, owner)
        self._owners[mine.fileno()] = mine
        self._poll.register(mine, select.POLLIN)
        pidfd = os.pidfd_open(pid)
        with suppress(OSError):  # the owner has lost interest; it will be noticed
            spawning.send(monitor, Started(pid), [pidfd])
        os.close(pidfd)

    def _become(
        self, request: Spawn, server: int, sock: int, stderr: int, asking: socket.socket
    ) -> NoReturn:
        """In the new process. Whatever happens here must not return into the server's loop."""
        code = 1
        try:
            os.setpgid(0, 0)
            die_with(server)
            for owner in self._owners.values():
                owner.close()
            for child in self._children.values():
                child.monitor.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._parent, self._ended, self._waking):
                os.close(fd)
            os.dup2(stderr, 1)
            os.dup2(stderr, 2)
            os.close(stderr)
            os.environ.update(request.env)
            if request.argv:
                os.set_inheritable(sock, True)
                os.execv(request.argv[0], [*request.argv, str(sock)])
            from hotbunk.rollout.process import launch
            from hotbunk.rollout.process.child import run

            launch.ask_on(asking)
            code = run(socket.socket(fileno=sock))
        # The end of a process: there is nobody to raise to.
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Whoever has ended: processes of ours, and orphans of theirs."""
        with suppress(BlockingIOError):
            while os.read(self._ended, 4096):
                pass
        with suppress(ChildProcessError):
            # First a look only: a zombie's number, which is its group's, is nobody else's.
            while (
                found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                child = self._children.pop(found.si_pid, None)
                if child is not None:
                    kill_group(child.pid)
                _, status = os.waitpid(found.si_pid, 0)
                if child is not None:
                    with suppress(OSError):
                        spawning.send(child.monitor, Exited(status), [])
                    child.monitor.close()

    def _disown(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._owners.pop(fd).close()
        for child in self._children.values():
            if child.owner == fd:
                kill_group(child.pid)  # reaped when it has ended


def main(argv: list[str]) -> int:
    """Load, then serve."""
    first, parent = socket.socket(fileno=int(argv[1])), int(argv[2])
    first.set_inheritable(False)
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    for name in argv[3:]:
        # What cannot be loaded here is missing in the engine's process, too, which says so.
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # shared with every fork, as long as nobody walks it
    server = Server(first, watched)
    try:
        server.run()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Offers on this host: a socket in a private directory, and a token.

A socket's address holds about a hundred characters, and temporary directories may be longer, so
both ends go through a descriptor of the directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotbunk.checkpoint_engine.transports.base import Door
from hotbunk.rollout.errors import TransferFailed

PREFIX = "hotbunk-sync-"
_NAME = "s"
_BACKLOG = 1024
_TRIES = 5  # within a tenth of a second
_EMPTY_FOR = 3600.0  # seconds after which a directory without a socket is nobody's


@contextmanager
def inside(directory: Path) -> Iterator[str]:
    """A path to it that is short enough for a socket's name, however long its own."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def listen(directory: Path | None = None) -> tuple[socket.socket, Path]:
    """A listening socket, alone in a new directory (0700) under the system's temporary one.

    :raises TransferFailed: there can be none: no room, no descriptor, no permission.
    """
    listener, home = None, None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        with inside(home) as short:
            listener.bind(f"{short}/new")
            listener.listen(_BACKLOG)
            # Whoever finds the name may take a refused connection for a dead sender.
            os.rename(f"{short}/new", f"{short}/{_NAME}")
    except OSError as error:
        if listener is not None:
            listener.close()
        if home is not None:
            remove(home)
        raise TransferFailed(f"no socket for an offer: {error}") from error
    listener.setblocking(False)
    return listener, home


def remove(home: Path) -> None:
    """Remove an offer's directory. Idempotent."""
    with suppress(OSError):  # it may be gone, or hold what others put there
        for name in (_NAME, "new"):
            (home / name).unlink(missing_ok=True)
        home.rmdir()


class UnixDoor(Door):
    """For receivers of this host and user."""

    same_user = True

    def __init__(self, directory: Path | None = None) -> None:
        self.listener, self._home = listen(directory)

    def address(self, token: str) -> str:
        return ticket_address(self._home, token)

    def close(self) -> None:
        self.listener.close()
        remove(self._home)


def ticket_address(home: Path, token: str) -> str:
    """What a ticket says."""
    return f"{token}@{home}"


def parse(address: str) -> tuple[Path, str]:
    """The directory and the token. :raises TransferFailed: it is not such an address."""
    token, at, home = address.partition("@")
    if not at or not os.path.isabs(home):
        raise TransferFailed(f"{address!r} is no address of an offer on this host")
    return Path(home), token


async def connect(home: Path) -> socket.socket:
    """:raises TransferFailed: the offer is gone, or it is somebody else's."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise TransferFailed(f"no socket to reach the offer with: {error}") from error
    sock.setblocking(False)
    try:
        if os.stat(home).st_uid != os.geteuid():
            raise TransferFailed(f"{str(home)!r} belongs to another user")
        with inside(home) as short:
            await asyncio.get_running_loop().sock_connect(sock, f"{short}/{_NAME}")
    except OSError as error:
        sock.close()
        sweep(home)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TransferFailed(f"the offer cannot be reached: {error.strerror}") from error
        raise TransferFailed(
            f"the offer is gone: {error.strerror} ({str(home)!r})",
            remedy="a ticket is good for one sync; ask for a new one",
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def sweep(home: Path) -> bool:
    """Remove the directory of a sender that died; whether it is gone."""
    try:
        found = os.stat(home)
        if found.st_uid != os.geteuid() or not home.name.startswith(PREFIX):
            return False
        with inside(home) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(f"{short}/{_NAME}")
    except ConnectionRefusedError:
        remove(home)
    except FileNotFoundError:  # no socket in it: made a moment ago, or left half-made
        if home.is_dir() and time.time() - os.stat(home).st_mtime > _EMPTY_FOR:
            remove(home)
    except OSError:
        return False
    return not home.exists()


async def sweep_soon(home: Path) -> None:
    """After a connection broke: a process that dies closes its sockets one by one."""
    for _ in range(_TRIES):
        if sweep(home):
            return
        await asyncio.sleep(0.02)


def sweep_all(directory: Path | None = None) -> None:
    """Remove what senders that died left behind, as far as it can be seen."""
    with suppress(OSError):  # it can wait; whether a new offer can be made is found out then
        for home in Path(directory or tempfile.gettempdir()).glob(f"{PREFIX}*"):
            sweep(home)

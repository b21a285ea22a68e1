"""What travels between a process and its fork server: one packet a message, descriptors beside it."""

from __future__ import annotations

import array
import os
import socket

import msgspec

PACKET = 128 << 10  # bytes
DESCRIPTORS = 4


class Spawn(msgspec.Struct, frozen=True):
    """Start a process. Comes with the descriptors of its socket, its stderr and its monitor.

    ``argv`` is executed with the socket's number at its end; without it the server forks itself.
    """

    argv: list[str]
    env: dict[str, str]


class Started(msgspec.Struct, frozen=True, tag=True):
    """On the monitor: it runs. Comes with its pidfd."""

    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """On the monitor: it has ended and is reaped. ``status`` is a wait status."""

    status: int


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a nameless socket that keeps packets whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send a packet. :raises OSError: the other side is gone, or cannot take it now."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([msgspec.msgpack.encode(message)], rights, socket.MSG_DONTWAIT)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A packet and its descriptors (close-on-exec); no bytes: the other side is gone."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, PACKET, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return b"", []
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        return b"", []
    return data, list(fds)

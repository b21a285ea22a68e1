"""Offers that other machines reach: a port, and a token."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from hotbunk.checkpoint_engine.transports.base import Door
from hotbunk.rollout.errors import ConfigError, TransferFailed

_BACKLOG = 1024


class TcpDoor(Door):
    """:raises ConfigError: this machine has no such address, or the port is taken."""

    def __init__(self, address: str, port: int = 0) -> None:
        check_address(address)
        try:
            self.listener = socket.create_server(
                (address, port), family=_family(address), backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {address}:{port}: {error.strerror or error}",
                remedy="set transport.options.address to an address of this machine",
            ) from error
        self.listener.setblocking(False)
        host = f"[{address}]" if ":" in address else address
        self._place = f"{host}:{self.listener.getsockname()[1]}"

    def address(self, token: str) -> str:
        return f"{self._place}/{token}"

    def close(self) -> None:
        self.listener.close()


def parse(address: str) -> tuple[str, int, str]:
    """Host, port and token. :raises TransferFailed: it is not such an address."""
    place, _, token = address.partition("/")
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""
    if not (host and port.isdecimal() and int(port) < 1 << 16 and token):
        raise TransferFailed(f"{address!r} is no address of an offer")
    return host, int(port), token


async def connect(host: str, port: int, seconds: float) -> socket.socket:
    """:raises TransferFailed: the offer is gone, or does not answer in time."""
    try:
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
    except OSError as error:
        raise TransferFailed(f"no socket to reach the offer with: {error}") from error
    sock.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except TimeoutError:
        sock.close()
        raise TransferFailed(f"{host}:{port} did not answer within {seconds:g} s") from None
    except OSError as error:
        sock.close()
        raise TransferFailed(
            f"the offer is gone: {error.strerror or error} ({host}:{port})",
            remedy="a ticket is good for one sync; ask for a new one",
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def check_address(address: str) -> None:
    """:raises ConfigError: not an IP address that others could be told."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(f"{address!r} is not an IP address") from None
    if found.is_unspecified:
        raise ConfigError(
            f"{address!r} is every address and none", remedy="name the one that receivers reach"
        )

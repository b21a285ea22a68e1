"""What a transport is, seen from the sender: an offer, a ticket a replica, a serving, an end."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hotbunk.rollout.contract import Manifest, Ticket, Transfer
from hotbunk.rollout.errors import Unsupported

if TYPE_CHECKING:  # a receiver's process may have no torch
    from hotbunk.checkpoint_engine.source import WeightSource


class Published(msgspec.Struct, frozen=True):
    """Weights that stay where they are until they are read. ``ticket`` opens them as often as asked."""

    manifest: Manifest
    ticket: Ticket


class Offer(ABC):
    """One sync on offer to some replicas, each of one or more receiver ranks.

    A replica is served only when all of its ranks have accepted, and what happens to one replica
    happens to no other: one that refuses, fails, hangs beyond the deadline or dies is left out from
    then on, and its own ranks see why.
    """

    tickets: tuple[Ticket, ...]  # one a replica, in the order they were asked for

    @abstractmethod
    async def serve(self) -> None:
        """Send until every replica has all of it or is out. Off the event loop where it takes long.

        Run beside the receivers, once. Returns normally whatever became of single replicas.

        :raises HotbunkError: the source failed; every receiver still under way was told.
        """

    async def drop(self, replica: int) -> None:  # noqa: B027 - most have nothing to do
        """The replica of that ticket will not come (any more): do not wait for it. Idempotent."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything the offer holds. Idempotent; also after a failure half-way."""


class Door(ABC):
    """Where the receivers of one offer come in."""

    listener: socket.socket
    same_user = False  # whether others than this process's user are turned away

    @abstractmethod
    def address(self, token: str) -> str:
        """What a ticket says."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class Transport(ABC):
    """A way for bytes to travel. The receiving side is opened by name from a ticket.

    A transport lives as long as its trainer and keeps what is costly from sync to sync (memory,
    groups). At most one offer of it is open at a time.
    """

    name: str

    @property
    def held(self) -> int:
        """Bytes of this process's own memory that are kept from sync to sync, outside any pool it was given."""
        return 0

    @abstractmethod
    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        """Put a sync on offer: ``ranks[i]`` receiver ranks in replica i, ``deadline`` seconds in all.

        :raises ConfigError: the bucket size cannot work.
        :raises SessionError: the last offer is still open, or so many ranks cannot be reached.
        """

    @staticmethod
    @abstractmethod
    async def open(ticket: Ticket) -> Transfer:
        """The receiver's end. Needs neither torch nor the sender's classes.

        :raises TransferFailed: the offer is gone, or this is not its ticket.
        """

    async def publish(self, source: WeightSource, manifest: Manifest) -> Published:
        """Put weights where receivers find them later, with no replica in view.

        :raises Unsupported: they travel this way only while sender and receiver are both there.
        :raises TransferFailed: there is no room, or the medium failed.
        """
        raise Unsupported("publishing weights for later", self.name, "use transport=disk")

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what was kept from sync to sync. Idempotent."""

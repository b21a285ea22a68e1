"""What a transport is, seen from the sender: an offer, a ticket a receiver rank, an end."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.rollout.contract import Manifest, Ticket, Transfer


class Offer(ABC):
    """One sync on offer to the ranks of one replica."""

    tickets: tuple[Ticket, ...]

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything the offer holds. Idempotent; also after a failure half-way."""


class Transport(ABC):
    """A way for bytes to travel. The receiving side is opened by name from a ticket."""

    name: str

    @abstractmethod
    async def offer(self, source: WeightSource, manifest: Manifest, *, ranks: int = 1) -> Offer:
        """Put a sync on offer. :raises ConfigError: the bucket size cannot work."""

    @staticmethod
    @abstractmethod
    def open(ticket: Ticket) -> Transfer:
        """The receiver's end. :raises TransferFailed: the offer is gone."""

"""Weights between processes of one host, through memory that both have mapped.

The trainer packs buckets into one half of a nameless file while the receivers copy the last bucket
out of the other (``memory.py``). A receiver that publishes its arena and layout gets every tensor
written where it belongs instead: one copy a byte. Control goes over a Unix socket in a private
directory; ``sender.py`` and ``receiver.py`` are its ends.

The receiving side imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.checkpoint_engine.transports.shm.receiver import ShmTransfer
from hotbunk.rollout.contract import Manifest, Ticket, Transfer
from hotbunk.rollout.errors import ConfigError, SessionError

if TYPE_CHECKING:
    from hotbunk.checkpoint_engine.source import WeightSource
    from hotbunk.checkpoint_engine.transports.shm.sender import Sender, ShmOffer

__all__ = ["ShmTransport"]


class ShmTransport(Transport):
    """See the module. Keeps its memory, its maps and its compiled copies from sync to sync.

    :param stall: seconds; a receiver that does not take a bucket for so long is left out, one that
        has not accepted by then is not waited for, and receivers give a silent sender up.
    :param directory: where the sockets' directories are made (default: the system's temporary one).
    :param one_copy: a receiver that cannot be written in place is refused, not served by two copies.
    """

    name = "shm"

    def __init__(
        self,
        *,
        stall: float = 30.0,
        directory: Path | str | None = None,
        one_copy: bool = False,
    ) -> None:
        if stall <= 0:
            raise ConfigError(f"stall={stall} must be above 0 seconds")
        self._stall = stall
        self._one_copy = one_copy
        self._directory = None if directory is None else Path(directory)
        self._sender: Sender | None = None
        self._open: ShmOffer | None = None

    @property
    def held(self) -> int:
        return 0 if self._sender is None else self._sender.memory.nbytes

    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        await asyncio.to_thread(import_module, f"{__name__}.sender")  # it takes a while, once
        from hotbunk.checkpoint_engine.transports.shm.sender import Sender, ShmOffer

        if self._open is not None and not self._open.closed:
            raise SessionError("the last offer of this transport is still open")
        if self._sender is None:
            self._sender = Sender(self._directory)
        self._open = ShmOffer(
            self._sender, source, manifest, ranks, deadline, self._stall, one_copy=self._one_copy
        )
        return self._open

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        return await ShmTransfer.open(ticket)

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None
        if self._sender is not None:
            self._sender.memory.close()
            self._sender = None

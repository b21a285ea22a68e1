"""Weights between processes that share a device, through memory of the device that both have mapped.

The trainer packs buckets on the device, into one half of its memory while the receivers copy the
last bucket out of the other; a receiver that publishes its arena gets every tensor written where it
belongs. A handle of the memory travels as a descriptor over a Unix socket (CUDA), or as a number that
the owner has allowed the peer to use (ACL). What is mapped lives for one sync: memory that somebody
else has mapped does not come back by being freed, and the device is wanted for other things.

``device="fake"`` is memory of the host behind the fake driver: everything but the device is real, so
it is a simulation, and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.checkpoint_engine.transports.ipc.devices import Ledger, driver_of
from hotbunk.rollout.contract import Manifest, Ticket, Transfer
from hotbunk.rollout.errors import ConfigError, SessionError

if TYPE_CHECKING:
    from hotbunk.checkpoint_engine.source import WeightSource
    from hotbunk.checkpoint_engine.transports.ipc.sender import IpcOffer
    from hotbunk.rollout.memory import NativePool

__all__ = ["IpcTransport"]
log = logging.getLogger(__name__)


class IpcTransport(Transport):
    """See the module. ``ledger`` counts the handles of the trainer's side.

    :param device: ``cuda:N``, ``npu:N``, or ``fake`` (simulated; ``fake:BYTES``).
    :param stall: seconds; a receiver that does not take a bucket for so long is left out, one that
        has not accepted by then is not waited for, and receivers give a silent sender up.
    :param directory: where the sockets' directories are made (default: the system's temporary one).
    :param library: what is opened as the CUDA or ACL driver, if not the usual one.
    :raises ConfigError: there is no such device.
    """

    name = "ipc"

    def __init__(
        self,
        device: str = "cuda:0",
        *,
        stall: float = 30.0,
        directory: Path | str | None = None,
        library: Path | str | None = None,
    ) -> None:
        if stall <= 0:
            raise ConfigError(f"stall={stall} must be above 0 seconds")
        self.ledger = Ledger()
        self.driver = driver_of(device)
        self.simulated = self.driver.startswith("fake")
        self._stall = stall
        self._directory = None if directory is None else Path(directory)
        self._library = None if library is None else Path(library)
        self._pool: NativePool | None = None
        self._open: IpcOffer | None = None

    @property
    def pool(self) -> NativePool:
        """Memory of the device, as this transport has it.

        :raises Unsupported: there is no such device, or its driver cannot be used.
        """
        if self._pool is None:
            from hotbunk.rollout.memory import NativePool

            self._pool = NativePool(self.driver, library=self._library)
            unix.sweep_all(self._directory)
            if self.simulated:
                log.warning("ipc is simulated: memory of the host stands for the device's")
        return self._pool

    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        from hotbunk.checkpoint_engine.transports.ipc.sender import IpcOffer

        if self._open is not None and not self._open.closed:
            raise SessionError("the last offer of this transport is still open")
        pool = await asyncio.to_thread(lambda: self.pool)
        self._open = IpcOffer(
            pool, self.ledger, self._directory, source, manifest, ranks, deadline, self._stall
        )
        return self._open

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        # Opens the native library, in an engine that may not have it yet.
        receiver: Any = await asyncio.to_thread(import_module, f"{__name__}.receiver")
        return cast(Transfer, await receiver.IpcTransfer.open(ticket))

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

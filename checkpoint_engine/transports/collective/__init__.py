"""Weights by broadcast, over torch.distributed: gloo, nccl or hccl, by device.

What is negotiated goes over TCP (:mod:`hotbunk.checkpoint_engine.transports.protocol`); the bytes go
through process groups of the transport's own. Every replica has its own groups: one for each set of
its ranks that want the same bytes (all of them, where no rank wants only slices), with the trainer
as rank 0. A collective cannot leave a member out, so a member that dies or hangs breaks its group,
and with it its replica, which fails as a whole anyway; other replicas are in other groups and go on.

Groups are built when they are first needed and kept: a sync to the same processes builds nothing. A
group that broke, or whose members changed, is replaced by one of the next generation. The trainer's
own process groups are neither used nor seen.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.checkpoint_engine.transports.offering import STALL
from hotbunk.checkpoint_engine.transports.parties import Party
from hotbunk.checkpoint_engine.transports.tcp import check_address
from hotbunk.rollout.contract import Manifest, Ticket, Transfer
from hotbunk.rollout.errors import ConfigError

if TYPE_CHECKING:  # torch is imported where it is needed
    from hotbunk.checkpoint_engine.source import WeightSource
    from hotbunk.checkpoint_engine.transports.collective.groups import Group
    from hotbunk.checkpoint_engine.transports.collective.sender import GroupLink

MOST_KEPT = 256  # groups of one trainer


class CollectiveTransport(Transport):
    """See the module.

    :param address: of this machine, as receivers reach it. The default is for receivers on this
        machine; receivers answer from whatever address of theirs leads there.
    :param device: where buckets lie, and so which backend moves them: ``cpu`` gloo, ``cuda`` nccl,
        ``npu`` hccl.
    :param stall: seconds for building a group, for one broadcast, and of silence after which a peer
        is given up.
    :raises ConfigError: one of these cannot be used.
    """

    name = "collective"

    def __init__(
        self, *, address: str = "127.0.0.1", device: str = "cpu", stall: float = STALL
    ) -> None:
        from hotbunk.checkpoint_engine.transports.collective.groups import Kept, backend_for

        check_address(address)
        if stall <= 0:
            raise ConfigError(f"stall={stall} must be above 0 seconds")
        self.backend = backend_for(device)
        self.generation = 0
        self.store_port = 0
        self.address = address
        self._stall = stall
        self._name = uuid.uuid4().hex[:12]
        self._store: Any = None
        self._kept = Kept(MOST_KEPT)

    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        await asyncio.to_thread(import_module, f"{__name__}.sender")  # it takes a while, once
        from hotbunk.checkpoint_engine.transports.collective.sender import CollectiveOffer

        return CollectiveOffer(
            self, source, manifest, ranks=ranks, deadline=deadline, stall=self._stall
        )

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        # Imports torch, in an engine that may not have it yet.
        receiver: Any = await asyncio.to_thread(import_module, f"{__name__}.receiver")
        return cast(Transfer, await receiver.CollectiveTransfer.open(ticket))

    async def close(self) -> None:
        self._kept.close()
        self._store, self.store_port = None, 0

    # -- for offers ---------------------------------------------------------------------------

    def group_for(self, link: GroupLink) -> tuple[Group, bool]:
        """The link's group, and whether it must be built."""
        from hotbunk.checkpoint_engine.transports.collective.groups import Group, open_store

        kept = self._kept.get(link.key)
        if kept is not None and all(kept.name in member.holds for member in link.members):
            return kept, False
        self._kept.drop(link.key)
        if self._store is None:
            self._store, self.store_port = open_store(self.address, self._stall)
        self.generation += 1
        group = Group(
            f"{self._name}/{self.generation}",
            self.generation,
            0,
            1 + len(link.members),
            backend=self.backend,
            address=self.address,
        )
        self._kept.put(link.key, group)
        return group, True

    def forget(self, party: Party) -> None:
        """The replica did not commit: its groups may be in the middle of something."""
        ranks = {(m.process, m.rank) for m in party.members.values()}
        self._kept.drop_if(lambda key: bool(ranks & set(key[1])))

"""The sending end: one offer to many replicas, in the trainer's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.mapped import Arena, Way
from hotbunk.checkpoint_engine.transports.mapping import Halves as AnyHalves
from hotbunk.checkpoint_engine.transports.mapping import MappedLink, MappedOffer
from hotbunk.checkpoint_engine.transports.parties import Member
from hotbunk.checkpoint_engine.transports.protocol import Accept
from hotbunk.checkpoint_engine.transports.shm.memory import Halves, Mapped, Memory, packed_bytes
from hotbunk.checkpoint_engine.transports.streams import Plans
from hotbunk.rollout.contract import Manifest
from hotbunk.rollout.errors import UpdateRefused


class Sender:
    """What a transport keeps from sync to sync."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.memory = Memory()
        self.plans: list[Plans] = []
        unix.sweep_all(directory)

    def plans_for(self, count: int) -> list[Plans]:
        """One for each stream, in their order."""
        self.plans += [Plans() for _ in range(count - len(self.plans))]
        del self.plans[count:]
        return self.plans


class ShmOffer(MappedOffer):
    """Replicas of this host; buckets lie in memory of the host."""

    def __init__(
        self,
        sender: Sender,
        source: WeightSource,
        manifest: Manifest,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
        *,
        one_copy: bool = False,
    ) -> None:
        door = unix.UnixDoor(sender.directory)
        super().__init__("shm", door, source, manifest, ranks=ranks, deadline=deadline, stall=stall)
        self._sender = sender
        self._one_copy = one_copy

    def examine(self, member: Member, said: Accept, fd: int | None) -> None:
        super().examine(member, said, fd)
        if self._one_copy and member.want and member not in self._arenas:
            raise UpdateRefused(
                "one copy was asked for, and this receiver has no memory that it can be written to",
                remedy="set one_copy=false (transport=shm), or use an engine that shows its arena",
            )

    def map_arena(self, arena: Arena, fd: int | None) -> Mapped | None:
        if arena.kind != "file" or fd is None:
            return None
        return self._sender.memory.arena(fd, arena.nbytes)

    def packed_bytes(self) -> int:
        return packed_bytes(super().packed_bytes())

    def make_halves(self, rooms: Sequence[int]) -> list[Halves]:
        return self._sender.memory.halves(rooms)

    def way(self, link: MappedLink, halves: AnyHalves) -> tuple[Way, int | None]:
        assert isinstance(halves, Halves)
        return Way(False, halves.room), halves.fd

    def plans(self, count: int) -> list[Plans]:
        return self._sender.plans_for(count)

    async def release(self) -> None:
        # Who failed may be gone, and its arena's pages would stay with this process.
        fine = [link.mapped for link in self._links if link.party.failure is None]
        await super().release()
        self._sender.memory.keep([mapped for mapped in fine if isinstance(mapped, Mapped)])

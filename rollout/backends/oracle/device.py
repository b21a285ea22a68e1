"""A device that counts bytes instead of holding them, and can refuse, lie, and be late."""

from __future__ import annotations

from hotbunk.rollout.errors import HostOutOfMemory, ResumeOutOfMemory

Arena = tuple[str, str]  # (tag, group)


class Device:
    """Memory of one device and of its host, in bytes; engines and trainers are its tenants.

    The faults are plain attributes, set by a test at any time: ``refuse`` holds tags whose next
    mapping fails, however much is free; ``withhold`` is how many bytes of what is unmapped from
    now on never come back; ``late`` is how many ticks pass until unmapped bytes are free.
    """

    def __init__(self, capacity: int = 1 << 20, host_capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.refuse: set[str] = set()
        self.withhold = 0
        self.late = 0
        self.peak = 0
        self._arenas: dict[Arena, int] = {}
        self._backups: dict[Arena, int] = {}
        self._tenants: dict[str, int] = {}
        self._lost: dict[Arena, int] = {}  # withheld for good
        self._pending: list[tuple[int, Arena, int]] = []  # (due tick, whose, bytes)
        self._now = 0

    @property
    def used(self) -> int:
        """Bytes that nobody else can have now, whoever holds them."""
        held = sum(self._arenas.values()) + sum(self._tenants.values())
        return held + sum(self._lost.values()) + sum(n for _, _, n in self._pending)

    @property
    def free(self) -> int:
        """Bytes that can be mapped now."""
        return self.capacity - self.used

    @property
    def host_used(self) -> int:
        """Bytes of host memory that backups take."""
        return sum(self._backups.values())

    def mapped(self, tag: str, group: str) -> bool:
        """Whether the arena's memory is mapped."""
        return (tag, group) in self._arenas

    def resident(self, tag: str | None = None, group: str | None = None) -> int:
        """Bytes in use on the engine's account, those that did not come back included."""
        total = 0
        for (of_tag, of_group), nbytes in self._owned():
            if (tag is None or tag == of_tag) and (group is None or group == of_group):
                total += nbytes
        return total

    def backup(self, tag: str, group: str) -> int:
        """Bytes of the arena's host copy."""
        return self._backups.get((tag, group), 0)

    def tenant(self, name: str, nbytes: int) -> None:
        """Somebody else (a trainer) now holds ``nbytes``.

        :raises ResumeOutOfMemory: there is not that much.
        """
        needed = nbytes - self._tenants.get(name, 0)
        if needed > self.free:
            raise ResumeOutOfMemory(name, needed, self.free)
        self._tenants[name] = nbytes
        self._peaked()

    def map(self, tag: str, group: str, nbytes: int) -> None:
        """Take memory for an arena.

        :raises ResumeOutOfMemory: too little is free, or the device refuses.
        """
        if tag in self.refuse:
            self.refuse.discard(tag)
            raise ResumeOutOfMemory(tag, nbytes, 0)
        if nbytes > self.free:
            raise ResumeOutOfMemory(tag, nbytes, self.free)
        self._arenas[tag, group] = nbytes
        self._peaked()

    def unmap(self, tag: str, group: str) -> int:
        """Give an arena's memory back, sooner or later; returns the bytes promised."""
        nbytes = self._arenas.pop((tag, group), 0)
        kept = min(self.withhold, nbytes)
        if kept:
            self._lost[tag, group] = self._lost.get((tag, group), 0) + kept
        if self.late:
            self._pending.append((self._now + self.late, (tag, group), nbytes - kept))
        return nbytes

    def tick(self) -> None:
        """Time passes on the device: what was late may come free."""
        self._now += 1
        self._pending = [entry for entry in self._pending if entry[0] > self._now]

    def keep_backup(self, tag: str, group: str, nbytes: int) -> None:
        """Account for a host copy (0: it is gone).

        :raises HostOutOfMemory: there is no room.
        """
        others = self.host_used - self.backup(tag, group)
        if nbytes > self.host_capacity - others:
            raise HostOutOfMemory(nbytes, self.host_capacity - others)
        self._backups[tag, group] = nbytes
        if not nbytes:
            del self._backups[tag, group]

    def _owned(self) -> list[tuple[Arena, int]]:
        late = [(arena, nbytes) for _, arena, nbytes in self._pending]
        return [*self._arenas.items(), *self._lost.items(), *late]

    def _peaked(self) -> None:
        self.peak = max(self.peak, self.used)

"""What an arena and a pool of them are; :mod:`hotbunk.rollout.memory` has the pools.

An arena is one range of addresses for one tag and weight group. Its regions are bound once, and
neither a release nor a resume moves them.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec

from hotbunk.rollout.contract import MemoryReport, Retention
from hotbunk.rollout.errors import SessionError

PAGE = mmap.PAGESIZE
ALIGN = 256  # bytes; every region starts at a multiple of it


class Survival(StrEnum):
    """What becomes of a region when its arena is released."""

    CONTENT = "content"  # kept by a backup; forgotten by a discard: a sync brings it back
    STATE = "state"  # kept through every release: buffers, rotary caches, scales
    PERSIST = "persist"  # stays on the device through every release
    ZERO = "zero"  # kept by none, and zeros after every resume: gradients, KV


class Region(msgspec.Struct, frozen=True):
    """A named range of an arena, in bytes."""

    name: str
    offset: int
    nbytes: int
    survival: Survival = Survival.CONTENT


class Arena(ABC):
    """One range of addresses for one tag and weight group. Regions never move."""

    tag: str
    group: str
    size: int  # bytes, persistent ones included
    address: int
    used: int  # bytes given to regions, without persistent ones
    regions: dict[str, Region]

    @abstractmethod
    def add(self, name: str, nbytes: int, survival: Survival = Survival.CONTENT) -> Region:
        """Take the next range. :raises MemoryFault: the arena is full, or the name is taken."""

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether its memory is given away."""

    @abstractmethod
    def view(self, region: Region | None = None) -> memoryview:
        """Writable bytes. Stays valid over release and resume; touching it between is a fault.

        :raises Unsupported: the memory is a device's.
        """

    @abstractmethod
    def lease(self) -> object:
        """What keeps the addresses reserved while somebody holds it, dropped arena or not."""


class MemoryPool(ABC):
    """Arenas that can be released and resumed, all or none of a call's."""

    device: str = "cpu"  # as torch names it
    cannot_release: str = ""  # why :meth:`release` is unsupported, and the remedy

    @abstractmethod
    def arena(self, tag: str, nbytes: int, group: str = "", *, persistent: int = 0) -> Arena:
        """Reserve a new arena of at least ``nbytes``, and ``persistent`` that are never released.

        :raises MemoryFault: it exists, or there is not so much memory.
        """

    @abstractmethod
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that are in the pool now, in order of creation."""

    @abstractmethod
    def drop(self, arena: Arena) -> None:
        """Take one arena out of the pool, released or not; its addresses go with the last view."""

    @abstractmethod
    def release(
        self, tags: Collection[str], retention: Mapping[str, Retention] | Retention
    ) -> MemoryReport:
        """Give back every arena of the tags.

        ``retention`` is one for all, or one per group (others are discarded). Released arenas
        follow a stricter retention: DISCARD drops a backup.

        :raises HostOutOfMemory: no room for the backups; nothing was released.
        :raises MemoryFault: the kernel or driver will not take it; nothing was released.
        :raises ReleaseIncomplete: released, and the device still counts it.
        :raises Unsupported: this pool cannot; nothing was released.
        """

    @abstractmethod
    def resume(self, tags: Collection[str]) -> MemoryReport:
        """Map every released arena of the tags and restore what was kept.

        :raises ResumeOutOfMemory: everything this call mapped is released again.
        :raises MemoryFault: likewise, where it was no lack of memory.
        """

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is reserved, resident and backed up now."""

    @abstractmethod
    def audit(self) -> MemoryReport:
        """As :meth:`memory`, counted by the most thorough means there is."""

    @abstractmethod
    def check_invariants(self) -> None:
        """:raises AssertionError: an arena and the device disagree."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Views held by others have no content afterwards."""


def checked(tags: Collection[str]) -> Collection[str]:
    """The tags, unless they are one string by mistake. :raises SessionError: they are."""
    if isinstance(tags, str):
        raise SessionError(f"tags must be a list, not the string {tags!r}")
    return tags

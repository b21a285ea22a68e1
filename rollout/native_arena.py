"""An arena of the native pool: regions, views, and what other processes may be given."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotbunk.rollout.arena import Arena, Region, Survival
from hotbunk.rollout.errors import MemoryFault, Unsupported
from hotbunk.rollout.native_pool import ArenaInfo, Outcome, Shared

if TYPE_CHECKING:
    from hotbunk.rollout.memory import NativePool

_POLICY = {Survival.CONTENT: 0, Survival.STATE: 1, Survival.PERSIST: 2, Survival.ZERO: 3}


def number_of_bytes(count: int) -> int:
    """A count or offset for the library. :raises MemoryFault: one that C would take for another."""
    if not 0 <= count < 1 << 63:
        raise MemoryFault(f"{count} is no number of bytes")
    return count


def name_of(text: str) -> bytes:
    """A name for the library. :raises MemoryFault: one that C would cut off."""
    if "\0" in text:
        raise MemoryFault(f"{text!r} is no name: it holds a NUL")
    return text.encode()


class NativeArena(Arena):
    """An arena of a :class:`~hotbunk.rollout.memory.NativePool`."""

    def __init__(
        self, pool: NativePool, number: int, info: ArenaInfo, tag: str, group: str
    ) -> None:
        self.tag, self.group = tag, group
        self.address = int(info.address)
        self.size = int(info.size + info.persistent)
        self.used = 0
        self.regions = {}
        self.number = number
        self._pool = pool
        # Every view holds this object, and the addresses go when the last of them does: one that
        # is still written to by a thread of a cancelled sync must not become a fault.
        self._buffer: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * self.size).from_address(
            self.address
        )
        weakref.finalize(self._buffer, _let_go, pool.lib, pool.number, number).atexit = False

    def add(self, name: str, nbytes: int, survival: Survival = Survival.CONTENT) -> Region:
        offset, outcome = ctypes.c_uint64(), Outcome()
        code = self._pool.lib.hb_arena_add(
            self._pool.number,
            self.number,
            name_of(name),
            number_of_bytes(nbytes),
            _POLICY[survival],
            offset,
            outcome,
        )
        self._pool.check(code, outcome)
        region = self.regions[name] = Region(name, offset.value, nbytes, survival)
        if survival is not Survival.PERSIST:
            self.used = region.offset + nbytes
        return region

    @property
    def info(self) -> ArenaInfo:
        """What the library knows of it. :raises MemoryFault: it was given back."""
        info = ArenaInfo()
        if self._pool.lib.hb_arena_look(self._pool.number, self.number, info):
            raise MemoryFault(f"arena {self.tag}/{self.group} was given back")
        return info

    @property
    def released(self) -> bool:
        return bool(self.info.released)

    @property
    def fd(self) -> int | None:
        """The file behind shared memory, to be passed to another process; the arena owns it."""
        found = int(self._pool.lib.hb_arena_fd(self._pool.number, self.number))
        return None if found < 0 else found

    def export(self, peer: int = 0) -> Shared:
        """A handle of its memory for another process; its ``fd`` is the caller's to close.

        :param peer: that process, for drivers that must be told.
        :raises MemoryFault: it is released, or the driver has no such handles.
        """
        shared, outcome = Shared(peer=peer), Outcome()
        code = self._pool.lib.hb_arena_export(self._pool.number, self.number, shared, outcome)
        self._pool.check(code, outcome)
        return shared

    def lease(self) -> object:
        if self._buffer is None:
            raise MemoryFault(f"arena {self.tag}/{self.group} was given back")
        return self._buffer

    def view(self, region: Region | None = None) -> memoryview:
        held = self.lease()
        if not self._pool.addressable:
            raise Unsupported("views by the host", self._pool.driver, "use read and write")
        whole = memoryview(held).cast("B")  # type: ignore[arg-type]
        return whole if region is None else whole[region.offset : region.offset + region.nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of bytes, wherever the memory is.

        :raises MemoryFault: it is released, or there are not so many.
        """
        if number_of_bytes(offset) + number_of_bytes(nbytes) > self.size:
            raise MemoryFault(f"bytes beyond the end of arena {self.tag}/{self.group}")
        data, outcome = ctypes.create_string_buffer(nbytes), Outcome()
        where = (self._pool.number, self.number, offset)
        self._pool.check(self._pool.lib.hb_arena_read(*where, data, nbytes, outcome), outcome)
        return data.raw[:nbytes]

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes in. :raises MemoryFault: it is released, or they do not fit."""
        outcome = Outcome()
        where = (self._pool.number, self.number, number_of_bytes(offset))
        self._pool.check(self._pool.lib.hb_arena_write(*where, data, len(data), outcome), outcome)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this when the last view of it is gone, and its memory with it."""
        weakref.finalize(self.lease(), call).atexit = False

    def forget(self) -> None:
        """It is out of the pool: only views that exist already go on."""
        self._buffer = None


def _let_go(lib: Any, pool: int, arena: int) -> None:
    lib.hb_arena_drop(pool, arena, None)  # usually done before
    lib.hb_arena_unreserve(pool, arena)

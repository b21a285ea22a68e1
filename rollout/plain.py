"""What is left of a pool without the native library: memory that stays.

It allocates, so that an engine runs from a pure wheel, and says that it cannot release.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Collection, Mapping

from hotbunk.rollout.arena import ALIGN, PAGE, Arena, MemoryPool, Region, Survival, checked
from hotbunk.rollout.contract import ArenaReport, MemoryReport, Retention
from hotbunk.rollout.errors import MemoryFault, Unsupported
from hotbunk.rollout.native import NativeUnavailable


class PlainArena(Arena):
    """An arena of a :class:`PlainPool`."""

    def __init__(self, tag: str, nbytes: int, group: str) -> None:
        self.tag, self.group = tag, group
        self.size = -(-max(nbytes, 1) // PAGE) * PAGE
        self._memory = mmap.mmap(-1, self.size)
        self._buffer = (ctypes.c_char * self.size).from_buffer(self._memory)
        self.address = ctypes.addressof(self._buffer)
        self.used = 0
        self.regions = {}

    @property
    def released(self) -> bool:
        return False

    def add(self, name: str, nbytes: int, survival: Survival = Survival.CONTENT) -> Region:
        if name in self.regions:
            raise MemoryFault(f"arena {self.tag}/{self.group} already has a region {name!r}")
        offset = -(-self.used // ALIGN) * ALIGN
        if offset + nbytes > self.size:
            raise MemoryFault(
                f"arena {self.tag}/{self.group} has {self.size - offset} bytes left and "
                f"{name!r} needs {nbytes}"
            )
        region = self.regions[name] = Region(name, offset, nbytes, survival)
        self.used = offset + nbytes
        return region

    def lease(self) -> object:
        return self._buffer

    def view(self, region: Region | None = None) -> memoryview:
        whole = memoryview(self._buffer).cast("B")
        return whole if region is None else whole[region.offset : region.offset + region.nbytes]


class PlainPool(MemoryPool):
    """Plain memory, where the native library is missing: it stays until an arena is dropped."""

    def __init__(self, why: NativeUnavailable) -> None:
        self.cannot_release = str(why)
        self._remedy = why.remedy
        self._arenas: dict[tuple[str, str], PlainArena] = {}
        self._lock = threading.Lock()

    def arena(self, tag: str, nbytes: int, group: str = "", *, persistent: int = 0) -> PlainArena:
        with self._lock:
            if (tag, group) in self._arenas:
                raise MemoryFault(f"the pool already has an arena {tag}/{group}")
            made = PlainArena(tag, nbytes + persistent + ALIGN, group)
            return self._arenas.setdefault((tag, group), made)

    def arenas(self) -> tuple[PlainArena, ...]:
        with self._lock:
            return tuple(self._arenas.values())

    def drop(self, arena: Arena) -> None:
        with self._lock:
            del self._arenas[arena.tag, arena.group]

    def release(
        self, tags: Collection[str], retention: Mapping[str, Retention] | Retention
    ) -> MemoryReport:
        if any(a.tag in checked(tags) for a in self.arenas()):
            raise Unsupported("release", "plain memory", self._remedy)
        return self.memory()

    def resume(self, tags: Collection[str]) -> MemoryReport:
        return self.memory()  # nothing was ever released

    def memory(self) -> MemoryReport:
        with self._lock:
            arenas = tuple(
                ArenaReport(a.tag, a.group, a.size, a.size) for a in self._arenas.values()
            )
        return MemoryReport(arenas, measured_by="accounting")

    def audit(self) -> MemoryReport:
        return self.memory()

    def check_invariants(self) -> None:
        """Nothing can contradict anything."""

    def close(self) -> None:
        with self._lock:
            self._arenas.clear()

"""Memory that can be taken away: an arena per tag and weight group, at addresses that stay.

:class:`MemoryPool` is what engines and trainers hold; :class:`HostPool` keeps it in private
anonymous mappings of this process. An arena's regions are bound once; a release writes what must
survive into an unlinked file (so a killed process leaves nothing behind), gives the pages back and
makes the range untouchable: a stray read is a fault, not silent zeros. A resume maps it again and
restores. "Resident" is always what the operating system says: :meth:`HostPool.memory` asks the
page tables through ``mincore``, which is cheap enough for every verb, and :meth:`HostPool.audit`
reads ``/proc/self/smaps``, which takes as long as the process has mappings. They agree but for
pages that were read and never written: those map the kernel's one page of zeros, which costs
nothing, and only the page tables count them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import IO

import msgspec

from hotbunk.rollout.contract import ArenaReport, MemoryReport, Retention
from hotbunk.rollout.errors import (
    HostOutOfMemory,
    MemoryFault,
    ReleaseIncomplete,
    ResumeOutOfMemory,
    SessionError,
)

PAGE = mmap.PAGESIZE
ALIGN = 256  # bytes; every region starts at a multiple of it
HUGE_FROM = 32 << 20  # bytes; smaller arenas would round up to huge pages what they really use
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE = 0x02, 0x20, 0x4000
MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 4, 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_munmap = _libc.munmap
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Survival(StrEnum):
    """What becomes of a region's content when its arena is discarded."""

    CONTENT = "content"  # forgotten: a sync brings it back
    STATE = "state"  # kept through every release: buffers, rotary caches, scales


class Region(msgspec.Struct, frozen=True):
    """A named range of an arena, in bytes."""

    name: str
    offset: int
    nbytes: int
    survival: Survival = Survival.CONTENT


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def resident_pages(address: int, nbytes: int) -> int:
    """Resident bytes of a page-aligned range of private memory, from the page tables.

    :raises MemoryFault: the range is not mapped.
    """
    pages = nbytes // PAGE
    flags = ctypes.create_string_buffer(pages)
    if _libc.mincore(address, nbytes, flags):
        raise MemoryFault(f"mincore: {os.strerror(ctypes.get_errno())}")
    return (pages - flags.raw[:pages].count(b"\0")) * PAGE


def resident_bytes(ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Resident bytes of address ranges ``name -> (start, end)``, read from ``/proc/self/smaps``.

    Ranges must be page-aligned and not share a mapping with anything else.
    """
    found = dict.fromkeys(ranges, 0)
    inside = ""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("Rss:"):
                if inside:
                    found[inside] += int(line.split()[1]) * 1024
            elif line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
                low, high = (int(x, 16) for x in line.split(" ", 1)[0].split("-"))
                inside = ""
                for name, (start, end) in ranges.items():
                    if start <= low and high <= end:
                        inside = name
                        break
    return found


class Arena(ABC):
    """One range of addresses for one tag and weight group. Regions never move."""

    tag: str
    group: str
    size: int
    address: int
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
        """Writable bytes. Stays valid over release and resume; touching it between is a fault."""


class MemoryPool(ABC):
    """Arenas that can be released and resumed, all or none of a call's."""

    @abstractmethod
    def arena(self, tag: str, nbytes: int, group: str = "") -> Arena:
        """Reserve a new arena of at least ``nbytes``. :raises MemoryFault: it exists."""

    @abstractmethod
    def drop(self, arena: Arena) -> None:
        """Take one arena out of the pool and give its addresses back."""

    @abstractmethod
    def release(
        self, tags: Collection[str], retention: Mapping[str, Retention] | Retention
    ) -> MemoryReport:
        """Give back every arena of the tags.

        ``retention`` is one for all, or one per group (others are discarded). Released arenas
        follow a stricter retention: DISCARD drops a backup.

        :raises HostOutOfMemory: no room for the backups; nothing was released.
        :raises MemoryFault: the kernel will not take the pages; nothing was released.
        :raises ReleaseIncomplete: released, and the OS still counts pages.
        """

    @abstractmethod
    def resume(self, tags: Collection[str]) -> MemoryReport:
        """Map every released arena of the tags and restore what was kept.

        :raises ResumeOutOfMemory: everything this call mapped is released again.
        """

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is reserved, resident and backed up now."""

    @abstractmethod
    def check_invariants(self) -> None:
        """:raises AssertionError: an arena and the OS disagree."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Views held by others have no content afterwards."""


class HostArena(Arena):
    """An arena in a private anonymous mapping, fenced by a page on either side."""

    def __init__(self, tag: str, nbytes: int, group: str) -> None:
        self.tag, self.group = tag, group
        self.size = _round_up(max(nbytes, 1), PAGE)
        self.regions = {}
        self.used = 0
        self.backup: _Backup | None = None
        self._released = False
        span = self.size + 2 * PAGE  # the fences keep the kernel from merging mappings
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        base = _libc.mmap(None, span, PROT_NONE, flags, -1, 0)
        if base == _MAP_FAILED:
            raise MemoryFault(
                f"cannot reserve {span} bytes of addresses: {os.strerror(ctypes.get_errno())}"
            )
        self.address = base + PAGE
        # Every view holds this object, and the addresses go when the last of them does: one that
        # is still written to by a thread of a cancelled sync must not become a fault.
        self._buffer: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * self.size).from_address(
            self.address
        )
        weakref.finalize(self._buffer, _munmap, base, span).atexit = False
        self.protect(PROT_READ | PROT_WRITE)
        if self.size >= HUGE_FROM:
            _libc.madvise(self.address, self.size, MADV_HUGEPAGE)  # a hint: kernels may lack it
        try:
            self._populate()
        except MemoryFault:
            _libc.munmap(base, span)
            raise

    @property
    def released(self) -> bool:
        return self._released

    @property
    def range(self) -> tuple[int, int]:
        """Addresses ``[start, end)``."""
        return self.address, self.address + self.size

    def add(self, name: str, nbytes: int, survival: Survival = Survival.CONTENT) -> Region:
        if name in self.regions:
            raise MemoryFault(f"arena {self.tag}/{self.group} already has a region {name!r}")
        offset = _round_up(self.used, ALIGN)
        if offset + nbytes > self.size:
            raise MemoryFault(
                f"arena {self.tag}/{self.group} has {self.size - offset} bytes left and "
                f"{name!r} needs {nbytes}"
            )
        region = self.regions[name] = Region(name, offset, nbytes, survival)
        self.used = offset + nbytes
        return region

    def view(self, region: Region | None = None) -> memoryview:
        if self._buffer is None:
            raise MemoryFault(f"arena {self.tag}/{self.group} was given back")
        whole = memoryview(self._buffer).cast("B")
        return whole if region is None else whole[region.offset : region.offset + region.nbytes]

    def protect(self, protection: int) -> None:
        """Change what may be done with the pages. :raises MemoryFault: the kernel says no."""
        if _libc.mprotect(self.address, self.size, protection):
            raise MemoryFault(
                f"mprotect of {self.tag}/{self.group}: {os.strerror(ctypes.get_errno())}"
            )

    def drop_pages(self) -> None:
        """Fence the range off and give the pages back.

        :raises MemoryFault: the kernel says no (locked pages, say); nothing was given back.
        """
        self.protect(PROT_NONE)
        if _libc.madvise(self.address, self.size, MADV_DONTNEED):
            why = os.strerror(ctypes.get_errno())
            self.protect(PROT_READ | PROT_WRITE)
            raise MemoryFault(f"madvise of {self.tag}/{self.group}: {why}")
        self._released = True

    def map_pages(self) -> None:
        """Make the range usable again, empty, with all its memory in place.

        :raises MemoryFault: there is not enough; the range stays released.
        """
        self.protect(PROT_READ | PROT_WRITE)
        try:
            self._populate()
        except MemoryFault:
            self.drop_pages()
            raise
        self._released = False

    def _populate(self) -> None:
        """Have every page now: what is mapped is there, not promised until somebody touches it."""
        if not _libc.madvise(self.address, self.size, MADV_POPULATE_WRITE):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise MemoryFault(
                f"{self.tag}/{self.group} needs {self.size} bytes: {os.strerror(code)}"
            )
        ctypes.memset(self.address, 0, self.size)  # Linux before 5.14

    def close(self) -> None:
        """Return the pages now, and the addresses as soon as no view is left."""
        if self.backup is not None:
            self.backup.close()
        if not self._released:
            _libc.madvise(self.address, self.size, MADV_DONTNEED)
        self._buffer = None


class _Backup:
    """What a release keeps, in an unlinked file. ``whole``: all content, not only state."""

    def __init__(self, arena: HostArena, directory: str, *, whole: bool) -> None:
        self.whole = whole
        self.ranges = [(0, arena.used)] if whole else _state_of(arena)
        self.nbytes = sum(n for _, n in self.ranges)
        self._file: IO[bytes] | None = None
        if not self.nbytes:  # nothing to keep needs no room
            return
        try:
            # It has no name, so nothing outlives the process.
            self._file = tempfile.TemporaryFile(dir=directory, prefix="hotbunk-")  # noqa: SIM115
            os.posix_fallocate(self._fd, 0, self.nbytes)
            view = arena.view()
            at = 0
            for offset, nbytes in self.ranges:
                _write_all(self._fd, view[offset : offset + nbytes], at)
                at += nbytes
        except OSError as error:
            self.close()
            raise HostOutOfMemory(self.nbytes, _free_bytes(directory), where=str(error)) from error

    @property
    def _fd(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def restore(self, arena: HostArena) -> None:
        """Read everything back. :raises MemoryFault, OSError: it cannot be read."""
        view, at = arena.view(), 0
        for offset, nbytes in self.ranges:
            part, done = view[offset : offset + nbytes], 0
            while done < nbytes:
                got = os.preadv(self._fd, [part[done:]], at + done)
                if not got:
                    raise MemoryFault(f"the backup of {arena.tag}/{arena.group} is cut short")
                done += got
            at += nbytes

    def forget_content(self, arena: HostArena) -> None:
        """Keep only state on. It moves towards the front of the file, so it needs no room."""
        if not self.whole:
            return
        ranges, at = _state_of(arena), 0
        for offset, nbytes in ranges:
            for done in range(0, nbytes, _CHUNK):
                piece = os.pread(self._fd, min(_CHUNK, nbytes - done), offset + done)
                _write_all(self._fd, memoryview(piece), at + done)
            at += nbytes
        self.whole, self.ranges, self.nbytes = False, ranges, at
        if self._file is not None:
            os.truncate(self._fd, at)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_CHUNK = 1 << 20


def _state_of(arena: HostArena) -> list[tuple[int, int]]:
    """Ranges of the regions that survive everything, in order of address."""
    return [(r.offset, r.nbytes) for r in arena.regions.values() if r.survival is Survival.STATE]


def _free_bytes(directory: str) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


class HostPool(MemoryPool):
    """Arenas in this process's own anonymous memory.

    :param backup_dir: where backups are written (default: the system's temporary folder). On a
        machine without accelerators a backup in RAM would save nothing.
    """

    #: Share of what was released that the OS may still count after a release, before it is an error.
    RESIDUAL = 0.05

    def __init__(self, backup_dir: Path | None = None) -> None:
        self._arenas: dict[tuple[str, str], HostArena] = {}
        self._lock = threading.Lock()  # of the table: buckets come and go while others count
        self._dir = str(backup_dir or tempfile.gettempdir())

    def arena(self, tag: str, nbytes: int, group: str = "") -> HostArena:
        with self._lock:
            if (tag, group) in self._arenas:
                raise MemoryFault(f"the pool already has an arena {tag}/{group}")
            arena = self._arenas[tag, group] = HostArena(tag, nbytes, group)
            return arena

    def drop(self, arena: Arena) -> None:
        with self._lock:
            self._arenas.pop((arena.tag, arena.group)).close()

    def release(
        self, tags: Collection[str], retention: Mapping[str, Retention] | Retention
    ) -> MemoryReport:
        before = _resident(self.memory())
        made: list[tuple[HostArena, _Backup]] = []
        try:
            for arena in self._of(tags):
                kept = (
                    retention
                    if isinstance(retention, Retention)
                    else retention.get(arena.group, Retention.DISCARD)
                )
                if kept is Retention.RESIDENT:
                    continue
                if not arena.released:
                    whole = kept is Retention.BACKUP
                    made.append((arena, _Backup(arena, self._dir, whole=whole)))
                elif kept is Retention.DISCARD and arena.backup is not None:
                    arena.backup.forget_content(arena)
            for arena, _ in made:
                arena.drop_pages()
        except BaseException:
            for arena, backup in made:
                if arena.released:
                    arena.map_pages()
                    backup.restore(arena)
                backup.close()
            raise
        for arena, backup in made:
            arena.backup = backup
        report = self.memory()
        left = _resident(report)
        expected = sum(before[a.tag, a.group] for a, _ in made)
        residue = sum(left[a.tag, a.group] for a, _ in made)
        if residue > self.RESIDUAL * max(expected, 1):
            raise ReleaseIncomplete(expected, expected - residue)
        return msgspec.structs.replace(report, freed=expected - residue)

    def resume(self, tags: Collection[str]) -> MemoryReport:
        wanted = [arena for arena in self._of(tags) if arena.released]
        mapped: list[HostArena] = []
        try:
            for arena in wanted:
                arena.map_pages()
                mapped.append(arena)
            for arena in mapped:
                if arena.backup is not None:
                    arena.backup.restore(arena)
        except BaseException as error:
            for arena in mapped:
                arena.drop_pages()
            if not isinstance(error, (MemoryFault, OSError)):
                raise
            free = os.sysconf("SC_AVPHYS_PAGES") * PAGE
            needed = sum(a.size for a in wanted)
            raise ResumeOutOfMemory(",".join(tags), needed, free) from error
        for arena in mapped:  # backups are dropped last, when nothing can fail any more
            if arena.backup is not None:
                arena.backup.close()
                arena.backup = None
        report = self.memory()
        now = _resident(report)
        return msgspec.structs.replace(report, mapped=sum(now[a.tag, a.group] for a in mapped))

    def memory(self) -> MemoryReport:
        with self._lock:
            return self._report(
                {k: resident_pages(a.address, a.size) for k, a in self._arenas.items()}
            )

    def audit(self) -> MemoryReport:
        """As :meth:`memory`, counted by ``/proc/self/smaps``."""
        with self._lock:
            counted = resident_bytes({"/".join(k): a.range for k, a in self._arenas.items()})
            return self._report({k: counted["/".join(k)] for k in self._arenas})

    def _report(self, counted: Mapping[tuple[str, str], int]) -> MemoryReport:
        return MemoryReport(
            tuple(
                ArenaReport(
                    a.tag,
                    a.group,
                    a.size,
                    counted[k],
                    a.backup.nbytes if a.backup else 0,
                )
                for k, a in self._arenas.items()
            )
        )

    def check_invariants(self) -> None:
        # Nothing may run meanwhile, so the two ways of counting agree, but for pages of zeros.
        reports = self.memory().arenas
        for counted, report in zip(self.audit().arenas, reports, strict=True):
            assert counted.resident <= report.resident, "smaps counts more than the page tables"
            arena = self._arenas[report.tag, report.group]
            assert report.resident <= arena.size, f"{report} counts pages that are not its own"
            if arena.released:
                assert report.resident == 0, f"{report} is released and resident"
                assert arena.backup is not None, f"{report} is released and kept no state"
            else:
                assert arena.backup is None, f"{report} is mapped and still has a backup"

    def close(self) -> None:
        for arena in list(self._arenas.values()):
            self.drop(arena)

    def _of(self, tags: Collection[str]) -> list[HostArena]:
        if isinstance(tags, str):
            raise SessionError(f"tags must be a list, not the string {tags!r}")
        with self._lock:
            return [a for a in self._arenas.values() if a.tag in tags]


def _resident(report: MemoryReport) -> dict[tuple[str, str], int]:
    return {(a.tag, a.group): a.resident for a in report.arenas}

"""Memory that can be taken away: an arena per tag and weight group, at addresses that stay.

:class:`MemoryPool` is what engines and trainers hold, :class:`NativePool` is the one that gives
memory back (csrc/pool, behind hotbunk_pool.h), :class:`~hotbunk.rollout.plain.PlainPool` what is left without the native
library: it allocates and says that it cannot release. :func:`host_pool` chooses.

An arena's regions are bound once. A release writes what must survive into a nameless file (so a
killed process leaves nothing behind), gives the memory back and makes the range untouchable: a
stray read is a fault, not silent zeros. A resume brings it back to the same addresses. "Resident"
is always what the operating system or the driver says: on the host, :meth:`MemoryPool.memory` asks
the page tables, which is cheap enough for every verb, and :meth:`NativePool.audit` reads
``/proc/self/smaps``, which takes as long as the process has mappings. They agree but for pages that
were read and never written: those map the kernel's one page of zeros, and only the page tables
count them.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from hotbunk.rollout import native
from hotbunk.rollout.arena import ALIGN, PAGE, Arena, MemoryPool, Region, Survival, checked
from hotbunk.rollout.contract import ArenaReport, MemoryReport, Retention
from hotbunk.rollout.errors import (
    ConfigError,
    HostOutOfMemory,
    MemoryFault,
    ReleaseIncomplete,
    ResumeOutOfMemory,
    Unsupported,
)
from hotbunk.rollout.native_arena import NativeArena, name_of, number_of_bytes
from hotbunk.rollout.native_pool import ArenaInfo, Choice, Code, Facts, Options, Outcome, Shared
from hotbunk.rollout.plain import PlainPool

__all__ = [
    "ALIGN",
    "PAGE",
    "Arena",
    "HostPool",
    "MemoryPool",
    "NativeArena",
    "NativePool",
    "PlainPool",
    "Region",
    "Survival",
    "host_pool",
    "resident_bytes",
    "resident_pages",
]

_RETAIN = {Retention.DISCARD: 0, Retention.BACKUP: 1, Retention.RESIDENT: 2}


def resident_pages(address: int, nbytes: int) -> int:
    """Resident bytes of a page-aligned range of private memory, from the page tables.

    :raises MemoryFault: the range is not mapped.
    """
    found = int(native.load().lib.hb_resident(address, nbytes))
    if found < 0:
        raise MemoryFault(f"no memory is mapped at {address:#x}")
    return found


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


class NativePool(MemoryPool):
    """Arenas on one device, by the native library.

    :param driver: ``host``, ``shared`` (``shared:tmpfs``, ``:hugetlb``, ``:memfd``), ``cuda:N``,
        ``acl:N`` or ``fake`` (``fake:BYTES``).
    :param backup_dir: where backups are written; None: into memory of the host. On a machine
        without accelerators a backup in memory would save nothing.
    :param library: what is opened as the CUDA or ACL driver.
    :param wait: seconds a release waits for the device to count memory as free.
    :param after_release: called once after each release that gave memory back: what else holds
        memory of the device (torch's cache) gives it back there.
    :raises NativeUnavailable: hotbunk was installed pure.
    :raises Unsupported: the driver cannot be used on this machine; says why.
    :raises ConfigError: there is no such driver.
    """

    def __init__(
        self,
        driver: str = "host",
        *,
        backup_dir: Path | None = None,
        library: Path | None = None,
        wait: float = 2.0,
        after_release: Callable[[], None] | None = None,
    ) -> None:
        self._after_release = after_release
        self.lib = native.load().lib
        self.driver = driver
        options = Options(
            driver.encode(),
            None if backup_dir is None else str(backup_dir).encode(),
            None if library is None else str(library).encode(),
            int(wait * 1000),
        )
        number, outcome = ctypes.c_uint64(), Outcome()
        code = self.lib.hb_pool_open(options, number, outcome)
        if code == Code.UNAVAILABLE:
            raise Unsupported(f"driver {driver!r}", "memory pool", outcome.message)
        if code == Code.INVALID:
            raise ConfigError(outcome.message)
        self.number = number.value
        self.check(code, outcome)
        weakref.finalize(self, self.lib.hb_pool_close, self.number).atexit = False
        self._arenas: dict[int, NativeArena] = {}
        self._lock = threading.Lock()  # of the table: buckets come and go while others count
        facts = self.facts()
        self.kind = facts.kind.decode()
        self._total = int(facts.total)
        self.addressable = bool(facts.addressable)
        name, _, index = driver.partition(":")
        self.measured_by = "process" if facts.per_process else "device"
        if name == "fake":
            self.measured_by = "accounting"  # it counts; there is no hardware to ask
        self.device = {"cuda": f"cuda:{index or 0}", "acl": f"npu:{index or 0}"}.get(name, "cpu")

    def facts(self) -> Facts:
        """Granularity, free and total bytes of the device, and what kind of memory it is."""
        facts, outcome = Facts(), Outcome()
        self.check(self.lib.hb_pool_facts_of(self.number, facts, outcome), outcome)
        return facts

    def arena(self, tag: str, nbytes: int, group: str = "", *, persistent: int = 0) -> NativeArena:
        number, outcome = ctypes.c_uint64(), Outcome()
        names, sizes = (
            (name_of(tag), name_of(group)),
            (number_of_bytes(nbytes), number_of_bytes(persistent)),
        )
        self.check(self.lib.hb_arena_open(self.number, *names, *sizes, number, outcome), outcome)
        info = ArenaInfo()
        self.lib.hb_arena_look(self.number, number, info)
        arena = NativeArena(self, number.value, info, tag, group)
        with self._lock:
            self._arenas[arena.number] = arena
        return arena

    def import_arena(self, shared: Shared, tag: str, group: str = "") -> NativeArena:
        """Another process's memory as an arena; no verb releases it. ``shared`` may go at once.

        With ``shared.read_only``, writing there is a fault.

        :raises MemoryFault: it cannot be had.
        """
        number, outcome = ctypes.c_uint64(), Outcome()
        names = (name_of(tag), name_of(group))
        self.check(self.lib.hb_arena_import(self.number, *names, shared, number, outcome), outcome)
        info = ArenaInfo()
        self.lib.hb_arena_look(self.number, number, info)
        return NativeArena(self, number.value, info, tag, group)

    def arenas(self) -> tuple[NativeArena, ...]:
        with self._lock:
            return tuple(self._arenas.values())

    def drop(self, arena: Arena) -> None:
        assert isinstance(arena, NativeArena)
        outcome = Outcome()
        self.check(self.lib.hb_arena_drop(self.number, arena.number, outcome), outcome)
        with self._lock:
            self._arenas.pop(arena.number, None)
        arena.forget()

    def leave(self, arena: NativeArena) -> None:
        """As :meth:`drop`, but its memory goes when the last view of it does. Idempotent."""
        with self._lock:
            self._arenas.pop(arena.number, None)
        arena.forget()

    def release(
        self, tags: Collection[str], retention: Mapping[str, Retention] | Retention
    ) -> MemoryReport:
        groups = {} if isinstance(retention, Retention) else retention
        rest = retention if isinstance(retention, Retention) else Retention.DISCARD
        choices = []
        for tag in checked(tags):
            for group, kept in groups.items():
                choices.append(Choice(name_of(tag), name_of(group), _RETAIN[kept]))
            choices.append(Choice(name_of(tag), None, _RETAIN[rest]))
        outcome = Outcome()
        array = (Choice * len(choices))(*choices)
        code = self.lib.hb_pool_release(self.number, array, len(choices), outcome)
        gave = bool(outcome.expected) and code in (Code.OK, Code.INCOMPLETE)
        if gave and self._after_release:
            self._after_release()
        self.check(code, outcome)
        report = self.memory()
        measured = outcome.free if gave and not self._after_release else None
        outside = max(self._in_use(measured) - report.resident(), 0)
        return msgspec.structs.replace(report, freed=outcome.freed, outside=outside)

    def _in_use(self, free: int | None) -> int:
        """Bytes in use: by this process where its own pages are counted, else of the device.

        ``free``: what was measured as free of it just now. 0 where the driver will not say: a
        release that is done must not fail over its report.
        """
        if self.measured_by == "process":
            return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE
        try:
            return self._total - (self.facts().free if free is None else free)
        except MemoryFault:
            return 0

    def resume(self, tags: Collection[str]) -> MemoryReport:
        names = [name_of(tag) for tag in checked(tags)]
        outcome = Outcome()
        array = (ctypes.c_char_p * len(names))(*names)
        code = self.lib.hb_pool_resume(self.number, array, len(names), outcome)
        if code == Code.NOMEM:
            raise ResumeOutOfMemory(
                ",".join(tags), outcome.needed, outcome.free, where=outcome.message
            )
        self.check(code, outcome)
        return msgspec.structs.replace(self.memory(), mapped=outcome.mapped)

    def memory(self) -> MemoryReport:
        count = ctypes.c_uint64()
        with self._lock:
            known = dict(self._arenas)
        infos = (ArenaInfo * (len(known) + 16))()  # some may come meanwhile; they are not known
        if self.lib.hb_pool_look(self.number, infos, len(infos), count):
            return MemoryReport(measured_by=self.measured_by)  # closed
        found = []
        for info in infos[: count.value]:
            arena = known.get(info.arena)
            if arena is not None:
                found.append(
                    ArenaReport(arena.tag, arena.group, arena.size, info.resident, info.backup)
                )
        return MemoryReport(tuple(found), measured_by=self.measured_by)

    def audit(self) -> MemoryReport:
        """As :meth:`memory`, counted by ``/proc/self/smaps`` where it is this process's memory."""
        report = self.memory()
        if self.driver != "host":
            return report
        with self._lock:
            ranges = {
                f"{a.tag}/{a.group}": (a.address, a.address + a.size) for a in self._arenas.values()
            }
        counted = resident_bytes(ranges)
        arenas = tuple(
            msgspec.structs.replace(a, resident=counted.get(f"{a.tag}/{a.group}", 0))
            for a in report.arenas
        )
        return msgspec.structs.replace(report, arenas=arenas)

    def check_invariants(self) -> None:
        # Nothing may run meanwhile, so the two ways of counting agree, but for pages of zeros.
        outcome = Outcome()
        assert not self.lib.hb_pool_check(self.number, outcome), outcome.message
        reports = self.memory().arenas
        for counted, report in zip(self.audit().arenas, reports, strict=True):
            assert counted.resident <= report.resident, "smaps counts more than the page tables"
            assert report.resident <= report.reserved, f"{report} counts pages that are not its own"

    def close(self) -> None:
        self.lib.hb_pool_close(self.number)
        with self._lock:
            arenas, self._arenas = list(self._arenas.values()), {}
        for arena in arenas:
            arena.forget()

    # -- the fake driver ----------------------------------------------------------------------

    def fail(self, function: str, nth: int = 1, code: Code = Code.DRIVER) -> None:
        """Fake driver: the nth call of ``function`` from now on fails. 0: none does."""
        assert not self.lib.hb_fake_fail(self.number, function.encode(), nth, code)

    def lie(self, nbytes: int, *, after: int, looks: int) -> None:
        """Fake driver: ``after`` honest answers, then free memory is told too low."""
        assert not self.lib.hb_fake_lie(self.number, nbytes, after, looks)

    def count(self, what: str) -> int:
        """Fake driver: calls of a function, or live ranges, memory, maps, stores, bytes."""
        return int(self.lib.hb_fake_count(self.number, what.encode()))

    def check(self, code: int, outcome: Outcome) -> None:
        """The error that a code stands for.

        :raises MemoryFault: or one of its kinds.
        """
        if code == Code.OK:
            return
        text = outcome.message or self.lib.hb_strerror(code).decode()
        if code == Code.HOST_NOMEM:
            raise HostOutOfMemory(outcome.needed, outcome.free, where=text)
        if code in (Code.NOMEM, Code.FULL) and str(outcome.needed) not in text:
            text += f": {outcome.needed} bytes are needed and {outcome.free} are free"
        if code == Code.INCOMPLETE:
            raise ReleaseIncomplete(outcome.expected, outcome.freed, where=text)
        raise MemoryFault(text)


class HostPool(NativePool):
    """A pool in this process's own anonymous memory.

    :param backup_dir: where backups are written (default: the system's temporary folder).
    """

    def __init__(self, backup_dir: Path | None = None) -> None:
        super().__init__("host", backup_dir=backup_dir or Path(tempfile.gettempdir()))


def host_pool(backup_dir: Path | None = None) -> MemoryPool:
    """A pool in this process's memory; without the native library one that cannot release."""
    try:
        return HostPool(backup_dir)
    except native.NativeUnavailable as error:
        return PlainPool(error)

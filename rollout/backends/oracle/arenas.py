"""The oracle's memory verbs: mapping, backing up and releasing arenas of a counted device."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.faults import FaultPlan
from hotbunk.rollout.backends.oracle.model import WeightGroup
from hotbunk.rollout.backends.oracle.options import Options
from hotbunk.rollout.backends.oracle.scheduler import Scheduler
from hotbunk.rollout.contract import ArenaReport, MemoryReport, Retention, Tag
from hotbunk.rollout.errors import HostOutOfMemory, ReleaseIncomplete, ResumeOutOfMemory

KV_POOL = "pool"  # the one arena of the kv_cache tag


class Arenas:
    """Which arena is mapped, what is kept of it, and what the device says about it."""

    def __init__(
        self,
        options: Options,
        device: Device,
        faults: FaultPlan,
        groups: Mapping[str, WeightGroup],
        scheduler: Scheduler,
    ) -> None:
        self.device = device
        self._options = options
        self._faults = faults
        self._groups = groups
        self._scheduler = scheduler

    def of(self, tags: Collection[Tag]) -> list[tuple[Tag, str, int]]:
        """(tag, group, bytes) of every arena of these tags, weights first."""
        found = []
        if Tag.WEIGHTS in tags:
            found += [(Tag.WEIGHTS, g.name, g.nbytes) for g in self._groups.values()]
        if Tag.KV_CACHE in tags:
            found.append((Tag.KV_CACHE, KV_POOL, self._options.kv_bytes))
        return found

    def map_all(self) -> None:
        """At start: everything.

        :raises ResumeOutOfMemory: the device is too small.
        """
        for tag, name, nbytes in self.of(tuple(Tag)):
            self.device.map(tag, name, nbytes)

    def forget(self) -> None:
        """At the end: everything goes, measured by nobody."""
        for tag, name, _ in self.of(tuple(Tag)):
            self.device.unmap(tag, name)
            self.device.keep_backup(tag, name, 0)

    async def resume(self, tags: Collection[Tag]) -> MemoryReport:
        """Map what is not mapped, all of it or nothing, then restore."""
        await self._faults.reach("resume/map")
        mapped: list[tuple[Tag, str]] = []
        total = 0
        try:
            for tag, name, nbytes in self.of(tags):
                if not self.device.mapped(tag, name):
                    self.device.map(tag, name, nbytes)
                    mapped.append((tag, name))
                    total += nbytes
        except ResumeOutOfMemory:
            for tag, name in mapped:
                self.device.unmap(tag, name)
            raise
        await self._faults.reach("resume/restore")
        for tag, name in mapped:
            if tag is Tag.KV_CACHE:
                self._scheduler.kv_mapped = True
            else:
                self._groups[name].map()
            self.device.keep_backup(tag, name, 0)
        return self.report(mapped=total)

    async def release(
        self,
        tags: Collection[Tag],
        retention: Retention,
        overrides: Mapping[str, Retention],
        keep_kv: bool,
    ) -> MemoryReport:
        """Back up what is to be kept, unmap, and wait until the device has it."""
        await self._back_up(tags, retention, overrides, keep_kv)
        await self._faults.reach("release/unmap")
        before, promised, recomputed, kept = self.device.resident(), 0, 0, 0
        for tag, name, _ in self.of(tags):
            how = overrides.get(name, retention)
            if tag is Tag.KV_CACHE:
                promised += self.device.unmap(tag, name)
                self._scheduler.kv_mapped = False
                frozen = self._scheduler.frozen()
                kept = sum(bool(entry.kv) for entry in frozen) if keep_kv else 0
                recomputed = self._scheduler.forget_kv(() if keep_kv else frozen)
                if not keep_kv:  # also what an earlier release kept
                    self.device.keep_backup(tag, name, 0)
            elif how is not Retention.RESIDENT and self.device.mapped(tag, name):
                promised += self.device.unmap(tag, name)
                self._groups[name].unmap(keep_content=how is Retention.BACKUP)
            elif how is Retention.DISCARD:
                self._groups[name].forget_backup()
                self.device.keep_backup(tag, name, 0)
        freed = await self._measured(before, promised)
        return self.report(freed=freed, recomputed=recomputed, kept=kept)

    def report(
        self, *, freed: int = 0, mapped: int = 0, recomputed: int = 0, kept: int = 0
    ) -> MemoryReport:
        """What the device says now."""
        arenas = tuple(
            ArenaReport(
                tag, name, nbytes, self.device.resident(tag, name), self.device.backup(tag, name)
            )
            for tag, name, nbytes in self.of(tuple(Tag))
        )
        return MemoryReport(
            arenas,
            freed=freed,
            mapped=mapped,
            recomputed_requests=recomputed,
            kept_requests=kept,
        )

    async def _back_up(
        self,
        tags: Collection[Tag],
        retention: Retention,
        overrides: Mapping[str, Retention],
        keep_kv: bool,
    ) -> None:
        """Make room on the host for every backup, or for none."""
        await self._faults.reach("release/backup")
        made = []
        try:
            for tag, name, nbytes in self.of(tags):
                kept = overrides.get(name, retention) is Retention.BACKUP
                if tag is Tag.KV_CACHE:
                    kept = keep_kv
                    nbytes = self._scheduler.blocks_used * self._options.kv_block_bytes
                if kept and self.device.mapped(tag, name):
                    self.device.keep_backup(tag, name, nbytes)
                    made.append((tag, name))
        except HostOutOfMemory:
            for tag, name in made:
                self.device.keep_backup(tag, name, 0)
            raise

    async def _measured(self, before: int, promised: int) -> int:
        """Wait until the device says that the memory is back."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.release_deadline
        while True:
            freed = before - self.device.resident()
            if freed >= promised:
                return freed
            if loop.time() >= until:
                raise ReleaseIncomplete(promised, freed)
            await asyncio.sleep(self._options.step_time or 0.001)
            self.device.tick()

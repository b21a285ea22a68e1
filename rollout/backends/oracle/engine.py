"""The oracle engine: the contract's verbs over counted memory, real bytes and a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.faults import EngineDied, FaultPlan
from hotbunk.rollout.backends.oracle.model import DRAFT, ENCODER, GROUPS, WeightGroup
from hotbunk.rollout.backends.oracle.options import Options, capabilities
from hotbunk.rollout.backends.oracle.scheduler import Forward, Scheduler, stop
from hotbunk.rollout.backends.oracle.tokens import encoder_bits, weights_bits
from hotbunk.rollout.backends.oracle.update import Writer, check_manifest
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FULL,
    TARGET,
    AbortReport,
    ArenaReport,
    BackendStatus,
    Cache,
    Digests,
    Engine,
    Gate,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
)
from hotbunk.rollout.errors import (
    KVNotResident,
    ReleaseIncomplete,
    ResumeOutOfMemory,
    SessionError,
    Unsupported,
    UsageError,
    WeightsNotLoaded,
    WeightsNotResident,
    WeightsPoisoned,
    closest,
)
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes

KV_POOL = "pool"  # the one arena of the kv_cache tag


class OracleEngine(Engine):
    """Built by :func:`hotbunk.rollout.backends.oracle.create`.

    What a test may look at, besides the contract: ``device``, ``faults``, ``groups`` (the bytes
    themselves), ``scheduler``, and ``post_loads`` (how often post-load processing ran).
    """

    def __init__(self, options: Options, device: Device, faults: FaultPlan) -> None:
        self.options = options
        self.device = device
        self.faults = faults
        self.capabilities = capabilities(options)
        self.groups = {name: WeightGroup(name, 0 if options.loaded else None) for name in GROUPS}
        self.post_loads = 0
        self.encoder_cache: dict[int, int] = {}
        self.scheduler = Scheduler(
            step_time=options.step_time,
            max_running=options.max_running,
            kv_blocks=options.kv_blocks,
            block_tokens=options.block_tokens,
            faults=faults,
            forward=self._forward,
            encode=self._encode,
        )
        self._dirty: set[str] = set()
        self._loop: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.faults.reach("start")
        for group in self.groups.values():
            self.device.map(Tag.WEIGHTS, group.name, group.nbytes)
        self.device.map(Tag.KV_CACHE, KV_POOL, self.options.kv_bytes)
        self._loop = asyncio.create_task(self.scheduler.run())
        self._loop.add_done_callback(self._loop_ended)

    async def close(self) -> None:
        if self._loop is not None:
            await stop(self._loop)
            self._loop = None
        for group in self.groups.values():
            self.device.unmap(Tag.WEIGHTS, group.name)
            self.device.keep_backup(Tag.WEIGHTS, group.name, 0)
        self.device.unmap(Tag.KV_CACHE, KV_POOL)

    def _loop_ended(self, loop: asyncio.Task[None]) -> None:
        """The loop ends by :meth:`close` or because the engine crashed, as in a real one."""
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self.faults.kill()
            crash = EngineDied(f"the engine crashed: {type(error).__name__}: {error}")
            self.scheduler.fail(crash)

    # -- memory -------------------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        wanted = parse_tags(tags)
        await self.faults.reach("resume/map")
        mapped: list[tuple[str, str]] = []
        total = 0
        try:
            for tag, name, nbytes in self._arenas(wanted):
                if not self.device.mapped(tag, name):
                    self.device.map(tag, name, nbytes)
                    mapped.append((tag, name))
                    total += nbytes
        except ResumeOutOfMemory:
            for tag, name in mapped:
                self.device.unmap(tag, name)
            raise
        await self.faults.reach("resume/restore")
        for tag, name in mapped:
            if tag == Tag.KV_CACHE:
                self.scheduler.kv_mapped = True
            else:
                self.groups[name].map()
                self.device.keep_backup(tag, name, 0)
        return self._report(mapped=total)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
    ) -> MemoryReport:
        wanted, caps = parse_tags(tags), self.capabilities
        kv_only = wanted == (Tag.KV_CACHE,)
        self._require("release_kv_cache" if kv_only else "release", bool(caps.release))
        if Tag.WEIGHTS in wanted:
            self._require(f"retention {retention.value!r}", retention in caps.retentions)
        self._require_quiet("release")
        await self._back_up(wanted, retention, overrides or {})
        before = self.device.resident()
        await self.faults.reach("release/unmap")
        promised, recomputed = 0, 0
        for tag, name, _ in self._arenas(wanted):
            how = (overrides or {}).get(name, retention)
            if tag == Tag.KV_CACHE:
                promised += self.device.unmap(tag, name)
                self.scheduler.kv_mapped = False
                recomputed = self.scheduler.forget_kv(self.scheduler.frozen())
            elif how is not Retention.RESIDENT:
                if self.device.mapped(tag, name):
                    promised += self.device.unmap(tag, name)
                    self.groups[name].unmap(keep_content=how is Retention.BACKUP)
                    self._dirty.discard(name)
                elif how is Retention.DISCARD:
                    self._drop_backup(name)
        self.encoder_cache.clear()
        freed = await self._measured(before, promised)
        return self._report(freed=freed, recomputed_requests=recomputed)

    async def release_kv_cache(self) -> MemoryReport:
        self._require("release_kv_cache", bool(self.capabilities.release_kv_cache))
        return await self.release([Tag.KV_CACHE])

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def memory(self) -> MemoryReport:
        await self.faults.reach("memory")
        return self._report()

    def _arenas(self, tags: Collection[Tag]) -> list[tuple[str, str, int]]:
        found: list[tuple[str, str, int]] = []
        if Tag.WEIGHTS in tags:
            found += [(Tag.WEIGHTS.value, g.name, g.nbytes) for g in self.groups.values()]
        if Tag.KV_CACHE in tags:
            found.append((Tag.KV_CACHE.value, KV_POOL, self.options.kv_bytes))
        return found

    async def _back_up(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> None:
        """Make room on the host for every backup, or for none."""
        await self.faults.reach("release/backup")
        done: list[str] = []
        for tag, name, nbytes in self._arenas(tags):
            backup = overrides.get(name, retention) is Retention.BACKUP
            if tag == Tag.KV_CACHE or not backup or not self.device.mapped(tag, name):
                continue
            try:
                self.device.keep_backup(tag, name, nbytes)
            except MemoryError:
                raise
            done.append(name)

    def _drop_backup(self, name: str) -> None:
        group = self.groups[name]
        group.backup, group.loaded, group.version = None, False, None
        self.device.keep_backup(Tag.WEIGHTS, name, 0)

    async def _measured(self, before: int, promised: int) -> int:
        """Wait until the device says that the memory is back."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.options.release_deadline
        while True:
            freed = before - self.device.resident()
            if freed >= promised:
                return freed
            if loop.time() >= until:
                raise ReleaseIncomplete(promised, freed)
            await asyncio.sleep(self.options.step_time or 0.001)
            self.device.tick()

    def _report(
        self, freed: int = 0, mapped: int = 0, recomputed_requests: int = 0
    ) -> MemoryReport:
        arenas = tuple(
            ArenaReport(
                tag,
                name,
                nbytes,
                self.device.resident(tag, name),
                self.device.backup(tag, name),
            )
            for tag, name, nbytes in self._arenas(tuple(Tag))
        )
        return MemoryReport(
            arenas, freed=freed, mapped=mapped, recomputed_requests=recomputed_requests
        )

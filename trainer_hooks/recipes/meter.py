"""Resident memory by tag, of both tenants, as it changes over a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from hotbunk.rollout.arena import MemoryPool
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.trainer_hooks.hooks import TrainerShare
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder

TOTAL = "total"


class MeteredShare:
    """A trainer's share whose comings and goings are sampled."""

    def __init__(self, share: TrainerShare, meter: MemoryMeter) -> None:
        self._share = share
        self._meter = meter

    async def offload(self) -> None:
        await self._meter.sample()  # in a sync: the new weights are there, and the trainer still is
        await self._share.offload()
        await self._meter.sample()

    async def restore(self) -> None:
        await self._share.restore()
        await self._meter.sample()


class MemoryMeter:
    """Samples every arena of the engines and of the trainer's pool.

    Maxima are kept per ``watch``: a name from :meth:`watch` until :meth:`peaks`.
    """

    def __init__(
        self, handles: Sequence[ReplicaHandle], pool: MemoryPool, recorder: RunRecorder
    ) -> None:
        self._handles = handles
        self._pool = pool
        self._recorder = recorder
        self._others: dict[str, ReplicaHandle] = {}
        self._held: Callable[[], int] = lambda: 0
        self._watches: dict[str, dict[str, int]] = {}

    def add(self, name: str, handle: ReplicaHandle) -> None:
        """Count an engine that is not the policy's, all of it under ``name``."""
        self._others[name] = handle

    def add_buckets(self, held: Callable[[], int]) -> None:
        """Count what a transport keeps outside the trainer's pool."""
        self._held = held

    async def sample(self) -> dict[str, int]:
        """Resident bytes by tag, now. A replica that is lost has none: its process is gone."""
        levels = {"trainer": 0, "weights": 0, "kv_cache": 0, "bucket": self._held()}
        reports = [self._pool.memory()]
        for handle in list(self._handles):
            with suppress(ReplicaLost):
                reports.append(await handle.memory())
        for report in reports:
            for arena in report.arenas:
                levels[arena.tag] = levels.get(arena.tag, 0) + arena.resident
        for name, handle in self._others.items():
            levels[name] = (await handle.memory()).resident()
        self._recorder.memory(levels)
        for peaks in self._watches.values():
            for tag, size in {**levels, TOTAL: sum(levels.values())}.items():
                peaks[tag] = max(peaks.get(tag, 0), size)
        return levels

    async def mark(self) -> None:
        """A sample nobody needs at once (a transport's full bucket)."""
        await self.sample()

    @asynccontextmanager
    async def sampling(
        self, every: float = 0.02, also: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """Sample at the beginning and the end, and every so many seconds in between.

        ``also`` is called with each sample in between.
        """
        await self.sample()

        async def often() -> None:
            while True:
                await asyncio.sleep(every)
                await self.sample()
                if also is not None:
                    await also()

        sampler = asyncio.create_task(often())
        try:
            yield
        finally:
            sampler.cancel()
            await asyncio.wait({sampler})
        if not sampler.cancelled():
            sampler.result()  # it ended by an error
        await self.sample()

    def watch(self, name: str) -> None:
        """Keep maxima from now on."""
        self._watches[name] = {}

    def peaks(self, name: str) -> dict[str, int]:
        """Maxima since :meth:`watch`, by tag and in ``total``."""
        return self._watches.pop(name)

"""The memory verbs of one engine, and what they make of the state table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.contract import Engine, MemoryReport, Retention, Tag
from hotbunk.rollout.gate import SLEEP, Gate
from hotbunk.rollout.lifecycle import Residency
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.status import Deadlines


class Parking:
    """Releases and resumes; generation stands still while one runs."""

    def __init__(
        self,
        backend: Engine,
        line: EngineLine,
        gate: Gate,
        residency: Residency,
        deadlines: Deadlines,
    ) -> None:
        self._backend = backend
        self._line = line
        self._gate = gate
        self._residency = residency
        self._deadlines = deadlines

    async def resume(self, tags: Collection[Tag]) -> MemoryReport:
        """Map the tags; a sleep ends when its last one is back."""
        report = await self._memory_verb("resume", self._backend.resume(tags))
        self._residency.resumed(tags)
        if self._residency.mapped() == frozenset(Tag):
            self._gate.drop(SLEEP)
        return report

    async def release(
        self, tags: Collection[Tag], retention: Retention, keep_kv: bool
    ) -> MemoryReport:
        """Give the tags back.

        :raises Unsupported: requests are frozen, and the backend cannot release under them.
        """
        if not self._backend.capabilities.keep_release:
            # Not the gate's view: an aborted request is there until its client has read its end.
            said = await self._line.call("status", self._backend.status(), self._deadlines.inspect)
            if said.frozen:
                raise errors.Unsupported(
                    "release under kept requests",
                    self._backend.capabilities.backend,
                    self._backend.capabilities.keep_release.how,
                )
        verb = "release"
        if tuple(tags) == (Tag.KV_CACHE,):
            verb = "release_kv_cache"
            coro = self._backend.release_kv_cache(keep_kv=keep_kv)
        else:
            overrides = self._residency.overrides(retention)
            coro = self._backend.release(
                tags, retention=retention, overrides=overrides, keep_kv=keep_kv
            )
        try:
            report = await self._memory_verb(verb, coro)
        except errors.ReleaseIncomplete:
            self._residency.released(tags, retention)  # the content is gone, if not every byte
            raise
        except errors.ReleaseUndone:
            self._residency.released(tags, retention)
            self._residency.resumed(tags)
            raise
        self._residency.released(tags, retention)
        return report

    async def _memory_verb(self, verb: str, coro: Awaitable[MemoryReport]) -> MemoryReport:
        """A memory verb that does not come back, or crashes, leaves memory in an unknown state."""
        began = time.perf_counter()
        try:
            report = await self._line.call(verb, coro, self._deadlines.memory)
        except (errors.DeadlineExceeded, errors.EngineFailed, asyncio.CancelledError):
            self._line.lose(f"{verb} was cut off, so what is mapped is unknown")
            raise
        return msgspec.structs.replace(report, seconds=time.perf_counter() - began)

"""The verbs that cases call, straight to a server: no gate, no state table, no rule of ours.

What a report would say is what the suite's own streams show.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import msgspec

from hotbunk.conformance.backends.stock.asking import Came, Server, ended
from hotbunk.conformance.backends.stock.dialect import Dialect, not_part
from hotbunk.conformance.rig import Unseen
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.conformance.under_test import Tensors
from hotbunk.rollout.contract import (
    FULL,
    TARGET,
    AbortReport,
    BackendStatus,
    Cache,
    Capabilities,
    FinishReason,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Tag,
    TokenChunk,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import EngineFailed, UnknownTag, Unsupported, UsageError
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.lifecycle import KV
from hotbunk.rollout.status import Deadlines, Health, ReplicaStatus

Publish = Callable[[Tensors], Path]


class Bare:
    """One server for one case. ``publish`` puts tensors where the server can read them."""

    def __init__(
        self,
        url: str,
        key: str | None,
        dialect: Dialect,
        deadlines: Deadlines,
        publish: Publish,
        fresh: Tensors,
    ) -> None:
        self.dialect, self.deadlines = dialect, deadlines
        self._server = Server(url, key, dialect, deadlines)
        self.url, self._ask = self._server.url, self._server.ask
        self._publish, self._fresh = publish, fresh
        self._streams: dict[str, Came] = {}
        self._sent: Version | None = None
        self._kv_away = False
        self._kept_kv = True

    @property
    def capabilities(self) -> Capabilities:
        """What its routes could do."""
        return self.dialect.capabilities

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring it to where a fresh engine would be: awake, open, empty, version 0."""
        caps, dialect = self.capabilities, self.dialect
        if caps.abort:
            await self._ask(dialect.abort(None))
        if caps.release or caps.release_kv_cache:
            await self._ask(dialect.wake(None))
        if caps.pause.get(PauseMode.ABORT):
            await self._ask(dialect.resume())
        await self._load(self._fresh, Version(0, 0))
        await self.reset_caches()

    async def close(self) -> None:
        """Stop listening to it. It goes on."""
        await self._server.close()

    async def check_invariants(self) -> None:
        """Nothing of its inside is known."""

    # -- memory -------------------------------------------------------------------------------

    async def sleep(
        self,
        level: Any = 2,
        *,
        mode: str = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
        deadline: float | None = None,
    ) -> MemoryReport:
        """By its levels where it has them, else a pause and a release."""
        if keep_kv:
            raise not_part("a sleep that saves KV")
        _no_deadline(deadline)
        meant = level in (0, 1, 2) and mode in list(PauseMode)
        try:
            call = self.dialect.sleep(level, mode)
        except Unseen:
            if not meant or not self._keeps(level):
                raise
            await self.pause_generation(mode, clear_cache=clear_cache)
            call = self.dialect.release([t.value for t in Tag], level)
        await self._ask(call, meant=meant, wrong=UsageError)
        self._away(level, list(Tag))
        return MemoryReport()

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: str = Retention.DISCARD,
        keep_kv: bool = False,
        deadline: float | None = None,
    ) -> MemoryReport:
        """What stays is said by its levels."""
        _no_deadline(deadline)
        if keep_kv or retention == Retention.RESIDENT:
            raise not_part("a release that keeps what it releases")
        if retention not in list(Retention):
            raise not_part("the name of a retention")
        level = 1 if retention == Retention.BACKUP else 2
        wanted = [t.value for t in Tag] if tags is None else list(tags)
        try:
            call = self.dialect.release(wanted, level)
        except Unseen:
            if _known(wanted):
                raise
            raise UnknownTag(f"it has no way to be told {wanted}: not sent") from None
        await self._ask(call, meant=_known(wanted), wrong=UnknownTag)
        self._away(level, wanted)
        return MemoryReport()

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv)

    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport:
        wanted = None if tags is None else list(tags)
        await self._ask(self.dialect.wake(wanted), meant=_known(wanted or ()), wrong=UnknownTag)
        if wanted is None or Tag.KV_CACHE in wanted:
            self._kv_away = False
        return MemoryReport()

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        if tags is not None and not list(tags):
            raise not_part("a resume of nothing")
        return await self.wake_up(tags)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.wake_up([Tag.KV_CACHE])

    async def memory(self) -> MemoryReport:
        raise Unseen(self.dialect.unseen["memory"])

    async def digest(self, names: Collection[str] | None = None) -> Any:
        raise Unseen(self.capabilities.digest.how)

    # -- weights ------------------------------------------------------------------------------

    async def update_weights(
        self,
        transfer: MemoryTransfer,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport:
        """Its tensors as a directory that the server is told to load, and a label.

        :raises Unseen: it is the sender's own behaviour that is to be tried, and no sender reaches it.
        """
        manifest = transfer.manifest
        plain = type(transfer) is MemoryTransfer and manifest.fingerprint == KIND
        if not plain or scope != FULL or manifest.version != version:
            raise not_part("an offer, and what becomes of it")
        if version == self._sent:
            raise not_part("the same version once more")
        try:
            tensors = [(spec, transfer.content(n)) for n, spec in enumerate(manifest.tensors)]
            await self._load(tensors, version)
        except BaseException as error:
            await transfer.abort(error)
            raise
        await transfer.commit()
        self._sent = version
        total = len(manifest.tensors)
        return UpdateReport(version, applied=total, nbytes=manifest.total_bytes)

    async def _load(self, tensors: Tensors, version: Version) -> None:
        label = f"{version.incarnation}.{version.step}"
        for call in self.dialect.reload(self._publish(tensors), label):
            await self._ask(call, seconds=self.deadlines.update)

    # -- generation ---------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: str = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        reject: bool = False,
        owner: str = "",
        deadline: float | None = None,
    ) -> PauseReport:
        """It knows no owners. The report is what became of the suite's streams."""
        if reject:
            raise not_part("turning requests away")
        _no_deadline(deadline)
        running = {name: s for name, s in self._streams.items() if s.tokens}
        meant = mode in list(PauseMode)
        call = self.dialect.pause(mode, clear_cache=clear_cache)
        await self._ask(call, meant=meant, wrong=UsageError, seconds=self.deadlines.drain)
        if mode != PauseMode.KEEP:
            await ended(running.values(), self.deadlines.grace)
        self._kept_kv = self._kept_kv and not clear_cache
        ends = {name: stream.reason for name, stream in running.items()}
        return PauseReport(
            PauseMode(mode),
            aborted=tuple(n for n, end in ends.items() if end is FinishReason.ABORT),
            finished=tuple(n for n, end in ends.items() if end not in (None, FinishReason.ABORT)),
            frozen=tuple(n for n, end in ends.items() if end is None),
            cleared_cache=not self._kept_kv,
            stale_tokens=0,
        )

    async def resume_generation(self, *, owner: str = "") -> None:
        self._kept_kv = True
        await self._ask(self.dialect.resume())

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        """Counted are those whose streams end."""
        ids = list(self._streams) if request_ids is None else list(request_ids)
        asked = {name: self._streams[name] for name in ids if name in self._streams}
        for name in [None] if request_ids is None else request_ids:
            await self._ask(self.dialect.abort(name))
        await ended(asked.values(), self.deadlines.grace)
        aborted = [name for name, s in asked.items() if s.reason is FinishReason.ABORT]
        return AbortReport(tuple(aborted), tuple(n for n in ids if n not in asked))

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        for cache in self.capabilities.caches if which is None else which:
            if cache not in self.capabilities.caches:
                raise Unsupported(f"resetting cache {cache!r}", self.capabilities.backend)
            answer = await self._ask(self.dialect.forget(cache))
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineFailed(f"the {cache} cache was not reset: {answer}", where=self.url)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Waits as long as the server may hold a request, and no longer.

        :raises Unseen: it holds it for longer: how long is its own setting.
        """
        if request.version is not None or request.adapter is not None:
            raise not_part("a request for one version or adapter")
        call, reader = self.dialect.generate(request), self.dialect.reader(request)
        stream = self._streams[request.request_id] = Came()
        try:
            async with aclosing(self._server.lines(call, lambda: self._kv_away)) as lines:
                async for line in lines:
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for chunk in reader.read(msgspec.json.decode(line[6:])):
                            stream.add(chunk)
                            yield chunk
            for chunk in reader.end():
                stream.add(chunk)
                yield chunk
            if stream.reason is None:
                raise EngineFailed("a stream ended without a finish reason", where=self.url)
        finally:
            stream.over.set()
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> ReplicaStatus:
        """What it says of itself; of weight groups and the KV cache it says nothing."""
        seen = await self.dialect.seen(self._ask)
        parts = seen.label.split(".")
        known = len(parts) == 2 and all(part.isdecimal() for part in parts)
        versions = {TARGET: Version(int(parts[0]), int(parts[1]))} if known else {}
        shut = bool(seen.paused or seen.sleeping)
        waiting = tuple(n for n, s in self._streams.items() if not s.tokens)
        running = tuple(n for n, s in self._streams.items() if s.tokens)
        there = tuple(f"request {n}" for n in range(seen.running or 0))
        backend = BackendStatus(bool(seen.paused), there, versions=versions, steps=seen.steps)
        return ReplicaStatus(
            name=self.url,
            health=Health.OK,
            groups=dict.fromkeys(self.capabilities.groups, "unseen"),
            versions=versions,
            kv=cast(KV, "unseen"),
            pauses=(),
            held=waiting if shut else (),
            running=running,
            is_paused=shut,
            is_sleeping=bool(seen.sleeping),
            servable=not shut,
            backend=backend,
        )

    # -- inside -------------------------------------------------------------------------------

    def _keeps(self, level: int) -> bool:
        kept = Retention.BACKUP if level == 1 else Retention.DISCARD
        return level != 0 and kept in self.capabilities.retentions

    def _away(self, level: int, tags: Collection[str]) -> None:
        self._kv_away = self._kv_away or (level != 0 and Tag.KV_CACHE in tags)
        if level == 2 and Tag.WEIGHTS in tags:
            self._sent = None


def _known(tags: Collection[str]) -> bool:
    return all(tag in list(Tag) for tag in tags)


def _no_deadline(deadline: float | None) -> None:
    if deadline is not None:
        raise not_part("a deadline of the caller's")

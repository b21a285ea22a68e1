"""A replica's verbs over HTTP: what a manager drives. The truth is the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

import msgspec

from hotbunk.rollout.backends.hotbunk_http.client import Client
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.calls import abandoned
from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    BackendStatus,
    Cache,
    Capabilities,
    Digests,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Ticket,
    TokenChunk,
    UpdateReport,
    Version,
    parse_tags,
)
from hotbunk.rollout.errors import HotbunkError, ReplicaLost, SessionError, UsageError
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.lifecycle import KV
from hotbunk.rollout.status import Health, ReplicaStatus

LEVELS = (0, 1, 2)


class _Info(msgspec.Struct):
    """Of /server_info."""

    name: str
    boot: str
    model: str
    context: int
    capabilities: Capabilities


class HttpHandle:
    """One server of ``hotbunk serve``; see :class:`HttpOptions`. Made by :meth:`connect`.

    Verbs that change nothing when repeated are, should they not get through; updates and requests
    never. When the server is gone, hangs or was started again, verbs end in ``ReplicaLost``, streams
    with an abort that may be sent again, and ``status`` says LOST.
    """

    def __init__(self, options: HttpOptions, name: str = "") -> None:
        self.options = options
        self.capabilities = Capabilities("hotbunk_http")
        self.name = name or options.url
        self._client = Client(options, options.generate_url)
        self._deadlines = options.deadlines
        self._generation: int | None = None
        self._ending: asyncio.Future[None] | None = None  # of an update that was given up

    @staticmethod
    async def connect(options: HttpOptions, name: str = "") -> HttpHandle:
        """Ask the server what it is, and take its word. On nodes other than 0 nobody is asked.

        :raises ReplicaLost: nobody is there.
        :raises ConfigError: it wants another key. :raises Unsupported: it has no control plane.
        """
        handle = HttpHandle(options, name)
        if options.node_rank == 0:
            try:
                info = await handle._client.get("/server_info", _Info)
            except BaseException:
                await handle.close()
                raise
            handle.capabilities = info.capabilities
        return handle

    @property
    def sends(self) -> bool:
        """Whether this node is the one that speaks to the server."""
        return self.options.node_rank == 0

    # -- memory -------------------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        content = {"tags": _tags(tags)}
        return await self._memory("/resume_memory_occupation", content)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        keep_kv: bool = False,
    ) -> MemoryReport:
        content = {"tags": _tags(tags), "retention": Retention(retention), "keep_kv": keep_kv}
        return await self._memory("/release_memory_occupation", content)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self._memory("/release_kv_cache_memory", {"keep_kv": keep_kv})

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._memory("/resume_kv_cache_memory", None)

    async def sleep(
        self,
        level: int = 2,
        *,
        mode: PauseMode = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
    ) -> MemoryReport:
        if isinstance(level, bool) or level not in LEVELS:
            raise UsageError(f"sleep level {level!r} is not 0, 1 or 2")
        content = {
            "level": level,
            "mode": PauseMode(mode),
            "clear_cache": clear_cache,
            "keep_kv": keep_kv,
        }
        return await self._memory("/sleep", content)

    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._memory("/wake_up", {"tags": _tags(tags)})

    async def _memory(self, path: str, content: Any) -> MemoryReport:
        if not self.sends:
            return MemoryReport()
        seconds = self._deadlines.drain + self._deadlines.memory
        body = await self._client.call(path, seconds, content=content)
        return self._client.report(path, body, MemoryReport)

    # -- weights ------------------------------------------------------------------------------

    async def update_weights(
        self,
        source: Ticket,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport:
        """Have the server take the update that the ticket names; no byte of it comes this way.

        :raises SessionError: another client of this server has taken over.
        """
        if not self.sends:
            return UpdateReport(version, skipped=True)
        limit = self._deadlines.update if deadline is None else deadline
        generation = await self._started()
        content = {
            "ticket": source,
            "version": version,
            "scope": scope,
            "generation": generation,
            "deadline": limit,
        }
        mine = {"generation": generation}
        done = False
        try:
            # The replica keeps the deadline; ours is for a server that does not answer.
            seconds = limit + self._deadlines.grace
            path = "/update_weights"
            body = await self._client.call(path, seconds, content=content, repeat=False)
            report = self._client.report(path, body, UpdateReport)
            await self._client.call(
                "/finish_weight_update", self._deadlines.inspect, content=mine, repeat=False
            )
            done = True
        finally:
            if not done and not self._client.lost:
                self._ending = asyncio.ensure_future(self._aborted(mine))
                await asyncio.shield(self._ending)
        return report

    async def _started(self) -> int:
        """A session of ours: the generation it is in."""
        seconds = self._deadlines.inspect
        if self._generation is None:
            path = "/init_weight_transfer_engine"
            body = await self._client.call(path, seconds, repeat=False)
            self._generation = int(msgspec.json.decode(body)["generation"])
        mine = {"generation": self._generation}
        await self._client.call("/start_weight_update", seconds, content=mine, repeat=False)
        return self._generation

    async def _aborted(self, mine: dict[str, int]) -> None:
        seconds = self._deadlines.inspect + self._deadlines.grace
        try:
            await self._client.call("/abort_weight_update", seconds, content=mine, repeat=False)
        except (SessionError, ReplicaLost):
            pass  # over already, one way or the other
        except HotbunkError:
            self._generation = None  # the next update begins anew

    # -- generation ---------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        reject: bool = False,
        owner: str = CALLER,
        deadline: float | None = None,
        min_start_version: Version | None = None,
    ) -> PauseReport:
        mode = PauseMode(mode)
        if not self.sends:
            return PauseReport(mode)
        query: dict[str, Any] = {
            "mode": mode.value,
            "clear_cache": clear_cache,
            "reject": reject,
            "owner": owner,
        }
        if deadline is not None:
            query["deadline"] = deadline
        if min_start_version is not None:
            query["min_start_version"] = str(min_start_version)
        seconds = self._deadlines.drain if deadline is None else deadline
        body = await self._client.call("/pause", seconds + self._deadlines.grace, query=query)
        return self._client.report("/pause", body, PauseReport)

    async def resume_generation(self, *, owner: str = CALLER) -> None:
        if self.sends:
            await self._client.call("/resume", self._deadlines.drain, query={"owner": owner})

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        if not self.sends:
            return AbortReport()
        content = {"request_ids": None if request_ids is None else [*request_ids]}
        path = "/abort_requests"
        body = await self._client.call(path, self._deadlines.drain, content=content)
        return msgspec.json.decode(body, type=AbortReport)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        if self.sends:
            query = {} if which is None else {"which": [Cache(one).value for one in which]}
            seconds = self._deadlines.drain + self._deadlines.memory
            await self._client.call("/reset_caches", seconds, query=query)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._client.generate(request)

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> ReplicaStatus:
        """What the server's replica knows; of one that is gone or hangs, that it is LOST."""
        try:
            if self.sends:
                said = await self._client.get("/status", ReplicaStatus)
                return msgspec.structs.replace(said, name=self.name)
        except ReplicaLost:
            pass
        return ReplicaStatus(
            name=self.name,
            health=Health.LOST if self._client.lost else Health.OK,
            groups={},
            versions={},
            kv=KV.RELEASED,
            pauses=(),
            held=(),
            running=(),
            is_paused=False,
            is_sleeping=False,
            servable=False,
            backend=BackendStatus(busy=True),
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        content = {"names": None if names is None else [*names]}
        path = "/weight_checker"
        body = await self._client.call(path, self._deadlines.memory, content=content)
        return msgspec.json.decode(body, type=Digests)

    async def memory(self) -> MemoryReport:
        if not self.sends:
            return MemoryReport()
        return await self._client.get("/memory", MemoryReport)

    async def close(self) -> None:
        """Let go of the connections. The server is its owner's."""
        if self._ending is not None:
            await abandoned(self._ending)
        await self._client.close()


def _tags(tags: Collection[str] | None) -> list[str] | None:
    """:raises UnknownTag: said here, where the traceback helps."""
    return None if tags is None else [tag.value for tag in parse_tags(tags)]

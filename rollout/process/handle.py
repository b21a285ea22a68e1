"""A replica in a process of its own, and the handle to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, cast

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
)
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.lifecycle import KV
from hotbunk.rollout.process import verbs
from hotbunk.rollout.process.remote import Remote
from hotbunk.rollout.process.spec import ReplicaSpec
from hotbunk.rollout.status import Deadlines, Health, ReplicaStatus


async def start_replica(
    backend: str = "reference",
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "replica0",
    deadlines: Deadlines | None = None,
    fed_groups: Collection[str] | None = None,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    setup: str = "",
) -> ProcessHandle:
    """Start a replica in a process of its own; see :class:`ReplicaSpec` for what is asked.

    :raises ConfigError, BackendNotFound, MissingExtra: as building the backend here would.
    :raises DeadlineExceeded: it did not start within ``deadlines.start``.
    :raises EngineFailed: it ended instead; the error says what its stderr said last.
    """
    return await start(
        ReplicaSpec(
            backend,
            dict(options or {}),
            name,
            deadlines or Deadlines(),
            None if fed_groups is None else tuple(fed_groups),
            data_parallel,
            tensor_parallel,
            pipeline_parallel,
            python,
            dict(env or {}),
            setup,
        )
    )


async def start(spec: ReplicaSpec) -> ProcessHandle:
    """Start what ``spec`` says: for the first time, or in place of one that was lost."""
    remote = Remote(spec, verbs.REPLICA_VERBS)
    await remote.start()
    return ProcessHandle(remote)


class ProcessHandle:
    """A replica's verbs, across a process. Errors are the replica's own.

    When the process dies or hangs, everything that waits for it ends in ``ReplicaLost`` (streams:
    with an abort that may be sent again), ``status`` says LOST, and ``start(handle.spec)`` makes
    its successor. Cancelling a call cancels it there.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    @property
    def spec(self) -> ReplicaSpec:
        """What it was started from."""
        return self._remote.spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """The replica's process."""
        return self._remote.pid

    @property
    def capabilities(self) -> Capabilities:
        return self._remote.capabilities

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._memory("resume", verbs.Tags(_listed(tags)))

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        keep_kv: bool = False,
    ) -> MemoryReport:
        args = verbs.Release(_listed(tags), Retention(retention), keep_kv)
        return await self._memory("release", args)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self._memory("release_kv_cache", verbs.ReleaseKV(keep_kv))

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._memory("resume_kv_cache", verbs.Nothing())

    async def update_weights(
        self,
        source: Ticket,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport:
        args = verbs.Update(source, version, scope, deadline)
        return cast(UpdateReport, await self._remote.call("update_weights", args))

    async def sleep(
        self,
        level: int = 2,
        *,
        mode: PauseMode = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
    ) -> MemoryReport:
        return await self._memory(
            "sleep", verbs.Sleep(level, PauseMode(mode), clear_cache, keep_kv)
        )

    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._memory("wake_up", verbs.Tags(_listed(tags)))

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
        args = verbs.Pause(PauseMode(mode), clear_cache, reject, owner, deadline, min_start_version)
        return cast(PauseReport, await self._remote.call("pause_generation", args))

    async def resume_generation(self, *, owner: str = CALLER) -> None:
        await self._remote.call("resume_generation", verbs.Owner(owner))

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        args = verbs.RequestIds(_listed(request_ids))
        return cast(AbortReport, await self._remote.call("abort", args))

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        """Forget caches, as :meth:`Replica.reset_caches`."""
        await self._remote.call("reset_caches", verbs.Caches(None if which is None else [*which]))

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._remote.generate(request)

    async def status(self) -> ReplicaStatus:
        """What the replica knows; of a process that is gone or hangs, that it is LOST."""
        try:
            return cast(ReplicaStatus, await self._remote.call("status"))
        except ReplicaLost:
            return ReplicaStatus(
                name=self.name,
                health=Health.LOST,
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
        return cast(Digests, await self._remote.call("digest", verbs.Names(_listed(names))))

    async def memory(self) -> MemoryReport:
        return await self._memory("memory", verbs.Nothing())

    async def close(self) -> None:
        """End the replica and its process: SIGTERM, then (``deadlines.grace``) SIGKILL."""
        await self._remote.close()

    async def _memory(self, verb: str, args: Any) -> MemoryReport:
        return cast(MemoryReport, await self._remote.call(verb, args))


def _listed(values: Collection[str] | None) -> Any:
    """A list; a bare string stays one, for the replica to refuse."""
    return values if values is None or isinstance(values, str) else [*values]

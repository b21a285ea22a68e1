"""The same verbs for scripts without an event loop: each call blocks until it is done.

One thread runs the loop that replicas and managers live on, so requests stream and pauses are held
while the script computes. Calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    Completion,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Scope,
    TokenChunk,
    Version,
    collect_all,
)
from hotbunk.rollout.errors import DeadlineExceeded, SessionError
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import ReplicaStatus

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own.

    :param deadline: seconds any call may take; it is cancelled then.
    """

    def __init__(self, deadline: float = 3600.0) -> None:
        self.deadline = deadline
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hotbunk", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call()`` returns, awaited on the loop.

        :raises DeadlineExceeded: not in time; it was cancelled.
        :raises SessionError: the thread was closed, or this is the thread itself.
        """
        if threading.current_thread() is self._thread:
            raise SessionError("a blocking call on the event loop it would block")
        if self._loop.is_closed():
            raise SessionError("the loop was closed")

        async def awaited() -> T:
            return await call()

        future: Future[T] = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result(self.deadline)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the call's own
            future.cancel()
            raise DeadlineExceeded("a blocking call", self.deadline) from None
        except BaseException:  # Ctrl-C included: nothing goes on behind the caller's back
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Idempotent."""
        if self._loop.is_closed():
            return

        async def last() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=10)
            await self._loop.shutdown_asyncgens()

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(last(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()


class BlockingManager:
    """A :class:`CheckpointEngineManager` for scripts. Verbs and errors are those of the manager.

    :param make: builds manager and replicas, on the loop; it is awaited.
    :param deadline: seconds any call may take.
    """

    def __init__(
        self, make: Callable[[], Awaitable[CheckpointEngineManager]], *, deadline: float = 3600.0
    ) -> None:
        self._thread = LoopThread(deadline)
        try:
            self.manager = self._thread.run(make)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every replica, and end the thread. Idempotent."""
        try:
            if not self._thread._loop.is_closed():
                self._thread.run(self.manager.close)
        finally:
            self._thread.close()

    def sleep_replicas(self) -> dict[str, MemoryReport]:
        return self._thread.run(self.manager.sleep_replicas)

    def wake_replicas(self) -> dict[str, MemoryReport]:
        return self._thread.run(self.manager.wake_replicas)

    def pause_replicas(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True, owner: str = CALLER
    ) -> dict[str, PauseReport]:
        return self._thread.run(
            lambda: self.manager.pause_replicas(mode, clear_cache=clear_cache, owner=owner)
        )

    def resume_generation_replicas(self, *, owner: str = CALLER) -> None:
        self._thread.run(lambda: self.manager.resume_generation_replicas(owner=owner))

    def abort_replicas(self, request_ids: Collection[str] | None = None) -> dict[str, AbortReport]:
        ids = None if request_ids is None else list(request_ids)
        return self._thread.run(lambda: self.manager.abort_replicas(ids))

    def release_kv_replicas(self, *, keep_kv: bool = False) -> dict[str, MemoryReport]:
        return self._thread.run(lambda: self.manager.release_kv_replicas(keep_kv=keep_kv))

    def resume_kv_replicas(self) -> dict[str, MemoryReport]:
        return self._thread.run(self.manager.resume_kv_replicas)

    def statuses(self) -> list[ReplicaStatus]:
        return self._thread.run(self.manager.statuses)

    def add_replica(self, handle: ReplicaHandle) -> None:
        self._thread.run(lambda: self.manager.add_replica(handle))

    def remove_replica(self, name: str, *, drain: float = 0.0) -> ReplicaHandle:
        return self._thread.run(lambda: self.manager.remove_replica(name, drain=drain))

    def adopt(self) -> Version | None:
        return self._thread.run(self.manager.adopt)

    def catch_up(self, replicas: Collection[str] | None = None) -> SyncReport:
        return self._thread.run(lambda: self.manager.catch_up(replicas))

    def update_weights(
        self,
        source: WeightSource,
        version: Version,
        *,
        scope: Scope = FULL,
        policy: SyncPolicy | None = None,
        let_go: Callable[[], None] | None = None,
        replicas: Collection[str] | None = None,
    ) -> SyncReport:
        """As the manager's; ``let_go`` is a plain function, and runs in a thread beside the loop."""

        async def letting_go() -> None:
            assert let_go is not None
            await asyncio.to_thread(let_go)

        return self._thread.run(
            lambda: self.manager.update_weights(
                source,
                version,
                scope=scope,
                policy=policy,
                let_go=None if let_go is None else letting_go,
                replicas=replicas,
            )
        )

    def generate(self, requests: Iterable[GenerateRequest]) -> list[list[Completion]]:
        """Each request's responses, all requests at once, spread over the routable replicas.

        :raises SessionError: no replica serves the current version.
        """
        asked = list(requests)

        async def all_of_them() -> list[list[Completion]]:
            serving = self.manager.routable()
            if not serving:
                raise SessionError("no replica serves", remedy="call update_weights or adopt first")
            return await asyncio.gather(
                *(
                    collect_all(serving[n % len(serving)].generate(request))
                    for n, request in enumerate(asked)
                )
            )

        return self._thread.run(all_of_them)

    def stream(self, handle: ReplicaHandle, request: GenerateRequest) -> Iterator[TokenChunk]:
        """One request's chunks as they come. Closing the iterator ends the request."""
        chunks: AsyncIterator[TokenChunk] = handle.generate(request)
        closing: Any = chunks
        try:
            while True:
                chunk = self._thread.run(lambda: anext(chunks, None))
                if chunk is None:
                    return
                yield chunk
        finally:
            self._thread.run(closing.aclose)

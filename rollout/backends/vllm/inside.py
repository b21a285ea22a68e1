"""One vLLM worker as a rank: its verbs, served from a thread of its own over a Unix socket.

So what concerns memory and weights reaches every worker of every engine core, each worker answers
for itself with typed errors, and an update under way can be stopped although it runs inside. The
engine core stands still meanwhile: the adapter has paused it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.adapters import alpha_of
from hotbunk.rollout.backends.vllm.bank import AdapterBank
from hotbunk.rollout.backends.vllm.landing import Landing
from hotbunk.rollout.backends.vllm.parked import Counted, Own, Parked
from hotbunk.rollout.backends.vllm.transfer_engine import HotbunkWeightTransferEngine
from hotbunk.rollout.backends.vllm.weights import landed
from hotbunk.rollout.contract import (
    FULL,
    NATIVE,
    AbortReport,
    BackendStatus,
    Cache,
    Capabilities,
    Digests,
    Engine,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    ReceiverLayout,
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
from hotbunk.rollout.process.connection import Connection
from hotbunk.rollout.process.messages import Ping, Pong, Ready, ToChild
from hotbunk.rollout.process.rank import Asking, RankTarget
from hotbunk.rollout.process.service import Service
from hotbunk.rollout.process.verbs import RANK_VERBS
from hotbunk.rollout.uncut import in_thread

log = logging.getLogger(__name__)


def rank_of(worker: Any) -> int:
    """Its number among all workers of all engine cores."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(worker.rank)


class WorkerEngine(Engine):
    """Memory and weights of one worker. Requests and pauses are the engine core's."""

    capabilities = Capabilities(backend="vllm", sharded=NATIVE)

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        engine = worker.weight_transfer_engine
        assert isinstance(engine, HotbunkWeightTransferEngine)
        pool = getattr(worker, "hotbunk_pool", None)
        if pool is not None:
            self._memory: Parked = pool
        elif worker.vllm_config.model_config.enable_sleep_mode:
            self._memory = Own(worker)
        else:
            self._memory = Counted(worker, "vLLM was started without sleep")
        if pool is not None and pool.binding is not None:
            engine.arena = pool.binding.arena
        self.weights = engine.weights()
        self.adapters: AdapterBank | None = None
        if worker.vllm_config.lora_config is not None:
            memory = None if pool is None else pool.pool
            self.adapters = AdapterBank(worker, self.weights.routes, memory)

    def found(self) -> dict[str, Any]:
        """What this rank holds and may hold, as plain data."""
        bank = self.adapters
        able = None if bank is None else msgspec.to_builtins(bank.adaptable)
        return {**self.weights.found(), "adaptable": able}

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        wanted = parse_tags(tags)
        return await in_thread(lambda: self._memory.resume(wanted))

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        wanted = parse_tags(tags)
        return await in_thread(lambda: self._release(wanted, retention, overrides or {}))

    def _release(
        self, tags: Collection[Tag], retention: Retention, overrides: Mapping[str, Retention]
    ) -> MemoryReport:
        if self.adapters is not None and Tag.WEIGHTS in tags:
            self.adapters.forget()
        return self._memory.release(tags, retention, overrides)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv)

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        if scope.kind is ScopeKind.ADAPTER and self.adapters is not None:
            return await self._receive_adapter(self.adapters, transfer, version, scope.name)
        return await self.weights.receive(transfer, version, scope, self._session)

    async def _receive_adapter(
        self, bank: AdapterBank, transfer: Transfer, version: Version, name: str
    ) -> UpdateReport:
        """The base stays as it is, and vLLM has no session for what is beside it."""
        manifest = transfer.manifest
        layout = bank.adaptable.placements(manifest)
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        alpha = alpha_of(manifest)
        return await landed(
            transfer,
            version,
            ReceiverLayout(layout),
            lambda: Landing(manifest, bank.routes(name, shapes, alpha)),
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        beside = None if self.adapters is None else self.adapters.tensors()
        return await in_thread(lambda: self.weights.digest(names, beside))

    async def memory(self) -> MemoryReport:
        return await in_thread(self._memory.memory)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """vLLM's own update session, ended whatever happens: a broken one would stay open."""
        worker = self._worker
        worker.start_weight_update()
        try:
            yield
            worker.weight_transfer_engine.received = True
            worker.finish_weight_update()
        except BaseException:
            worker.weight_transfer_engine.abort()
            worker._weight_update_active = False
            raise

    # -- what a worker has no part in ---------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        _not_here("generate")

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        _not_here("pause_generation")

    async def resume_generation(self) -> None:
        _not_here("resume_generation")

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        _not_here("abort")

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        _not_here("reset_caches")

    async def status(self) -> BackendStatus:
        _not_here("status")


def _not_here(verb: str) -> NoReturn:
    raise errors.Unsupported(verb, "vllm worker", "ask the engine")


def serve(engine: WorkerEngine, path: str, *, sharded: bool) -> None:
    """Connect to the adapter, and answer it until it goes, in a thread.

    :raises OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    threading.Thread(
        target=lambda: asyncio.run(_Served(engine, sharded).run(sock)),
        name="hotbunk rank",
        daemon=True,
    ).start()


class _Served:
    """One connection."""

    def __init__(self, engine: WorkerEngine, sharded: bool) -> None:
        self._engine = engine
        self._connection = Connection(self._receive, self._closed, ToChild)
        self._over = asyncio.Event()
        asking = Asking(self._connection.send)
        target = RankTarget(engine, asking.barrier, sharded=sharded)
        self._service = Service(target, RANK_VERBS, self._connection, asking.told)

    async def run(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._connection, sock=sock)
        self._connection.send(Ready(self._engine.capabilities))
        await self._over.wait()
        await self._service.close(0.0)  # an update without its adapter is nobody's

    def _receive(self, message: object) -> None:
        if isinstance(message, Ping):
            self._connection.send(Pong())
        else:
            self._service.receive(message)

    def _closed(self, reason: str) -> None:
        log.info("the adapter %s", reason)
        self._over.set()

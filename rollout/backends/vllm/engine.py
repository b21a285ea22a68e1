"""The vLLM engine: the contract's verbs over ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import msgspec
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.adapters import PATH, group_of
from hotbunk.rollout.backends.vllm.compat import CORE_PAUSE, installed
from hotbunk.rollout.backends.vllm.declared import declared
from hotbunk.rollout.backends.vllm.face import Face
from hotbunk.rollout.backends.vllm.links import Links
from hotbunk.rollout.backends.vllm.options import VllmOptions
from hotbunk.rollout.backends.vllm.pauses import Flight
from hotbunk.rollout.backends.vllm.requests import check_length
from hotbunk.rollout.backends.vllm.stats import Stats
from hotbunk.rollout.backends.vllm.streams import Stream, sampling_params
from hotbunk.rollout.backends.vllm.update import Receiver, merged
from hotbunk.rollout.calls import whole
from hotbunk.rollout.contract import (
    FULL,
    TARGET,
    BackendStatus,
    Digests,
    GenerateRequest,
    MemoryReport,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    Ticket,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
)
from hotbunk.rollout.process import union
from hotbunk.rollout.process.ranked import RankedEngine
from hotbunk.rollout.process.ranked_update import RankedTransfer
from hotbunk.rollout.watch import WatchedTransfer

WORKER = "hotbunk.rollout.backends.vllm.worker.WorkerExtension"


class VllmEngine(Face[Stream]):
    """See :mod:`hotbunk.rollout.backends.vllm`.

    The weights lie in the engine core's process. A new request's KV is keyed by the version label,
    so no request ever shares KV with one of another version.
    """

    worker_extension = WORKER

    def __init__(self, options: VllmOptions) -> None:
        super().__init__()
        known = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
        self._args = options.to_engine_args(known)
        self.options = options
        self.capabilities = declared(options)
        self.grid = options.grid
        self._llm: Any = None
        self._stats = Stats(options.grid.data)
        idle = self._pause_idle if CORE_PAUSE in installed() else None
        self._flight: Flight[Stream] = Flight(lambda: self.llm, self._silenced, idle)
        self._silent = ""  # why nothing is asked of its core any more
        self._version: Version | None = None
        self._adapters: dict[str, Version] = {}
        self._numbers: dict[str, int] = {}  # of adapters, for vLLM; never given to another
        self._labels: dict[str, Version] = {}
        self._closed = False
        self._receiver: Receiver
        self._links: Links | None = None
        self._away: set[Tag] = set()

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own engine. :raises ReplicaLost: it is not up."""
        if self._llm is None:
            raise errors.ReplicaLost("vLLM is not running", remedy="restart the engine")
        if self._llm.errored or self._silent:
            why = self._silent or "vLLM's engine core died"
            raise errors.ReplicaLost(why, remedy="restart the engine")
        return self._llm

    async def start(self) -> None:
        """Bring vLLM up (seconds) and prove that its weights can be written where they lie.

        :raises ConfigError: vLLM refuses the options, or transforms the weights after loading.
        """
        self._links = links = Links(self.grid)
        links.ranks.on_lost = self._lost
        try:
            self._llm = await asyncio.to_thread(self._launched, links)
            said = await self.everywhere("hotbunk_bind", str(links.folder))
            await links.ranks.start()
            self._receiver = Receiver(merged(said, self.grid.shards))
            await self.llm.get_supported_tasks()  # asked once, so that no request waits for it
            await self.label(Version(0, 0))
        except BaseException as error:
            await self.close()
            if isinstance(error, ValueError) and not isinstance(error, errors.HotbunkError):
                # pydantic's are, too
                raise errors.ConfigError(f"vLLM refuses its options: {error}") from error
            raise

    def _launched(self, links: Links) -> AsyncLLM:
        """vLLM, its sockets in our folder: in /tmp it would leave them."""
        with links.sockets():
            args = AsyncEngineArgs(**self._args, worker_extension_cls=self.worker_extension)
            return AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: self._stats])

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closed_to("the engine was closed")
        llm, self._llm = self._llm, None
        if self._links is not None:
            self._links.remove()  # first: vLLM may take longer to end than we are given
        try:
            if llm is not None:
                if llm.output_handler is not None:
                    llm.output_handler.cancel()  # else it calls the orderly end a failure
                await asyncio.to_thread(llm.shutdown)
        finally:
            if self._links is not None:
                await self._links.close()

    def _silenced(self, why: str) -> None:
        self._silent = self._silent or why
        self._lost(why)

    def _lost(self, why: str) -> None:
        if not self._closed and self.on_lost is not None:
            self.on_lost(why)

    @property
    def ranks(self) -> RankedEngine:
        """All workers together. :raises ReplicaLost: vLLM is not up."""
        _ = self.llm
        assert self._links is not None
        return self._links.ranks

    async def everywhere(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of every engine core; what each returned, in order.

        vLLM's own ``collective_rpc`` returns those of the first engine core only. It is over when all
        have answered, also when who waits for it is cancelled: until then they may write.

        :raises EngineFailed: some of them failed.
        """
        said = await whole(
            self.llm.engine_core.call_utility_all_async(
                "collective_rpc", "hotbunk_call", None, (method, *args), {}
            )
        )
        answers = [one for core in said for one in core]
        wrong = [f"worker {n}: {why}" for n, (why, _) in enumerate(answers) if why]
        if wrong:
            raise errors.EngineFailed(f"{method} failed in {'; '.join(wrong)}")
        return [found for _, found in answers]

    async def _pause_idle(self, mode: str, clear_cache: bool) -> None:
        """Without the 20 ms that vLLM's own pause adds for outputs that are on their way: none are."""
        if clear_cache:
            await self.llm.reset_mm_cache()
        await self.llm.engine_core.call_utility_all_async("pause_scheduler", mode, clear_cache)

    # -- the five verbs -----------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        """In every worker or in none. vLLM's scheduler is not told: its own wake-up would open it."""
        wanted = parse_tags(tags)
        report = await self.ranks.resume(wanted)
        self._away -= set(wanted)
        return report

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        """In every worker or in none. Frozen requests lose their KV and are computed again."""
        wanted = parse_tags(tags)
        caps = self.capabilities
        ability = caps.keep_kv if keep_kv else caps.release
        if not ability:
            raise errors.Unsupported("keep_kv" if keep_kv else "release", caps.backend, ability.how)
        if Tag.WEIGHTS in wanted and retention not in caps.retentions:
            raise errors.Unsupported(f"retention {retention.value!r}", caps.backend)
        if not wanted:
            return await self.memory()
        flight = self._flight
        self._must_stand_still("release")
        frozen = 0
        if Tag.KV_CACHE in wanted:
            frozen = sum(1 for stream in flight.alive().values() if stream.tokens)
            await self.reset_caches(None)
        stays = {Tag.WEIGHTS} if retention is Retention.RESIDENT else set()
        new = set(wanted) - stays - self._away
        self._away |= new
        try:
            report = await self.ranks.release(wanted, retention=retention, overrides=overrides)
        except (errors.Unsupported, errors.HostOutOfMemory, errors.MemoryFault):
            self._away -= new  # nothing was released
            raise
        if Tag.WEIGHTS in wanted:
            for name in [*self._adapters]:
                if (overrides or {}).get(group_of(name), retention) is Retention.DISCARD:
                    del self._adapters[name]
        return msgspec.structs.replace(report, recomputed_requests=frozen)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv)

    async def open_transfer(self, ticket: Ticket) -> Transfer:
        """Each worker opens its own end: one hop from the trainer."""
        return await self.ranks.open_transfer(ticket)

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        """Received in the workers (a ticket's transfer), or here and handed on (any other)."""
        self._must_stand_still("update_weights")
        if Tag.WEIGHTS in self._away:
            raise errors.WeightsNotResident(TARGET, "released")
        inner = transfer.inner if isinstance(transfer, WatchedTransfer) else transfer
        if not isinstance(inner, RankedTransfer):
            return await self._receiver.receive(self, transfer, version, scope)
        await transfer.accept(None)
        async for _ in transfer.buckets():
            pass
        await transfer.fingerprints()
        await self.forget_old_versions()
        await transfer.commit()
        await self.label(version, scope)
        return union.update(inner.reports, inner.wanted, len(inner.manifest.tensors))

    async def label(self, version: Version, scope: Scope = FULL) -> None:
        """Stamp every later token with this version; an adapter's is told by the status alone."""
        if scope.kind is ScopeKind.ADAPTER:
            self._numbers.setdefault(scope.name, len(self._numbers) + 1)
            self._adapters[scope.name] = version
            return
        self._labels[str(version)] = version
        await self.llm.update_weight_version(str(version))
        self._version = version

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        params = sampling_params(request.sampling)
        adapter, salt = None, str(self._version)
        if request.adapter is not None:
            name = request.adapter
            adapter = LoRARequest(name, self._numbers[name], PATH + name)
            salt = f"{salt}/{name}/{self._adapters[name]}"
        prompt = tokens_input(list(request.prompt), cache_salt=salt)
        try:
            collector = await self.llm.add_request(
                request.request_id, prompt, params, lora_request=adapter
            )
        except EngineDeadError as error:
            raise errors.ReplicaLost(f"vLLM's engine core died: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise errors.UsageError(f"request {request.request_id!r}: {error}") from error
        except GracefulHTTPError as error:  # one of its queues is full
            raise errors.RequestRejected(f"request {request.request_id!r}: {error}") from error
        flight = self._flight
        stream = Stream(request, collector, self.llm.output_processor, self._labels, flight.changed)
        flight.streams[request.request_id] = stream
        try:
            while not stream.read:
                yield await stream.next()
        finally:
            self._left(stream)
            if not stream.ended.is_set():
                stream.stop()
                if self._llm is not None and not self._llm.errored and not self._silent:
                    await self._llm.abort(stream.internal_id, internal=True)
            flight.changed()

    async def resume_generation(self) -> None:
        """:raises WeightsNotLoaded, KVNotResident: a step would touch memory that is not there."""
        if Tag.WEIGHTS in self._away:
            raise errors.WeightsNotLoaded(TARGET, "released")
        if Tag.KV_CACHE in self._away:
            raise errors.KVNotResident()
        await super().resume_generation()

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        _ = self.llm  # says if it is dead
        return self._seen(
            int(self.llm.vllm_config.cache_config.num_gpu_blocks or 0),
            self._stats.kv_usage,
            versions={
                **({TARGET: self._version} if self._version else {}),
                **{group_of(name): version for name, version in self._adapters.items()},
            },
            steps=self._stats.steps,
            preemptions=self._stats.preemptions,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return await self.ranks.digest(names)

    async def memory(self) -> MemoryReport:
        return await self.ranks.memory()

    # -- inside -------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        """Refuse at once what could never run, or would not mean what it says."""
        name = self.capabilities.backend
        if request.request_id in self._flight.streams:
            raise errors.UsageError(f"request id {request.request_id!r} is already in flight")
        if request.adapter is not None and not self.capabilities.adapter:
            raise errors.Unsupported("adapters", name, self.capabilities.adapter.how)
        if request.adapter is not None and request.adapter not in self._adapters:
            raise errors.WeightsNotLoaded(group_of(request.adapter), "unknown")
        if request.media:
            raise errors.Unsupported("media", name, "token ids only, for now")
        if request.sampling.stop and self._args["skip_tokenizer_init"]:
            raise errors.UsageError(
                f"request {request.request_id!r} has stop strings and the engine no tokenizer",
                remedy="use stop_token_ids, or a model directory with its tokenizer",
            )
        config = self.llm.model_config
        vocabulary, limit = config.get_vocab_size(), config.max_model_len
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise errors.UsageError(
                f"request {request.request_id!r} has token ids outside 0..{vocabulary - 1}"
            )
        check_length(request, limit)

"""The vLLM engine: the contract's verbs over ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm import compat
from hotbunk.rollout.backends.vllm.options import VllmOptions
from hotbunk.rollout.backends.vllm.pauses import Flight
from hotbunk.rollout.backends.vllm.streams import Stream, sampling_params
from hotbunk.rollout.backends.vllm.update import Receiver, merged
from hotbunk.rollout.contract import (
    FULL,
    NATIVE,
    TARGET,
    Ability,
    AbortReport,
    ArenaReport,
    BackendStatus,
    Cache,
    Capabilities,
    Digests,
    Engine,
    Gate,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Support,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
    unsupported,
)
from hotbunk.rollout.fingerprint import KIND

WORKER = "hotbunk.rollout.backends.vllm.worker.WorkerExtension"
_NO_SLEEP = unsupported("vLLM's sleep is not mapped yet; stock vLLM frees nothing on CPUs")
_CACHES = frozenset({Cache.PREFIX, Cache.MULTIMODAL, Cache.ENCODER})


class VllmEngine(Engine):
    """See :mod:`hotbunk.rollout.backends.vllm`.

    The weights lie in the engine core's process. A new request's KV is keyed by the version label,
    so no request ever shares KV with one of another version.
    """

    def __init__(self, options: VllmOptions) -> None:
        compat.check()
        known = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
        self._args = options.to_engine_args(known)
        self.options = options
        self.capabilities = Capabilities(
            backend="vllm",
            release=_NO_SLEEP,
            release_kv_cache=_NO_SLEEP,
            retentions=frozenset({Retention.RESIDENT}),
            pause={
                PauseMode.ABORT: NATIVE,
                # vLLM's own wait leaves queued requests queued, also those a keep put there.
                PauseMode.WAIT: Ability(
                    Support.NATIVE, "the adapter lets what is in flight end, then pauses vLLM"
                ),
                PauseMode.KEEP: NATIVE,
            },
            keep_release=_NO_SLEEP,
            gate=Gate.ENGINE_PAUSE,
            layout=NATIVE,
            caches=_CACHES,
            memory_measured_by="accounting",
        )
        self._llm: Any = None
        self._stats = _Stats()
        self._flight: Flight[Stream] = Flight(lambda: self.llm)
        self._version: Version | None = None
        self._labels: dict[str, Version] = {}
        self._tokens = 0  # of requests that were read to their end; the rest count themselves
        self._cached = 0
        self._closed = False
        self._receiver: Receiver

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own engine. :raises ReplicaLost: it is not up."""
        if self._llm is None:
            raise errors.ReplicaLost("vLLM is not running", remedy="restart the engine")
        if self._llm.errored:
            raise errors.ReplicaLost("vLLM's engine core died", remedy="restart the engine")
        return self._llm

    async def start(self) -> None:
        """Bring vLLM up (seconds) and prove that its weights can be written where they lie.

        :raises ConfigError: vLLM refuses the options, or transforms the weights after loading.
        """
        args = AsyncEngineArgs(**self._args, worker_extension_cls=WORKER)
        try:
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, args, stat_loggers=[lambda *_: self._stats]
            )
        except ValueError as error:  # pydantic's are, too
            raise errors.ConfigError(f"vLLM refuses its options: {error}") from error
        try:
            self._receiver = Receiver(merged(await self.llm.collective_rpc("hotbunk_bind")))
            await self.llm.get_supported_tasks()  # asked once, so that no request waits for it
            await self.label(Version(0, 0))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in self._flight.streams.values():
            stream.items.put_nowait(errors.ReplicaLost("the engine was closed"))
            stream.stop()
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it calls the orderly end a failure
            await asyncio.to_thread(llm.shutdown)

    # -- the five verbs -----------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        parse_tags(tags)
        return await self.memory()  # nothing ever left

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
        if parse_tags(tags):
            raise errors.Unsupported("release", self.capabilities.backend, _NO_SLEEP.how)
        return await self.memory()

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE])

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        if not self._flight.standing_still:
            raise errors.RequestsInFlight(list(self._flight.streams), "update_weights", 0.0)
        return await self._receiver.receive(self, transfer, version, scope)

    async def label(self, version: Version) -> None:
        """Stamp every later token with this version."""
        self._labels[str(version)] = version
        await self.llm.update_weight_version(str(version))
        self._version = version

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        params = sampling_params(request.sampling)
        prompt = tokens_input(list(request.prompt), cache_salt=str(self._version))
        try:
            collector = await self.llm.add_request(request.request_id, prompt, params)
        except EngineDeadError as error:
            raise errors.ReplicaLost(f"vLLM's engine core died: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise errors.UsageError(f"request {request.request_id!r}: {error}") from error
        except GracefulHTTPError as error:  # one of its queues is full
            raise errors.RequestRejected(f"request {request.request_id!r}: {error}") from error
        flight = self._flight
        stream = Stream(request, collector, self.llm.output_processor, self._labels, flight.changed)
        flight.streams[request.request_id] = stream
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, errors.HotbunkError):
                    raise item
                finished = stream.ended.is_set() and stream.items.empty()
                yield item
        finally:
            flight.streams.pop(request.request_id, None)
            self._tokens += stream.tokens
            self._cached += stream.cached
            if not stream.ended.is_set():
                stream.stop()
                if self._llm is not None and not self._llm.errored:
                    await self._llm.abort(stream.internal_id, internal=True)
            flight.changed()

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self._flight.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._flight.resume()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self._flight.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        wanted = _CACHES if which is None else frozenset(which)
        if Cache.PREFIX in wanted:
            # Frozen requests are recomputed: else vLLM resets nothing, and only says so.
            done = await self.llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=False
            )
            if not done:
                raise errors.EngineFailed("vLLM did not reset its prefix cache")
        if Cache.MULTIMODAL in wanted:
            await self.llm.reset_mm_cache()
        if Cache.ENCODER in wanted:
            await self.llm.reset_encoder_cache()

    async def forget_old_versions(self) -> None:
        """After new weights: drop what was computed from older ones and nobody holds.

        :raises EngineFailed: vLLM refuses although nothing is in flight.
        """
        done = await self.llm.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
        if not done and not self._flight.alive():
            raise errors.EngineFailed("vLLM did not reset its prefix cache")
        await self.reset_caches([Cache.MULTIMODAL, Cache.ENCODER])

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        _ = self.llm  # says if it is dead
        flight = self._flight
        live = flight.alive()
        begun = tuple(key for key, stream in live.items() if stream.tokens)
        still = flight.mode in (PauseMode.KEEP, PauseMode.ABORT)
        total = int(self.llm.vllm_config.cache_config.num_gpu_blocks or 0)
        return BackendStatus(
            paused=flight.mode is not None,
            running=() if still else begun,
            waiting=tuple(key for key in live if key not in begun),
            frozen=begun if still else (),
            versions={TARGET: self._version} if self._version else {},
            kv_blocks_total=total,
            kv_blocks_used=round(self._stats.kv_usage * total),
            tokens_generated=self._tokens + sum(s.tokens for s in flight.streams.values()),
            steps=self._stats.steps,
            preemptions=self._stats.preemptions,
            cached_tokens=self._cached + sum(s.cached for s in flight.streams.values()),
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return Digests(await self._receiver.digest(self, names), KIND, self._receiver.ranks)

    async def memory(self) -> MemoryReport:
        ranks = await self.llm.collective_rpc("hotbunk_memory")
        sizes = {tag: sum(rank[tag.value] for rank in ranks) for tag in Tag}
        arenas = (
            ArenaReport(Tag.WEIGHTS, TARGET, sizes[Tag.WEIGHTS], sizes[Tag.WEIGHTS]),
            ArenaReport(Tag.KV_CACHE, "", sizes[Tag.KV_CACHE], sizes[Tag.KV_CACHE]),
        )
        return MemoryReport(arenas, measured_by=self.capabilities.memory_measured_by)

    # -- inside -------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        """Refuse at once what could never run, or would not mean what it says."""
        name = self.capabilities.backend
        if request.request_id in self._flight.streams:
            raise errors.UsageError(f"request id {request.request_id!r} is already in flight")
        if request.adapter is not None:
            raise errors.Unsupported("adapters", name, self.capabilities.adapter.how)
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
        tokens = len(request.prompt) + request.sampling.max_tokens
        if tokens > limit:
            raise errors.UsageError(
                f"request {request.request_id!r} may grow to {tokens} tokens and max_model_len "
                f"is {limit}"
            )


class _Stats:
    """A stat logger of vLLM's shape: counts the core's steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.kv_usage = 0.0
        self.preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called once an output of the engine core."""
        self.steps += 1
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is logged."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_sleep_state(self, *_: Any) -> None:
        """Sleep is not mapped."""

"""The contract over a vLLM server: pauses, streams, caches, memory, versions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.face import Face
from hotbunk.rollout.backends.vllm.requests import check_length
from hotbunk.rollout.backends.vllm_http.checkpoint import Checkpoint
from hotbunk.rollout.backends.vllm_http.client import RemoteLLM, VllmClient
from hotbunk.rollout.backends.vllm_http.declared import declared, tempers, way_of
from hotbunk.rollout.backends.vllm_http.flight import RemoteFlight
from hotbunk.rollout.backends.vllm_http.metrics import Gauges
from hotbunk.rollout.backends.vllm_http.options import VllmHttpOptions
from hotbunk.rollout.backends.vllm_http.probe import Surface, probe
from hotbunk.rollout.backends.vllm_http.streams import CompletionsDialect, Stream, TokensDialect
from hotbunk.rollout.backends.vllm_http.weights import Weights
from hotbunk.rollout.contract import (
    FULL,
    TARGET,
    ArenaReport,
    BackendStatus,
    Capabilities,
    Digests,
    GenerateRequest,
    MemoryReport,
    Retention,
    Scope,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
    unsupported,
)

_LABEL = re.compile(r"(\d{1,18})\.(\d{1,18})")
_LEVEL = {Retention.BACKUP: 1, Retention.DISCARD: 2}
_RAW, _PROCESSED = "raw_logprobs", "processed_logprobs"
TEMPERED = "tempered"  # as the contract means them


class VllmHttpEngine(Face[Stream]):
    """See :mod:`hotbunk.rollout.backends.vllm_http`.

    The server has other clients, perhaps: what they start passes no gate of ours, and weights that
    they bring are noticed by their label.
    """

    def __init__(self, options: VllmHttpOptions) -> None:
        super().__init__()
        self.options = options
        self.capabilities = Capabilities(
            "vllm_http", digest=unsupported("nobody has asked the server yet")
        )
        self.surface: Surface
        self._remote: RemoteLLM
        self._client: VllmClient
        self._gauges: Gauges
        self._weights: Weights
        self._dialect: TokensDialect | CompletionsDialect
        self._flight = RemoteFlight(self._alive)
        self._version = Version()
        self._labels: dict[str, Version] = {}
        self._asleep: frozenset[Tag] = frozenset()
        self._logprobs_mode = ""
        self._weights_bytes = 0

    async def start(self) -> None:
        """Connect, and ask what the server can do.

        :raises ConfigError: it lacks routes; the message names each.
        :raises SessionError: it sleeps or is paused, which its driver here could not know.
        """
        deadlines = self.options.deadlines
        self._client = VllmClient(self.options)
        self._remote = RemoteLLM(self._client, deadlines.drain, deadlines.memory, deadlines.update)
        try:
            surface = self.surface = await probe(self._client)
            way, why = way_of(surface, self.options.weights)
            self.capabilities = declared(surface, way)
            self._weights = Weights(self, way, why)
            self._logprobs_mode = surface.config.model_config.logprobs_mode
            self._dialect = TokensDialect() if surface.tells_versions else CompletionsDialect()
            self._gauges = Gauges(self._client)
            await self._gauges.read()
            if await self.llm.is_paused():  # a server that sleeps says so, too
                raise errors.SessionError(
                    "the server is paused or sleeps",
                    where=self._client.url,
                    remedy="POST /wake_up or /resume there, then connect",
                )
            with suppress(errors.ConfigError):  # it may lie on another host
                found = await asyncio.to_thread(Checkpoint, surface.config.model_config.model)
                self._weights_bytes = found.nbytes
            if tempers(surface):
                await self.llm.collective_rpc("hotbunk_temper")
                self._logprobs_mode = TEMPERED
            await self._first_label(await self.llm.get_weight_version())
        except BaseException:
            await self._client.close()
            raise

    async def close(self) -> None:
        """Let go of the connections; what is in flight ends there. The server is its owner's."""
        if not hasattr(self, "_client"):
            return
        self._closed_to("the connection was closed")
        await self._client.close()

    @property
    def llm(self) -> RemoteLLM:
        """The server, as ``AsyncLLM`` would be asked."""
        return self._remote

    # -- the five verbs -----------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        """Memory that wakes last wakes vLLM's scheduler, too; a pause of ours is asked for again."""
        wanted = frozenset(parse_tags(tags)) & self._asleep
        if wanted:
            await self.llm.wake_up([tag.value for tag in sorted(wanted)])
            self._asleep -= wanted
            if not self._asleep and self._flight.mode is not None:
                await self.llm.pause_generation(mode="keep", clear_cache=False)
        return await self.memory()

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        """Through vLLM's sleep, whose levels take both tags.

        :raises Unsupported: the server has no sleep mode, or one tag is released already.
        """
        wanted = frozenset(parse_tags(tags)) - self._asleep
        if not wanted:
            return await self.memory()
        self._need("release" if Tag.WEIGHTS in wanted else "release_kv_cache")
        if wanted == {Tag.KV_CACHE} or (Tag.WEIGHTS in wanted and retention not in _LEVEL):
            return await self.release_kv_cache()
        if self._asleep:
            raise errors.Unsupported(
                f"releasing {errors.shown(wanted)} beside {errors.shown(self._asleep)}",
                self.capabilities.backend,
                "resume first, then release both",
            )
        self._must_stand_still("release")
        await self.llm.sleep(_LEVEL[retention], "keep")
        self._asleep = frozenset(Tag)
        if wanted == {Tag.WEIGHTS}:
            await self.llm.wake_up([Tag.KV_CACHE.value])
            self._asleep = wanted
        return await self.memory()

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        self._need("release_kv_cache")
        if Tag.KV_CACHE not in self._asleep:
            self._must_stand_still("release_kv_cache")
            await self.llm.release_kv_cache_memory()
            self._asleep |= {Tag.KV_CACHE}
        return await self.memory()

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        self._must_stand_still("update_weights")
        await self._gauges.read()  # one that was started again has other weights
        if not await self.llm.is_paused():
            # An update under running steps kills vLLM's engine core.
            raise errors.SessionError(
                "somebody else has resumed the server", where=self._client.url
            )
        return await self._weights.receive(transfer, version, scope)

    async def label(self, version: Version) -> None:
        """Stamp every later token with this version."""
        self._labels[str(version)] = version
        for stream in self._flight.alive().values():
            stream.weights_change()
        await self.llm.update_weight_version(str(version))
        self._version = version

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        key, flight = request.request_id, self._flight
        stream = Stream(request, self._dialect, self._version, self._labels, flight.changed)
        flight.streams[key] = stream  # a pause that comes before the answer must see it
        served = self.options.served_name or self.surface.served[0]
        body = self._dialect.body(request, served, str(self._version))
        try:
            stream.begin(self._client, await self._client.open(self._dialect.path, body))
            while not stream.read:
                yield await stream.next()
        finally:
            self._left(stream)
            if not stream.ended.is_set():
                stream.stop()
            flight.changed()

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        """Of the server as a whole, but only our own requests by name."""
        gauges = await self._gauges.read()
        return self._seen(
            int(self.surface.config.cache_config.num_gpu_blocks or 0),
            gauges.kv_usage,
            versions={TARGET: self._version} if Tag.WEIGHTS not in self._asleep else {},
            steps=gauges.steps,
            preemptions=gauges.preemptions,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        self._need("digest")
        raise AssertionError("declared, but not there")

    async def memory(self) -> MemoryReport:
        """By its configuration and its checkpoint: of bytes that are there a server tells nothing."""
        sizes = {
            Tag.WEIGHTS: self._weights_bytes,
            Tag.KV_CACHE: self.surface.config.cache_config.kv_cache_memory_bytes or 0,
        }
        arenas = tuple(
            ArenaReport(
                tag,
                TARGET if tag is Tag.WEIGHTS else "",
                size,
                0 if tag in self._asleep else size,
            )
            for tag, size in sizes.items()
        )
        return MemoryReport(arenas, measured_by=self.capabilities.memory_measured_by)

    # -- inside -------------------------------------------------------------------------------

    def _alive(self) -> RemoteLLM:
        self._client.check_alive()
        return self._remote

    async def _first_label(self, said: str) -> None:
        """Ours of an earlier connection goes on; anything else is version 0 from now on."""
        if match := _LABEL.fullmatch(said):
            self._version = Version(int(match[1]), int(match[2]))
            self._labels[said] = self._version
        else:
            self._labels[said] = Version()  # of requests that run now
            await self.label(Version())

    def _need(self, verb: str) -> None:
        ability = getattr(self.capabilities, verb)
        if not ability:
            raise errors.Unsupported(verb, self.capabilities.backend, ability.how)

    def _check(self, request: GenerateRequest) -> None:
        """Refuse at once what could not be, or would not mean what it says."""
        name, sampling = self.capabilities.backend, request.sampling
        model = self.surface.config.model_config
        if request.request_id in self._flight.streams:
            raise errors.UsageError(f"request id {request.request_id!r} is already in flight")
        if request.adapter is not None:
            raise errors.Unsupported("adapters", name, self.capabilities.adapter.how)
        if request.media:
            raise errors.Unsupported("media", name, "token ids only, for now")
        if sampling.stop and model.skip_tokenizer_init:
            raise errors.Unsupported("stop_strings", name, self.capabilities.stop_strings.how)
        check_length(request, model.max_model_len)
        _check_logprobs(self._logprobs_mode, request, name)


def _check_logprobs(mode: str, request: GenerateRequest, backend: str) -> None:
    """Log-probs are at the request's temperature, before any truncation of the distribution.

    :raises Unsupported: vLLM would give others under the same name.
    """
    sampling = request.sampling
    tempered = sampling.temperature not in (0.0, 1.0)
    cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if mode == _RAW and tempered:
        raise errors.Unsupported(
            f"temperature={sampling.temperature:g}",
            backend,
            "the server's log-probs are at temperature 1: start it with --logprobs-mode "
            f"{_PROCESSED}, or with hotbunk's worker extension",
        )
    if mode == _PROCESSED and cut and sampling.temperature:
        raise errors.Unsupported(
            "truncated sampling",
            backend,
            f"the server's log-probs are after truncation: start it with --logprobs-mode {_RAW}",
        )
    if mode not in (_RAW, _PROCESSED, TEMPERED):
        raise errors.Unsupported("log-probs", backend, f"the server gives {mode}")

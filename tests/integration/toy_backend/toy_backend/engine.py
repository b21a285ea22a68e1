"""An engine of some hundred lines. Memory stays where it is; whatever else it lacks, it says so."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from hotbunk.rollout.capabilities import Ability
from hotbunk.rollout.contract import (
    FULL,
    NATIVE,
    TARGET,
    AbortReport,
    ArenaReport,
    BackendStatus,
    Bucket,
    Cache,
    Capabilities,
    Digests,
    Engine,
    FinishReason,
    Gate,
    GenerateRequest,
    Manifest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Placement,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    unsupported,
)
from hotbunk.rollout.errors import Unsupported, UsageError, VerifyFailed
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes
from hotbunk.rollout.intake import Intake, check_offer

SHAPES = {"embed": (16, 4), "layer.0": (8, 8), "layer.1": (3, 5), "norm": (8,), "scale": ()}
STEP = 0.005  # seconds a token takes
_NO = unsupported("it holds everything, always")
_CAPABILITIES = Capabilities(
    backend="toy",
    release=_NO,
    release_kv_cache=_NO,
    retentions=frozenset({Retention.RESIDENT}),
    pause={PauseMode.ABORT: NATIVE, PauseMode.WAIT: NATIVE, PauseMode.KEEP: _NO},
    keep_release=_NO,
    gate=Gate.PROXY,
    partial=_NO,
    caches=frozenset(),
    samples=_NO,
    stop_strings=_NO,
    top_logprobs=_NO,
    positional_draws=True,
    memory_measured_by="accounting",
)


def nbytes_of(shape: Sequence[int]) -> int:
    """Of float32."""
    count = 4
    for length in shape:
        count *= length
    return count


def content(name: str, step: int) -> bytes:
    """The trainer's bytes of a tensor."""
    seed = zlib.crc32(f"{name}@{step}".encode())
    return bytes((seed * (n + 1) >> 7) & 0xFF for n in range(nbytes_of(SHAPES[name])))


def next_token(weights: Mapping[str, bytes], context: Sequence[int], seed: int) -> int:
    """The token after ``context``: everything that must matter does."""
    mixed = zlib.crc32(repr((tuple(context), seed)).encode())
    for name in sorted(weights):
        mixed = zlib.crc32(weights[name], mixed)
    return mixed % 50_000


def create() -> Engine:
    """Build (not start) the engine."""
    return ToyEngine()


class ToyEngine(Engine):
    """One task a request; a pause closes the gate at the next token."""

    def __init__(self) -> None:
        self.capabilities = _CAPABILITIES
        self.weights = {name: bytearray(content(name, 0)) for name in SHAPES}
        self.version: Version | None = Version(0, 0)
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._running: dict[str, FinishReason | None] = {}
        self._made = 0

    async def start(self) -> None:
        self._open.set()
        self._idle.set()

    # -- memory: none ever moves --------------------------------------------------------------

    def _lacking(self, verb: str, ability: Ability = _NO) -> Unsupported:
        return Unsupported(verb, "toy", ability.how)

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self.memory()

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.memory()

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        raise self._lacking("release")

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        raise self._lacking("release_kv_cache")

    async def memory(self) -> MemoryReport:
        total = sum(map(len, self.weights.values()))
        return MemoryReport((ArenaReport(Tag.WEIGHTS, TARGET, total, total, 0),))

    # -- weights ------------------------------------------------------------------------------

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        if scope.kind is not ScopeKind.FULL:
            raise self._lacking(scope.kind.value)
        manifest = transfer.manifest
        places = {name: Placement("float32", shape) for name, shape in SHAPES.items()}
        check_offer(manifest, places, [frozenset({name}) for name in SHAPES])
        await transfer.accept(None)
        intake = Intake(manifest, [spec.nbytes for spec in manifest.tensors])
        async for bucket in transfer.buckets():
            self.version = None
            self._write(manifest, intake, bucket)
        applied = intake.finish()
        sent = await transfer.fingerprints()
        wrong = [
            n for n, value in sent.items() if fingerprint_bytes(bytes(self.weights[n])) != value
        ]
        if wrong:
            raise VerifyFailed(wrong)
        await transfer.commit()
        self.version = version
        return UpdateReport(
            version,
            applied=applied,
            nbytes=intake.nbytes,
            buckets=intake.buckets,
            verified="applied" if sent else "none",
        )

    def _write(self, manifest: Manifest, intake: Intake, bucket: Bucket) -> None:
        data = memoryview(bucket.data)
        for entry in intake.check(bucket, len(data)):
            spec = manifest.tensors[entry.index]
            piece = data[entry.offset : entry.offset + entry.nbytes]
            for name in spec.names:
                self.weights[name][entry.start : entry.start + entry.nbytes] = piece

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        sampling = request.sampling
        if sampling.n != 1:
            raise self._lacking("samples")
        if sampling.stop:
            raise self._lacking("stop strings")
        if sampling.logprobs:
            raise self._lacking("top log-probs")
        if request.adapter is not None:
            raise UsageError("no adapter was ever loaded")
        key, context = request.request_id, list(request.prompt)
        seed = (sampling.seed or 0) if sampling.temperature else 0
        self._running[key] = None
        self._idle.clear()
        try:
            for left in range(sampling.max_tokens - 1, -1, -1):
                await asyncio.sleep(STEP)
                if (reason := self._running[key]) is not None:
                    yield TokenChunk(key, version=self.version or Version(), finish_reason=reason)
                    return
                token = next_token({n: bytes(w) for n, w in self.weights.items()}, context, seed)
                context.append(token)
                self._made += 1
                end = FinishReason.LENGTH if left == 0 else None
                end = FinishReason.STOP if token in sampling.stop_token_ids else end
                yield TokenChunk(key, (token,), (-token / 50_000,), self.version or Version(), end)
                if end is not None:
                    return
        finally:
            self._running.pop(key, None)
            if not self._running:
                self._idle.set()

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        if mode is PauseMode.KEEP:
            raise self._lacking("pause mode keep")
        before = tuple(self._running)
        if mode is PauseMode.ABORT:
            await self.abort(None)
        self._open.clear()
        ends = {asyncio.ensure_future(event.wait()) for event in (self._idle, self._open)}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        ended = before if mode is PauseMode.ABORT else ()
        finished = before if mode is PauseMode.WAIT else ()
        return PauseReport(mode, aborted=ended, finished=finished, cleared_cache=clear_cache)

    async def resume_generation(self) -> None:
        self._open.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        wanted = list(self._running) if request_ids is None else list(request_ids)
        found = [key for key in wanted if key in self._running]
        self._running.update(dict.fromkeys(found, FinishReason.ABORT))
        return AbortReport(tuple(found), tuple(key for key in wanted if key not in found))

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        if which:
            raise self._lacking("caches")

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        versions = {} if self.version is None else {TARGET: self.version}
        running = tuple(self._running)
        paused = not self._open.is_set()
        return BackendStatus(paused=paused, running=running, versions=versions, steps=self._made)

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        wanted = self.weights if names is None else names
        return Digests({n: fingerprint_bytes(bytes(self.weights[n])) for n in wanted}, KIND)

"""The reference engine: the contract's verbs over a scheduler, a runner and a thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, TypeVar

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.backends.reference.runner import ModelRunner, Writer
from hotbunk.rollout.backends.reference.scheduler import Admission, Scheduler, Sequence
from hotbunk.rollout.backends.reference.thread import EngineThread
from hotbunk.rollout.contract import (
    FULL,
    NATIVE,
    TARGET,
    AbortReport,
    BackendStatus,
    Bucket,
    Cache,
    Capabilities,
    Digests,
    Engine,
    FinishReason,
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
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import check_offer
from hotbunk.rollout.lifecycle import Residency, Weights

T = TypeVar("T")


class _Stream(msgspec.Struct, eq=False):
    """Where a request's chunks go. An id may be used again, so the sequence says whose they are."""

    sequence: Sequence
    items: asyncio.Queue[TokenChunk | errors.HotbunkError]


class _Pending(msgspec.Struct):
    """A pause that waits for the engine to stand still."""

    mode: PauseMode
    clear_cache: bool
    before: tuple[str, ...]
    aborted: tuple[str, ...]
    future: asyncio.Future[PauseReport]


class ReferenceEngine(Engine):
    """See :mod:`hotbunk.rollout.backends.reference`. Every rule is kept in the engine itself."""

    def __init__(self, options: ReferenceOptions) -> None:
        self.options = options
        self.capabilities = Capabilities(backend="reference", layout=NATIVE, caches=frozenset())
        self._streams: dict[str, _Stream] = {}
        self._pending: list[_Pending] = []
        self._tokens = 0
        self._steps = 0
        self._version: Version | None = None
        self._closed = False
        # The engine keeps its own record of what may be computed: whoever asks it, no token
        # comes from weights without content.
        self._residency: Residency
        self._runner: ModelRunner
        self._scheduler: Scheduler
        self._thread: EngineThread

    async def start(self) -> None:
        options = self.options
        self._runner = await asyncio.to_thread(ModelRunner, options)
        self._scheduler = Scheduler(
            blocks=self._runner.blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        self._version = None if options.load == "empty" else Version(0, 0)
        self._residency = Residency(
            {TARGET: self._version}, fed=[TARGET], retentions=self.capabilities.retentions
        )
        self._thread = EngineThread(self._step, self._may_step, self._died)

    async def close(self) -> None:
        if self._closed or not hasattr(self, "_thread"):
            return
        self._closed = True
        closed = errors.ReplicaLost("the engine was closed")
        self._end_streams(closed)
        stopped = await asyncio.to_thread(self._thread.stop)
        for pending in self._pending:
            _fail(pending.future, closed)
        if stopped:
            self._runner.close()

    # -- the five verbs -----------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        wanted = parse_tags(tags)

        def run() -> MemoryReport:
            report = self._runner.pool.resume(wanted)
            self._residency.resumed(wanted)
            return report

        return await self._thread.call(run)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
    ) -> MemoryReport:
        wanted = parse_tags(tags)

        def run() -> MemoryReport:
            self._must_stand_still("release")
            recomputed = 0
            if Tag.KV_CACHE in wanted:
                recomputed = self._scheduler.drop_all_kv()
            kept = {TARGET: retention, **self._residency.overrides(retention), **(overrides or {})}
            report = self._runner.pool.release(wanted, kept)
            self._residency.released(wanted, kept[TARGET])
            if self._residency.groups[TARGET].version is None:
                self._version = None
            return msgspec.structs.replace(report, recomputed_requests=recomputed)

        return await self._thread.call(run)

    async def release_kv_cache(self) -> MemoryReport:
        return await self.release([Tag.KV_CACHE])

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        manifest = transfer.manifest
        if scope.kind not in (ScopeKind.FULL, ScopeKind.PARTIAL):
            raise errors.Unsupported(f"{scope.kind.value} updates", self.capabilities.backend)
        others = {spec.group for spec in manifest.tensors} - {TARGET}
        if others:
            raise errors.UnsupportedTarget(f"no weight group named {errors.shown(others)}")
        known = self._runner.binding.placements()
        check_offer(manifest, known, self._runner.binding.required())

        def begin() -> Writer:
            self._must_stand_still("update_weights")
            self._residency.check_offer([TARGET], scope, version)
            return Writer(self._runner, manifest)

        writer = await self._thread.call(begin)
        layout = {n: known[n] for spec in manifest.tensors for n in spec.names}
        await transfer.accept(ReceiverLayout(layout))

        def write(bucket: Bucket | None) -> None:
            # From here on the engine itself refuses to compute, whoever asks.
            self._residency.written([TARGET])
            if bucket is not None:
                writer.write(bucket)

        async for bucket in transfer.buckets():
            await _uncut(self._thread.call(partial(write, bucket)))
        await self._thread.call(partial(write, None))  # an update without a byte is one, too
        applied = writer.intake.finish()
        expected = dict(await transfer.fingerprints())
        if expected:
            differing = await self._thread.call(lambda: writer.differing(expected))
            if differing:
                raise errors.VerifyFailed(differing)
        await transfer.commit()

        def label() -> None:
            self._residency.committed([TARGET], version)
            self._version = version

        await self._thread.call(label)
        return UpdateReport(
            version,
            applied=applied,
            nbytes=writer.intake.nbytes,
            buckets=writer.intake.buckets,
            verified="applied" if expected else "none",
        )

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        sequence = Sequence(request)
        stream = self._streams[request.request_id] = _Stream(sequence, asyncio.Queue())
        finished = False

        def admit() -> None:
            # A pause makes callers wait, except for what only a resend will mend.
            if self._scheduler.admission is Admission.OPEN or self._residency.poisoned():
                self._residency.check_generate()
            self._scheduler.add(sequence)

        try:
            # Not awaited: admission is settled in the thread, and answers come by the stream.
            self._tell(admit, stream)
            while not finished:
                item = await stream.items.get()
                if isinstance(item, errors.HotbunkError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            self._streams.pop(request.request_id, None)
            if not finished and not self._closed and self._thread.failure is None:
                self._tell(lambda: self._scheduler.remove(sequence))

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        future: asyncio.Future[PauseReport] = asyncio.get_running_loop().create_future()

        def run() -> None:
            before = tuple(s.id for s in self._scheduler.in_flight())
            ended: tuple[str, ...] = ()
            if mode is PauseMode.ABORT:
                ended = self._abort_now(self._scheduler.in_flight())
            self._scheduler.pause(mode)
            self._pending.append(_Pending(mode, clear_cache, before, ended, future))
            self._settle_pauses()

        try:
            await self._thread.call(run)
            return await future
        finally:
            future.cancel()  # cut off before its answer: nobody will come for it

    async def resume_generation(self) -> None:
        def run() -> None:
            for pending in self._pending:
                error = errors.SessionError("generation was resumed before the pause was complete")
                self._post(_fail, pending.future, error)
            self._pending.clear()
            try:
                self._residency.check_generate()
            except errors.ContractError as missing:
                # Frozen requests stay; those that came meanwhile are told what is missing.
                for sequence in list(self._scheduler.arrived):
                    self._scheduler.remove(sequence)
                    self._post(self._put, sequence, missing)
            self._scheduler.resume()

        await self._thread.call(run)

    async def abort(self, request_ids: SequenceOf[str] | None = None) -> AbortReport:
        wanted = None if request_ids is None else set(request_ids)

        def run() -> tuple[str, ...]:
            ended = self._abort_now(self._scheduler.find(wanted))
            self._settle_pauses()
            return ended

        ended = await self._thread.call(run)
        return AbortReport(ended, tuple(sorted((wanted or set()) - set(ended))))

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        def run() -> None:
            self._must_stand_still("reset_caches")
            self._scheduler.drop_all_kv()

        await self._thread.call(run)

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        self._thread.check_alive()
        scheduler = self._scheduler  # snapshots of lists: reading them never waits for a step
        running, waiting = tuple(scheduler.running), (*scheduler.waiting, *scheduler.arrived)
        frozen = scheduler.admission == "frozen"
        ids = tuple(s.id for s in running)
        return BackendStatus(
            paused=scheduler.admission != "open",
            running=() if frozen else ids,
            waiting=tuple(s.id for s in waiting),
            frozen=ids if frozen else (),
            versions={TARGET: self._version} if self._version else {},
            kv_blocks_total=scheduler.blocks,
            kv_blocks_used=scheduler.blocks - len(scheduler.free),
            tokens_generated=self._tokens,
            steps=self._steps,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        def run() -> dict[str, int]:
            state = self._residency.groups[TARGET]
            if state.state in (Weights.BACKED_UP, Weights.DISCARDED):
                raise errors.WeightsNotResident(TARGET, str(state))
            return self._runner.digest(names)

        return Digests(await self._thread.call(run), KIND)

    async def memory(self) -> MemoryReport:
        return await asyncio.to_thread(self._runner.pool.memory)

    def check_invariants(self) -> None:
        """What must hold while no verb runs. :raises AssertionError: it does not."""
        self._scheduler.check_invariants()
        self._runner.pool.check_invariants()

    # -- in the engine's thread ---------------------------------------------------------------

    def _may_step(self) -> bool:
        return self._scheduler.has_work and self._residency.servable()

    def _step(self) -> None:
        plan = self._scheduler.plan()
        results = self._runner.step(plan)
        self._steps += 1
        version = self._version
        assert version is not None
        out: list[tuple[Sequence, TokenChunk]] = []
        for chunk, drawn in zip(plan.chunks, results, strict=True):
            if drawn is None:
                continue
            s = chunk.sequence
            s.tokens.append(drawn.token)
            self._tokens += 1
            reason = self._finish_reason(s, drawn.token)
            if reason is not None:
                self._scheduler.remove(s)
            made = TokenChunk(s.id, (drawn.token,), (drawn.logprob,), version, reason)
            out.append((s, made))
        self._post(self._deliver, out)
        self._settle_pauses()

    @staticmethod
    def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.request.sampling.stop_token_ids:
            return FinishReason.STOP
        if sequence.produced >= sequence.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _abort_now(self, sequences: Collection[Sequence]) -> tuple[str, ...]:
        version = self._version or Version()
        out = []
        for s in sequences:
            self._scheduler.remove(s)
            out.append((s, TokenChunk(s.id, version=version, finish_reason=FinishReason.ABORT)))
        self._post(self._deliver, out)
        return tuple(s.id for s, _ in out)

    def _settle_pauses(self) -> None:
        """Answer the pauses that wait, if the engine stands still."""
        if not self._pending or not self._scheduler.quiet:
            return
        frozen = self._scheduler.in_flight()
        left = {s.id for s in frozen}
        for pending in self._pending:
            stale = 0
            if pending.clear_cache:
                self._scheduler.drop_all_kv(frozen)
            else:
                stale = sum(s.computed for s in frozen)
            ended = set(pending.before) - left
            report = PauseReport(
                pending.mode,
                aborted=pending.aborted,
                finished=tuple(sorted(ended - set(pending.aborted))),
                frozen=tuple(s.id for s in frozen),
                cleared_cache=pending.clear_cache,
                stale_tokens=stale,
            )
            self._post(_succeed, pending.future, report)
        self._pending.clear()

    def _must_stand_still(self, verb: str) -> None:
        # An engine that is merely idle does not: a step could start at any moment.
        if not self._scheduler.quiet:
            raise errors.RequestsInFlight([s.id for s in self._scheduler.in_flight()], verb, 0.0)

    def _died(self, failure: errors.EngineFailed) -> None:
        for pending in self._pending:
            self._post(_fail, pending.future, failure)
        self._post(self._end_streams, failure)

    def _post(self, *call: Any) -> None:
        self._thread.post(*call)

    # -- in the event loop --------------------------------------------------------------------

    def _tell(self, command: Callable[[], None], stream: _Stream | None = None) -> None:
        """Give the thread a command; nobody waits for it, only a refusal goes to the stream."""

        def answered(future: asyncio.Future[None]) -> None:
            refusal = None if future.cancelled() else future.exception()
            if stream is not None and isinstance(refusal, errors.HotbunkError):
                stream.items.put_nowait(refusal)

        asyncio.ensure_future(self._thread.call(command)).add_done_callback(answered)

    def _deliver(self, chunks: list[tuple[Sequence, TokenChunk]]) -> None:
        for sequence, chunk in chunks:
            self._put(sequence, chunk)

    def _put(self, sequence: Sequence, item: TokenChunk | errors.HotbunkError) -> None:
        stream = self._streams.get(sequence.id)
        if stream is not None and stream.sequence is sequence:
            stream.items.put_nowait(item)

    def _end_streams(self, error: errors.HotbunkError) -> None:
        for stream in self._streams.values():
            stream.items.put_nowait(error)

    def _check(self, request: GenerateRequest) -> None:
        """Refuse at once what could never run."""
        if request.request_id in self._streams:
            raise errors.UsageError(f"request id {request.request_id!r} is already in flight")
        if request.adapter is not None:
            raise errors.Unsupported("adapters", self.capabilities.backend)
        if request.media:
            raise errors.Unsupported("media", self.capabilities.backend, "text models only")
        if not request.prompt or request.sampling.max_tokens < 1:
            raise errors.UsageError(
                f"request {request.request_id!r} needs a prompt and max_tokens of 1 or more"
            )
        vocabulary = int(self._runner.config.vocab_size)
        if not all(0 <= t < vocabulary for t in request.prompt):
            raise errors.UsageError(
                f"request {request.request_id!r} has token ids outside 0..{vocabulary - 1}"
            )
        temperature = request.sampling.temperature
        if temperature < 0 or not math.isfinite(temperature):
            raise errors.UsageError(
                f"request {request.request_id!r} asks for temperature {temperature}, which is not "
                "a number of 0 or more"
            )
        tokens = len(request.prompt) + request.sampling.max_tokens
        if tokens > self._runner.max_context:
            raise errors.UsageError(
                f"request {request.request_id!r} may grow to {tokens} tokens and the model's "
                f"context is {self._runner.max_context}"
            )
        if self._scheduler.blocks_for(tokens) > self._scheduler.blocks:
            raise errors.UsageError(
                f"request {request.request_id!r} may grow to {tokens} tokens and the whole KV "
                f"cache holds {self._scheduler.blocks * self.options.block_size}",
                remedy="raise kv_cache_tokens, or lower max_tokens",
            )


async def _uncut(call: Awaitable[T]) -> T:
    """Await a command to its end, also when cancelled: it works on a bucket that is only lent."""
    future = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # taken note of: whoever waited is gone
        raise


def _succeed(future: asyncio.Future[PauseReport], report: PauseReport) -> None:
    if not future.done():
        future.set_result(report)


def _fail(future: asyncio.Future[PauseReport], error: errors.HotbunkError) -> None:
    if not future.done():
        future.set_exception(error)

"""The generating half of the engine: streams, pauses, and the step that feeds them.

Methods of the first part run in the event loop; those under "in the engine's thread" in that
thread, between or in steps, and reach the loop only through :meth:`EngineThread.post`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.requests import RequestRules
from hotbunk.rollout.backends.reference.runner import ModelRunner
from hotbunk.rollout.backends.reference.scheduler import Admission, Scheduler, Sequence
from hotbunk.rollout.backends.reference.thread import EngineThread
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    TARGET,
    AbortReport,
    Cache,
    Engine,
    FinishReason,
    GenerateRequest,
    PauseMode,
    PauseReport,
    TokenChunk,
    Version,
)
from hotbunk.rollout.lifecycle import Residency

Item = TokenChunk | errors.HotbunkError


class _Stream(msgspec.Struct, eq=False):
    """Where a request's chunks go. An id may be used again, so the sequences say whose they are."""

    sequences: list[Sequence]
    items: asyncio.Queue[Item]


class _Pending(msgspec.Struct):
    """A pause that waits for the engine to stand still."""

    mode: PauseMode
    clear_cache: bool
    before: tuple[str, ...]
    aborted: tuple[str, ...]
    future: asyncio.Future[PauseReport]


class Generating(Engine):
    """Generation, pauses and aborts over a scheduler, a runner and a thread."""

    _runner: ModelRunner
    _scheduler: Scheduler
    _thread: EngineThread
    _rules: RequestRules
    # The engine keeps its own record of what may be computed: whoever asks it, no token comes
    # from weights without content.
    _residency: Residency

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._pending: list[_Pending] = []
        self._tokens = 0
        self._steps = 0
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if request.request_id in self._streams:
            raise errors.UsageError(f"request id {request.request_id!r} is already in flight")
        self._rules.check(request)
        sequences = [Sequence(request, index) for index in range(request.sampling.n)]
        stream = self._streams[request.request_id] = _Stream(sequences, asyncio.Queue())
        left = len(sequences)
        try:
            # Not awaited: admission is settled in the thread, and answers come by the stream.
            self._tell(lambda: self._add(request, sequences), stream)
            while left:
                item = await stream.items.get()
                if isinstance(item, errors.HotbunkError):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            self._streams.pop(request.request_id, None)
            if left and not self._closed and self._thread.failure is None:
                self._tell(lambda: self._remove(sequences))

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        future: asyncio.Future[PauseReport] = asyncio.get_running_loop().create_future()

        def run() -> None:
            before = _ids(self._scheduler.in_flight())
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
        await self._thread.call(self._resume_now)

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
            self._scheduler.pool.forget_all()

        if which is None or Cache.PREFIX in which:
            await self._thread.call(run)

    # -- in the engine's thread ---------------------------------------------------------------

    def _add(self, request: GenerateRequest, sequences: SequenceOf[Sequence]) -> None:
        # A pause makes callers wait, except for what only a resend will mend.
        if self._scheduler.admission is Admission.OPEN or self._residency.poisoned():
            self._residency.check_generate(request.adapter)
            self._check_pin(request)
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _remove(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.remove(sequence)
        self._settle_pauses()

    def _version_now(self) -> Version | None:
        return self._residency.groups[TARGET].version

    def _made_by(self, adapter: str | None) -> str:
        """Names the weights that compute KV now."""
        state = self._residency.groups.get(f"{ADAPTER_PREFIX}{adapter}")
        return f"{self._version_now()}/{adapter or ''}/{state.version if state else ''}"

    def _may_step(self) -> bool:
        return self._scheduler.has_work and self._residency.servable()

    def _step(self) -> None:
        plan = self._scheduler.plan(self._made_by)
        results = self._runner.step(plan)
        self._scheduler.computed(plan, self._made_by)
        self._steps += 1
        version = self._version_now()
        assert version is not None
        out: list[tuple[Sequence, Item]] = []
        for chunk, drawn in zip(plan.chunks, results, strict=True):
            if drawn is None:
                continue
            s = chunk.sequence
            s.tokens.append(drawn.token)
            self._tokens += 1
            reason = self._rules.finished(s, drawn.token)
            if reason is not None:
                self._scheduler.remove(s)
            made = TokenChunk(
                s.id,
                (drawn.token,),
                (drawn.logprob,),
                version,
                reason,
                cached_tokens=max(s.cached, 0) if s.produced == 1 else 0,
                index=s.index,
                top_logprobs=(drawn.top,) if drawn.top else (),
            )
            out.append((s, made))
        self._thread.post(self._deliver, out)
        self._settle_pauses()

    def _abort_now(self, sequences: Collection[Sequence], error: str = "") -> tuple[str, ...]:
        version = self._version_now() or Version()
        out: list[tuple[Sequence, Item]] = []
        for s in sequences:
            self._scheduler.remove(s)
            ended = TokenChunk(
                s.id,
                version=version,
                finish_reason=FinishReason.ABORT,
                error=error,
                retryable=bool(error),
                index=s.index,
            )
            out.append((s, ended))
        self._thread.post(self._deliver, out)
        return _ids(s for s, _ in out)

    def _resume_now(self) -> None:
        for pending in self._pending:
            error = errors.SessionError("generation was resumed before the pause was complete")
            self._thread.post(_fail, pending.future, error)
        self._pending.clear()
        refused: list[tuple[Sequence, Item]] = []
        for sequence in list(self._scheduler.arrived):
            try:  # frozen requests stay; those that came meanwhile are told what is missing
                self._residency.check_generate(sequence.request.adapter)
                self._check_pin(sequence.request)
            except errors.HotbunkError as missing:
                self._scheduler.remove(sequence)
                refused.append((sequence, missing))
        self._thread.post(self._deliver, refused)
        for sequence in self._scheduler.in_flight():
            why = self._cannot_go_on(sequence.request)
            if why:
                self._abort_now([sequence], why)
        self._scheduler.resume()

    def _cannot_go_on(self, request: GenerateRequest) -> str:
        """What ends a frozen request for good. That the base is missing does not: it waits."""
        now = self._version_now()
        if request.version is not None and now is not None and request.version != now:
            return f"pinned to version {request.version}; {now} is resident"
        group = f"{ADAPTER_PREFIX}{request.adapter}"
        if request.adapter is not None and self._residency.groups[group].version is None:
            return f"weight group {group!r} has no content ({self._residency.groups[group]})"
        return ""

    def _check_pin(self, request: GenerateRequest) -> None:
        now = self._version_now()
        if request.version is not None and request.version != now:
            raise errors.RequestRejected(
                f"request {request.request_id!r} is pinned to version {request.version} and {now} "
                "is resident"
            )

    def _settle_pauses(self) -> None:
        """Answer the pauses that wait, if the engine stands still."""
        if not self._pending or not self._scheduler.quiet:
            return
        frozen = self._scheduler.in_flight()
        left = set(_ids(frozen))
        clear = any(pending.clear_cache for pending in self._pending)
        if clear:
            for sequence in frozen:
                self._scheduler.drop_kv(sequence)
            self._scheduler.pool.forget_all()
        for pending in self._pending:
            ended = set(pending.before) - left
            report = PauseReport(
                pending.mode,
                aborted=pending.aborted,
                finished=tuple(sorted(ended - set(pending.aborted))),
                frozen=_ids(frozen),
                cleared_cache=clear,
                stale_tokens=sum(s.computed for s in frozen),
            )
            self._thread.post(_succeed, pending.future, report)
        self._pending.clear()

    def _must_stand_still(self, verb: str) -> None:
        # An engine that is merely idle does not: a step could start at any moment.
        if not self._scheduler.quiet:
            raise errors.RequestsInFlight(_ids(self._scheduler.in_flight()), verb, 0.0)

    def _died(self, failure: errors.EngineFailed) -> None:
        for pending in self._pending:
            self._thread.post(_fail, pending.future, failure)
        self._thread.post(self._end_streams, failure)

    # -- in the event loop --------------------------------------------------------------------

    def _tell(self, command: Callable[[], None], stream: _Stream | None = None) -> None:
        """Give the thread a command; nobody waits for it, only a refusal goes to the stream."""

        def answered(future: asyncio.Future[None]) -> None:
            refusal = None if future.cancelled() else future.exception()
            if stream is not None and isinstance(refusal, errors.HotbunkError):
                stream.items.put_nowait(refusal)

        asyncio.ensure_future(self._thread.call(command)).add_done_callback(answered)

    def _deliver(self, items: list[tuple[Sequence, Item]]) -> None:
        for sequence, item in items:
            stream = self._streams.get(sequence.id)
            if stream is not None and stream.sequences[sequence.index] is sequence:
                stream.items.put_nowait(item)

    def _end_streams(self, error: errors.HotbunkError) -> None:
        for stream in self._streams.values():
            stream.items.put_nowait(error)


def _ids(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Their requests' ids, each once, in order."""
    return tuple(dict.fromkeys(s.id for s in sequences))


def _succeed(future: asyncio.Future[PauseReport], report: PauseReport) -> None:
    if not future.done():
        future.set_result(report)


def _fail(future: asyncio.Future[PauseReport], error: errors.HotbunkError) -> None:
    if not future.done():
        future.set_exception(error)

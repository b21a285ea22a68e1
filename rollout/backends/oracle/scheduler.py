"""The oracle's engine loop: continuous batching, KV stamps, a prefix cache, pauses, aborts."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hotbunk.rollout.backends.oracle.faults import FaultPlan
from hotbunk.rollout.backends.oracle.model import Unmapped
from hotbunk.rollout.backends.oracle.tokens import Stamp, TokenInfo, encode_token, extend
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    PauseReport,
    TokenChunk,
    Version,
)


class Forward(NamedTuple):
    """What one step sees of the weights for one request."""

    version: Version
    weights: int  # token bits of the digests of the groups in use


class Signal:
    """Something changed: everybody who waits looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until the next :meth:`notify`."""
        await self._event.wait()


class Request:
    """One request inside the engine. ``kv`` has one stamp per token whose KV exists."""

    def __init__(self, request: GenerateRequest, *, late: bool) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.kv: list[Stamp] = []
        self.blocks = 0  # reserved while it runs
        self.late = late  # arrived during a pause: not in flight until generation opens
        self.started = False
        self.done = False
        self.context = extend(_seed(request), request.prompt)
        self.media = payload_key(request.media)
        self.chunks: asyncio.Queue[TokenChunk | BaseException] = asyncio.Queue()

    @property
    def id(self) -> str:
        """Its id."""
        return self.request.request_id

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens of its context so far."""
        return (*self.request.prompt, *self.tokens)

    def finish(self, reason: FinishReason, version: Version, error: str = "") -> None:
        """Deliver the last chunk; the tokens delivered before stand."""
        self.done = True
        self.chunks.put_nowait(
            TokenChunk(
                self.id,
                version=version,
                finish_reason=reason,
                error=error,
                retryable=bool(error),
            )
        )


def _seed(request: GenerateRequest) -> int:
    if request.sampling.temperature == 0:
        return 0
    return (request.sampling.seed or 0) & 0xFFFFFFFF


def payload_key(media: Mapping[str, Any]) -> int:
    """What the encoder cache is keyed by: the payload itself (0: none)."""
    if not media:
        return 0
    return zlib.crc32(repr(sorted(media.items())).encode()) or 1


class Scheduler:
    """Who runs. One asyncio task steps ``max_running`` requests at a time, a token a step.

    ``forward`` reads the weights for a request; ``encode`` returns the stamp of its media.
    """

    def __init__(
        self,
        *,
        step_time: float,
        max_running: int,
        kv_blocks: int,
        block_tokens: int,
        faults: FaultPlan,
        forward: Callable[[str | None], Forward],
        encode: Callable[[int], int],
    ) -> None:
        self.kv_blocks = kv_blocks
        self.block_tokens = block_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prefix: dict[tuple[object, ...], Stamp] = {}
        self.kv_mapped = True
        self.steps = 0
        self.tokens_generated = 0
        self.mode: PauseMode | None = None
        self._step_time = step_time
        self._max_running = max_running
        self._faults = faults
        self._forward = forward
        self._encode = encode
        self._changed = Signal()
        self._stepping = False
        self._clear = False
        self._opened = 0

    # -- state --------------------------------------------------------------------------------

    @property
    def standing_still(self) -> bool:
        """No step runs and none can start."""
        drained = self.mode is not PauseMode.WAIT or not self.in_flight()
        return self.mode is not None and drained and not self._stepping

    def in_flight(self) -> list[Request]:
        """Requests that a pause is about: all but those that came during one."""
        return [*self.running, *(r for r in self.waiting if not r.late)]

    def frozen(self) -> list[Request]:
        """Requests that stand still in the middle."""
        still = self.mode is not None and self.mode is not PauseMode.WAIT
        return self.in_flight() if still else []

    @property
    def blocks_used(self) -> int:
        """KV blocks that requests hold."""
        return sum(r.blocks for r in self.running) if self.kv_mapped else 0

    def blocks_needed(self, request: GenerateRequest) -> int:
        """KV blocks that a request reserves: enough to run to its end."""
        tokens = len(request.prompt) + request.sampling.max_tokens
        return -(-tokens // self.block_tokens)

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> Request:
        """Queue a request."""
        entry = Request(request, late=self.mode is not None)
        self.waiting.append(entry)
        self._changed.notify()
        return entry

    def drop(self, entry: Request) -> None:
        """Nobody reads it any more."""
        entry.done = True
        self._forget([entry])

    def abort(self, entries: Iterable[Request], version: Version, error: str = "") -> None:
        """End these now; a token of theirs that is being made is thrown away."""
        entries = list(entries)
        for entry in entries:
            entry.finish(FinishReason.ABORT, version, error)
        self._forget(entries)

    def fail(self, error: BaseException) -> None:
        """The engine is gone: every reader is told."""
        entries = [*self.running, *self.waiting]
        for entry in entries:
            entry.done = True
            entry.chunks.put_nowait(error)
        self._forget(entries)

    def _forget(self, entries: Sequence[Request]) -> None:
        self.running = [r for r in self.running if r not in entries]
        self.waiting = [r for r in self.waiting if r not in entries]
        self._changed.notify()

    # -- pauses -------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool, version: Version) -> PauseReport:
        """As :class:`~hotbunk.rollout.contract.GenerationControl` says."""
        opened, before = self._opened, self.in_flight()
        self._clear = self._clear or clear_cache
        if self.mode is not PauseMode.ABORT:
            self.mode = mode
        aborted: list[Request] = []
        if mode is PauseMode.ABORT:
            aborted = before
            self.abort(aborted, version, "aborted by a pause")
        self._changed.notify()
        while self._opened == opened and not self.standing_still:
            await self._changed.wait()
        frozen = self.frozen() if self._opened == opened else []
        cleared = self._clear and self._opened == opened
        if cleared:
            self.forget_kv(frozen)
        gone = {r.id for r in aborted} | {r.id for r in frozen}
        return PauseReport(
            mode,
            aborted=tuple(r.id for r in aborted),
            finished=tuple(r.id for r in before if r.done and r.id not in gone),
            frozen=tuple(r.id for r in frozen),
            cleared_cache=cleared,
            stale_tokens=0 if cleared else sum(len(r.kv) for r in frozen),
        )

    def open(self) -> None:
        """Frozen requests go on, those that came meanwhile may start, a pending pause is over."""
        self.mode, self._clear = None, False
        self._opened += 1
        for entry in self.waiting:
            entry.late = False
        self._changed.notify()

    # -- KV -----------------------------------------------------------------------------------

    def forget_kv(self, of: Iterable[Request] = ()) -> int:
        """Drop cached KV, and that of these requests; returns how many must be recomputed."""
        self.prefix.clear()
        hit = [r for r in of if r.kv]
        for entry in hit:
            entry.kv.clear()
        return len(hit)

    def _prefill(self, entry: Request, now: Stamp) -> int:
        """Fill the KV of the context, from the prefix cache as far as it reaches."""
        tokens, reused, filled = entry.sequence, 0, len(entry.kv)
        if not entry.kv:
            for end in range(self.block_tokens, len(tokens), self.block_tokens):
                stamp = self.prefix.get(self._key(entry, tokens[:end]))
                if stamp is None:
                    break
                entry.kv.extend([stamp] * self.block_tokens)
                reused = end
                filled = end
        entry.kv.extend([now] * (len(tokens) - len(entry.kv)))
        if min(entry.kv) == now:  # KV over a stale context is stale: nobody else may have it
            whole = filled - filled % self.block_tokens + self.block_tokens
            for end in range(whole, len(tokens) + 1, self.block_tokens):
                self.prefix[self._key(entry, tokens[:end])] = now
        while len(self.prefix) > self.kv_blocks - self.blocks_used:
            del self.prefix[next(iter(self.prefix))]
        return reused

    @staticmethod
    def _key(entry: Request, tokens: tuple[int, ...]) -> tuple[object, ...]:
        return (entry.request.adapter, entry.media, tokens)

    # -- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Step for ever; a paused or idle engine does not even wake up."""
        while True:
            batch = self._schedule()
            if not batch:
                await self._changed.wait()
                continue
            self._stepping = True
            try:
                seen = {r.id: self._forward(r.request.adapter) for r in batch}
                corrupt = await self._faults.reach("step")
                await asyncio.sleep(self._step_time)
                for entry in batch:
                    if not entry.done:
                        self._advance(entry, seen[entry.id], corrupt)
            finally:
                self._stepping = False
                self.steps += 1
                self._changed.notify()

    def _schedule(self) -> list[Request]:
        if self.mode in (PauseMode.ABORT, PauseMode.KEEP):
            return []
        for entry in [r for r in self.waiting if not r.late]:
            needed = self.blocks_needed(entry.request)
            if len(self.running) >= self._max_running:
                break
            if self.blocks_used + needed > self.kv_blocks:
                break
            entry.blocks = needed
            self.waiting.remove(entry)
            self.running.append(entry)
        return list(self.running)

    def _advance(self, entry: Request, seen: Forward, corrupt: bool) -> None:
        """The end of a step: one more token, made by what the weights are *now*."""
        if not self.kv_mapped:
            raise Unmapped(f"request {entry.id!r} read KV while its memory is released")
        now = self._forward(entry.request.adapter)
        torn = corrupt or now != seen
        weights = now.weights ^ 0x5A5 if torn else now.weights
        reused = self._prefill(entry, Stamp(now.version, weights))
        encoder = self._encode(entry.media) if entry.media else 0
        oldest = min(entry.kv)
        token = encode_token(TokenInfo(now.version, weights, oldest, encoder, entry.context))
        first = not entry.started
        entry.started = True
        entry.tokens.append(token)
        entry.context = extend(entry.context, (token,))
        self.tokens_generated += 1
        sampling = entry.request.sampling
        reason = None
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(entry.tokens) >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        entry.chunks.put_nowait(
            TokenChunk(
                entry.id,
                (token,),
                (-(1 + entry.context % 64) / 64,),
                now.version,
                reason,
                cached_tokens=min(reused, len(entry.request.prompt)) if first else 0,
            )
        )
        if reason is not None:
            self.drop(entry)


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel the loop's task and wait for its end."""
    task.cancel()
    await asyncio.wait({task})

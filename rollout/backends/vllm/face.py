"""What an engine of vLLM's does alike in its own process and behind its server.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.pauses import Flight
from hotbunk.rollout.backends.vllm.requests import Reading
from hotbunk.rollout.contract import (
    AbortReport,
    BackendStatus,
    Cache,
    Engine,
    MemoryReport,
    PauseMode,
    PauseReport,
    Tag,
)

R = TypeVar("R", bound=Reading)


class Face(Engine, Generic[R]):
    """Pauses, aborts, caches and counts, over ``AsyncLLM`` or what speaks like it."""

    _flight: Flight[R]

    def __init__(self) -> None:
        self._tokens = self._cached = 0  # of requests that were read to their end

    @property
    @abstractmethod
    def llm(self) -> Any:
        """Who is asked. :raises ReplicaLost: nobody can be."""

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self._flight.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._flight.resume()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self._flight.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        caches = self.capabilities.caches
        wanted = caches if which is None else frozenset(which)
        if Cache.PREFIX in wanted:
            # Frozen requests are recomputed: else vLLM resets nothing, and only says so.
            done = await self.llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=Cache.CONNECTORS in caches
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

    def _left(self, stream: R) -> None:
        """Nobody reads it any more."""
        self._flight.streams.pop(stream.request.request_id, None)
        self._tokens += stream.tokens
        self._cached += stream.cached

    def _closed_to(self, why: str) -> None:
        """Whoever reads is told that nothing more comes."""
        for stream in self._flight.streams.values():
            stream.items.put_nowait(errors.ReplicaLost(why))
            stream.stop()

    def _must_stand_still(self, verb: str) -> None:
        if not self._flight.standing_still:
            raise errors.RequestsInFlight(list(self._flight.streams), verb, 0.0)

    def _seen(self, blocks: int, kv_usage: float, **more: Any) -> BackendStatus:
        """What is in flight. ``more``: the fields that are told elsewhere."""
        flight = self._flight
        live = flight.alive()
        begun = tuple(key for key, stream in live.items() if stream.tokens)
        still = flight.mode in (PauseMode.KEEP, PauseMode.ABORT)
        return BackendStatus(
            paused=flight.mode is not None,
            running=() if still else begun,
            waiting=tuple(key for key in live if key not in begun),
            frozen=begun if still else (),
            kv_blocks_total=blocks,
            kv_blocks_used=round(kv_usage * blocks),
            tokens_generated=self._tokens + sum(s.tokens for s in flight.streams.values()),
            cached_tokens=self._cached + sum(s.cached for s in flight.streams.values()),
            **more,
        )

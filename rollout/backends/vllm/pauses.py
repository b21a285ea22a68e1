"""What is in flight in vLLM, and how it is brought to stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

from hotbunk.rollout import errors
from hotbunk.rollout.calls import noted
from hotbunk.rollout.contract import AbortReport, PauseMode, PauseReport

_SECONDS = 10.0  # for outputs that are on their way already
SILENCE = 30.0  # of an engine core that was asked between two steps: it hangs


class InFlight(Protocol):
    """One request, as far as it matters here. ``ended``: vLLM is done with it."""

    internal_id: str
    ended: asyncio.Event

    @property
    def aborted(self) -> bool:
        """Whether some response was cut short."""

    @property
    def computed(self) -> int:
        """Tokens whose KV it holds."""


S = TypeVar("S", bound=InFlight)


class Flight(Generic[S]):
    """The streams of one engine, and the pause it is in (``mode``; None: open).

    :param llm: gives vLLM's engine, or says that it is dead.
    :param on_silence: told why an engine core that answers no pause or resume is lost, also when
        whoever asked has long given up; None: nobody here can tell.
    :param idle: pauses an engine that has nothing in flight, by mode and ``clear_cache``; None: as any.
    """

    def __init__(
        self,
        llm: Callable[[], Any],
        on_silence: Callable[[str], object] | None = None,
        idle: Callable[[str, bool], Awaitable[object]] | None = None,
    ) -> None:
        self.streams: dict[str, S] = {}
        self.mode: PauseMode | None = None
        self._llm = llm
        self._on_silence = on_silence
        self._idle = idle
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """A stream came to its end, or the pause is another."""
        self._changed.set()

    def alive(self) -> dict[str, S]:
        """Streams that vLLM is not done with."""
        return {key: stream for key, stream in self.streams.items() if not stream.ended.is_set()}

    @property
    def standing_still(self) -> bool:
        """Whether no step runs and none can start."""
        return self.mode is not None and not (self.mode is PauseMode.WAIT and self.alive())

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PauseReport:
        """Carry out one pause; calls may overlap and escalate."""
        before = dict(self.streams)
        if mode is PauseMode.WAIT:
            await self._drain(clear_cache)
        else:
            self._become(mode)
            await self._stop(mode, clear_cache)
        if mode is PauseMode.ABORT:
            await self._until_ended(before, "pause(abort)")
        frozen = [key for key, stream in before.items() if not stream.ended.is_set()]
        return PauseReport(
            mode,
            aborted=tuple(k for k, s in before.items() if s.aborted),
            finished=tuple(k for k, s in before.items() if s.ended.is_set() and not s.aborted),
            frozen=tuple(frozen),
            cleared_cache=clear_cache,
            stale_tokens=0 if clear_cache else sum(before[key].computed for key in frozen),
        )

    async def resume(self) -> None:
        """Open generation."""
        self._become(None)
        await self._ask(self._llm().resume_generation())

    async def abort(self, request_ids: Collection[str] | None) -> AbortReport:
        """End these requests (None: all)."""
        wanted = set(self.streams if request_ids is None else request_ids)
        found = {key: stream for key, stream in self.alive().items() if key in wanted}
        if found:
            # By vLLM's own ids: by those of a response it does nothing, and says that it did.
            internal = [stream.internal_id for stream in found.values()]
            await self._llm().abort(internal, internal=True)
            await self._until_ended(found, "abort")
        ended = tuple(sorted(key for key, stream in found.items() if stream.aborted))
        return AbortReport(ended, tuple(sorted(wanted - set(ended))))

    def _become(self, mode: PauseMode | None) -> None:
        self.mode = mode
        self.changed()

    async def _drain(self, clear_cache: bool) -> None:
        """Let everything in flight end, then pause; unless another verb takes over meanwhile.

        vLLM's own ``wait`` is not enough: it lets only those requests end that hold KV. Queued ones
        stay queued, and so do those whose KV a ``keep`` with ``clear_cache`` dropped.

        :raises SessionError: generation was resumed.
        """
        self._become(PauseMode.WAIT)
        if self.alive():
            await self._ask(self._llm().resume_generation())
        while self.mode is PauseMode.WAIT and self.alive():
            self._changed.clear()
            await self._changed.wait()
        if self.mode is None:
            raise errors.SessionError("generation was resumed before the pause was complete")
        if self.mode is PauseMode.WAIT:
            await self._stop(PauseMode.KEEP, clear_cache)

    async def _stop(self, mode: PauseMode, clear_cache: bool) -> None:
        pause = self._llm().pause_generation  # also says if it is dead
        if self._idle is not None and not self.alive():
            await self._ask(self._idle(mode.value, clear_cache))
        else:
            await self._ask(pause(mode=mode.value, clear_cache=clear_cache))

    async def _ask(self, asked: Awaitable[object]) -> None:
        """What an engine core does between two steps, or not at all.

        :raises ReplicaLost: it hangs.
        """
        if self._on_silence is None:
            await asked
        else:
            await _heard(asked, self._on_silence)

    async def _until_ended(self, streams: Mapping[str, S], verb: str) -> None:
        """Their last outputs were sent before vLLM answered: they come in a moment, or never.

        :raises EngineFailed: some did not end.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                for stream in streams.values():
                    await stream.ended.wait()
        except TimeoutError:
            left = [key for key, stream in streams.items() if not stream.ended.is_set()]
            raise errors.EngineFailed(
                f"{verb} ended {len(streams) - len(left)} of {len(streams)} requests; still in "
                f"flight: {errors.shown(left)}"
            ) from None


async def _heard(asked: Awaitable[object], on_silence: Callable[[str], object]) -> None:
    """Await an answer. Who waits for it may give up; whether it comes is seen all the same.

    :raises ReplicaLost: there was none.
    """
    why = f"vLLM's engine core hangs: it has not answered for {SILENCE:g} s"
    answer = asyncio.ensure_future(asked)
    given_up = asyncio.get_running_loop().create_future()

    def silent() -> None:
        on_silence(why)
        given_up.cancel()
        answer.cancel()

    watch = asyncio.get_running_loop().call_later(SILENCE, silent)
    answer.add_done_callback(lambda _: watch.cancel())
    answer.add_done_callback(noted)
    await asyncio.wait({answer, given_up}, return_when=asyncio.FIRST_COMPLETED)
    if given_up.cancelled():
        raise errors.ReplicaLost(why, remedy="restart the engine")
    await answer

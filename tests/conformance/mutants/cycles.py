"""Memory that changes hands, broken."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from hotbunk.conformance.mutants import Patches, mutant
from hotbunk.rollout.backends.oracle import scheduler
from hotbunk.rollout.backends.oracle.arenas import Arenas
from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.backends.oracle.model import WeightGroup
from hotbunk.rollout.backends.oracle.scheduler import Request, Scheduler
from hotbunk.rollout.contract import TARGET, Tag, TokenChunk
from hotbunk.rollout.gate import SLEEP, Gate
from hotbunk.rollout.parking import Parking
from hotbunk.rollout.replica import Replica


@mutant("twenty_cycles_are_flat")
def each_cycle_leaks_a_byte(patch: Patches) -> None:
    """What is released is a byte less each time, and nobody promised it (M9, M11)."""
    original = Device.unmap

    def leak(self: Device, tag: str, group: str) -> int:
        promised = original(self, tag, group)
        if promised and tag == Tag.WEIGHTS:
            self._lost[tag, "leak"] = self._lost.get((tag, "leak"), 0) + 1
            return promised - 1
        return promised

    patch.setattr(Device, "unmap", leak)


@mutant("a_resume_without_room_is_undone")
def a_wake_without_room_keeps_half(patch: Patches) -> None:
    """What a failed resume mapped before it ran out stays mapped (M6)."""
    original = Device.unmap
    resuming: list[bool] = []
    resume = Arenas.resume

    async def halfway(self: Arenas, tags: Any) -> Any:
        resuming.append(True)
        try:
            return await resume(self, tags)
        finally:
            resuming.clear()

    def keep(self: Device, tag: str, group: str) -> int:
        return 0 if resuming else original(self, tag, group)

    patch.setattr(Arenas, "resume", halfway)
    patch.setattr(Device, "unmap", keep)


@mutant("golden_after_a_kv_only_release")
def a_kv_release_loses_weights(patch: Patches) -> None:
    """Weights go with the KV cache, and nobody says so (K6)."""
    original = Arenas.release

    async def clumsy(self: Arenas, tags: Any, *args: Any) -> Any:
        report = await original(self, tags, *args)
        if tuple(tags) == (Tag.KV_CACHE,):
            arena = self._groups[TARGET].arena
            arena[:] = bytes(len(arena))
        return report

    patch.setattr(Arenas, "release", clumsy)


@mutant("log_probs_survive_a_cycle")
def log_probs_are_off_after_a_wake(patch: Patches) -> None:
    """Tokens are right after a wake, and their log-probs are not (G6)."""
    original = WeightGroup.map
    woken: list[bool] = []

    def wake(self: WeightGroup) -> None:
        woken.append(True)
        original(self)

    def chunk(request: str, tokens: Any = (), logprobs: Any = (), *args: Any, **more: Any) -> Any:
        off = 0.01 if woken else 0.0
        return TokenChunk(request, tokens, tuple(v - off for v in logprobs), *args, **more)

    patch.setattr(WeightGroup, "map", wake)
    patch.setattr(scheduler, "TokenChunk", chunk)


@mutant("half_awake_serves_nobody")
def the_first_wake_opens(patch: Patches) -> None:
    """Sleep's pause ends with the first tag that is back (G1)."""
    original = Parking.resume

    async def eager(self: Parking, tags: Any) -> Any:
        report = await original(self, tags)
        self._gate.drop(SLEEP)
        return report

    patch.setattr(Parking, "resume", eager)


@mutant("requests_during_a_sleep_are_held_and_served")
def a_sleeping_engine_turns_requests_away(patch: Patches) -> None:
    """Who asks during a sleep is told to go elsewhere (H4)."""
    original = Replica.sleep

    async def unwelcoming(self: Replica, level: int = 2, **more: Any) -> Any:
        report = await original(self, level, **more)
        await self.pause_generation(owner=SLEEP, reject=True)
        return report

    patch.setattr(Replica, "sleep", unwelcoming)


@mutant("requests_during_a_sleep_are_held_and_served")
def a_wake_forgets_who_waits(patch: Patches) -> None:
    """Who was held during a sleep is not told that it is over (H4)."""
    original = Gate.drop

    def forget(self: Gate, owner: str) -> None:
        if owner == SLEEP and owner in self.pauses:
            self._open = asyncio.Event()  # they wait for the old one
        original(self, owner)

    patch.setattr(Gate, "drop", forget)


@mutant("the_peak_is_weights_and_a_bucket")
def an_update_takes_a_second_copy(patch: Patches) -> None:
    """New weights are collected beside the old ones before they are applied (M2)."""
    begin, forget = OracleEngine._begin, OracleEngine._forget_caches

    def stage(self: OracleEngine, touched: Any) -> None:
        begin(self, touched)
        self.device.map(Tag.WEIGHTS, "staged", 100 * sum(group.nbytes for group in touched))

    def unstage(self: OracleEngine, touched: Any) -> None:
        self.device.unmap(Tag.WEIGHTS, "staged")
        forget(self, touched)

    patch.setattr(OracleEngine, "_begin", stage)
    patch.setattr(OracleEngine, "_forget_caches", unstage)


@mutant("sleeping_twice_is_sleeping_once")
def a_second_sleep_counts_again(patch: Patches) -> None:
    """What was released long ago is reported as freed, once more (M9)."""
    original = Arenas.release

    async def boast(self: Arenas, tags: Any, *args: Any) -> Any:
        report = await original(self, tags, *args)
        total = sum(nbytes for _, _, nbytes in self.of(tags))
        return msgspec.structs.replace(report, freed=total)

    patch.setattr(Arenas, "release", boast)


@mutant("nothing_cached_survives_a_sleep")
def the_prefix_cache_survives_a_release(patch: Patches) -> None:
    """Blocks of released KV are found again after it came back (C3)."""
    original = Scheduler.forget_kv

    def hoard(self: Scheduler, of: Any = ()) -> int:
        kept = {} if self.kv_mapped else dict(self.prefix)
        count = original(self, of)
        self.prefix.update(kept)
        return count

    async def keep(self: Scheduler, mode: Any, clear: bool, version: Any) -> Any:
        return await pause(self, mode, False, version)

    pause = Scheduler.pause
    patch.setattr(Scheduler, "pause", keep)
    patch.setattr(Scheduler, "forget_kv", hoard)


@mutant("an_engine_fails_in_a_memory_verb")
def a_memory_verb_that_broke_is_forgotten(patch: Patches) -> None:
    """What is mapped is unknown, and the replica goes on as before (M6)."""

    async def trusting(self: Parking, verb: str, coro: Any) -> Any:
        return await self._line.call(verb, coro, self._deadlines.memory)

    patch.setattr(Parking, "_memory_verb", trusting)


@mutant("killed_and_started_anew")
def nobody_hears_of_a_death(patch: Patches) -> None:
    """The engine is gone, and who reads from it waits for ever (N3)."""
    original = Request.__init__

    def deaf(self: Request, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        put = self.chunks.put_nowait

        def put_chunks(item: Any) -> None:
            if not isinstance(item, BaseException):
                put(item)

        self.chunks.put_nowait = put_chunks  # type: ignore[method-assign]

    patch.setattr(Request, "__init__", deaf)

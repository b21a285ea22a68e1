"""Every promise of an engine, broken once: the conformance suite must notice each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hotbunk.conformance.backends.oracle_kit import first_failure
from hotbunk.rollout.backends.oracle.arenas import Arenas
from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.backends.oracle.model import GARBAGE, WeightGroup
from hotbunk.rollout.backends.oracle.scheduler import Request, Scheduler
from hotbunk.rollout.backends.oracle.update import Writer
from hotbunk.rollout.contract import BackendStatus, PauseMode, Retention, Tag

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def mutant(apply: Mutant) -> Mutant:
    MUTANTS[apply.__name__] = apply
    return apply


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


@mutant
def caches_outlive_their_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OracleEngine, "_forget_caches", nothing)


@mutant
def a_stale_request_feeds_the_cache(patch: pytest.MonkeyPatch) -> None:
    """KV kept over an update gets into the prefix cache: a new request reads it (C2)."""
    original = Scheduler._prefill

    def share(self: Scheduler, entry: Request, now: Any) -> int:
        reused = original(self, entry, now)
        for end in range(self.block_tokens, len(entry.kv), self.block_tokens):
            self.prefix[self._key(entry, entry.sequence[:end])] = entry.kv[end - 1]
        return reused

    patch.setattr(Scheduler, "_prefill", share)


@mutant
def clear_cache_is_ignored(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.pause

    async def hoard(self: Scheduler, mode: Any, clear: bool, version: Any) -> Any:
        import msgspec

        report = await original(self, mode, False, version)
        return msgspec.structs.replace(report, cleared_cache=clear)

    patch.setattr(Scheduler, "pause", hoard)


@mutant
def frozen_requests_keep_released_kv(patch: pytest.MonkeyPatch) -> None:
    def forget_prefixes_only(self: Scheduler, of: Any = ()) -> int:
        self.prefix.clear()
        return len(list(of))

    patch.setattr(Scheduler, "forget_kv", forget_prefixes_only)


@mutant
def saved_kv_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """It is kept, and the report says it is lost."""
    import msgspec

    original = Arenas.release

    async def silent(self: Arenas, *args: Any) -> Any:
        report = await original(self, *args)
        return msgspec.structs.replace(report, kept_requests=0)

    patch.setattr(Arenas, "release", silent)


@mutant
def keep_kv_keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    original = Arenas.release

    async def drop(self: Arenas, tags: Any, retention: Any, overrides: Any, keep_kv: bool) -> Any:
        return await original(self, tags, retention, overrides, False)

    patch.setattr(Arenas, "release", drop)


@mutant
def seeds_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hotbunk.rollout.backends.oracle.scheduler._seed", lambda request: 0)


@mutant
def keep_aborts(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.pause

    async def abort(self: Scheduler, mode: Any, clear: bool, version: Any) -> Any:
        mode = PauseMode.ABORT if mode is PauseMode.KEEP else mode
        return await original(self, mode, clear, version)

    patch.setattr(Scheduler, "pause", abort)


@mutant
def an_abort_loses_tokens(patch: pytest.MonkeyPatch) -> None:
    """Tokens reach the reader in pairs, and an abort drops the odd one (V5)."""
    original_finish, original_advance = Request.finish, Scheduler._advance

    def lossy(self: Request, *args: Any) -> None:
        while not self.chunks.empty():
            self.chunks.get_nowait()
        original_finish(self, *args)

    def hold_back(self: Scheduler, entry: Request, *args: Any) -> None:
        real, entry.chunks = entry.chunks, asyncio.Queue()
        original_advance(self, entry, *args)
        made, entry.chunks = entry.chunks, real
        held = entry.__dict__.setdefault("held", [])
        held.append(made.get_nowait())
        if len(held) == 2 or entry.done:
            for chunk in held:
                real.put_nowait(chunk)
            held.clear()

    patch.setattr(Request, "finish", lossy)
    patch.setattr(Scheduler, "_advance", hold_back)


@mutant
def a_pause_does_not_wait_for_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "standing_still", property(lambda self: self.mode is not None))


@mutant
def an_abandoned_request_runs_on(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.drop

    def run_on(self: Scheduler, entry: Request) -> None:
        if len(entry.tokens) >= entry.request.sampling.max_tokens:
            original(self, entry)

    patch.setattr(Scheduler, "drop", run_on)


@mutant
def buffers_are_lost(patch: pytest.MonkeyPatch) -> None:
    def forget(self: WeightGroup) -> None:
        self.mapped = True
        self.arena[:] = self.backup or bytes([GARBAGE]) * len(self.arena)
        self.backup = None

    patch.setattr(WeightGroup, "map", forget)


@mutant
def aliases_point_at_old_memory(patch: pytest.MonkeyPatch) -> None:
    original = WeightGroup.unmap

    def move(self: WeightGroup, *, keep_content: bool) -> None:
        original(self, keep_content=keep_content)
        self.arena = bytearray(self.arena)

    patch.setattr(WeightGroup, "unmap", move)


@mutant
def post_load_runs_twice(patch: pytest.MonkeyPatch) -> None:
    original = WeightGroup.post_load

    def twice(self: WeightGroup) -> None:
        original(self)
        original(self)

    patch.setattr(WeightGroup, "post_load", twice)


@mutant
def post_load_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightGroup, "pre_load", nothing)


@mutant
def nothing_is_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writer, "verify", nothing)


@mutant
def copies_are_made_too_late(patch: pytest.MonkeyPatch) -> None:
    """The receiver keeps views into buckets and copies at the end (G10)."""
    original_write, original_finish = Writer.write, Writer.finish
    kept: list[Any] = []
    patch.setattr(Writer, "write", lambda self, bucket: kept.append(bucket))

    def finish(self: Writer) -> int:
        for bucket in kept:
            original_write(self, bucket)
        kept.clear()
        return original_finish(self)

    patch.setattr(Writer, "finish", finish)


@mutant
def the_draft_stays_old(patch: pytest.MonkeyPatch) -> None:
    """Everything is said to be applied, and the draft's bytes are dropped (G16)."""
    original = WeightGroup.write

    def drop_draft(self: WeightGroup, name: str, *args: Any) -> None:
        if self.name != "draft" or not self.loaded_once:
            original(self, name, *args)

    patch.setattr(
        WeightGroup, "loaded_once", property(lambda self: self.arena[-1] != GARBAGE), raising=False
    )
    patch.setattr(WeightGroup, "write", drop_draft)
    patch.setattr(Writer, "verify", nothing)


@mutant
def backups_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
    original = Device.keep_backup

    def hoard(self: Device, tag: str, group: str, nbytes: int) -> None:
        if nbytes:
            original(self, tag, group, nbytes)

    patch.setattr(Device, "keep_backup", hoard)


@mutant
def a_discard_copies_anyway(patch: pytest.MonkeyPatch) -> None:
    original = Arenas._back_up

    async def copy_all(
        self: Arenas, tags: Any, retention: Any, overrides: Any, keep_kv: bool
    ) -> None:
        await original(self, tags, Retention.BACKUP, {}, keep_kv)

    patch.setattr(Arenas, "_back_up", copy_all)


@mutant
def kv_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    """Released by its word, not by the device's (M10)."""
    original = Device.unmap

    def keep(self: Device, tag: str, group: str) -> int:
        if tag == Tag.KV_CACHE:
            return 0
        return original(self, tag, group)

    patch.setattr(Device, "unmap", keep)


@mutant
def waking_weights_wakes_kv(patch: pytest.MonkeyPatch) -> None:
    original = Arenas.resume

    async def wake_all(self: Arenas, tags: Any) -> Any:
        return await original(self, tuple(Tag))

    patch.setattr(Arenas, "resume", wake_all)


@mutant
def a_paused_engine_spins(patch: pytest.MonkeyPatch) -> None:
    original = OracleEngine.status

    async def busy(self: OracleEngine) -> BackendStatus:
        self.scheduler.steps += 7 if self.scheduler.mode is not None else 0
        return await original(self)

    patch.setattr(OracleEngine, "status", busy)


@mutant
def the_engine_believes_whoever_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OracleEngine, "_check_content", nothing)


OPTIONS: dict[str, dict[str, Any]] = {"the_engine_believes_whoever_asks": {"gate": "in_engine"}}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert first_failure(**OPTIONS.get(name, {})), "the suite passes although the rule is broken"


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=str)
def test_nothing_is_caught_where_nothing_is_broken(options: dict[str, Any]) -> None:
    assert not first_failure(**options)

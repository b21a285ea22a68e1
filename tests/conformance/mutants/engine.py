"""Promises of an engine, broken."""

from __future__ import annotations

import asyncio
from typing import Any

from hotbunk.conformance.mutants import Patches, mutant, nothing
from hotbunk.rollout.backends.oracle import scheduler
from hotbunk.rollout.backends.oracle.arenas import Arenas
from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.backends.oracle.model import GARBAGE, WeightGroup
from hotbunk.rollout.backends.oracle.scheduler import Request, Scheduler
from hotbunk.rollout.backends.oracle.update import Writer
from hotbunk.rollout.contract import BackendStatus, PauseMode, Retention, Tag, TokenChunk


@mutant("no_kv_outlives_its_weights")
def caches_outlive_their_weights(patch: Patches) -> None:
    """An update leaves the prefix cache as it was (C1)."""
    patch.setattr(OracleEngine, "_forget_caches", nothing)


@mutant("new_requests_never_share_stale_kv")
def a_stale_request_feeds_the_cache(patch: Patches) -> None:
    """KV kept over an update gets into the prefix cache: a new request reads it (C2)."""
    original = Scheduler._prefill

    def share(self: Scheduler, entry: Request, now: Any) -> int:
        reused = original(self, entry, now)
        for end in range(self.block_tokens, len(entry.kv), self.block_tokens):
            self.prefix[self._key(entry, entry.sequence[:end])] = entry.kv[end - 1]
        return reused

    patch.setattr(Scheduler, "_prefill", share)


@mutant("clear_cache_forgets")
def clear_cache_is_ignored(patch: Patches) -> None:
    """A pause says that it cleared the cache, and did not (C9)."""
    original = Scheduler.pause

    async def hoard(self: Scheduler, mode: Any, clear: bool, version: Any) -> Any:
        import msgspec

        report = await original(self, mode, False, version)
        return msgspec.structs.replace(report, cleared_cache=clear)

    patch.setattr(Scheduler, "pause", hoard)


@mutant("frozen_requests_meet_new_weights_and_new_kv")
def frozen_requests_keep_released_kv(patch: Patches) -> None:
    """Frozen requests go on with KV that was released (C3)."""

    def forget_prefixes_only(self: Scheduler, of: Any = ()) -> int:
        self.prefix.clear()
        return len(list(of))

    patch.setattr(Scheduler, "forget_kv", forget_prefixes_only)


@mutant("frozen_requests_get_their_kv_back")
def saved_kv_is_not_counted(patch: Patches) -> None:
    """It is kept, and the report says it is lost (C9)."""
    import msgspec

    original = Arenas.release

    async def silent(self: Arenas, *args: Any) -> Any:
        report = await original(self, *args)
        return msgspec.structs.replace(report, kept_requests=0)

    patch.setattr(Arenas, "release", silent)


@mutant("frozen_requests_get_their_kv_back_with_the_weights")
def keep_kv_keeps_nothing(patch: Patches) -> None:
    """KV that was to be kept is dropped, and computed again (C9)."""
    original = Arenas.release

    async def drop(self: Arenas, tags: Any, retention: Any, overrides: Any, keep_kv: bool) -> Any:
        return await original(self, tags, retention, overrides, False)

    patch.setattr(Arenas, "release", drop)


@mutant("a_seed_repeats_its_draws")
def seeds_are_ignored(patch: Patches) -> None:
    """Whatever the seed, the draws are the same (contract, Verbs: generation)."""
    patch.setattr(scheduler, "_seed", lambda request: 0)


@mutant("company_changes_nothing")
def doubles_share_what_is_not_the_same(patch: Patches) -> None:
    """Of two equal prompts in one batch the second is computed wrongly (contract, Verbs: generation)."""
    original = Scheduler._advance

    def advance(self: Scheduler, entry: Request, seen: Any, corrupt: bool) -> None:
        before = self.running[: self.running.index(entry)] if entry in self.running else []
        double = any(other.request.prompt == entry.request.prompt for other in before)
        cold = entry.request.sampling.temperature == 0
        original(self, entry, seen, corrupt or (double and cold))

    patch.setattr(Scheduler, "_advance", advance)


@mutant("pause_keep")
def keep_aborts(patch: Patches) -> None:
    """A keep pause ends what runs, as abort would (V12)."""
    original = Scheduler.pause

    async def abort(self: Scheduler, mode: Any, clear: bool, version: Any) -> Any:
        mode = PauseMode.ABORT if mode is PauseMode.KEEP else mode
        return await original(self, mode, clear, version)

    patch.setattr(Scheduler, "pause", abort)


@mutant("pause_abort")
def an_abort_loses_tokens(patch: Patches) -> None:
    """A token reaches the reader with the next one, and an abort drops the last (V5)."""
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
        while len(held) > (0 if entry.done else 1):
            real.put_nowait(held.pop(0))

    patch.setattr(Request, "finish", lossy)
    patch.setattr(Scheduler, "_advance", hold_back)


@mutant("updates_wait_for_what_runs")
def a_pause_does_not_wait_for_the_step(patch: Patches) -> None:
    """A pause returns while the last step still runs (H7)."""
    patch.setattr(Scheduler, "standing_still", property(lambda self: self.mode is not None))


@mutant("dropping_the_stream_ends_the_request")
def an_abandoned_request_runs_on(patch: Patches) -> None:
    """A client goes away, and its request goes on (contract, Verbs: abort)."""
    original = Scheduler.drop

    def run_on(self: Scheduler, entry: Request) -> None:
        if len(entry.tokens) >= entry.request.sampling.max_tokens:
            original(self, entry)

    patch.setattr(Scheduler, "drop", run_on)


@mutant("cycle_parity")
def buffers_are_lost(patch: Patches) -> None:
    """What is no parameter is garbage after a discard (G3)."""

    def forget(self: WeightGroup) -> None:
        self.mapped = True
        self.arena[:] = self.backup or bytes([GARBAGE]) * len(self.arena)
        self.backup = None

    patch.setattr(WeightGroup, "map", forget)


@mutant("golden_after_a_backup_cycle")
def aliases_point_at_old_memory(patch: Patches) -> None:
    """Memory comes back at another address, and views do not follow (G5)."""
    original = WeightGroup.unmap

    def move(self: WeightGroup, *, keep_content: bool) -> None:
        original(self, keep_content=keep_content)
        self.arena = bytearray(self.arena)

    patch.setattr(WeightGroup, "unmap", move)


@mutant("updating_many_times")
def post_load_runs_twice(patch: Patches) -> None:
    """Weights are shuffled for the kernels twice (G7)."""
    original = WeightGroup.post_load

    def twice(self: WeightGroup) -> None:
        original(self)
        original(self)

    patch.setattr(WeightGroup, "post_load", twice)


@mutant("updating_many_times")
def post_load_is_not_undone(patch: Patches) -> None:
    """A second load writes into weights that are shuffled already (G8)."""
    patch.setattr(WeightGroup, "pre_load", nothing)


@mutant("a_flipped_bit_is_named")
def nothing_is_verified(patch: Patches) -> None:
    """Fingerprints are asked for and not compared (U1)."""
    patch.setattr(Writer, "verify", nothing)


@mutant("any_bucket_size")
def copies_are_made_too_late(patch: Patches) -> None:
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


@mutant("every_group_moves_with_an_update")
def the_draft_stays_old(patch: Patches) -> None:
    """Everything is said to be applied, and the draft's bytes are dropped (G16)."""
    original = WeightGroup.write

    def drop_draft(self: WeightGroup, name: str, *args: Any) -> None:
        empty = self.arena[-1] == GARBAGE  # the first load is real
        if self.name != "draft" or empty:
            original(self, name, *args)

    patch.setattr(WeightGroup, "write", drop_draft)
    patch.setattr(Writer, "verify", nothing)


@mutant("backups_are_given_back")
def backups_stay_on_the_host(patch: Patches) -> None:
    """After a wake the host still holds the backup (M16)."""
    original = Device.keep_backup

    def hoard(self: Device, tag: str, group: str, nbytes: int) -> None:
        if nbytes:
            original(self, tag, group, nbytes)

    patch.setattr(Device, "keep_backup", hoard)


@mutant("discard_takes_no_host_memory")
def a_discard_copies_anyway(patch: Patches) -> None:
    """Weights that will be overwritten are copied to the host (M17)."""
    original = Arenas._back_up

    async def copy_all(
        self: Arenas, tags: Any, retention: Any, overrides: Any, keep_kv: bool
    ) -> None:
        await original(self, tags, Retention.BACKUP, {}, keep_kv)

    patch.setattr(Arenas, "_back_up", copy_all)


@mutant("release_reports_what_it_freed")
def kv_is_not_given_back(patch: Patches) -> None:
    """Released by its word, not by the device's (M10)."""
    original = Device.unmap

    def keep(self: Device, tag: str, group: str) -> int:
        if tag == Tag.KV_CACHE:
            return 0
        return original(self, tag, group)

    patch.setattr(Device, "unmap", keep)


@mutant("golden_after_a_discard_cycle")
def waking_weights_wakes_kv(patch: Patches) -> None:
    """Waking the weights maps the KV cache, too (M3)."""
    original = Arenas.resume

    async def wake_all(self: Arenas, tags: Any) -> Any:
        return await original(self, tuple(Tag))

    patch.setattr(Arenas, "resume", wake_all)


@mutant("pause_when_idle")
def a_paused_engine_spins(patch: Patches) -> None:
    """A paused engine makes steps (H7)."""
    original = OracleEngine.status

    async def busy(self: OracleEngine) -> BackendStatus:
        self.scheduler.steps += 7 if self.scheduler.mode is not None else 0
        return await original(self)

    patch.setattr(OracleEngine, "status", busy)


@mutant("the_engine_itself_refuses", gate="in_engine")
def the_engine_believes_whoever_asks(patch: Patches) -> None:
    """It says that it guards itself, and serves half-written weights (N7)."""
    patch.setattr(OracleEngine, "_check_content", nothing)


@mutant("the_engine_itself_refuses", gate="engine_pause")
def a_pause_is_for_the_replica_alone(patch: Patches) -> None:
    """It says that its pause keeps everybody out, and serves half-written weights (N7)."""
    original = Scheduler.submit

    def serve(self: Scheduler, request: Any) -> Request:
        entry = original(self, request)
        if entry.late:
            entry.chunks.put_nowait(TokenChunk(request.request_id, (7,), (0.0,)))
        return entry

    patch.setattr(Scheduler, "submit", serve)

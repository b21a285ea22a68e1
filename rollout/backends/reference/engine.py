"""The reference engine: memory, weights and what can be looked at. Generation is its other half."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from hotbunk.rollout import errors, native
from hotbunk.rollout.backends.reference.blocks import BlockPool
from hotbunk.rollout.backends.reference.generation import Generating
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.backends.reference.quantize import QuantisingWriter, as_offered
from hotbunk.rollout.backends.reference.requests import RequestRules
from hotbunk.rollout.backends.reference.runner import KVStash, ModelRunner
from hotbunk.rollout.backends.reference.scheduler import Scheduler
from hotbunk.rollout.backends.reference.thread import EngineThread
from hotbunk.rollout.backends.reference.weights import Writer
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FULL,
    NATIVE,
    TARGET,
    ArenaReport,
    BackendStatus,
    Bucket,
    Cache,
    Capabilities,
    Digests,
    Manifest,
    MemoryReport,
    Placement,
    ReceiverLayout,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
    unsupported,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import check_offer
from hotbunk.rollout.lifecycle import Residency, Weights, groups_of
from hotbunk.rollout.uncut import uncut

T = TypeVar("T")
log = logging.getLogger(__name__)


def _capabilities(options: ReferenceOptions) -> Capabilities:
    """What this engine does in this install: only the native library gives memory back."""
    found = Capabilities(
        backend="reference",
        layout=NATIVE,
        adapter=NATIVE,
        keep_kv=NATIVE,
        caches=frozenset({Cache.PREFIX}) if options.enable_prefix_caching else frozenset(),
        positional_draws=True,
    )
    if options.device != "cpu":
        # A simulated device counts, and there is no hardware to ask.
        measured = "accounting" if options.device.startswith("fake") else "device"
        found = dataclasses.replace(found, memory_measured_by=measured)
    try:
        native.load()
    except native.NativeUnavailable as error:
        lacking = unsupported(str(error))
        return dataclasses.replace(
            found,
            release=lacking,
            release_kv_cache=lacking,
            keep_release=lacking,
            keep_kv=lacking,
            retentions=frozenset({Retention.RESIDENT}),
            memory_measured_by="accounting",
        )
    return found


class ReferenceEngine(Generating):
    """See :mod:`hotbunk.rollout.backends.reference`. Every rule is kept in the engine itself."""

    def __init__(self, options: ReferenceOptions) -> None:
        super().__init__()
        self.options = options
        self.capabilities = _capabilities(options)
        self._stash: KVStash | None = None

    async def start(self) -> None:
        options = self.options
        self._runner = await asyncio.to_thread(ModelRunner, options)
        pool = BlockPool(
            self._runner.blocks, options.block_size, caching=options.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            pool,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        self._rules = RequestRules(self._runner.config, Path(options.model), pool.count * pool.size)
        self._residency = Residency(
            {TARGET: None if options.load == "empty" else Version(0, 0)},
            fed=[TARGET],
            retentions=self.capabilities.retentions,
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
            if not pending.future.done():
                pending.future.set_exception(closed)
        self._forget_stash()
        if stopped:
            self._runner.close()

    # -- memory -------------------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        wanted = parse_tags(tags)

        def run() -> MemoryReport:
            report = self._runner.pool.resume(wanted)
            self._residency.resumed(wanted)
            if Tag.KV_CACHE in wanted:
                self._take_kv_back()
            return self._with_stash(report)

        return await self._thread.call(run)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        wanted = parse_tags(tags)

        def run() -> MemoryReport:
            self._must_stand_still("release")
            groups = dict.fromkeys(self._residency.groups, retention)
            groups.update(self._residency.overrides(retention))
            groups.update(overrides or {})
            stash = self._saved_kv() if keep_kv and Tag.KV_CACHE in wanted else None
            try:
                report = self._runner.pool.release(wanted, groups)
            except errors.ReleaseIncomplete:
                self._released(wanted, retention, groups, stash)  # the content is gone all the same
                raise
            except errors.HotbunkError:
                if stash is not None and stash is not self._stash:
                    stash.close()
                raise
            self._released(wanted, retention, groups, stash)
            if Tag.KV_CACHE not in wanted:
                return self._with_stash(report)
            report = msgspec.structs.replace(
                report,
                recomputed_requests=self._scheduler.lost(),
                kept_requests=0 if stash is None else len({s.id for s in stash.held}),
            )
            return self._with_stash(report)

        return await self._thread.call(run)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv)

    def _released(
        self,
        tags: Collection[Tag],
        retention: Retention,
        groups: Mapping[str, Retention],
        stash: KVStash | None,
    ) -> None:
        """Memory is gone. Who has KV in the stash keeps its blocks; others' is lost."""
        self._residency.released(tags, retention, groups)
        if Tag.KV_CACHE not in tags:
            return
        if self._stash is not stash:
            self._forget_stash()
        self._stash = stash
        for s in self._scheduler.everyone():
            if stash is None or s not in stash.held:
                self._scheduler.drop_kv(s)
        self._scheduler.pool.forget_all()

    def _saved_kv(self) -> KVStash:
        """KV of frozen requests, on the host; that of an earlier release stays where it is."""
        frozen = self._scheduler.in_flight()
        if self._stash is None:
            return self._runner.save_kv(frozen)
        self._stash.held &= set(frozen)
        return self._stash

    def _take_kv_back(self) -> None:
        """Saved KV goes where it was: its blocks stayed with their requests."""
        if self._stash is None:
            return
        try:
            self._runner.restore_kv(self._stash)
        except (errors.MemoryFault, OSError):
            log.exception("saved KV cannot be read back, so it is computed again")
            for sequence in self._stash.held & set(self._scheduler.everyone()):
                self._scheduler.drop_kv(sequence)
        self._forget_stash()

    def _forget_stash(self) -> None:
        if self._stash is not None:
            self._stash.close()
            self._stash = None

    def _with_stash(self, report: MemoryReport) -> MemoryReport:
        if self._stash is None:
            return report
        saved = ArenaReport(Tag.KV_CACHE, "saved", 0, 0, self._stash.nbytes)
        return msgspec.structs.replace(report, arenas=(*report.arenas, saved))

    # -- weights ------------------------------------------------------------------------------

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        manifest = transfer.manifest
        if scope.kind is ScopeKind.DELTA:
            raise errors.Unsupported("delta updates", self.capabilities.backend)
        groups = groups_of(scope, (spec.group for spec in manifest.tensors))
        known = self._placements(transfer, groups)

        def check() -> None:
            self._must_stand_still("update_weights")
            self._residency.check_offer(groups, scope, version)

        layout = {n: known[n] for spec in manifest.tensors for n in spec.names}
        await self._thread.call(check)
        adapter = scope.kind is ScopeKind.ADAPTER  # has an arena of its own, made when bytes come
        with nullcontext() if adapter else self._runner.shared_weights() as arena:
            in_place = await transfer.accept(ReceiverLayout(layout), arena)

        begun: list[Writer] = []

        def begin() -> Writer:
            if not begun:
                # From here on the engine itself refuses to compute, whoever asks.
                self._residency.written(groups)
                begun.append(self._writer(manifest))
            return begun[0]

        def write(bucket: Bucket) -> None:
            begin().write(bucket)

        if in_place:  # the first byte comes when the first bucket is asked for
            await self._thread.call(begin)
        await transfer.take(write, run=self._thread.call)
        # An update without a byte is one, too.
        writer = await self._thread.call(begin)
        applied = writer.intake.finish()
        expected = dict(await transfer.fingerprints())
        if expected:
            comparing = self._thread.call(partial(writer.differing, expected))
            differing = await uncut(comparing)
            if differing:
                raise errors.VerifyFailed(differing)
        await uncut(self._thread.call(lambda: self._outdate_caches(groups)))
        await transfer.commit()
        await uncut(self._thread.call(lambda: self._residency.committed(groups, version)))
        return UpdateReport(
            version,
            applied=applied,
            nbytes=writer.intake.nbytes,
            buckets=writer.intake.buckets,
            verified=(
                "none"
                if not expected
                else "transfer"
                if isinstance(writer, QuantisingWriter)
                else "applied"
            ),
        )

    def _writer(self, manifest: Manifest) -> Writer:
        """Called at the first byte: what was there before, an adapter's room too, stands till then."""
        if manifest.scope.kind is ScopeKind.ADAPTER:
            tensors = self._runner.adapters.prepare(manifest.scope.name, manifest)
            return Writer(manifest, tensors.__getitem__)
        runner = self._runner
        if runner.quantised:
            return QuantisingWriter(manifest, runner.binding.tensor, runner.quantised, runner.dtype)
        return Writer(manifest, runner.binding.tensor)

    def _placements(self, transfer: Transfer, groups: Collection[str]) -> Mapping[str, Placement]:
        """Where the tensors on offer would go. :raises UpdateRefused: they have no place here."""
        manifest = transfer.manifest
        if manifest.scope.kind is ScopeKind.ADAPTER:
            known: Mapping[str, Placement] = self._runner.adapters.placements(manifest)
            check_offer(manifest, known, [])
            return known
        if set(groups) != {TARGET}:
            raise errors.UnsupportedTarget(
                f"no weight group named {errors.shown(set(groups) - {TARGET})}"
            )
        layers = self._runner.quantised
        known = as_offered(self._runner.binding.placements(), layers, self._runner.dtype)
        needed = [names for names in self._runner.binding.required() if names & known.keys()]
        check_offer(manifest, known, needed)
        return known

    def _outdate_caches(self, groups: Collection[str]) -> None:
        """KV that older weights made: nobody new may find it, and what was saved is worthless."""
        self._scheduler.pool.forget_all()
        alive = set(self._scheduler.everyone())
        concerned = {
            s for s in alive if TARGET in groups or f"{ADAPTER_PREFIX}{s.request.adapter}" in groups
        }
        if self._stash is not None:
            for s in self._stash.held & concerned:
                self._scheduler.drop_kv(s)
            self._stash.held &= alive - concerned
            if not self._stash.held:
                self._forget_stash()
        self._scheduler.outdated(concerned)
        self._runner.zero_kv(self._scheduler.pool.unused())

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        self._thread.check_alive()
        scheduler = self._scheduler  # snapshots of lists: reading them never waits for a step
        running, waiting = tuple(scheduler.running), (*scheduler.waiting, *scheduler.arrived)
        frozen = scheduler.admission == "frozen"
        ids = tuple(dict.fromkeys(s.id for s in running))
        return BackendStatus(
            paused=scheduler.admission != "open",
            running=() if frozen else ids,
            waiting=tuple(dict.fromkeys(s.id for s in waiting)),
            frozen=ids if frozen else (),
            versions=self._residency.versions(),
            kv_blocks_total=scheduler.pool.count,
            kv_blocks_used=scheduler.pool.used,
            tokens_generated=self._tokens,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            cached_tokens=scheduler.cached_tokens,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        def run() -> dict[str, int]:
            state = self._residency.groups[TARGET]
            if state.state in (Weights.BACKED_UP, Weights.DISCARDED):
                raise errors.WeightsNotResident(TARGET, str(state))
            return self._runner.digest(names)

        return Digests(await self._thread.call(run), KIND)

    async def memory(self) -> MemoryReport:
        return self._with_stash(await asyncio.to_thread(self._runner.pool.memory))

    def check_invariants(self) -> None:
        """What must hold while no verb runs. :raises AssertionError: it does not."""
        self._scheduler.check_invariants()
        self._runner.pool.check_invariants()

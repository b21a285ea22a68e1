"""The oracle engine: the contract's verbs over counted memory, real bytes and a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from hotbunk.rollout.backends.oracle.arenas import Arenas
from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.faults import EngineDied, FaultPlan
from hotbunk.rollout.backends.oracle.model import DRAFT, ENCODER, GROUPS, WeightGroup
from hotbunk.rollout.backends.oracle.options import Options, capabilities
from hotbunk.rollout.backends.oracle.scheduler import Forward, Scheduler, stop
from hotbunk.rollout.backends.oracle.tokens import encoder_bits, weights_bits
from hotbunk.rollout.backends.oracle.update import DeltaWriter, Writer, check_manifest
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FULL,
    TARGET,
    AbortReport,
    BackendStatus,
    Cache,
    Digests,
    Engine,
    Gate,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    digest_name,
    parse_tags,
)
from hotbunk.rollout.errors import (
    KVNotResident,
    SessionError,
    Unsupported,
    UsageError,
    WeightsNotLoaded,
    WeightsNotResident,
    WeightsPoisoned,
    closest,
)
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes


class OracleEngine(Engine):
    """Built by :func:`hotbunk.rollout.backends.oracle.create`.

    What a test may look at besides the contract: ``device``, ``faults``, ``groups`` (the bytes
    themselves), ``scheduler``, and ``post_loads`` (how often post-load processing ran).
    """

    def __init__(self, options: Options, device: Device, faults: FaultPlan) -> None:
        self.options = options
        self.device = device
        self.faults = faults
        self.capabilities = capabilities(options)
        self.groups = {name: WeightGroup(name, 0 if options.loaded else None) for name in GROUPS}
        self.post_loads = 0
        self.encoder_cache: dict[int, int] = {}
        self.scheduler = Scheduler(
            step_time=options.step_time,
            max_running=options.max_running,
            kv_blocks=options.kv_blocks,
            block_tokens=options.block_tokens,
            faults=faults,
            forward=self._forward,
            encode=self._encode,
        )
        self._arenas = Arenas(options, device, faults, self.groups, self.scheduler)
        self._loop: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.faults.reach("start")
        self._arenas.map_all()
        self._loop = asyncio.create_task(self.scheduler.run())
        self._loop.add_done_callback(self._loop_ended)

    async def close(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        await stop(loop)
        self.scheduler.fail(EngineDied("the engine was closed"))
        self._arenas.forget()

    def _loop_ended(self, loop: asyncio.Task[None]) -> None:
        """The loop ends by :meth:`close`, or because the engine crashed, as a real one would."""
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self.faults.kill()
            self.scheduler.fail(EngineDied(f"the engine crashed: {type(error).__name__}: {error}"))

    # -- memory -------------------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._arenas.resume(parse_tags(tags))

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        wanted, caps = parse_tags(tags), self.capabilities
        self._require("release", bool(caps.release))
        self._require("keep_kv", bool(caps.keep_kv) or not keep_kv)
        if Tag.WEIGHTS in wanted:
            self._require(f"retention {retention.value!r}", retention in caps.retentions)
        self._require_quiet("release")
        if Tag.WEIGHTS in wanted:
            self.encoder_cache.clear()
        return await self._arenas.release(wanted, retention, overrides or {}, keep_kv)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        self._require("release_kv_cache", bool(self.capabilities.release_kv_cache))
        self._require("keep_kv", bool(self.capabilities.keep_kv) or not keep_kv)
        self._require_quiet("release_kv_cache")
        return await self._arenas.release((Tag.KV_CACHE,), Retention.DISCARD, {}, keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._arenas.resume((Tag.KV_CACHE,))

    # -- weights ------------------------------------------------------------------------------

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        manifest = transfer.manifest
        if scope.kind in (ScopeKind.PARTIAL, ScopeKind.ADAPTER, ScopeKind.DELTA):
            self._require(scope.kind.value, bool(getattr(self.capabilities, scope.kind.value)))
        self._require_quiet("update_weights")
        groups = dict(self.groups)
        if scope.kind is ScopeKind.ADAPTER:  # a new one comes to life with its first byte
            name = ADAPTER_PREFIX + scope.name
            groups.setdefault(name, WeightGroup(name, None))
        fed = [group for group, feedable in self.capabilities.groups.items() if feedable]
        check_manifest(manifest, groups, fed)
        touched = [groups[g] for g in sorted({spec.group for spec in manifest.tensors})]
        for group in touched:
            if not group.mapped:
                raise WeightsNotResident(group.name, "released")
        await self.faults.reach("update/accept")
        writer = (DeltaWriter if scope.kind is ScopeKind.DELTA else Writer)(manifest, groups)
        await transfer.accept(None)
        async for bucket in transfer.buckets():
            if writer.intake.buckets == 0:  # until then, a sender that fails has changed nothing
                self._begin(touched)
            corrupt = await self.faults.reach("update/bucket")
            writer.write(bucket)
            if corrupt:
                writer.flip_a_bit(bucket)
        if writer.intake.buckets == 0:
            self._begin(touched)
        applied = writer.finish()
        await self.faults.reach("update/post_load")
        for group in touched:
            group.post_load()
        self.post_loads += 1
        await self.faults.reach("update/verify")
        sent = await transfer.fingerprints()
        if manifest.fingerprint == KIND:
            writer.verify(sent)
        self._forget_caches(touched)
        await self.faults.reach("update/commit")
        await transfer.commit()
        await self.faults.reach("update/label")
        for group in touched:
            group.loaded, group.dirty, group.version = True, False, version
        return UpdateReport(
            version,
            applied=applied,
            nbytes=writer.intake.nbytes,
            buckets=writer.intake.buckets,
            verified=writer.verified if manifest.fingerprint == KIND else "none",
        )

    def _begin(self, touched: Collection[WeightGroup]) -> None:
        """From here on the old content is gone."""
        for group in touched:
            if group.name not in self.groups:
                self.device.map(Tag.WEIGHTS, group.name, group.nbytes)
                self.groups[group.name] = group
            group.loaded, group.dirty, group.version = False, True, None
            group.pre_load()

    def _forget_caches(self, touched: Collection[WeightGroup]) -> None:
        """Nothing computed from other content may be used again."""
        names = {group.name for group in touched}
        if ENCODER in names:
            self.encoder_cache.clear()
        # Saved KV goes with the weights that made it; KV kept by clear_cache=False does not.
        self.scheduler.forget_kv(() if self.scheduler.kv_mapped else self.scheduler.frozen())

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.faults.reach("generate")
        sampling = request.sampling
        self._require("samples", sampling.n == 1)
        self._require("stop strings", not sampling.stop)
        self._require("top log-probs", not sampling.logprobs)
        needed = self.scheduler.blocks_needed(request)
        if needed > self.options.kv_blocks:
            raise UsageError(
                f"request {request.request_id!r} needs {needed} KV blocks and there are "
                f"{self.options.kv_blocks}"
            )
        if self.capabilities.gate is Gate.IN_ENGINE:
            self._check_content(request.adapter)
        elif request.adapter is not None and ADAPTER_PREFIX + request.adapter not in self.groups:
            raise UsageError(f"no adapter {request.adapter!r} was ever loaded")
        entry = self.scheduler.submit(request)
        try:
            while True:
                chunk = await entry.chunks.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self.scheduler.drop(entry)

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        self._require(f"pause mode {mode.value!r}", bool(self.capabilities.pause[mode]))
        await self.faults.reach("pause")
        report = await self.scheduler.pause(mode, clear_cache, self._label())
        if self.faults.dead is not None:
            raise EngineDied("the engine died during a pause")
        return report

    async def resume_generation(self) -> None:
        await self.faults.reach("resume_generation")
        self.scheduler.open()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        self._require("abort", bool(self.capabilities.abort))
        await self.faults.reach("abort")
        everyone = {r.id: r for r in (*self.scheduler.running, *self.scheduler.waiting)}
        wanted = list(everyone) if request_ids is None else list(dict.fromkeys(request_ids))
        found = [everyone[i] for i in wanted if i in everyone]
        self.scheduler.abort(found, self._label())
        return AbortReport(
            tuple(r.id for r in found), tuple(i for i in wanted if i not in everyone)
        )

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self.faults.reach("reset_caches")
        wanted = self.capabilities.caches if which is None else frozenset(which)
        if not wanted <= self.capabilities.caches:
            lacking = ", ".join(sorted(wanted - self.capabilities.caches))
            raise Unsupported(f"reset of {lacking}", self.capabilities.backend)
        if Cache.PREFIX in wanted:
            self.scheduler.forget_kv()
        if Cache.ENCODER in wanted:
            self.encoder_cache.clear()

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        await self.faults.reach("status")
        scheduler = self.scheduler
        frozen = scheduler.frozen()
        return BackendStatus(
            paused=scheduler.mode is not None,
            running=tuple(r.id for r in scheduler.running if r not in frozen),
            waiting=tuple(r.id for r in scheduler.waiting if r not in frozen),
            frozen=tuple(r.id for r in frozen),
            versions={n: g.version for n, g in self.groups.items() if g.version is not None},
            kv_blocks_total=self.options.kv_blocks,
            kv_blocks_used=scheduler.blocks_used,
            tokens_generated=scheduler.tokens_generated,
            steps=scheduler.steps,
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        self._require("digest", bool(self.capabilities.digest))
        await self.faults.reach("digest")
        owner = {
            digest_name(group.name, name): group
            for group in self.groups.values()
            for name in group.names()
        }
        if names is None:
            names = [name for name, group in owner.items() if group.mapped]
        for name in names:
            if name not in owner:
                raise UsageError(f"no tensor {name!r}{closest(name, owner)}")
            if not owner[name].mapped:
                raise WeightsNotResident(owner[name].name, "released")
        values = {
            name: fingerprint_bytes(owner[name].read(name.rpartition("/")[2])) for name in names
        }
        return Digests(values, KIND)

    async def memory(self) -> MemoryReport:
        await self.faults.reach("memory")
        return self._arenas.report()

    # -- inside -------------------------------------------------------------------------------

    def _require(self, verb: str, able: bool) -> None:
        if not able:
            raise Unsupported(verb, self.capabilities.backend, "see its capabilities")

    def _require_quiet(self, verb: str) -> None:
        """What a real engine would answer with a crash, sooner or later."""
        if not self.scheduler.standing_still:
            raise SessionError(f"{verb} came while generation was not quiesced")

    def _label(self) -> Version:
        return self.groups[TARGET].version or Version()

    def _used_by(self, adapter: str | None) -> list[WeightGroup]:
        """Groups whose content is in every token: the speculative draft, too."""
        names = [TARGET, DRAFT] if adapter is None else [TARGET, DRAFT, ADAPTER_PREFIX + adapter]
        return [self.groups[name] for name in names]

    def _check_content(self, adapter: str | None) -> None:
        for group in self._used_by(adapter):
            if group.dirty:
                raise WeightsPoisoned(group.name)
            if not group.loaded or not group.mapped:
                raise WeightsNotLoaded(group.name, "without content")
        if not self.scheduler.kv_mapped:
            raise KVNotResident()

    def _forward(self, adapter: str | None) -> Forward:
        return Forward(
            self._label(), weights_bits(group.digest() for group in self._used_by(adapter))
        )

    def _encode(self, payload: int) -> int:
        if payload not in self.encoder_cache:
            self.encoder_cache[payload] = encoder_bits(self.groups[ENCODER].digest(), payload)
        return self.encoder_cache[payload]

"""A Hypothesis state machine over every verb of a replica, against the plain model.

Needs hypothesis. Use it as::

    TestMine = machine_for(MyEngineUnderTest).TestCase
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotbunk.conformance.case import ability
from hotbunk.conformance.model import Group, Model
from hotbunk.conformance.rig import Rig, Running, check_spans
from hotbunk.conformance.transfers import (
    Corrupted,
    FailedElsewhere,
    Hanging,
    MemoryTransfer,
    Missing,
    Raising,
    RefusedElsewhere,
    Truncated,
)
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.contract import (
    TARGET,
    FinishReason,
    PauseMode,
    Retention,
    Scope,
    Tag,
    Version,
)
from hotbunk.rollout.errors import HotbunkError, IncompleteUpdate, UpdateFailed, UpdateRefused
from hotbunk.rollout.replica import Replica

BEFORE: tuple[type[MemoryTransfer] | None, ...] = (None, RefusedElsewhere, Raising)
AFTER: tuple[type[MemoryTransfer], ...] = (
    FailedElsewhere,
    Truncated,
    Corrupted,
    Missing,
    Raising,
    Hanging,
)
TAGS = st.sampled_from([["weights"], ["kv_cache"], ["weights", "kv_cache"], None, []])
RETENTIONS = st.sampled_from([r.value for r in Retention])
MODES = st.sampled_from([m.value for m in PauseMode])
OWNERS = st.sampled_from(["caller", "other"])
ADAPTERS = st.sampled_from(["a", "b"])


class Tracked:
    """A request: where the model believes it to be, and which ends it may have."""

    def __init__(self, running: Running, prompt: Sequence[int], adapter: str | None) -> None:
        self.running = running
        self.prompt = tuple(prompt)
        self.adapter = adapter
        self.stage = "held"  # held, running, frozen, ended
        self.ends: set[object] = {FinishReason.LENGTH}
        self.stale = False  # KV of older weights may have been read: goldens do not hold
        self.adapted: set[int] = set()  # adapter versions that may have made its tokens

    def end(self, *ends: object) -> None:
        """It must end now, in one of these ways."""
        self.stage, self.ends = "ended", set(ends)


class ReplicaMachine(RuleBasedStateMachine):
    """All verbs in any order; subclasses set :attr:`make` to what builds the backend's description.

    Updates carry whole versions, so that a golden exists for whatever is resident.
    """

    make: ClassVar[Callable[[], BackendUnderTest]]

    def __init__(self) -> None:
        super().__init__()
        self.ut = type(self).make()
        self.loop = asyncio.Runner(loop_factory=self.ut.loop_factory)
        self.requests: list[Tracked] = []
        self.do(self._start())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something to its end; time passes only in here."""
        return self.loop.run(work)

    async def _start(self) -> None:
        import random

        engine = await self.ut.start()
        limits = msgspec.structs.replace(self.ut.deadlines, hold=1e6)
        self.replica = Replica(engine, name=self.ut.name, deadlines=limits)
        await self.replica.start()
        self.rig = Rig(self.ut, engine, self.replica, random.Random(0))
        self.caps = engine.capabilities
        fed = self.rig.fed()
        groups = {}
        for name, state in (await self.replica.status()).groups.items():
            loaded = state.startswith("RESIDENT")
            groups[name] = Group(
                "RESIDENT" if loaded else "EMPTY",
                0 if loaded else None,
                name in fed,
                0 if loaded else -1,
            )
        self.model = Model(groups, [r.value for r in self.caps.retentions])

    def teardown(self) -> None:
        async def stop() -> None:
            await self.rig.close()
            await self.replica.close()
            await self.ut.stop()

        self.do(stop())
        self.loop.close()

    def able(self, *capabilities: str) -> bool:
        """Whether the backend has them all."""
        return all(ability(self.caps, c) for c in capabilities)

    async def attempt(
        self, verb: Coroutine[Any, Any, object], want: type[BaseException] | None
    ) -> None:
        """The verb must end as the model says."""
        [got] = await asyncio.gather(verb, return_exceptions=True)
        if isinstance(got, BaseException) and not isinstance(got, HotbunkError):
            raise got
        error = got if isinstance(got, HotbunkError) else None
        wanted = want.__name__ if want else "no error"
        as_wanted = error is None if want is None else isinstance(error, want)
        assert as_wanted, f"wanted {wanted}, got {error!r}: {error}"

    # -- what the model believes about requests -----------------------------------------------

    def in_stage(self, *stages: str) -> list[Tracked]:
        """Requests believed to be there."""
        return [r for r in self.requests if r.stage in stages]

    def opened(self) -> None:
        """Generation may have opened: who waited is served or told why not."""
        if self.model.paused:
            return
        for request in self.in_stage("held"):
            missing = self.model.missing(request.adapter)
            if missing is None:
                request.stage = "running"
                self.adapt(request)
            else:
                request.end(missing)
        if self.model.missing() is None:
            for request in self.in_stage("frozen"):
                request.stage = "running"
                self.adapt(request)

    def adapt(self, request: Tracked) -> None:
        """Note which adapter version it runs with."""
        own = self.model.adapters.get(request.adapter or "")
        if own is not None and own.version is not None:
            request.adapted.add(own.version)

    def quiesced(self) -> None:
        """A verb drained what ran."""
        for request in self.in_stage("running"):
            request.end(FinishReason.LENGTH)

    def paused(self, owner: str, mode: str, clear: bool) -> None:
        """A pause came to its end."""
        self.model.pauses[owner] = mode
        self.model.clear = self.model.clear or clear
        if mode == "abort":
            for request in self.in_stage("running", "frozen"):
                request.end(FinishReason.LENGTH, FinishReason.ABORT)
        elif mode == "wait":
            gone = ("running", "frozen") if self.model.missing() is None else ("running",)
            for request in self.in_stage(*gone):
                request.end(FinishReason.LENGTH)
        else:
            for request in self.in_stage("running"):
                request.stage = "frozen"

    def committed(self) -> None:
        """New weights are in: whoever kept KV of the old ones reads it."""
        if not self.model.clear:
            for request in self.in_stage("frozen"):
                request.stale = True

    def poisoned(self, adapter: str | None = None) -> None:
        """Whoever waits for what was broken is let go."""
        for request in self.in_stage("held", "frozen"):
            if adapter is None or request.adapter == adapter:
                request.end(FinishReason.ABORT, FinishReason.LENGTH)

    # -- memory -------------------------------------------------------------------------------

    @rule(tags=TAGS, retention=RETENTIONS)
    def release(self, tags: list[str] | None, retention: str) -> None:
        wanted = ["weights", "kv_cache"] if tags is None else tags
        verb = "release_kv_cache" if wanted == ["kv_cache"] else "release"
        if not self.able(verb, f"retention.{retention}"):
            return
        if self.in_stage("frozen") and not self.able("keep_release"):
            return
        self.do(self.attempt(self.replica.release(tags, retention=Retention(retention)), None))
        if wanted:
            self.quiesced()
        self.model.release(wanted, retention)
        self.opened()

    @rule(tags=TAGS, wake=st.booleans())
    def resume(self, tags: list[str] | None, wake: bool) -> None:
        verb = self.replica.wake_up if wake else self.replica.resume
        self.do(self.attempt(verb(tags), None))
        self.model.resume(["weights", "kv_cache"] if tags is None else tags)
        self.opened()

    @rule(level=st.sampled_from([0, 1, 2]), mode=MODES, clear=st.booleans())
    def sleep(self, level: int, mode: str, clear: bool) -> None:
        retention = ["", "retention.backup", "retention.discard"][level]
        if not self.able(f"pause.{mode}", *(["release", retention] if level else [])):
            return
        if level and not self.able("keep_release") and (mode == "keep" or self.in_stage("frozen")):
            return
        verb = self.replica.sleep(level, mode=PauseMode(mode), clear_cache=clear)
        self.do(self.attempt(verb, None))
        self.paused("sleep", mode, clear)
        if level:
            self.model.release(["weights", "kv_cache"], ["", "backup", "discard"][level])
            self.model.clear = True

    # -- pauses -------------------------------------------------------------------------------

    @rule(owner=OWNERS, mode=MODES, clear=st.booleans())
    def pause(self, owner: str, mode: str, clear: bool) -> None:
        if not self.able(f"pause.{mode}"):
            return
        verb = self.replica.pause_generation(PauseMode(mode), owner=owner, clear_cache=clear)
        self.do(self.attempt(verb, None))
        self.paused(owner, mode, clear)

    @rule(owner=OWNERS)
    def unpause(self, owner: str) -> None:
        self.do(self.replica.resume_generation(owner=owner))
        self.model.drop(owner)
        self.opened()

    # -- updates ------------------------------------------------------------------------------

    @rule(ahead=st.sampled_from([-1, 0, 0, 1, 1, 1, 2]), size=st.integers(0, 3))
    def update(self, ahead: int, size: int) -> None:
        version = max(1, max(g.newest for g in self.model.groups.values()) + ahead)
        outcome = self.model.offered(version)
        sizes = self.ut.bucket_sizes
        transfer = self.rig.transfer(version, bucket_bytes=sizes[size % len(sizes)])
        self._send(transfer, outcome, version)

    @rule(right=st.booleans())
    def patch(self, right: bool) -> None:
        if not self.able("partial"):
            return
        version = max(g.newest for g in self.model.groups.values()) + 1
        base = self.model.version if right else 999
        outcome = self.model.offered(version, base, patch=True)
        scope = Scope.partial(Version(0, -1 if base is None else base))
        self._send(self.rig.transfer(version, scope=scope), outcome, version)

    def _send(self, transfer: MemoryTransfer, outcome: object, version: int) -> None:
        want = outcome if isinstance(outcome, type) else None
        self.do(self.attempt(self.rig.send(transfer), want))
        self.quiesced()
        if outcome == "send":
            self.committed()
            for group in self.model.groups.values():
                if group.fed:
                    group.commit(version)
        assert transfer.bytes_moved == (outcome == "send"), f"{outcome}: {transfer.events}"
        self.opened()

    @rule(kind=st.sampled_from(BEFORE))
    def broken_before(self, kind: type[MemoryTransfer] | None) -> None:
        version = max(g.newest for g in self.model.groups.values()) + 1
        outcome = self.model.offered(version)
        tensors = self.ut.weights(version)
        want: type[HotbunkError] = UpdateFailed if kind is Raising else UpdateRefused
        if kind is None:
            tensors, want = tensors[1:], IncompleteUpdate
        transfer = self.rig.sender(kind or MemoryTransfer, version, tensors=tensors)
        self.do(
            self.attempt(self.rig.send(transfer), outcome if isinstance(outcome, type) else want)
        )
        self.quiesced()
        self.opened()

    @rule(kind=st.sampled_from(AFTER), at=st.sampled_from([0, 1, -1]))
    def broken_after(self, kind: type[MemoryTransfer], at: int) -> None:
        version = max(g.newest for g in self.model.groups.values()) + 1
        outcome = self.model.offered(version)
        size = self.ut.bucket_sizes[min(1, len(self.ut.bucket_sizes) - 1)]
        options: dict[str, Any] = {"bucket_bytes": size}
        if kind is not FailedElsewhere:
            options["at"] = at if kind not in (Raising, Hanging) or at else 1
        transfer = self.rig.sender(kind, version, **options)
        want = outcome if isinstance(outcome, type) else HotbunkError
        self.do(self.attempt(self.rig.send(transfer, deadline=5 * self.ut.moment), want))
        self.quiesced()
        if outcome == "send":
            for group in self.model.groups.values():
                if group.fed:
                    group.write()
            self.poisoned()
        self.opened()

    @precondition(lambda self: self.able("adapter"))
    @rule(name=ADAPTERS, right=st.booleans(), broken=st.booleans(), ahead=st.integers(-1, 1))
    def adapt_base(self, name: str, right: bool, broken: bool, ahead: int) -> None:
        own = self.model.adapters.get(name)
        version = max(1, (own.newest if own else 0) + ahead)
        target = self.model.groups[TARGET]
        base = target.version if right and target.version is not None else 999
        outcome = self.model.offered_adapter(name, version, base)
        scope = Scope.adapter(name, Version(0, base))
        kind = FailedElsewhere if broken else MemoryTransfer
        tensors = self.ut.adapter(name, version)
        transfer = self.rig.sender(kind, version, tensors=tensors, scope=scope)
        want = outcome if isinstance(outcome, type) else None
        if outcome == "send" and broken:
            want = UpdateFailed
        self.do(self.attempt(self.rig.send(transfer), want))
        self.quiesced()
        if outcome == "send":
            group = self.model.adapters.setdefault(name, Group("EMPTY", None, fed=False))
            group.write()
            if broken:
                self.poisoned(name)
            else:
                self.committed()
                group.commit(version)
        self.opened()

    # -- requests -----------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), long=st.booleans(), adapter=st.none() | ADAPTERS)
    def submit(self, which: int, long: bool, adapter: str | None) -> None:
        if adapter is not None and not self.able("adapter"):
            return
        prompt = self.ut.prompts[which]
        tokens = self.ut.long_tokens if long else self.ut.tokens

        async def start() -> Running:
            running = self.rig.submit(prompt, tokens, adapter=adapter)
            await asyncio.sleep(0)
            return running

        request = Tracked(self.do(start()), prompt, adapter)
        self.requests.append(request)
        if self.model.paused and self.model.hopeless(adapter):
            request.end(FinishReason.ABORT)
        self.opened()

    @precondition(lambda self: not self.model.paused and self.model.missing() is None)
    @rule(adapter=st.none() | ADAPTERS, then=st.sampled_from(["go on", "keep", "keep KV", "wait"]))
    def catch(self, adapter: str | None, then: str) -> None:
        """A request caught in the middle; rare enough by chance to have a rule of its own."""
        if self.model.missing(adapter) is not None or len(self.in_stage("running")) > 4:
            return
        prompt = self.ut.prompts[0]

        async def start() -> Running:
            return await self.rig.submit(prompt, self.ut.long_tokens, adapter=adapter).started()

        self.requests.append(Tracked(self.do(start()), prompt, adapter))
        self.opened()
        if then.startswith("keep"):
            self.pause("caller", "keep", then == "keep")
        elif then == "wait":
            self.pause("other", "wait", clear=False)

    @precondition(lambda self: self.model.paused or self.model.missing() is not None)
    @rule()
    def serve_again(self) -> None:
        """Everything that a trainer would do to get going: without it most sequences end in sleep."""
        self.resume(None, wake=True)
        if any(g.state != "RESIDENT" for g in self.model.groups.values()):
            self.update(1, 0)
        for owner in list(self.model.pauses):
            self.unpause(owner)

    @precondition(lambda self: self.able("abort"))
    @rule()
    def abort(self) -> None:
        self.do(self.replica.abort())
        for request in self.in_stage("held", "running", "frozen"):
            request.end(FinishReason.ABORT, FinishReason.LENGTH)

    @precondition(lambda self: bool(self.in_stage("held", "running", "frozen")))
    @rule()
    def drop(self) -> None:
        request = self.in_stage("held", "running", "frozen")[0]

        async def stop() -> None:
            request.running.task.cancel()
            await asyncio.wait({request.running.task})

        self.do(stop())
        self.requests.remove(request)

    @rule()
    def let_time_pass(self) -> None:
        still = self.in_stage("held", "frozen")

        async def wait() -> None:
            await asyncio.sleep(0.001)  # what was made before a freeze is still being read
            before = [len(r.running.tokens) for r in still]
            await self.rig.moment()
            assert [len(r.running.tokens) for r in still] == before, "tokens during a pause"

        self.do(wait())

    # -- what must always hold ----------------------------------------------------------------

    @invariant()
    def as_the_model_says(self) -> None:
        if hasattr(self, "model"):
            self.do(self._compare())

    async def _compare(self) -> None:
        model, status = self.model, await self.replica.status()
        want = {name: str(group) for name, group in model.all_groups().items()}
        assert dict(status.groups) == want, f"groups are {status.groups}, the model has {want}"
        assert (status.kv == "RESIDENT") is model.kv, f"KV is {status.kv}"
        pauses = {p.owner: p.mode.value for p in status.pauses}
        assert pauses == model.pauses, f"pauses are {pauses}, the model has {model.pauses}"
        assert status.servable is (model.missing() is None)
        assert (status.health == "poisoned") is model.poisoned, f"health is {status.health}"
        assert (self.ut.resident(Tag.KV_CACHE) > 0) is model.kv
        if not any(g.mapped for g in model.all_groups().values()):
            assert self.ut.resident(Tag.WEIGHTS) == 0, "released weights take memory"
        await self.replica.check_invariants()
        await self._check_requests()

    async def _check_requests(self) -> None:
        for request in list(self.requests):
            task = request.running.task
            if request.stage == "ended":
                await asyncio.wait({task}, timeout=self.ut.deadlines.drain)
                assert task.done(), f"a request did not end: wanted {request.ends}"
            if not task.done():
                continue
            assert request.stage in ("ended", "running", "frozen"), "a held request ended"
            self._check_end(request)
            self.requests.remove(request)

    def _check_end(self, request: Tracked) -> None:
        task = request.running.task
        error = task.exception()
        if error is not None:
            assert type(error) in request.ends, f"{error!r} and wanted {request.ends}"
            return
        done = task.result()
        assert done.finish_reason in request.ends, f"{done} and wanted {request.ends}"
        check_spans(done)
        if request.stale:
            return
        tokens = list(done.token_ids)
        for span in done.spans:
            context = [*request.prompt, *tokens[: span.start]]
            made, n = tokens[span.start : span.end], span.end - span.start
            step = span.version.step
            if request.adapter is None:
                allowed = [self.ut.golden(context, step, n)]
            elif len(request.adapted) == 1:
                [own] = request.adapted
                allowed = [self.ut.adapter_golden(context, step, request.adapter, own, n)]
            else:
                continue  # it saw several adapters and does not say where they changed
            assert made in allowed, f"{made} were not made by version {step} alone"


def machine_for(make: Callable[[], BackendUnderTest]) -> type[ReplicaMachine]:
    """The machine for one backend; its ``TestCase`` is what a test module exports."""
    return type("Machine", (ReplicaMachine,), {"make": staticmethod(make)})

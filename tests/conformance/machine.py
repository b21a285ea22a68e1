"""A Hypothesis state machine over every verb of a replica, against the plain model.

Needs hypothesis. Use it as::

    TestMine = machine_for(MyEngineUnderTest).TestCase
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hotbunk.conformance.beliefs import Believer, Tracked
from hotbunk.conformance.model import Group
from hotbunk.conformance.rig import Running
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
    Version,
)
from hotbunk.rollout.errors import HotbunkError, IncompleteUpdate, UpdateFailed, UpdateRefused

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


class ReplicaMachine(Believer):
    """All verbs in any order. Updates carry whole versions, so whatever is resident has a golden."""

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


def machine_for(make: Callable[[], BackendUnderTest]) -> type[ReplicaMachine]:
    """The machine for one backend; its ``TestCase`` is what a test module exports."""
    return type("Machine", (ReplicaMachine,), {"make": staticmethod(make)})

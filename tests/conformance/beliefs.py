"""What the machine believes: about requests, and about everything else it compares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant

from hotbunk.conformance.case import ability
from hotbunk.conformance.model import Group, Model
from hotbunk.conformance.rig import Rig, Running, check_spans
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.contract import (
    FinishReason,
    Tag,
)
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.replica import Replica


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


class Believer(RuleBasedStateMachine):
    """A replica, its model, and the requests under way; the rules are the machine's.

    Subclasses set :attr:`make` to what builds the backend's description.
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

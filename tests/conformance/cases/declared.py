"""Declarations that are looked at from both sides."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.cases.broken import check_poisoned, heal
from hotbunk.conformance.rig import NotApplicable, Rig, Running, check_aborted, expect
from hotbunk.conformance.transfers import FailedElsewhere, MemoryTransfer
from hotbunk.rollout.contract import Cache, Gate, PauseMode, Scope, Support, Version
from hotbunk.rollout.errors import (
    BaseMismatch,
    HotbunkError,
    Unsupported,
    UpdateFailed,
    VersionRegression,
    WeightsPoisoned,
)


@case(level=Level.FAULT)
async def the_engine_itself_refuses(rig: Rig) -> None:
    """Whoever asks, past the replica, too: no token after a broken update, as far as its gate goes (N7)."""
    if rig.caps.gate is Gate.PROXY:
        raise NotApplicable("its gate is who stands in front of it: past that it promises nothing")
    await rig.load(1)
    await expect(UpdateFailed, rig.send(rig.sender(FailedElsewhere, 2)))
    await _past_the_replica(rig)
    await rig.load(3)
    if rig.ut.sabotage("commit", "fail"):  # half-written, whatever stands between
        await expect(HotbunkError, rig.send(rig.transfer(4)))
        await _past_the_replica(rig)
    await rig.load(5)
    await rig.check_golden(5)


async def _past_the_replica(rig: Rig) -> None:
    """An engine that guards itself says why; one that is paused lets nobody through, and may wait."""
    asked = Running(rig.engine.generate(rig.request(rig.ut.prompts[0])))
    try:
        if rig.caps.gate is Gate.IN_ENGINE:
            await expect(WeightsPoisoned, asked.result())
            return
        await rig.moment()
        assert not asked.tokens, f"past the replica came {asked.tokens}"
        if asked.done:
            try:
                check_aborted(await asked.result(), retryable=True)
            except WeightsPoisoned:
                pass
    finally:
        asked.task.cancel()
        await asyncio.wait({asked.task})


@case(level=Level.SYNC, capability="delta")
async def deltas(rig: Rig) -> None:
    """A delta over its base makes the next version whole; over another, or twice, it is refused (B17, V11).

    What it holds is the backend's own. One that broke poisons, and no other heals that.
    """
    await rig.load(1)

    def made(base: int, version: int) -> MemoryTransfer:
        scope = Scope.delta(Version(0, base))
        return rig.transfer(version, tensors=rig.ut.delta(base, version), scope=scope)

    first = made(1, 2)
    report = await rig.send(first)
    assert report.applied == len(first.manifest.tensors), f"applied {report.applied} of it"
    assert await rig.label() == Version(0, 2)
    _same_bytes(rig, 2)
    await rig.check_golden(2)
    before = await rig.snapshot()
    for error, again in ((BaseMismatch, made(1, 3)), (VersionRegression, made(1, 2))):
        await expect(error, rig.send(again))
        assert not again.bytes_moved, "bytes moved before the refusal"
        assert await rig.snapshot() == before, "a refused delta changed something"
    await rig.check_golden(2)
    scope = Scope.delta(Version(0, 2))
    broken = rig.sender(FailedElsewhere, 3, tensors=rig.ut.delta(2, 3), scope=scope)
    await expect(UpdateFailed, rig.send(broken))
    await check_poisoned(rig)
    await expect(BaseMismatch, rig.send(made(2, 3)))
    await heal(rig, 3)
    await rig.send(made(3, 4))
    await rig.check_golden(4)


def _same_bytes(rig: Rig, version: int) -> None:
    if rig.sees("bytes"):
        for spec, content in rig.ut.weights(version):
            assert rig.ut.read_weight(spec.name) == content, f"{spec.name} is not {version}'s"


@case()
async def caches_are_reset_by_name(rig: Rig) -> None:
    """reset_caches forgets what is declared, and refuses what is not (C4, C6)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    before = await rig.snapshot()
    for cache in Cache:
        if cache in rig.caps.caches:
            await rig.complete(prompt)
            await rig.replica.reset_caches([cache])
            if cache is Cache.PREFIX:
                done = await rig.complete(prompt)
                rig.check_uncached(done, "tokens were still cached")
        else:
            await expect(Unsupported, rig.replica.reset_caches([cache]))
    await rig.replica.reset_caches()
    assert await rig.snapshot() == before
    await rig.check_golden(1)


@case(smoke=True)
async def emulations_say_how(rig: Rig) -> None:
    """EMULATED and UNSUPPORTED come with a reason."""
    named = [
        rig.caps.release,
        rig.caps.release_kv_cache,
        rig.caps.keep_release,
        rig.caps.abort,
        rig.caps.digest,
        rig.caps.partial,
        rig.caps.adapter,
        rig.caps.delta,
        rig.caps.layout,
        rig.caps.keep_kv,
        rig.caps.samples,
        rig.caps.stop_strings,
        rig.caps.top_logprobs,
        *rig.caps.pause.values(),
    ]
    silent = [a for a in named if a.support is not Support.NATIVE and not a.how]
    assert not silent, "an ability is emulated or missing and nothing says why"
    assert set(rig.caps.pause) <= set(PauseMode)
    assert rig.caps.groups, "no weight group is declared"

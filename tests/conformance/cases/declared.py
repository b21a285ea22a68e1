"""Declarations that are looked at from both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import NotApplicable, Rig, expect
from hotbunk.conformance.transfers import FailedElsewhere
from hotbunk.rollout.contract import Cache, PauseMode, Support, TokenChunk, collect
from hotbunk.rollout.errors import Unsupported, UpdateFailed, WeightsPoisoned


@case(level=Level.FAULT, capability="gate.in_engine")
async def the_engine_itself_refuses(rig: Rig) -> None:
    """Whoever asks, past the replica, too: no token from half-written weights."""
    await rig.load(1)
    await expect(UpdateFailed, rig.send(rig.sender(FailedElsewhere, 2)))
    stream: AsyncIterator[TokenChunk] = rig.engine.generate(rig.request(rig.ut.prompts[0]))
    await expect(WeightsPoisoned, collect(stream))


@case(level=Level.SYNC, capability="delta")
async def deltas(rig: Rig) -> None:
    """Only its refusal is looked at: what a delta holds is the backend's own."""
    raise NotApplicable("nobody says what a delta looks like")


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

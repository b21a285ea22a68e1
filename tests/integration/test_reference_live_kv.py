"""Live KV: frozen requests' KV goes to the host with a release and comes back with the resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager  # noqa: E402
from hotbunk.checkpoint_engine.policy import SyncPolicy  # noqa: E402
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport  # noqa: E402
from hotbunk.rollout.contract import (  # noqa: E402
    PauseMode,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.handle import LocalHandle  # noqa: E402

pytestmark = pytest.mark.anyio
LENGTH = 60


def manager_of(target: Any) -> CheckpointEngineManager:
    """Syncs that leave frozen requests as they are."""
    policy = SyncPolicy(pause=PauseMode.KEEP, clear_cache=False)
    return CheckpointEngineManager([LocalHandle(target)], NaiveTransport(), policy=policy)


@pytest.mark.parametrize("through", ["kv only", "sleep"])
async def test_kept_kv_comes_back_and_nothing_is_computed_again(
    tiny: Any, kit: Any, replica: Any, through: str
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(6, longest=30))
    await frozen.freeze()
    made = frozen.made()
    for _ in range(3):
        if through == "kv only":
            report = await target.release_kv_cache(keep_kv=True)
        else:
            report = await target.sleep(1, mode=PauseMode.KEEP, clear_cache=False, keep_kv=True)
        assert (report.kept_requests, report.recomputed_requests) == (6, 0)
        memory = await target.memory()
        assert memory.resident(Tag.KV_CACHE) == 0
        assert memory.backup(Tag.KV_CACHE) > 0, "nobody says what the saved KV takes"
        await (target.resume_kv_cache() if through == "kv only" else target.wake_up())
        assert (await target.memory()).backup(Tag.KV_CACHE) == 0
        assert (await target.status()).is_paused, "the caller's pause went with the wake"
    assert await frozen.thaw() == frozen.goldens(model)
    left = sum(LENGTH - n for n in made)
    assert frozen.computed == left, f"{frozen.computed} tokens computed and {left} were missing"


async def test_without_keep_kv_they_are_recomputed_and_counted_c3(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(4, shortest=8, longest=30))
    await frozen.freeze()
    made = frozen.made()
    report = await target.release_kv_cache()
    assert (report.kept_requests, report.recomputed_requests) == (0, 4)
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(model)
    assert frozen.computed > sum(LENGTH - n for n in made)


async def test_a_pause_that_clears_the_cache_leaves_nothing_to_keep_c9(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(), block_size=8)
    frozen = kit.frozen(target, kit.prompts(3, longest=30))
    await frozen.freeze(clear_cache=True)
    report = await target.release_kv_cache(keep_kv=True)
    assert (report.kept_requests, report.recomputed_requests) == (0, 3)
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(tiny())


async def test_shared_prefixes_are_saved_once_and_fit_where_they_were(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """Eight requests share a long prompt; eight private copies of it would not fit the pool."""
    model = tiny()
    target = await replica(model, block_size=8, kv_cache_tokens=640)
    [prompt] = kit.prompts(1, shortest=121, longest=121)
    await kit.complete(target, prompt, 1)
    tails = [[*prompt, n] for n in range(8)]
    frozen = kit.frozen(target, tails)
    await frozen.freeze()
    used = (await target.status()).backend.kv_blocks_used
    report = await target.release_kv_cache(keep_kv=True)
    assert report.kept_requests == 8
    whole = target.backend._runner._kv.numel() * 4
    assert report.backup(Tag.KV_CACHE) == whole * used // 80
    await target.resume_kv_cache()
    assert (await target.status()).backend.preemptions == 0
    assert await frozen.thaw() == frozen.goldens(model)


@pytest.mark.parametrize("when", ["while away", "after it came back"])
async def test_an_update_outdates_what_was_kept_c1_v7(
    tiny: Any, kit: Any, replica: Any, when: str
) -> None:
    """While it is away it is dropped: the rest is what fresh new weights make of the prefix."""
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one, block_size=8)
    manager = manager_of(target)
    frozen = kit.frozen(target, kit.prompts(4, longest=20))
    await frozen.freeze()
    made = frozen.made()
    report = await target.release_kv_cache(keep_kv=True)
    assert report.kept_requests == 4
    if when == "after it came back":
        await target.resume_kv_cache()
    await manager.update_weights(kit.source(two), Version(0, 1))
    assert (await target.memory()).backup(Tag.KV_CACHE) == 0
    await target.resume_kv_cache()
    tokens = await frozen.thaw()
    for prompt, n, got in zip(frozen.prompts, made, tokens, strict=True):
        assert got[:n] == kit.golden(one, prompt, n)
        if when == "while away":
            assert got[n:] == kit.golden(two, [*prompt, *got[:n]], LENGTH - n)
    if when == "after it came back":  # stale by the caller's wish, and nobody else's
        assert frozen.computed == sum(LENGTH - n for n in made)
        for prompt, got in zip(frozen.prompts, tokens, strict=True):
            again = [*prompt, *got]
            assert list((await kit.complete(target, again, 8)).token_ids) == kit.golden(
                two, again, 8
            )


async def test_the_same_version_again_moves_nothing_and_keeps_the_kv_h19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    manager = manager_of(target)
    await manager.update_weights(kit.source(model), Version(0, 1))
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    made = frozen.made()
    await target.release_kv_cache(keep_kv=True)
    await manager.update_weights(kit.source(model), Version(0, 1))
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(model)
    assert frozen.computed == sum(LENGTH - n for n in made)


async def test_requests_that_end_while_their_kv_is_away_leave_their_blocks(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """Dropped, aborted or at their deadline: the others go on, and the pool is whole."""
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(5, longest=20))
    await frozen.freeze()
    await target.release_kv_cache(keep_kv=True)
    ids = (await target.status()).running
    assert (await target.abort([ids[1]])).aborted == (ids[1],)
    await frozen.streams[2].aclose()  # type: ignore[attr-defined]
    again = await target.release_kv_cache(keep_kv=True)
    assert again.kept_requests == 3
    await target.resume_kv_cache()
    await target.resume_generation()
    for n in (0, 3, 4):
        rest = await collect(frozen.streams[n])
        assert frozen.begun[n] + list(rest.token_ids) == kit.golden(
            model, frozen.prompts[n], LENGTH
        )
    assert (await target.status()).backend.kv_blocks_used == 0
    target.backend.check_invariants()


async def test_a_second_release_without_keep_drops_what_the_first_one_kept(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    await target.release_kv_cache(keep_kv=True)
    report = await target.release()
    assert (report.kept_requests, report.recomputed_requests) == (0, 3)
    assert report.backup(Tag.KV_CACHE) == 0
    await target.resume(["kv_cache"])
    await target.resume()
    manager = manager_of(target)
    await manager.update_weights(kit.source(model), Version(0, 1))
    assert await frozen.thaw() == frozen.goldens(model)


async def test_samples_of_one_request_count_as_one(tiny: Any, kit: Any, replica: Any) -> None:
    target = await replica(tiny(), block_size=8)
    stream = target.generate(kit.request([1, 2, 3], LENGTH, n=3))
    await kit.first_tokens(stream, 9)
    await target.pause_generation(PauseMode.KEEP, clear_cache=False)
    report = await target.release_kv_cache(keep_kv=True)
    assert (report.kept_requests, report.recomputed_requests) == (1, 0)
    report = await target.release_kv_cache()
    assert (report.kept_requests, report.recomputed_requests) == (0, 1)
    await stream.aclose()


async def test_kv_that_was_lost_and_is_there_again_does_not_count_as_lost(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze(clear_cache=True)
    await target.resume_generation()
    more = await asyncio.gather(*(kit.first_tokens(s, 5) for s in frozen.streams))
    frozen.begun = [a + b for a, b in zip(frozen.begun, more, strict=True)]
    await target.pause_generation(PauseMode.KEEP, clear_cache=False)
    report = await target.release_kv_cache(keep_kv=True)
    assert (report.kept_requests, report.recomputed_requests) == (3, 0)
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(model)


async def test_an_adapter_update_drops_only_its_users_kv(tiny: Any, kit: Any, replica: Any) -> None:
    from hotbunk.conformance.kit import make_adapter, merged
    from hotbunk.conformance.transfers import MemoryTransfer
    from hotbunk.rollout.contract import Scope, TensorSpec
    from hotbunk.rollout.kernels import as_bytes

    model = tiny()
    target = await replica(model, block_size=8)

    async def load(step: int) -> Any:
        scope, version = Scope.adapter("a", Version(0, 0)), Version(0, step)
        tensors = make_adapter(kit.loaded(model), "a", step)
        content = [
            (
                TensorSpec(n, tuple(t.shape), "float32", t.numel() * 4, "adapter:a"),
                bytes(as_bytes(t).tolist()),
            )
            for n, t in tensors.items()
        ]
        transfer = MemoryTransfer(content, version=version, scope=scope)
        await target.update_weights(transfer, version=version, scope=scope)
        return merged(kit.loaded(model), tensors)

    from hotbunk.conformance.kit import greedy

    old = await load(1)
    frozen = kit.frozen(target, [[1, 2, 3, 4], [5, 6, 7]])
    user = target.generate(msgspec.structs.replace(kit.request([9] * 12, 40), adapter="a"))
    begun = await kit.first_tokens(user, 3)
    await frozen.freeze()
    n, *made = frozen.made()
    assert (await target.release_kv_cache(keep_kv=True)).kept_requests == 3
    new = await load(2)
    await target.resume_kv_cache()
    base = await frozen.thaw()
    rest = await collect(user)
    assert base == frozen.goldens(model)
    got = begun + list(rest.token_ids)
    assert got[:n] == greedy(old, [9] * 12, n)
    assert got[n:] == greedy(new, [*[9] * 12, *got[:n]], 40 - n)
    assert frozen.computed == sum(LENGTH - k for k in made) + (12 + n) + (40 - n - 1)

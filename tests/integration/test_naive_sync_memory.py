"""Sync and memory: who holds what when, the order of verbs, fences, cancellation, and no stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import (
    Outcome,
    ReleaseKV,
    SyncPolicy,
)
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Deployment,
    PauseMode,
    Retention,
    Tag,
    Version,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.memory import HostPool
from hotbunk.trainer_hooks.recipes.models import build_tiny, load_model
from hotbunk.trainer_hooks.share import PooledTrainer

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
BUCKET = 65_536


# -- who holds what, when ---------------------------------------------------------------------


async def test_peak_is_trainer_weights_and_one_bucket_and_no_kv_m1_m2(
    tiny: Any, kit: Any, replica: Any, pool: HostPool
) -> None:
    target = await replica(tiny(seed=0))
    model = load_model(tiny(seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    share = PooledTrainer(model, optimizer, pool, offload=True)
    for state in optimizer.state.values():
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(1.0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    seen: list[tuple[int, int, int]] = []

    async def sample() -> None:
        engine = target.backend._runner.pool.audit()
        trainer = pool.audit()
        seen.append(
            (
                engine.resident(Tag.KV_CACHE),
                engine.resident() + trainer.resident(),
                trainer.resident("bucket"),
            )
        )

    async def let_go() -> None:
        assert pool.audit().resident("bucket") == 0, "the bucket is given back before that"
        log.append("let_go")
        await share.offload()

    log: list[str] = []
    manager = CheckpointEngineManager(
        [kit.recording(target, log)],
        NaiveTransport(pool, sample),
        policy=SyncPolicy(bucket_bytes=BUCKET),
    )
    await kit.complete(target, PROMPT)
    weights = (await target.memory()).resident(Tag.WEIGHTS)
    await manager.sleep_replicas()
    assert (await target.memory()).resident() == 0
    holding = pool.audit().resident("trainer")
    log.clear()
    report = await manager.update_weights(module_source(model), Version(0, 1), let_go=let_go)
    (one,) = report.outcomes
    for phase in ("wake_weights", "sync"):
        assert one.memory[phase].tags == {"weights": weights, "kv_cache": 0}, phase
    assert one.memory["wake_kv"].total == (await target.memory()).resident()
    assert one.memory["sync"].measured_by == "process"
    assert log == [
        "wake_up weights",
        "update_weights",
        "let_go",
        "wake_up kv_cache",
        "resume_generation",
    ]
    assert len(seen) > 5
    page = 4096
    assert {kv for kv, _, _ in seen} == {0}
    assert seen[0][2] == 0, "the first look is before the first bucket"
    assert all(0 < bucket <= BUCKET for _, _, bucket in seen[1:])
    assert max(total for _, total, _ in seen) <= holding + weights + BUCKET + page
    assert pool.audit().resident() == 0
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


@pytest.mark.parametrize("offload_kv", [ReleaseKV.AUTO, ReleaseKV.NEVER, ReleaseKV.ALWAYS])
async def test_kv_of_an_awake_engine_is_released_only_where_the_policy_says_always(
    tiny: Any, kit: Any, replica: Any, pool: HostPool, offload_kv: ReleaseKV
) -> None:
    target, log, kv = await replica(tiny(seed=0)), list[str](), list[bool]()

    async def sample() -> None:
        arenas = target.backend._runner.pool.arenas()
        kv.extend(a.released for a in arenas if a.tag == Tag.KV_CACHE)

    policy = SyncPolicy(bucket_bytes=BUCKET, release_kv=offload_kv)
    manager = CheckpointEngineManager(
        [kit.recording(target, log)],
        NaiveTransport(pool, sample),
        deployment=Deployment.STANDALONE,
        policy=policy,
    )
    await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert set(kv) == {offload_kv is ReleaseKV.ALWAYS}
    released = ["release_kv_cache"] if offload_kv is ReleaseKV.ALWAYS else []
    resumed = ["resume_kv_cache"] if offload_kv is ReleaseKV.ALWAYS else []
    assert log == [
        "pause_generation",
        *released,
        "update_weights",
        *resumed,
        "resume_generation",
    ]
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_kv_that_a_fenced_sync_left_released_comes_back_with_the_next_one(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    original = target.backend.resume

    async def full(tags: Any = None) -> Any:
        raise errors.ResumeOutOfMemory("kv_cache", 1 << 30, 4096)

    target.backend.resume = full
    source, always = kit.source(tiny(seed=1)), SyncPolicy(release_kv=ReleaseKV.ALWAYS)
    report = await kit.failed(manager.update_weights(source, Version(0, 1), policy=always))
    assert report.outcomes[0].outcome is Outcome.FENCED
    assert (await target.status()).is_paused
    target.backend.resume = original
    await manager.update_weights(source, Version(0, 1))  # a policy that releases nothing itself
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_kv_released_around_a_refused_sync_comes_back(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    policy = SyncPolicy(release_kv=ReleaseKV.ALWAYS)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(), policy=policy)
    report = await kit.failed(manager.update_weights(kit.source(tiny("qwen3")), Version(0, 1)))
    assert report.outcomes[0].outcome is Outcome.ROLLED_BACK
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=0), PROMPT)


@pytest.mark.parametrize("deployment", list(Deployment))
async def test_free_cache_engine_off_means_no_release_and_no_resume_f1(
    tiny: Any, kit: Any, replica: Any, deployment: Deployment
) -> None:
    log: list[str] = []
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager(
        [kit.recording(target, log)],
        NaiveTransport(),
        deployment=deployment,
        free_cache_engine=False,
        policy=SyncPolicy(release_kv=ReleaseKV.ALWAYS),
    )
    slept = await manager.sleep_replicas()
    assert "no-op" in slept[target.name].emulated
    await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    await manager.wake_replicas()
    assert log == ["pause_generation", "update_weights", "resume_generation"]
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_colocated_sleep_keeps_a_backup_and_wakes_without_a_sync(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny(seed=0)
    target = await replica(model)
    manager = CheckpointEngineManager(
        [LocalHandle(target)], NaiveTransport(), deployment=Deployment.COLOCATED
    )
    await manager.sleep_replicas()
    memory = await target.memory()
    assert memory.resident() == 0
    assert memory.backup(Tag.WEIGHTS) > 0
    assert memory.backup(Tag.KV_CACHE) == 0
    await manager.wake_replicas()
    assert (await target.memory()).backup() == 0
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(model, PROMPT)


async def test_standalone_sleep_does_nothing_and_says_so(tiny: Any, kit: Any, replica: Any) -> None:
    log: list[str] = []
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager(
        [kit.recording(target, log)], NaiveTransport(), deployment=Deployment.STANDALONE
    )
    assert "standalone" in (await manager.sleep_replicas())[target.name].emulated
    await manager.wake_replicas()
    assert log == []
    assert len((await kit.complete(target, PROMPT)).token_ids) == 12


# -- the event loop ---------------------------------------------------------------------------


async def test_the_event_loop_never_stalls_during_a_sync_h11(
    replica: Any, tmp_path: Any, kit: Any
) -> None:
    model = build_tiny(tmp_path / "bigger", hidden=512, layers=6, heads=8)
    target = await replica(model)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    clock = asyncio.get_running_loop().time

    class Gathering:
        """A source whose gather takes longer than a loop may stand still."""

        def specs(self) -> Any:
            return kit.source(model).specs()

        def tensors(self) -> Iterator[Any]:
            time.sleep(0.3)
            yield from kit.source(model).tensors()

    async def longest_gap(syncing: asyncio.Event) -> float:
        last, longest = clock(), 0.0
        while not syncing.is_set():
            await asyncio.sleep(0.005)
            now = clock()
            longest, last = max(longest, now - last), now
        return longest

    stalls = []
    for step in range(1, 5):
        await manager.sleep_replicas()
        done = asyncio.Event()
        watching = asyncio.ensure_future(longest_gap(done))
        report = await manager.update_weights(Gathering(), Version(0, step))
        done.set()
        stalls.append(await watching)
        assert report.nbytes > 50 << 20
    # What a sync does to the loop it does every time; a busy machine does not.
    assert min(stalls) < 0.2, stalls


async def test_a_sync_waits_for_nobody_under_keep_and_release(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """A pool of frozen requests through sleep, sync and wake: all recomputed, all finish."""
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one)
    policy = SyncPolicy(pause=PauseMode.KEEP)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(), policy=policy)
    prompts = kit.prompts(6)
    streams = [target.generate(kit.request(p, 80)) for p in prompts]
    begun = [await kit.first_tokens(s, 2) for s in streams]
    slept = await manager.sleep_replicas()
    assert slept[target.name].recomputed_requests == len(prompts)
    assert (await target.memory()).resident() == 0
    await manager.update_weights(kit.source(two), Version(0, 1))
    for prompt, start, stream in zip(prompts, begun, streams, strict=True):
        chunks = [c async for c in stream]
        old = start + [t for c in chunks if c.version == Version(0, 0) for t in c.token_ids]
        new = [t for c in chunks if c.version == Version(0, 1) for t in c.token_ids]
        assert new == kit.golden(two, prompt + old, 80 - len(old))
    assert (await target.release(retention=Retention.BACKUP)).resident() == 0

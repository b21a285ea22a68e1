"""Sleep of a real vLLM on the CPU: memory goes, comes back, and no step touches what is away."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.transfers import Corrupted, MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.engine import VllmEngine
from hotbunk.rollout.contract import (
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.replica import Replica

pytestmark = pytest.mark.anyio
_ids = count()
LEFT = 0.05  # of what was resident


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, **sampling})
    return GenerateRequest(f"z{next(_ids)}", tuple(prompt), chosen)


async def until(done: Any, seconds: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    for _ in iter(done, True):
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.005)


async def send(
    replica: Replica, it: VllmUnderTest, version: int, kind: Any = MemoryTransfer
) -> Any:
    transfer = kind(it.weights(version), version=Version(0, version))
    return await replica.update_weights(transfer, version=Version(0, version))


def rss(it: VllmUnderTest) -> int:
    """Bytes of vLLM's process that are resident, its shared memory included."""
    with open(f"/proc/{it._where['pid']}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("level", [1, 2])
async def test_little_of_what_is_tagged_stays_and_output_is_the_same(
    level: int, replica: Replica, untied: VllmUnderTest
) -> None:
    """Stock vLLM answers sleep with success on CPUs and frees nothing."""
    before = {tag: untied.resident(tag) for tag in Tag}
    process = rss(untied)
    addresses = [place[2] for place in untied._where["tensors"].values()]
    report = await replica.sleep(level)
    assert sum(untied.resident(tag) for tag in Tag) <= LEFT * sum(before.values())
    assert report.freed >= (1 - LEFT) * sum(before.values())
    assert process - rss(untied) >= (1 - LEFT) * sum(before.values())
    await replica.wake_up(["weights"])
    if level == 2:
        await send(replica, untied, 1)
    await replica.wake_up(["kv_cache"])
    version = level - 1
    for prompt in untied.prompts:
        done = await collect(replica.generate(ask(prompt, 16)))
        assert list(done.token_ids) == untied.golden(prompt, version, 16)
    assert [place[2] for place in untied._where["tensors"].values()] == addresses
    for spec, content in untied.weights(version):
        assert untied.read_weight(spec.name) == content


async def test_all_state_is_that_of_a_backup_after_a_discard_and_the_same_update(
    replica: Replica, untied: VllmUnderTest
) -> None:
    digests = []
    for version, level in ((1, 1), (2, 2)):
        await replica.sleep(level)
        await replica.wake_up(["weights"])
        transfer = MemoryTransfer(untied.weights(1), version=Version(0, version))
        await replica.update_weights(transfer, version=Version(0, version))
        await replica.wake_up()
        digests.append((await replica.digest()).values)
    assert digests[0] == digests[1]
    assert len(digests[0]) > len(untied.weights(1)), "buffers are state, too"


async def test_kv_alone_goes_and_weights_provably_stay(
    replica: Replica, untied: VllmUnderTest
) -> None:
    prompt = untied.prompts[0]
    await collect(replica.generate(ask(prompt)))
    digest, weights = (await replica.digest()).values, untied.resident(Tag.WEIGHTS)
    report = await replica.release_kv_cache()
    assert untied.resident(Tag.KV_CACHE) == 0
    assert untied.resident(Tag.WEIGHTS) == weights
    assert report.freed > 0
    assert (await replica.digest()).values == digest
    with pytest.raises(errors.KVNotResident):
        await collect(replica.generate(ask(prompt)))
    await replica.resume_kv_cache()
    done = await collect(replica.generate(ask(prompt)))
    assert done.cached_tokens == 0, "its KV was forgotten with the memory"
    assert list(done.token_ids) == untied.golden(prompt, 0, 8)


async def test_requests_that_come_asleep_are_held_and_served(
    replica: Replica, untied: VllmUnderTest
) -> None:
    await replica.sleep(2)
    held = [asyncio.create_task(collect(replica.generate(ask(p)))) for p in untied.prompts]
    await until(lambda: len(replica._gate.entries) == len(held))
    await replica.wake_up(["weights"])
    await send(replica, untied, 1)
    assert not any(task.done() for task in held)
    await replica.wake_up(["kv_cache"])
    for prompt, task in zip(untied.prompts, held, strict=True):
        done = await task
        assert list(done.token_ids) == untied.golden(prompt, 1, 8)
        assert [span.version for span in done.spans] == [Version(0, 1)]


async def test_everything_awake_without_weights_makes_no_token(
    replica: Replica, untied: VllmUnderTest
) -> None:
    """vLLM's own wake_up schedules at once: garbage, stamped with the old version."""
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(replica.generate(ask(prompt, 60))))
    engine: Any = untied._engine
    await until(lambda: any(s.tokens > 5 for s in engine._flight.streams.values()))
    await replica.sleep(2, mode=PauseMode.KEEP)
    [flight] = engine._flight.streams.values()
    kept = flight.tokens
    await replica.wake_up()
    steps = (await engine.status()).steps
    await asyncio.sleep(0.2)
    assert (flight.tokens, (await engine.status()).steps) == (kept, steps)
    assert (await replica.status()).backend.paused
    with pytest.raises(errors.WeightsNotLoaded):
        await collect(replica.generate(ask(prompt)))
    await send(replica, untied, 1)
    await replica.resume_generation()
    done = await running
    assert list(done.token_ids[:kept]) == untied.golden(prompt, 0, kept)
    rest = untied.golden([*prompt, *done.token_ids[:kept]], 1, 60 - kept)
    assert list(done.token_ids[kept:]) == rest


async def test_the_engine_itself_opens_over_nothing(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """A step would touch memory that is not there, and take the process with it."""
    await engine.pause_generation()
    await engine.release(retention=Retention.BACKUP)
    with pytest.raises(errors.WeightsNotLoaded):
        await engine.resume_generation()
    transfer = MemoryTransfer(untied.weights(1), version=Version(0, 1))
    with pytest.raises(errors.WeightsNotResident):
        await engine.update_weights(transfer, version=Version(0, 1))
    assert not transfer.events
    await engine.resume([Tag.WEIGHTS])
    with pytest.raises(errors.KVNotResident):
        await engine.resume_generation()
    await engine.resume()
    await engine.resume_generation()
    done = await collect(engine.generate(ask(untied.prompts[1])))
    assert list(done.token_ids) == untied.golden(untied.prompts[1], 0, 8)


async def test_nothing_is_released_under_running_steps(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(engine.generate(ask(prompt, 100))))
    await until(lambda: bool(engine._flight.streams))
    before = untied.resident(Tag.KV_CACHE)
    with pytest.raises(errors.RequestsInFlight):
        await engine.release_kv_cache()
    assert untied.resident(Tag.KV_CACHE) == before
    assert list((await running).token_ids) == untied.golden(prompt, 0, 100)


async def test_a_callers_pause_survives_keep_release_update_and_wake(
    replica: Replica, untied: VllmUnderTest
) -> None:
    """Before-tokens stand; the rest is what a fresh engine makes of them: all of it, in float32."""
    requests = [ask(prompt, 80) for prompt in untied.prompts]
    reading = [asyncio.create_task(collect(replica.generate(r))) for r in requests]
    engine: Any = untied._engine
    streams = engine._flight.streams
    await until(lambda: len(streams) == 3 and all(s.tokens > 10 for s in streams.values()))
    await replica.pause_generation(PauseMode.KEEP)
    kept = {key: stream.tokens for key, stream in streams.items()}
    report = await replica.release_kv_cache()
    assert report.recomputed_requests == 3
    await send(replica, untied, 1)
    await replica.resume_kv_cache()
    status = await replica.status()
    assert [pause.owner for pause in status.pauses] == ["caller"]
    assert status.backend.paused
    assert {key: stream.tokens for key, stream in streams.items()} == kept
    await replica.resume_generation()
    for request, task in zip(requests, reading, strict=True):
        done, at = await task, kept[request.request_id]
        assert list(done.token_ids[:at]) == untied.golden(request.prompt, 0, at)
        rest = untied.golden([*request.prompt, *done.token_ids[:at]], 1, 80 - at)
        assert list(done.token_ids[at:]) == rest
        spans = [(s.version, s.start, s.end) for s in done.spans]
        assert spans == [(Version(0, 0), 0, at), (Version(0, 1), at, 80)]


async def test_caches_are_forgotten_and_the_commit_made_before_kv_comes_back(
    replica: Replica, untied: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind, connectors too: vLLM may schedule as soon as KV is there."""
    engine: Any = untied._engine
    happened: list[str] = []

    def spy(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            said = kwargs.get("reset_connector")
            happened.append(name if said is None else f"{name} connectors={said}")
            return await inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    await replica.sleep(2)
    await replica.wake_up(["weights"])
    for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
        spy(engine.llm, name)
    for name in ("label", "resume", "resume_generation"):
        spy(engine, name)
    await send(replica, untied, 1)
    await replica.wake_up(["kv_cache"])
    assert happened == [
        "reset_prefix_cache connectors=True",
        "reset_mm_cache",
        "reset_encoder_cache",
        "label",
        "resume",
        "resume_generation",
    ]


async def test_twenty_cycles_are_flat(replica: Replica, untied: VllmUnderTest) -> None:
    sizes, left = [], set()
    prompt = untied.prompts[1]
    for cycle in range(20):
        await replica.sleep(1 + cycle % 2)
        left.add(sum(untied.resident(tag) for tag in Tag))
        await replica.wake_up(["weights"])
        if cycle % 2:
            await send(replica, untied, cycle)
        await replica.wake_up(["kv_cache"])
        await collect(replica.generate(ask(prompt, 2)))
        sizes.append(rss(untied))
    assert left == {0}
    assert max(sizes[10:]) - max(sizes[4:10]) < 2 << 20, sizes


async def test_a_broken_update_asleep_is_fenced_and_a_whole_one_heals(
    replica: Replica, untied: VllmUnderTest
) -> None:
    await replica.sleep(2)
    await replica.wake_up(["weights"])
    with pytest.raises(errors.VerifyFailed):
        await send(replica, untied, 1, Corrupted)
    await replica.wake_up(["kv_cache"])
    with pytest.raises(errors.WeightsPoisoned):
        await collect(replica.generate(ask(untied.prompts[0])))
    await send(replica, untied, 2)
    done = await collect(replica.generate(ask(untied.prompts[0])))
    assert list(done.token_ids) == untied.golden(untied.prompts[0], 2, 8)


async def test_merely_paused_is_not_asleep(replica: Replica) -> None:
    """vLLM's own is_sleeping says so of a paused engine."""
    await replica.pause_generation()
    status = await replica.status()
    assert (status.is_paused, status.is_sleeping) == (True, False)
    await replica.sleep(1)
    assert (await replica.status()).is_sleeping
    await replica.wake_up()
    status = await replica.status()
    assert (status.is_paused, status.is_sleeping) == (True, False)


async def test_a_tag_that_does_not_exist_changes_nothing(
    replica: Replica, untied: VllmUnderTest
) -> None:
    """vLLM wakes "bogus" with success."""
    with pytest.raises(errors.UnknownTag):
        await replica.release(["bogus"])
    with pytest.raises(errors.UnknownTag):
        await replica.wake_up(["bogus"])
    done = await collect(replica.generate(ask(untied.prompts[0])))
    assert list(done.token_ids) == untied.golden(untied.prompts[0], 0, 8)

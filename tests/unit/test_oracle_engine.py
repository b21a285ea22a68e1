"""The oracle as an engine: stamps, caches, batching, and loud misuse."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hotbunk.conformance.backends.oracle_kit import PROMPT, ask, load, request, running
from hotbunk.conformance.rig import expect
from hotbunk.rollout.backends.oracle import (
    EngineDied,
    decode_token,
)
from hotbunk.rollout.contract import (
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.errors import (
    SessionError,
    Unsupported,
)

pytestmark = pytest.mark.anyio


async def test_stale_kv_shows_in_every_token() -> None:
    """clear_cache=False keeps the KV of a frozen request: its stamp says so."""
    async with running() as (replica, _):
        await load(replica, 1)
        kept_request = await ask(replica, "x", 30).started()
        report = await replica.pause_generation(PauseMode.KEEP, clear_cache=False)
        assert report.stale_tokens >= len(PROMPT)
        kept = len(kept_request.tokens)
        await load(replica, 2)
        await replica.resume_generation()
        done = await kept_request.task
        infos = [decode_token(token) for token in done.token_ids]
        assert {i.version for i in infos[kept:]} == {Version(0, 2)}
        assert {i.kv.version for i in infos} == {Version(0, 1)}
        assert infos[0].weights == infos[0].kv.digest != infos[-1].weights


async def test_the_encoder_cache_dies_with_its_weights() -> None:
    """The same image before and after an update of the encoder (C6)."""
    async with running() as (replica, engine):
        stamps = []
        for step in (1, 2):
            await load(replica, step)
            for name in ("a", "b"):
                done = await collect(
                    replica.generate(request(f"{name}{step}", media={"image": name}))
                )
                [encoder] = {decode_token(t).encoder for t in done.token_ids}
                stamps.append(encoder)
            assert len(engine.encoder_cache) == 2
        assert 0 not in stamps
        assert stamps[:2] != stamps[2:]
        plain = await collect(replica.generate(request("plain")))
        assert {decode_token(t).encoder for t in plain.token_ids} == {0}


async def test_prefixes_are_shared_by_prompt_adapter_and_media() -> None:
    async with running() as (replica, _):
        first = await collect(replica.generate(request("a")))
        again = await collect(replica.generate(request("b")))
        assert (first.cached_tokens, again.cached_tokens) == (0, 8)
        other = await collect(replica.generate(request("c", media={"image": 1})))
        assert other.cached_tokens == 0
        longer = await collect(
            replica.generate(request("d", prompt=(*PROMPT, *first.token_ids[:4])))
        )
        assert longer.cached_tokens == 12


async def test_batching_keeps_to_slots_and_blocks() -> None:
    async with running(max_running=2, kv_blocks=10) as (replica, engine):
        requests = [ask(replica, str(n), 8) for n in range(5)]
        most = 0
        while not all(r.done for r in requests):
            await asyncio.sleep(0.01)
            most = max(most, len(engine.scheduler.running))
            assert engine.scheduler.blocks_used <= 10
        assert most == 2
        assert {len((await r.task).token_ids) for r in requests} == {8}
        assert engine.scheduler.blocks_used == 0
        with pytest.raises(Exception, match="KV blocks"):
            await collect(replica.generate(request("huge", 1000)))


async def test_steps_take_time_and_idle_ones_none() -> None:
    async with running(step_time=0.5) as (replica, engine):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await collect(replica.generate(request("x", 10)))
        assert loop.time() - began == pytest.approx(5.0)
        steps = engine.scheduler.steps
        await asyncio.sleep(3600)
        assert engine.scheduler.steps == steps == 10


async def test_stop_tokens_and_seeds() -> None:
    async with running() as (replica, _):
        plain = await collect(replica.generate(request("a")))
        sampling = Sampling(0, 8, stop_token_ids=(plain.token_ids[3],))
        stopped = await collect(replica.generate(GenerateRequest("b", PROMPT, sampling)))
        assert stopped.token_ids == plain.token_ids[:4]
        assert stopped.finish_reason == "stop"
        drawn = [
            await collect(
                replica.generate(GenerateRequest(f"s{n}", PROMPT, Sampling(1.0, 8, seed)))
            )
            for n, seed in enumerate((1, 1, 2))
        ]
        assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


@pytest.mark.parametrize("update", [False, True])
async def test_saved_kv_is_used_again_unless_the_weights_changed(update: bool) -> None:
    async with running() as (replica, engine):
        await load(replica, 1)
        kept_request = await ask(replica, "x", 30).started()
        await replica.pause_generation(PauseMode.KEEP, clear_cache=False)
        report = await engine.release_kv_cache(keep_kv=True)
        assert (report.kept_requests, report.recomputed_requests) == (1, 0)
        assert report.backup(Tag.KV_CACHE) == engine.device.host_used > 0
        [entry] = engine.scheduler.frozen()
        assert entry.kv
        if update:
            await load(replica, 2)
        assert bool(entry.kv) is not update
        await engine.resume_kv_cache()
        assert engine.device.host_used == 0
        await replica.resume_generation()
        done = await kept_request.task
        stamps = [decode_token(token).kv for token in done.token_ids]
        assert stamps[-1].version == Version(0, 2 if update else 1)


@pytest.mark.parametrize("more", [{"n": 2}, {"stop": ("x",)}, {"logprobs": 1}], ids=str)
async def test_what_it_cannot_sample_is_refused(more: dict[str, Any]) -> None:
    async with running() as (replica, _):
        asked = GenerateRequest("x", PROMPT, Sampling(0, 8, **more))
        await expect(Unsupported, collect(replica.generate(asked)))


async def test_misuse_is_loud() -> None:
    """What a real engine answers with a crash: verbs without a pause, memory that is gone."""
    async with running() as (replica, engine):
        for verb in (engine.release(), engine.release_kv_cache()):
            await expect(SessionError, verb)
        await engine.pause_generation()
        await engine.release([Tag.WEIGHTS], retention=Retention.DISCARD)
        await engine.resume_generation()
        await expect(EngineDied, collect(engine.generate(request("x"))))
        await expect(EngineDied, engine.status())
        await replica.close()
        await engine.close()
        assert engine.device.resident() == 0


async def test_thousands_of_verbs_a_second() -> None:
    """Cheap enough to be driven by a state machine."""
    async with running() as (replica, _):
        began = time.perf_counter()
        for _ in range(500):
            await replica.sleep(1)
            await replica.wake_up()
        assert time.perf_counter() - began < 5


async def test_an_image_seen_before_a_sleep_is_encoded_anew_after_it() -> None:
    """The cache of an encoder is gone with its weights, on both sides: no empty answer (C7, C6)."""
    async with running() as (replica, engine):
        await load(replica, 1)
        encoders = []
        for cycle in range(3):
            name = f"image{cycle}"
            done = await collect(replica.generate(request(name, media={"image": "same"})))
            assert len(done.token_ids) == 8, "an image that was seen before gave an empty answer"
            [encoder] = {decode_token(t).encoder for t in done.token_ids}
            encoders.append(encoder)
            await replica.sleep(1 if cycle else 2)
            assert not engine.encoder_cache
            await replica.wake_up()
            await load(replica, 2)
        assert encoders[0] != encoders[1] == encoders[2]
        assert 0 not in encoders

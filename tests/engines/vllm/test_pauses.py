"""Pauses, aborts and version spans over a real vLLM. One hazard a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm import pauses
from hotbunk.rollout.backends.vllm.engine import VllmEngine
from hotbunk.rollout.contract import (
    Cache,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Version,
    collect,
)

pytestmark = pytest.mark.anyio
_ids = count()


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, **sampling})
    return GenerateRequest(f"p{next(_ids)}", tuple(prompt), chosen)


async def update(
    engine: VllmEngine, it: VllmUnderTest, version: int, kind: type[Any] = MemoryTransfer
) -> None:
    transfer = kind(it.weights(version), version=Version(0, version))
    await engine.update_weights(transfer, version=Version(0, version))


async def until(done: Any, seconds: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    for _ in iter(done, True):
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.005)


async def test_tokens_made_before_an_update_say_so_however_late_they_are_read(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """keep + clear_cache: the rest is what a fresh engine makes of the prefix. Spans cover it."""
    prompt = untied.prompts[0]
    request = ask(prompt, 120)
    stream = engine.generate(request)
    first = await anext(stream)  # and then nobody reads for a while
    flight = engine._flight.streams[request.request_id]
    await until(lambda: flight.tokens > 20)
    await engine.pause_generation(PauseMode.KEEP, clear_cache=True)
    kept = flight.tokens
    await update(engine, untied, 1)
    await engine.resume_generation()
    await until(flight.ended.is_set)

    async def whole() -> AsyncIterator[Any]:
        yield first
        async for chunk in stream:
            yield chunk

    done = await collect(whole())
    spans = [(s.version, s.start, s.end) for s in done.spans]
    assert spans == [(Version(0, 0), 0, kept), (Version(0, 1), kept, 120)]
    assert list(done.token_ids[:kept]) == untied.golden(prompt, 0, kept)
    rest = untied.golden([*prompt, *done.token_ids[:kept]], 1, 120 - kept)
    assert list(done.token_ids[kept:]) == rest


async def test_merged_outputs_are_cut_where_the_weights_changed(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """vLLM joins outputs that wait to be read: one may hold tokens of two versions."""
    prompt = untied.prompts[1]
    request = ask(prompt, 60)
    reading = asyncio.create_task(collect(engine.generate(request)))
    await until(lambda: request.request_id in engine._flight.streams)
    flight = engine._flight.streams[request.request_id]
    await until(lambda: flight.tokens > 0)
    collector = flight._collector
    get, free = collector.get, asyncio.Event()

    async def slow() -> Any:
        await free.wait()
        return await get()

    collector.get, collector.get_nowait = slow, lambda: None
    await engine.pause_generation(PauseMode.KEEP)
    await update(engine, untied, 1)
    await engine.resume_generation()
    await until(lambda: request.request_id not in engine.llm.output_processor.external_req_ids)
    free.set()
    done = await reading
    assert [s.version for s in done.spans] == [Version(0, 0), Version(0, 1)]
    at = done.spans[0].end
    assert list(done.token_ids[:at]) == untied.golden(prompt, 0, at)
    assert list(done.token_ids[at:]) == untied.golden([*prompt, *done.token_ids[:at]], 1, 60 - at)


async def test_wait_lets_queued_requests_end_too(engine: VllmEngine, untied: VllmUnderTest) -> None:
    """vLLM's own wait leaves what holds no KV in its queue."""
    requests = [ask(untied.prompts[n % 3], 40) for n in range(24)]  # 16 run at once
    reading = [asyncio.create_task(collect(engine.generate(r))) for r in requests]
    await until(lambda: len(engine._flight.streams) == 24)
    report = await engine.pause_generation(PauseMode.WAIT)
    assert set(report.finished) == {r.request_id for r in requests}
    for request, task in zip(requests, reading, strict=True):
        done = await task
        assert list(done.token_ids) == untied.golden(request.prompt, 0, 40)


async def test_a_resume_ends_a_wait_that_is_pending(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """vLLM answers such a pause with success, later, while it is not paused."""
    running = asyncio.create_task(collect(engine.generate(ask(untied.prompts[0], 150))))
    await until(lambda: bool(engine._flight.streams))
    waiting = asyncio.create_task(engine.pause_generation(PauseMode.WAIT))
    await asyncio.sleep(0.01)
    await engine.resume_generation()
    with pytest.raises(errors.SessionError):
        await waiting
    assert not (await engine.status()).paused
    assert len((await running).token_ids) == 150


async def test_abort_reaches_what_it_names(engine: VllmEngine, untied: VllmUnderTest) -> None:
    requests = [ask(untied.prompts[n], 200) for n in range(3)]
    reading = [asyncio.create_task(collect(engine.generate(r))) for r in requests]
    streams = engine._flight.streams
    await until(lambda: len(streams) == 3 and all(s.tokens for s in streams.values()))
    report = await engine.abort([requests[1].request_id, "nobody"])
    assert report.aborted == (requests[1].request_id,)
    assert report.unknown == ("nobody",)
    ends = [await task for task in reading]
    assert [end.finish_reason for end in ends] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    assert ends[1].token_ids


async def test_an_abort_that_aborts_nothing_is_an_error(
    engine: VllmEngine, untied: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a response's id vLLM aborts nothing, and reports success."""

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    running = asyncio.create_task(collect(engine.generate(ask(untied.prompts[0], 300))))
    await until(lambda: bool(engine._flight.streams))
    with monkeypatch.context() as patch:
        patch.setattr(pauses, "_SECONDS", 0.1)
        patch.setattr(engine.llm, "abort", nothing)
        with pytest.raises(errors.EngineFailed, match="0 of 1"):
            await engine.abort()
    assert (await engine.abort()).aborted
    assert (await running).finish_reason is FinishReason.ABORT


async def test_every_argument_that_matters_is_passed(
    engine: VllmEngine, untied: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default of vLLM's that changes must not change what a pause does; idle, it is the core's alone."""
    calls: list[tuple[str, Any]] = []

    def spy(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            assert not (args and kwargs)
            if name != "call_utility_all_async" or args[0] == "pause_scheduler":
                calls.append((name, args or kwargs))
            return await inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    running = asyncio.create_task(collect(engine.generate(ask(untied.prompts[0], 900))))
    await until(lambda: any(s.tokens for s in engine._flight.streams.values()))
    for name in ("pause_generation", "reset_prefix_cache", "reset_mm_cache"):
        spy(engine.llm, name)
    spy(engine.llm.engine_core, "call_utility_all_async")
    for mode in (PauseMode.KEEP, PauseMode.ABORT):
        await engine.pause_generation(mode, clear_cache=mode is PauseMode.ABORT)
    assert (await running).finish_reason is FinishReason.ABORT
    for mode in PauseMode:
        await engine.pause_generation(mode, clear_cache=mode is PauseMode.ABORT)
    monkeypatch.setattr(engine._flight, "_idle", None)  # of a vLLM that has no such pause
    await engine.pause_generation(PauseMode.KEEP, clear_cache=False)
    await engine.reset_caches([Cache.PREFIX])
    await engine.resume_generation()
    assert calls == [
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("pause_generation", {"mode": "abort", "clear_cache": True}),
        ("reset_mm_cache", {}),
        ("call_utility_all_async", ("pause_scheduler", "abort", True)),
        ("call_utility_all_async", ("pause_scheduler", "keep", False)),
        ("call_utility_all_async", ("pause_scheduler", "keep", False)),
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("reset_prefix_cache", {"reset_running_requests": True, "reset_connector": True}),
    ]


async def test_the_prefix_cache_is_used_within_a_version(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """Else a test that finds no stale KV finds nothing."""
    prompt = untied.prompts[0]
    before = (await engine.status()).cached_tokens
    first, again = [await collect(engine.generate(ask(prompt))) for _ in range(2)]
    assert (first.cached_tokens, again.cached_tokens) == (0, 64)
    assert first.token_ids == again.token_ids
    assert (await engine.status()).cached_tokens - before == 64
    await engine.pause_generation(clear_cache=False)
    await update(engine, untied, 1)
    await engine.resume_generation()
    assert (await collect(engine.generate(ask(prompt)))).cached_tokens == 0

"""What is true of vLLM itself, and what the adapter makes of it. One hazard a test."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.async_llm import AsyncLLM

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.kit import greedy
from hotbunk.conformance.transfers import Corrupted, MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm import compat, pauses
from hotbunk.rollout.backends.vllm.engine import VllmEngine
from hotbunk.rollout.backends.vllm.update import Staging
from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Scope,
    Tag,
    Version,
    collect,
    collect_all,
)
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
_ids = count()


@pytest.fixture
async def engine(untied: VllmUnderTest) -> VllmEngine:
    """The running engine, at version 0."""
    it = await untied.engine()
    assert isinstance(it, VllmEngine)
    return it


@pytest.fixture
async def replica(untied: VllmUnderTest) -> AsyncIterator[Replica]:
    it = Replica(await untied.start(), name="vllm", deadlines=untied.deadlines)
    await it.start()
    yield it
    await it.close()


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, **sampling})
    return GenerateRequest(f"a{next(_ids)}", tuple(prompt), chosen)


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


# -- updates ----------------------------------------------------------------------------------


async def test_a_tied_head_follows_as_in_a_fresh_engine(tied: VllmUnderTest) -> None:
    """a -> b -> a would pass with a stale head; a fresh engine on b does not lie."""
    engine = await tied.engine()
    await engine.pause_generation()
    await update(engine, tied, 1)  # type: ignore[arg-type]
    await engine.resume_generation()
    updated = [await collect(engine.generate(ask(p, 16))) for p in tied.prompts]
    model = tied.model(1)
    other = under_test("vllm", tied=True)
    assert isinstance(other, VllmUnderTest)
    model.save_pretrained(other._disk)
    fresh = await other.engine()
    # Not reset, so version 0 there is what was read from disk: the weights of version 1.
    try:
        for prompt, done in zip(tied.prompts, updated, strict=True):
            want = await collect(fresh.generate(ask(prompt, 16)))
            assert done.token_ids == want.token_ids
            assert done.logprobs == want.logprobs
            assert list(done.token_ids) == tied.golden(prompt, 1, 16)
    finally:
        await other.finish()


async def test_one_tensor_of_a_fused_matrix_can_be_sent_alone(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """vLLM's own loader, given q without k and v, corrupts the layer without a word."""
    name = "model.layers.1.self_attn.q_proj.weight"
    some = [(spec, content) for spec, content in untied.weights(1) if spec.name == name]
    mixed = copy.deepcopy(untied.model(0))
    with torch.no_grad():
        mixed.get_parameter(name).copy_(untied.model(1).get_parameter(name))
    await engine.pause_generation()
    scope = Scope.partial(Version(0, 0))
    transfer = MemoryTransfer(some, version=Version(0, 1), scope=scope)
    report = await engine.update_weights(transfer, version=Version(0, 1), scope=scope)
    assert report.applied == 1
    assert report.verified == "applied"
    await engine.resume_generation()
    for prompt in untied.prompts:
        done = await collect(engine.generate(ask(prompt)))
        assert list(done.token_ids) == greedy(mixed, prompt, 8)


async def test_an_update_under_running_steps_is_refused(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """vLLM's own start_weight_update kills the engine core there."""
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(engine.generate(ask(prompt, 100))))
    await until(lambda: bool(engine._flight.streams))
    transfer = MemoryTransfer(untied.weights(1), version=Version(0, 1))
    with pytest.raises(errors.RequestsInFlight):
        await engine.update_weights(transfer, version=Version(0, 1))
    assert not transfer.events
    assert list((await running).token_ids) == untied.golden(prompt, 0, 100)


async def test_a_failed_update_does_not_poison_the_next(
    engine: VllmEngine, untied: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's own sessions, what a failed one buffered is replayed in the next."""
    table = Staging.table
    await engine.pause_generation()
    with pytest.raises(errors.VerifyFailed):
        await update(engine, untied, 1, Corrupted)
    with monkeypatch.context() as patch:
        bad = [[["nobody"], "float32", [1], 0]]
        patch.setattr(Staging, "table", lambda staging: [*table(staging)[:5], *bad])
        with pytest.raises(Exception, match="nobody"):
            await update(engine, untied, 1)
    await update(engine, untied, 2)
    await engine.resume_generation()
    for prompt in untied.prompts:
        done = await collect(engine.generate(ask(prompt)))
        assert list(done.token_ids) == untied.golden(prompt, 2, 8)


async def test_nothing_is_left_of_an_update(engine: VllmEngine, untied: VllmUnderTest) -> None:
    def open_files() -> list[str]:
        held = []
        for key in os.listdir("/proc/self/fd"):
            try:
                held.append(os.readlink(f"/proc/self/fd/{key}"))
            except FileNotFoundError:
                continue  # the one that lists them
        return [path for path in held if "hotbunk-update" in path]

    await engine.pause_generation()
    for version, kind in ((1, MemoryTransfer), (2, Corrupted), (3, MemoryTransfer)):
        try:
            await update(engine, untied, version, kind)
        except errors.UpdateFailed:
            assert kind is Corrupted
        assert not open_files()


async def test_host_memory_is_asked_for_before_a_byte_moves(
    engine: VllmEngine, untied: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        available = 1000

    monkeypatch.setattr("hotbunk.rollout.backends.vllm.update.psutil.virtual_memory", Full)
    await engine.pause_generation()
    transfer = MemoryTransfer(untied.weights(1), version=Version(0, 1))
    with pytest.raises(errors.HostOutOfMemory):
        await engine.update_weights(transfer, version=Version(0, 1))
    assert not transfer.events


async def test_digest_and_memory_are_what_lies_there(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    said = await engine.digest()
    for spec, content in untied.weights(0):
        assert said.values[spec.name] == fingerprint_bytes(content), spec.name
        assert untied.read_weight(spec.name) == content
    assert len(said.values) > len(untied.weights(0)), "buffers are state, too"
    memory = await engine.memory()
    assert memory.resident(Tag.WEIGHTS) >= sum(spec.nbytes for spec, _ in untied.weights(0))
    for tag in Tag:
        assert memory.resident(tag) == untied.resident(tag)
    with pytest.raises(errors.UnknownNames):
        await engine.digest(["nobody"])


async def test_two_ranks_hold_shards_and_verify_them_together() -> None:
    it = under_test("vllm", tensor_parallel_size=2)
    assert isinstance(it, VllmUnderTest)
    engine = it._create()
    assert isinstance(engine, VllmEngine)
    try:
        await engine.start()
        await engine.pause_generation()
        await update(engine, it, 1)
        with pytest.raises(errors.VerifyFailed):
            await update(engine, it, 2, Corrupted)
        await update(engine, it, 3)
        await engine.resume_generation()
        done = await collect(engine.generate(ask(it.prompts[0])))
        assert list(done.token_ids) == it.golden(it.prompts[0], 3, 8)
        assert (await engine.digest()).ranks == (0, 1)
    finally:
        await engine.close()
        await it.finish()


# -- pauses and versions ----------------------------------------------------------------------


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
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default of vLLM's that changes must not change what a pause does."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def spy(name: str) -> Any:
        inner = getattr(engine.llm, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            assert not args
            calls.append((name, kwargs))
            return await inner(**kwargs)

        return call

    for name in ("pause_generation", "reset_prefix_cache"):
        monkeypatch.setattr(engine.llm, name, spy(name))
    for mode in PauseMode:
        await engine.pause_generation(mode, clear_cache=mode is PauseMode.ABORT)
    await engine.reset_caches()
    await engine.resume_generation()
    assert calls == [
        ("pause_generation", {"mode": "abort", "clear_cache": True}),
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("reset_prefix_cache", {"reset_running_requests": True, "reset_connector": False}),
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


# -- sampling ---------------------------------------------------------------------------------


def exact(it: VllmUnderTest, done: Completion, prompt: tuple[int, ...], temperature: float) -> Any:
    """log-softmax at that temperature, by transformers: [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *done.token_ids]])
    with torch.inference_mode():
        logits = it.model(0)(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
async def test_logprobs_are_at_the_temperature_before_truncation(
    engine: VllmEngine, untied: VllmUnderTest, sampling: dict[str, Any]
) -> None:
    """vLLM's are before the temperature (raw) or after the truncation (processed)."""
    prompt = untied.prompts[1]
    # A greedy neighbour in the batch must not change them.
    other = asyncio.create_task(collect(engine.generate(ask(untied.prompts[2], 12))))
    done = await collect(engine.generate(ask(prompt, 12, seed=3, logprobs=3, **sampling)))
    await other
    want = exact(untied, done, prompt, sampling.get("temperature", 0.0))
    for n, token in enumerate(done.token_ids):
        assert done.logprobs[n] == pytest.approx(float(want[n, token]), abs=2e-4)
        values, ids = want[n].topk(3)
        assert [t for t, _ in done.top_logprobs[n]] == ids.tolist()
        assert [v for _, v in done.top_logprobs[n]] == pytest.approx(values.tolist(), abs=2e-4)


async def test_sampling_fields_mean_what_they_say(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    prompt = untied.prompts[1]

    async def tokens(**sampling: Any) -> list[int]:
        return list((await collect(engine.generate(ask(prompt, 20, **sampling)))).token_ids)

    golden = untied.golden(prompt, 0, 20)
    assert await tokens() == golden
    assert await tokens(temperature=2.0, top_k=1, seed=1) == golden
    assert await tokens(temperature=2.0, top_p=1e-6, seed=1) == golden
    assert await tokens(temperature=2.0, min_p=1.0, seed=1) == golden
    drawn = await tokens(temperature=2.0, seed=7)
    assert drawn == await tokens(temperature=2.0, seed=7)
    assert drawn != await tokens(temperature=2.0, seed=8)
    stop = golden[5]
    cut = await collect(engine.generate(ask(prompt, 20, stop_token_ids=(stop,))))
    assert list(cut.token_ids) == golden[: golden.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP


async def test_several_responses_are_those_of_their_seeds(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    prompt = untied.prompts[1]
    many = await collect_all(engine.generate(ask(prompt, 10, temperature=1.5, seed=4, n=3)))
    assert [done.index for done in many] == [0, 1, 2]
    for done in many:
        one = await collect(engine.generate(ask(prompt, 10, temperature=1.5, seed=4 + done.index)))
        assert done.token_ids == one.token_ids
        assert done.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert done.spans[-1].end == 10


async def test_several_responses_are_aborted_together(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    request = ask(untied.prompts[0], 300, n=3, temperature=1.0)
    reading = asyncio.create_task(collect_all(engine.generate(request)))
    await until(lambda: bool(engine._flight.streams))
    await until(lambda: len(engine._flight.streams[request.request_id].produced) == 3)
    assert (await engine.abort()).aborted == (request.request_id,)
    assert {done.finish_reason for done in await reading} == {FinishReason.ABORT}
    assert not engine.llm.output_processor.request_states


@pytest.mark.parametrize(
    "request_, error",
    [
        (ask((300,)), errors.UsageError),
        (ask((1,), 5000), errors.UsageError),
        (ask((1,), stop=("x",)), errors.UsageError),
        (ask((1,), top_p=7.0), errors.UsageError),
        (ask((1,), temperature=2.5), errors.UsageError),
        (ask((1,), n=2), errors.UsageError),
        (ask((1,), logprobs=999), errors.UsageError),
        (GenerateRequest("a", (1,), adapter="x"), errors.Unsupported),
        (GenerateRequest("b", (1,), media={"image": 1}), errors.Unsupported),
    ],
    ids=str,
)
async def test_what_cannot_run_is_refused_at_once(
    engine: VllmEngine, request_: GenerateRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await collect(engine.generate(request_))
    assert not engine._flight.streams


async def test_stop_strings_and_the_models_own_end(untied: VllmUnderTest, tmp_path: Path) -> None:
    """Both end a response with the token that does it, which is part of it."""
    prompt = untied.prompts[1]
    golden = untied.golden(prompt, 0, 20)
    untied.model(0).save_pretrained(tmp_path)
    words = {f"<{token}>": token for token in range(256)}
    model = WordLevel(words, unk_token="<0>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(tmp_path)
    end = golden[11]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    engine = create_backend("vllm", model=str(tmp_path), dtype="float32", max_model_len=512)
    try:
        await engine.start()
        cut = await collect(engine.generate(ask(prompt, 20, stop=(f"<{golden[4]}>",))))
        assert list(cut.token_ids) == golden[: golden.index(golden[4]) + 1]
        assert cut.finish_reason is FinishReason.STOP
        assert len(cut.logprobs) == len(cut.token_ids)
        cut = await collect(engine.generate(ask(prompt, 20)))
        assert list(cut.token_ids) == golden[: golden.index(end) + 1]
        assert cut.finish_reason is FinishReason.STOP
        whole = await collect(engine.generate(ask(prompt, 20, ignore_eos=True)))
        assert list(whole.token_ids) == golden
        assert whole.finish_reason is FinishReason.LENGTH
    finally:
        await engine.close()


# -- the engine itself ------------------------------------------------------------------------


def test_a_vllm_that_lacks_something_is_named_before_launch() -> None:
    assert compat.missing() == []

    class Older:
        from_engine_args = AsyncLLM.from_engine_args

        async def pause_generation(self, *, wait_for_inflight_requests: bool = False) -> None: ...

    lacking = compat.missing(Older)
    assert "AsyncLLM.pause_generation(mode)" in lacking
    assert "AsyncLLM.collective_rpc" in lacking


def test_unknown_engine_arguments_are_refused_with_the_closest() -> None:
    with pytest.raises(errors.ConfigError, match="max_num_batched_tokens"):
        create_backend("vllm", model="m", engine_args={"max_num_batched_token": 8})


async def test_bad_options_are_one_sentence(untied: VllmUnderTest) -> None:
    engine = create_backend("vllm", model=str(untied._disk), max_model_len=1 << 30)
    with pytest.raises(errors.ConfigError, match="vLLM refuses"):
        await engine.start()
    await engine.close()


async def test_an_engine_that_dies_is_lost_and_says_so(
    untied: VllmUnderTest, replica: Replica
) -> None:
    """Its requests end typed, nothing hangs, and the suite's next case gets a new one."""
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(replica.generate(ask(prompt, 500))))
    await asyncio.sleep(0.1)
    os.kill(untied._where["pid"], signal.SIGKILL)
    with pytest.raises(errors.ReplicaLost):
        await running
    await replica.status()
    assert replica.health is Health.LOST
    with pytest.raises(errors.ReplicaLost):
        await collect(replica.generate(ask(prompt)))
    again = await untied.engine()
    done = await collect(again.generate(ask(prompt)))
    assert list(done.token_ids) == untied.golden(prompt, 0, 8)

"""Updates of a real vLLM, and its end. One hazard a test."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from itertools import count
from typing import Any

import pytest
import torch

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.kit import greedy
from hotbunk.conformance.transfers import Corrupted, MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.engine import VllmEngine
from hotbunk.rollout.backends.vllm.update import Staging
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    Sampling,
    Scope,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
_ids = count()


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

    monkeypatch.setattr("hotbunk.rollout.staging.psutil.virtual_memory", Full)
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


@pytest.mark.slow
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
    cut = await running  # the tokens it has had stand, and it may be sent elsewhere
    assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, True)
    await replica.status()
    assert replica.health is Health.LOST
    with pytest.raises(errors.ReplicaLost):
        await collect(replica.generate(ask(prompt)))
    again = await untied.engine()
    done = await collect(again.generate(ask(prompt)))
    assert list(done.token_ids) == untied.golden(prompt, 0, 8)

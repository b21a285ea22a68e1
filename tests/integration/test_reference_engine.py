"""The reference engine's tokens: equal to transformers', whatever happened in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.handle import LocalHandle

pytestmark = pytest.mark.anyio
CHUNKED = {"max_num_batched_tokens": 24, "kv_cache_tokens": 4096, "block_size": 8}


@pytest.fixture(scope="module")
def pair(tiny: Any, kit: Any) -> tuple[Path, Path, list[list[int]]]:
    """Two versions of a model, and prompts on which each answers differently."""
    one, two = tiny(seed=0), tiny(seed=1)
    prompts = kit.prompts(8)
    for prompt in prompts:
        assert kit.golden(one, prompt) != kit.golden(two, prompt), (
            "goldens must tell versions apart"
        )
    return one, two, prompts


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_64_prompts_in_one_batch_with_chunked_prefill_equal_generate(
    tiny: Any, kit: Any, engine: Any, family: str, tied: bool
) -> None:
    model = tiny(family, tied=tied)
    prompts = kit.prompts(64, longest=60)
    assert any(len(p) > CHUNKED["max_num_batched_tokens"] for p in prompts)
    backend = await engine(model, **CHUNKED)
    done = await asyncio.gather(*(kit.complete(backend, p, 10) for p in prompts))
    goldens = [kit.golden(model, p, 10) for p in prompts]
    assert [list(c.token_ids) for c in done] == goldens
    assert len({tuple(g) for g in goldens}) > 60, "an engine that ignores its prompt would pass"
    assert {c.finish_reason for c in done} == {FinishReason.LENGTH}
    backend.check_invariants()


async def test_sleep_level_1_and_wake_give_the_same_tokens(
    pair: Any, kit: Any, replica: Any
) -> None:
    one, _, prompts = pair
    target = await replica(one)
    for _ in range(3):
        await target.sleep(1)
        assert (await target.memory()).resident() == 0
        await target.wake_up()
        for prompt in prompts:
            done = await kit.complete(target, prompt)
            assert list(done.token_ids) == kit.golden(one, prompt)
            assert [s.version for s in done.spans] == [Version(0, 0)]
    target.backend.check_invariants()


async def test_level_2_then_update_gives_the_new_models_tokens_g1(
    pair: Any, kit: Any, replica: Any
) -> None:
    one, two, prompts = pair
    target = await replica(one)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    before = await kit.complete(target, prompts[0])
    assert list(before.token_ids) == kit.golden(one, prompts[0])
    for step, model in enumerate((two, one, two), 1):
        await manager.sleep_replicas()
        await manager.update_weights(kit.source(model), Version(0, step))
        done = await asyncio.gather(*(kit.complete(target, p) for p in prompts))
        assert [list(c.token_ids) for c in done] == [kit.golden(model, p) for p in prompts]
        assert {s.version for c in done for s in c.spans} == {Version(0, step)}
    target.backend.check_invariants()


async def test_update_while_awake_gives_the_new_models_tokens_c1(
    pair: Any, kit: Any, replica: Any
) -> None:
    one, two, prompts = pair
    target = await replica(one)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    await kit.complete(target, prompts[0])
    await manager.update_weights(kit.source(two), Version(0, 1))
    done = await kit.complete(target, prompts[0])
    assert list(done.token_ids) == kit.golden(two, prompts[0])
    assert done.cached_tokens == 0


async def test_kv_only_release_keeps_weights_and_tokens_k6(
    pair: Any, kit: Any, replica: Any
) -> None:
    one, _, prompts = pair
    target = await replica(one)
    digest = await target.digest()
    weights = (await target.memory()).resident(Tag.WEIGHTS)
    await target.release_kv_cache()
    memory = await target.memory()
    assert (memory.resident(Tag.KV_CACHE), memory.resident(Tag.WEIGHTS)) == (0, weights)
    with pytest.raises(errors.KVNotResident):
        await kit.complete(target, prompts[0])
    await target.resume_kv_cache()
    assert await target.digest() == digest
    for prompt in prompts:
        assert list((await kit.complete(target, prompt)).token_ids) == kit.golden(one, prompt)


async def test_frozen_requests_survive_a_kv_release_and_recompute_c3(
    pair: Any, kit: Any, replica: Any
) -> None:
    one, _, prompts = pair
    target = await replica(one, max_num_batched_tokens=16)
    streams = [target.generate(kit.request(p, 40)) for p in prompts]
    begun = [await kit.first_tokens(s, 1) for s in streams]
    report = await target.pause_generation(PauseMode.KEEP, clear_cache=False)
    assert report.frozen
    released = await target.release_kv_cache()
    assert released.recomputed_requests > 0
    await target.resume_kv_cache()
    await target.resume_generation()
    for prompt, start, stream in zip(prompts, begun, streams, strict=True):
        rest = await collect(stream)
        assert start + list(rest.token_ids) == kit.golden(one, prompt, 40)
    target.backend.check_invariants()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
async def test_logprobs_are_the_trainers_log_softmax_at_the_requests_temperature(
    tiny: Any, kit: Any, engine: Any, temperature: float
) -> None:
    model = tiny("qwen3")
    backend = await engine(model, **CHUNKED)
    prompts = kit.prompts(12, longest=60)
    done = await asyncio.gather(
        *(kit.complete(backend, p, 10, temperature=temperature, seed=3) for p in prompts)
    )
    trainer = kit.loaded(model)
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = trainer(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        ours = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert len(completion.logprobs) == len(completion.token_ids) == 10
        assert torch.tensor(completion.logprobs).sub(ours).abs().max() < 1e-4


async def test_a_seeded_draw_does_not_depend_on_batch_neighbours(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model, prompts = tiny(), kit.prompts(24)
    backend = await engine(model)

    def seeded(index: int) -> Any:
        return kit.complete(backend, prompts[index], 12, temperature=1.0, seed=100 + index)

    alone = [await seeded(i) for i in range(len(prompts))]
    together = await asyncio.gather(*(seeded(i) for i in reversed(range(len(prompts)))))
    assert [c.token_ids for c in alone] == [c.token_ids for c in reversed(together)]
    other = await kit.complete(backend, prompts[0], 12, temperature=1.0, seed=99)
    assert other.token_ids != alone[0].token_ids


async def test_a_seeded_draw_survives_a_freeze_with_recompute(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, prompt = await replica(tiny()), kit.prompts(1)[0]
    whole = await kit.complete(target, prompt, 40, temperature=1.0, seed=5)
    stream = target.generate(kit.request(prompt, 40, temperature=1.0, seed=5))
    begun = await kit.first_tokens(stream, 2)
    await target.pause_generation(PauseMode.KEEP)
    await target.resume_generation()
    assert (*begun, *(await collect(stream)).token_ids) == whole.token_ids


async def test_draws_follow_the_models_distribution(tiny: Any, kit: Any, engine: Any) -> None:
    model, prompt = tiny(), kit.prompts(1)[0]
    backend = await engine(model)
    draws = await asyncio.gather(
        *(kit.complete(backend, prompt, 1, temperature=1.0, seed=n) for n in range(2000))
    )
    with torch.no_grad():
        expected = kit.loaded(model)(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor([c.token_ids[0] for c in draws]), minlength=len(expected))
    # Total variation of 2000 honest draws: well below this; uniform or stuck draws: far above.
    assert (found / 2000 - expected).abs().sum() / 2 < 0.2


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
async def test_the_smallest_temperatures_are_greedy_and_finite(
    tiny: Any, kit: Any, engine: Any, temperature: float
) -> None:
    model, prompt = tiny(), kit.prompts(1)[0]
    done = await kit.complete(await engine(model), prompt, 6, temperature=temperature)
    assert list(done.token_ids) == kit.golden(model, prompt, 6)
    assert all(-1e-3 < p <= 0.0 for p in done.logprobs)


async def test_stop_ids_end_a_response_with_the_stop_token(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model, prompt = tiny(), kit.prompts(1)[0]
    expected = kit.golden(model, prompt, 20)
    stop = expected[7]
    done = await kit.complete(await engine(model), prompt, 20, stop_token_ids=(stop, 9999))
    assert list(done.token_ids) == expected[: expected.index(stop) + 1]
    assert done.finish_reason is FinishReason.STOP


async def test_context_may_be_used_to_its_last_token(tiny: Any, kit: Any, engine: Any) -> None:
    model = tiny(context=64)
    backend = await engine(model, **CHUNKED)
    prompt = kit.prompts(1, shortest=50, longest=50)[0]
    assert list((await kit.complete(backend, prompt, 14)).token_ids) == kit.golden(
        model, prompt, 14
    )


@pytest.mark.parametrize(
    "prompt, sampling, says",
    [
        ((), {}, "prompt"),
        ((1, 2), {"max_tokens": 0}, "max_tokens"),
        ((1, 259), {}, "outside 0..258"),
        ((-1, 2), {}, "outside 0..258"),
        (tuple(range(65)), {}, "context is 64"),
        ((1,) * 60, {"max_tokens": 5}, "context is 64"),
        ((1, 2), {"temperature": -0.1}, "temperature"),
        ((1, 2), {"temperature": float("nan")}, "temperature"),
        ((1, 2), {"temperature": float("inf")}, "temperature"),
    ],
)
async def test_requests_that_can_never_run_are_refused_and_leave_nothing(
    tiny: Any, kit: Any, engine: Any, prompt: tuple[int, ...], sampling: Any, says: str
) -> None:
    model = tiny(context=64)
    backend = await engine(model)
    bad = GenerateRequest("bad", prompt, Sampling(**{"max_tokens": 4, **sampling}))
    with pytest.raises(errors.UsageError, match=says):
        await collect(backend.generate(bad))
    assert list((await kit.complete(backend, [1, 2], 6)).token_ids) == kit.golden(model, [1, 2], 6)
    backend.check_invariants()


async def test_two_engines_in_one_process_do_not_mix(pair: Any, kit: Any, engine: Any) -> None:
    one, two, prompts = pair
    first, second = await engine(one), await engine(two, block_size=4)
    jobs = [kit.complete(backend, p) for p in prompts for backend in (first, second)]
    done = await asyncio.gather(*jobs)
    expected = [kit.golden(model, p) for p in prompts for model in (one, two)]
    assert [list(c.token_ids) for c in done] == expected
    await first.close()
    assert list((await kit.complete(second, prompts[0])).token_ids) == expected[1]

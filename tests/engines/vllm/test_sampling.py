"""What is drawn from a real vLLM, and what is said about it."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.engine import VllmEngine
from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampling,
    collect,
    collect_all,
)
from hotbunk.rollout.registry import create_backend

pytestmark = pytest.mark.anyio
_ids = count()


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, **sampling})
    return GenerateRequest(f"s{next(_ids)}", tuple(prompt), chosen)


async def until(done: Any, seconds: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    for _ in iter(done, True):
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.005)


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


async def test_greedy_samples_are_the_best_tokens_with_their_own_log_probs(
    engine: VllmEngine, untied: VllmUnderTest
) -> None:
    """vLLM itself refuses n > 1 at temperature 0."""
    prompt = untied.prompts[0]
    alone = await collect(engine.generate(ask(prompt, 8)))
    for one in await collect_all(engine.generate(ask(prompt, 8, n=2))):
        assert one.token_ids == alone.token_ids
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "request_, error",
    [
        (ask((300,)), errors.UsageError),
        (ask((1,), 5000), errors.UsageError),
        (ask((1,), top_p=7.0), errors.UsageError),
        (ask((1,), temperature=2.5), errors.UsageError),
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


async def test_stop_strings_without_a_tokenizer_are_refused(tied: VllmUnderTest) -> None:
    engine = await tied.engine()
    with pytest.raises(errors.UsageError):
        await collect(engine.generate(ask((1,), stop=("x",))))


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

"""How tokens are drawn, where a response ends, and what comes with a token."""

from __future__ import annotations

import asyncio
from typing import Any

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import (
    NotApplicable,
    Rig,
    check_aborted,
    check_spans,
    expect,
)
from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Version,
    collect_all,
)
from hotbunk.rollout.errors import RequestRejected

HOT = 2.0  # the most that engines in the field take


def _asked(rig: Rig, prompt: Any, tokens: int = 0, /, **wants: Any) -> GenerateRequest:
    """A request that is greedy unless it says otherwise."""
    wants = {"ignore_eos": True, "max_tokens": tokens or rig.ut.tokens, **wants}
    wants.setdefault("temperature", 0.0)
    return rig.request(prompt, sampling=Sampling(**wants))


async def _done(rig: Rig, prompt: Any, tokens: int = 0, /, **wants: Any) -> Completion:
    return await rig.read(_asked(rig, prompt, tokens, **wants)).result()


@case(capability="samples")
async def samples_share_a_prompt(rig: Rig) -> None:
    """n responses come under one id, each whole, told apart by their index."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    done = await collect_all(rig.replica.generate(_asked(rig, prompt, n=3)))
    assert [one.index for one in done] == [0, 1, 2]
    for one in done:
        rig.check_tokens(one, prompt, 1)
        assert one.finish_reason is FinishReason.LENGTH
    hot = await collect_all(
        rig.replica.generate(_asked(rig, prompt, 16, n=3, temperature=HOT, seed=1))
    )
    assert len({one.token_ids for one in hot}) == 3, "the samples of one seed are equal"
    await rig.check_golden(1)


@case(capability="samples pause.abort")
async def samples_end_together_at_an_abort(rig: Rig) -> None:
    """A pause ends every response of a request, each with its own tokens (V5)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    stream = rig.replica.generate(_asked(rig, prompt, rig.ut.long_tokens, n=2))
    chunks = [await anext(stream)]
    report = await rig.replica.pause_generation(PauseMode.ABORT)
    assert len(report.aborted) == 1, f"one request was aborted, the report says {report.aborted}"
    chunks += [chunk async for chunk in stream]
    ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(chunk.index for chunk in ends) == [0, 1]
    assert {chunk.finish_reason for chunk in ends} == {FinishReason.ABORT}
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case()
async def stop_tokens_end_a_response(rig: Rig) -> None:
    """A stop token is the last one of the response, and part of it."""
    await rig.load(1)
    for prompt in rig.ut.prompts:
        golden = rig.ut.golden(prompt, 1, rig.ut.tokens)
        wanted = golden[len(golden) // 2]
        done = await _done(rig, prompt, stop_token_ids=(wanted,))
        rig.check_tokens(done, prompt, 1)
        assert list(done.token_ids) == golden[: golden.index(wanted) + 1]
        assert done.finish_reason is FinishReason.STOP, f"finished with {done.finish_reason}"


@case(capability="stop_strings")
async def stop_strings_end_a_response(rig: Rig) -> None:
    """With the token that completes the string, also where it begins inside another token."""
    await rig.load(1)
    if rig.ut.text((1,)) is None:
        raise NotApplicable("no tokenizer")
    for prompt in rig.ut.prompts:
        golden = rig.ut.golden(prompt, 1, rig.ut.tokens)
        said = rig.ut.text(golden[:5])
        assert said is not None
        wanted = said[-3:]
        first = next(n for n in range(1, 6) if wanted in (rig.ut.text(golden[:n]) or ""))
        done = await _done(rig, prompt, stop=("never said", wanted))
        assert list(done.token_ids) == golden[:first], f"{done.token_ids} and not {golden[:first]}"
        assert done.finish_reason is FinishReason.STOP


@case(capability="top_logprobs")
async def alternatives_come_with_each_token(rig: Rig) -> None:
    """The best first; greedy takes the best, and its log-prob is the token's own (V3)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    done = await _done(rig, prompt, logprobs=3)
    rig.check_tokens(done, prompt, 1)
    assert len(done.top_logprobs) == len(done.token_ids), "alternatives are missing or left over"
    for token, logprob, top in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True):
        values = [value for _, value in top]
        assert len({alternative for alternative, _ in top}) == 3, f"asked for 3, got {top}"
        assert values == sorted(values, reverse=True), f"not in order: {values}"
        assert top[0][0] == token, f"greedy took {token} and not the best, {top[0][0]}"
        assert abs(top[0][1] - logprob) < 1e-6
    plain = await _done(rig, prompt)
    assert plain.top_logprobs == (), "alternatives nobody asked for"


@case()
async def log_probs_are_log_probs(rig: Rig) -> None:
    """One a token, none above 0, and the same for the same tokens (V5)."""
    await rig.load(1)
    for prompt in rig.ut.prompts:
        done, again = await _done(rig, prompt), await _done(rig, prompt)
        check_spans(done)
        assert all(value <= 1e-6 for value in done.logprobs), f"above 0: {done.logprobs}"
        differ = [abs(a - b) for a, b in zip(done.logprobs, again.logprobs, strict=True)]
        assert max(differ) < 1e-2, f"they differ by {max(differ)}"


@case()
async def a_seed_repeats_its_draws(rig: Rig) -> None:
    """The same seed draws the same tokens, in company, too; others draw others."""
    await rig.load(1)
    prompt, hot = rig.ut.prompts[0], {"temperature": HOT}
    alone = await _done(rig, prompt, 16, seed=7, **hot)
    crowd = await asyncio.gather(*(_done(rig, prompt, 16, seed=s, **hot) for s in (6, 7, 8)))
    assert crowd[1].token_ids == alone.token_ids, "the same seed drew other tokens"
    assert len({done.token_ids for done in crowd}) == 3, "different seeds drew the same tokens"
    for done in crowd:
        check_spans(done)


@case()
async def positional_draws_continue(rig: Rig) -> None:
    """Declared: a response that is cut off and continued draws what it would have drawn (V1)."""
    if not rig.caps.positional_draws:
        raise NotApplicable("draws depend on more than seed and position")
    await rig.load(1)
    for seed, prompt in enumerate(rig.ut.prompts):
        hot = {"temperature": HOT, "seed": seed}
        whole = (await _done(rig, prompt, 16, **hot)).token_ids
        for cut in (1, 9):
            rest = await _done(rig, (*prompt, *whole[:cut]), 16 - cut, **hot)
            assert rest.token_ids == whole[cut:], f"{rest.token_ids} and not {whole[cut:]}"


@case(level=Level.SYNC, capability="pause.keep")
async def a_pinned_request_is_made_by_its_version_alone(rig: Rig) -> None:
    """Frozen over an update it ends, with what it has; held over one it is refused (V6, V7)."""
    await rig.load(1)
    prompt, old, new = rig.ut.prompts[0], Version(0, 1), Version(0, 2)
    pinned = rig.submit(prompt, rig.ut.long_tokens, version=old)
    free = rig.submit(rig.ut.prompts[1], rig.ut.long_tokens)
    for running in (pinned, free):
        await running.started()
    await rig.replica.pause_generation(PauseMode.KEEP)
    held_old = rig.submit(prompt, version=old)
    held_new = rig.submit(prompt, version=new)
    await rig.moment()
    await rig.load(2)
    await rig.replica.resume_generation()
    done = await pinned.result()
    check_aborted(done, retryable=True)
    assert done.token_ids, "the partial tokens were lost"
    rig.check_tokens(done, prompt, 1, cut=True)
    await expect(RequestRejected, held_old.result())
    rig.check_tokens(await held_new.result(), prompt, 2)
    assert (await free.result()).finish_reason is FinishReason.LENGTH
    await rig.check_golden(2)

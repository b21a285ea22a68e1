"""Requests that are carried over pauses: what is joined, and where it ends (V1, V3, V5, V6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from hotbunk.conformance.backends.oracle_kit import PROMPT, request
from hotbunk.conformance.rig import check_spans, expect
from hotbunk.rollout.contract import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    Sampling,
    TokenChunk,
    Version,
)
from hotbunk.rollout.errors import (
    EngineFailed,
    ReplicaLost,
    ReplicaRejecting,
    RequestRejected,
    UsageError,
    WeightsPoisoned,
)
from hotbunk.rollout.partial import GivenUp, PartialPolicy, PartialResult, PartialRollout

pytestmark = pytest.mark.anyio
STEP = 0.01  # seconds of a step of the oracle: one token


def whole(result: PartialResult, tokens: int) -> None:
    """One response, as if nothing had happened: all its side data fit (V3)."""
    done = result.completion
    check_spans(done)
    assert len(done.token_ids) == tokens
    assert done.finish_reason is FinishReason.LENGTH
    assert (done.error, done.retryable) == ("", False)


# -- scripted replicas ------------------------------------------------------------------------


class Scripted:
    """A handle that plays parts, one a call; an exception in a part is raised there."""

    name = "scripted"
    capabilities = Capabilities("scripted")

    def __init__(self, *parts: Sequence[TokenChunk | Exception]) -> None:
        self.parts = list(parts)
        self.asked: list[GenerateRequest] = []
        self.closed = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.asked.append(request)
        part = self.parts.pop(0)
        try:
            for item in part:
                await asyncio.sleep(STEP)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


def made(*tokens: int, step: int = 1, incarnation: int = 0, **more: Any) -> TokenChunk:
    version = Version(incarnation, step)
    return TokenChunk("r", tokens, tuple(-float(t) for t in tokens), version, **more)


CUT = TokenChunk("r", finish_reason=FinishReason.ABORT, error="cut off by a pause", retryable=True)
END = TokenChunk("r", finish_reason=FinishReason.LENGTH)


def client(*handles: Any, **policy: Any) -> PartialRollout:
    return PartialRollout(handles, PartialPolicy(**policy))


async def test_cut_off_exactly_at_the_limit_it_is_over_without_a_call_v1() -> None:
    handle = Scripted([made(1), made(2), made(3), CUT])
    result = await client(handle).generate(request("r", 3))
    whole(result, 3)
    assert len(handle.asked) == 1
    assert result.continuations == 0


async def test_every_kind_of_side_data_is_joined_once_v3() -> None:
    top = (((1, -1.0), (9, -2.0)),)
    handle = Scripted(
        [made(1, top_logprobs=top, routed_experts="a", cached_tokens=8), made(2, 3), CUT],
        [made(4, top_logprobs=top, routed_experts="b", cached_tokens=16), END],
    )
    result = await client(handle).generate(request("r", 4))
    whole(result, 4)
    done = result.completion
    assert done.token_ids == (1, 2, 3, 4)
    assert done.logprobs == (-1.0, -2.0, -3.0, -4.0)
    assert done.top_logprobs == top * 2
    assert result.routed_experts == ("a", "b")
    assert done.cached_tokens == 8, "tokens of our own response count as cached prompt"
    assert handle.closed == 2


async def test_stop_and_errors_that_are_final_are_the_end() -> None:
    stop = TokenChunk("r", (7,), (-7.0,), Version(0, 1), FinishReason.STOP)
    final = TokenChunk("r", finish_reason=FinishReason.ABORT, error="no", retryable=False)
    for last, tokens in ((stop, (1, 7)), (final, (1,))):
        handle = Scripted([made(1), CUT], [last])
        result = await client(handle).generate(request("r", 9))
        assert result.completion.token_ids == tokens
        assert result.completion.finish_reason is last.finish_reason
        assert result.completion.error == last.error


# -- versions ---------------------------------------------------------------------------------


async def test_tokens_beyond_the_version_age_are_not_taken_v6() -> None:
    handle = Scripted(
        [made(1, step=3), CUT], [made(2, step=4), CUT], [made(3, step=5), made(4, step=5), END]
    )
    result = await client(handle, version_age=1).generate(request("r", 9))
    done = result.completion
    assert (done.token_ids, done.finish_reason) == ((1, 2), FinishReason.ABORT)
    assert "1 steps apart" in done.error
    assert done.retryable
    check_spans(done)
    assert handle.closed == 3, "the request was left running"
    enough = Scripted([made(1, step=3), CUT], [made(2, step=5), END])
    whole(await client(enough, version_age=2).generate(request("r", 2)), 2)


async def test_another_incarnation_is_beyond_every_age() -> None:
    handle = Scripted([made(1, step=5), CUT], [made(2, step=5, incarnation=1), END])
    result = await client(handle, version_age=100).generate(request("r", 2))
    assert result.completion.token_ids == (1,)
    assert result.completion.finish_reason is FinishReason.ABORT


# -- limits and ends --------------------------------------------------------------------------


@pytest.mark.parametrize("continuations", [0, 2])
async def test_continuations_are_bounded(continuations: int) -> None:
    parts = [[made(n), CUT] for n in range(9)]
    handle = Scripted(*parts)
    result = await client(handle, continuations=continuations).generate(request("r", 9))
    done = result.completion
    assert len(handle.asked) == continuations + 1
    assert done.token_ids == tuple(range(continuations + 1))
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert f"cut off {continuations + 1} times" in done.error
    assert result.continuations == continuations


# -- several replicas -------------------------------------------------------------------------


async def test_one_clients_requests_do_not_send_each_other_back_to_a_rejecting_replica() -> None:
    """Each request goes round the replicas on its own, whoever else asks meanwhile."""
    away = ReplicaRejecting("leaving")
    rejecting = Scripted(*([away] for _ in range(99)))
    good = Scripted(*([made(1), END] for _ in range(99)))
    rollout = client(rejecting, good)
    results = await asyncio.gather(*(rollout.generate(request(f"r{n}", 1)) for n in range(9)))
    assert all(r.completion.token_ids == (1,) for r in results)


async def test_when_all_reject_the_first_error_is_the_callers() -> None:
    handles = [Scripted([ReplicaRejecting("leaving")]) for _ in range(2)]
    await expect(ReplicaRejecting, client(*handles).generate(request("r", 5)))
    assert [len(h.asked) for h in handles] == [1, 1]


async def test_when_nobody_goes_on_the_tokens_so_far_stand_v5() -> None:
    for error in (ReplicaRejecting("leaving"), ReplicaLost("gone"), WeightsPoisoned("target")):
        handle = Scripted([made(1), made(2), CUT], [error])
        done = (await client(handle).generate(request("r", 5))).completion
        assert (done.token_ids, done.finish_reason) == ((1, 2), FinishReason.ABORT)
        assert done.retryable
        assert str(error) in done.error


async def test_an_engine_that_dies_in_the_middle_loses_no_token_v5() -> None:
    dead = EngineFailed("the engine died")
    one, two = Scripted([made(1), made(2), dead]), Scripted([made(3), END])
    result = await client(one, two).generate(request("r", 3))
    whole(result, 3)
    assert two.asked[0].prompt == (*PROMPT, 1, 2)
    alone = Scripted([made(1), dead])
    done = (await client(alone).generate(request("r", 3))).completion
    assert (done.token_ids, done.finish_reason) == ((1,), FinishReason.ABORT)
    mute = Scripted([dead])
    await expect(EngineFailed, client(mute).generate(request("r", 3)))


async def test_a_stream_that_just_ends_is_an_engine_that_failed() -> None:
    await expect(EngineFailed, client(Scripted([])).generate(request("r", 3)))


async def test_a_response_that_is_complete_needs_nobody_any_more() -> None:
    handle = Scripted([made(1), made(2), EngineFailed("it died on its way out")], [END])
    other = Scripted([END])
    result = await client(handle, other).generate(request("r", 2))
    whole(result, 2)
    assert not other.asked


# -- seeds ------------------------------------------------------------------------------------


async def test_an_engine_that_counts_draws_gets_another_seed_for_the_rest() -> None:
    """The oracle's draws are not positional: the same seed again would draw the beginning again."""
    sampled = msgspec.structs.replace(request("r", 4), sampling=Sampling(1.0, max_tokens=4, seed=7))
    handle = Scripted([made(1), CUT], [made(2), CUT], [made(3, 4), END])
    await client(handle).generate(sampled)
    seeds = [r.sampling.seed for r in handle.asked]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    again = Scripted([made(1), CUT], [made(2), CUT], [made(3, 4), END])
    await client(again).generate(sampled)
    assert [r.sampling.seed for r in again.asked] == seeds, "continuations are not repeatable"
    positional = Scripted([made(1), CUT], [made(2, 3, 4), END])
    positional.capabilities = Capabilities("positional", positional_draws=True)
    await client(positional).generate(sampled)
    assert [r.sampling.seed for r in positional.asked] == [7, 7]


async def test_no_seed_stays_no_seed() -> None:
    handle = Scripted([made(1), CUT], [made(2), END])
    await client(handle).generate(request("r", 2))
    assert [r.sampling.seed for r in handle.asked] == [None, None]


# -- what cannot be meant ---------------------------------------------------------------------


async def test_senseless_policies_and_requests() -> None:
    with pytest.raises(UsageError):
        PartialRollout([])
    for wrong in ({"continuations": -1}, {"version_age": -1}):
        with pytest.raises(UsageError):
            PartialPolicy(**wrong)
    for sampling in (Sampling(max_tokens=4, n=2), Sampling(max_tokens=0)):
        handle = Scripted()
        with pytest.raises(UsageError):
            await client(handle).generate(GenerateRequest("r", PROMPT, sampling))
        assert not handle.asked


# -- what a pause cost --------------------------------------------------------------------------


async def test_what_is_sent_again_is_counted_less_what_its_engine_still_had() -> None:
    """Each continuation after tokens: prompt and response, minus what the prefix cache gave."""
    handle = Scripted(
        [made(1), made(2), CUT],
        [made(3, step=2, cached_tokens=4), CUT],
        [made(4, step=3), END],
    )
    asked = request("r", 9)
    result = await client(handle).generate(asked)
    prompt = len(asked.prompt)
    assert result.resent_tokens == (prompt + 2 - 4) + (prompt + 3)
    assert (result.switched_tokens, result.dropped_tokens) == (0, 0)


async def test_cut_off_before_a_token_nothing_was_computed_twice() -> None:
    handle = Scripted([CUT], [made(1), END])
    assert (await client(handle).generate(request("r", 9))).resent_tokens == 0


async def test_a_switch_under_a_running_request_counts_its_context_v12() -> None:
    handle = Scripted([made(1), made(2), made(3, step=2), made(4, step=2), END])
    asked = request("r", 9)
    result = await client(handle).generate(asked)
    assert result.switched_tokens == len(asked.prompt) + 2
    assert (result.resent_tokens, result.continuations) == (0, 0), "kept, never aborted"


async def test_begun_again_from_the_prompt_its_tokens_are_lost_v2() -> None:
    handle = Scripted([made(1), made(2), CUT], [made(3, step=2), made(4, step=2), END])
    asked = request("r", 9)
    result = await client(handle, from_prompt=True).generate(asked)
    assert result.completion.token_ids == (3, 4)
    assert result.dropped_tokens == 2
    assert result.resent_tokens == len(asked.prompt)


async def test_replicas_may_come_and_go_between_calls() -> None:
    """V12 of a pool: who serves is asked anew for each call."""
    gone, there = Scripted([made(1), CUT]), Scripted([made(2), END])
    serving: list[Any] = [gone]
    rollout = PartialRollout(lambda: serving)
    seen: list[TokenChunk] = []

    def saw(chunk: TokenChunk) -> None:
        seen.append(chunk)
        serving[:] = [there]

    result = await rollout.generate(request("r", 9), seen=saw)
    assert result.completion.token_ids == (1, 2)
    assert [c.token_ids for c in seen] == [(1,), (), (2,), ()]


async def test_where_nobody_serves_it_says_so_and_keeps_what_it_has() -> None:
    serving: list[Any] = []
    rollout = PartialRollout(lambda: serving)
    with pytest.raises(RequestRejected, match="no replica serves"):
        await rollout.generate(request("r", 9))
    serving.append(Scripted([made(1), CUT]))
    result = await rollout.generate(request("r", 9), seen=lambda chunk: serving.clear())
    assert result.given_up is GivenUp.NO_REPLICA
    assert result.completion.token_ids == (1,)


async def test_it_says_why_it_was_given_up() -> None:
    old = Scripted([made(1), CUT], [made(2, step=9), END])
    assert (await client(old, version_age=1).generate(request("r", 9))).given_up is GivenUp.TOO_OLD
    cut = Scripted([made(1), CUT], [made(2), CUT])
    result = await client(cut, continuations=1).generate(request("r", 9))
    assert result.given_up is GivenUp.CUT_OFF
    assert (await client(Scripted([made(1), END])).generate(request("r", 9))).given_up is None

"""Requests that are carried over pauses, on the oracle in virtual time (V1, V2, V3, V5, V6, V7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from hotbunk.conformance.backends.oracle_kit import PROMPT, load, request, running
from hotbunk.conformance.rig import check_spans
from hotbunk.conformance.transfers import FailedElsewhere
from hotbunk.rollout.backends.oracle import decode_token
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    TokenChunk,
    Version,
    VersionSpan,
    collect,
)
from hotbunk.rollout.errors import (
    UpdateFailed,
    WeightsPoisoned,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.partial import PartialPolicy, PartialResult, PartialRollout
from hotbunk.rollout.replica import Deadlines, Replica

pytestmark = pytest.mark.anyio
STEP = 0.01  # seconds of a step of the oracle: one token


class Seen(LocalHandle):
    """A handle that notes what is asked of it."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.replica = replica
        self.asked: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.asked.append(request)
        return super().generate(request)


@asynccontextmanager
async def pool(count: int = 1, **options: Any) -> AsyncIterator[list[Seen]]:
    """Handles of so many replicas with weights of version 0.1."""
    async with AsyncExitStack() as stack:
        handles = []
        for _ in range(count):
            replica, _ = await stack.enter_async_context(running(**options))
            await load(replica, 1)
            handles.append(Seen(replica))
        yield handles


def start(client: PartialRollout, what: GenerateRequest) -> asyncio.Task[PartialResult]:
    return asyncio.create_task(client.generate(what))


async def after(tokens: int) -> None:
    """So long that a request on its own has just so many tokens."""
    await asyncio.sleep(STEP * (tokens + 0.5))


async def cut_off(handle: Seen, step: int | None = None) -> None:
    """A pause that aborts, perhaps an update, and an end of the pause."""
    await handle.pause_generation(PauseMode.ABORT)
    if step is not None:
        await load(handle.replica, step)
    await handle.resume_generation()


def whole(result: PartialResult, tokens: int) -> None:
    """One response, as if nothing had happened: all its side data fit (V3)."""
    done = result.completion
    check_spans(done)
    assert len(done.token_ids) == tokens
    assert done.finish_reason is FinishReason.LENGTH
    assert (done.error, done.retryable) == ("", False)


# -- the budget -------------------------------------------------------------------------------


async def test_what_is_left_of_the_budget_is_asked_for_v1_v5() -> None:
    """Limit 10, cut off at 6: the continuation asks for 4, and the tokens are the uninterrupted ones."""
    async with pool() as [handle]:
        plain = await collect(handle.replica.generate(request("plain", 10)))
        carried = start(PartialRollout([handle]), request("r", 10))
        await after(6)
        await cut_off(handle)
        result = await carried
        whole(result, 10)
        assert result.completion.token_ids == plain.token_ids
        assert result.completion.logprobs == plain.logprobs
        first, second = handle.asked
        assert (first.sampling.max_tokens, second.sampling.max_tokens) == (10, 4)
        assert second.prompt == (*PROMPT, *plain.token_ids[:6])
        assert (first.continued, second.continued) == (0, 6)
        assert (result.continuations, result.dropped_tokens) == (1, 0)
        assert result.completion.request_id == "r"


@pytest.mark.parametrize("cuts", [1, 2, 5])
async def test_however_often_it_is_cut_off_the_tokens_are_the_same_v1(cuts: int) -> None:
    async with pool() as [handle]:
        plain = await collect(handle.replica.generate(request("plain", 30)))
        carried = start(PartialRollout([handle]), request("r", 30))
        for _ in range(cuts):
            await after(3)
            await cut_off(handle)
        result = await carried
        whole(result, 30)
        assert result.completion.token_ids == plain.token_ids
        assert result.continuations == cuts
        assert [r.sampling.max_tokens for r in handle.asked] == [
            30 - 3 * n for n in range(cuts + 1)
        ]


async def test_cut_off_before_its_first_token_nothing_is_lost_v5() -> None:
    async with pool() as [handle]:
        carried = start(PartialRollout([handle]), request("r", 5))
        await asyncio.sleep(STEP / 2)
        await cut_off(handle)
        result = await carried
        whole(result, 5)
        assert [r.sampling.max_tokens for r in handle.asked] == [5, 5]


def client(*handles: Any, **policy: Any) -> PartialRollout:
    return PartialRollout(handles, PartialPolicy(**policy))


# -- versions ---------------------------------------------------------------------------------


async def test_every_token_keeps_the_version_that_served_it_v6_v7() -> None:
    async with pool() as [handle]:
        carried = start(PartialRollout([handle]), request("r", 12))
        await after(5)
        await cut_off(handle, step=2)
        await after(4)
        await cut_off(handle, step=3)
        result = await carried
        whole(result, 12)
        infos = [decode_token(t) for t in result.completion.token_ids]
        spans = result.completion.spans
        said = [s.version for s in spans for _ in range(s.start, s.end)]
        assert [i.version for i in infos] == said
        assert [i.kv.version for i in infos] == said, "KV of older weights was read"
        assert [s.version.step for s in spans] == [1, 2, 3]
        assert spans[0] == VersionSpan(Version(0, 1), 0, 5)
        assert result.versions == (Version(0, 1), Version(0, 2), Version(0, 3))


async def test_a_kept_request_that_spans_versions_is_joined_as_it_is_v7() -> None:
    async with pool() as [handle]:
        carried = start(PartialRollout([handle]), request("r", 8))
        await after(3)
        await handle.pause_generation(PauseMode.KEEP)
        await load(handle.replica, 2)
        await handle.resume_generation()
        result = await carried
        whole(result, 8)
        assert [(s.version.step, s.start, s.end) for s in result.completion.spans] == [
            (1, 0, 4),  # the step in progress came to its end
            (2, 4, 8),
        ]
        assert result.continuations == 0


async def test_from_prompt_one_version_makes_it_all_v2() -> None:
    async with pool() as [handle]:
        carried = start(client(handle, from_prompt=True), request("r", 10))
        for step in (2, 3):
            await after(4)
            await cut_off(handle, step=step)
        result = await carried
        whole(result, 10)
        assert result.versions == (Version(0, 3),)
        plain = await collect(handle.replica.generate(request("plain", 10)))
        assert result.completion.token_ids == plain.token_ids
        assert result.dropped_tokens == 8
        assert [r.prompt for r in handle.asked] == [PROMPT] * 3
        assert [r.continued for r in handle.asked] == [0] * 3


async def test_from_prompt_also_restarts_what_a_keep_carried_into_new_weights_v2() -> None:
    async with pool() as [handle]:
        carried = start(client(handle, from_prompt=True), request("r", 10))
        await after(4)
        await handle.pause_generation(PauseMode.KEEP)
        await load(handle.replica, 2)
        await handle.resume_generation()
        result = await carried
        whole(result, 10)
        assert result.versions == (Version(0, 2),)
        assert result.dropped_tokens == 5
        assert not (await handle.status()).running


# -- limits and ends --------------------------------------------------------------------------


async def test_a_users_own_abort_is_not_carried_on() -> None:
    """By the request's own id, also after a continuation, running or held."""
    for state in ("first call", "continued", "held"):
        async with pool() as [handle]:
            carried = start(PartialRollout([handle]), request("r", 50))
            await after(4)
            if state != "first call":
                await cut_off(handle)
                await after(2)
            if state == "held":
                await handle.pause_generation(PauseMode.ABORT)
                await asyncio.sleep(STEP)
            report = await handle.abort(["r"])
            assert report.aborted == ("r",), state
            done = (await carried).completion
            assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, False)
            assert len(done.token_ids) >= 4
            check_spans(done)


async def test_a_held_request_whose_deadline_passes_is_sent_again() -> None:
    async with pool(deadlines=Deadlines(hold=1.0)) as [handle]:
        carried = start(PartialRollout([handle]), request("r", 6))
        await after(2)
        await handle.pause_generation(PauseMode.ABORT)
        await asyncio.sleep(2.5)
        await handle.resume_generation()
        result = await carried
        whole(result, 6)
        assert result.continuations == 3


async def test_dropping_the_call_ends_the_request_in_the_engine() -> None:
    async with pool() as [handle]:
        carried = start(PartialRollout([handle]), request("r", 50))
        await after(3)
        carried.cancel()
        await asyncio.wait({carried})
        await asyncio.sleep(STEP)
        status = await handle.status()
        assert (status.running, status.backend.running) == ((), ())


# -- several replicas -------------------------------------------------------------------------


async def test_a_replica_that_rejects_is_left_for_the_next() -> None:
    async with pool(2) as [leaving, staying]:
        rollout = PartialRollout([leaving, staying])
        carried = [start(rollout, request(f"r{n}", 12)) for n in range(6)]
        await after(4)
        await leaving.pause_generation(PauseMode.ABORT, reject=True)
        results = await asyncio.gather(*carried)
        for result in results:
            whole(result, 12)
        assert len({r.completion.request_id for r in results}) == 6
        moved = [r for r in results if r.continuations]
        assert len(moved) == 3
        late = await asyncio.gather(*(start(rollout, request(f"s{n}", 3)) for n in range(5)))
        assert [len(r.completion.token_ids) for r in late] == [3] * 5


async def test_a_poisoned_replica_is_left_for_the_next_n7() -> None:
    async with pool(2) as [broken, healthy]:
        rollout = PartialRollout([broken, healthy])
        carried = start(rollout, request("r0", 12))
        await after(3)
        await broken.pause_generation(PauseMode.KEEP)
        with pytest.raises(UpdateFailed):
            await load(broken.replica, 2, FailedElsewhere)
        await broken.resume_generation()
        whole(await carried, 12)
        assert healthy.asked[0].prompt[: len(PROMPT)] == PROMPT
        for n in range(1, 5):  # new ones do not stumble over it, either
            whole(await rollout.generate(request(f"r{n}", 3)), 3)
        with pytest.raises(WeightsPoisoned):
            await PartialRollout([broken]).generate(request("alone", 3))


# -- what cannot be meant ---------------------------------------------------------------------


async def test_many_requests_over_many_cuts_are_all_whole_v1_v3() -> None:
    async with pool(2) as handles:
        rollout = PartialRollout(handles)
        carried = [start(rollout, request(f"r{n}", 5 + 3 * n)) for n in range(12)]
        for step in range(2, 8):
            await after(4)
            for handle in handles:
                await cut_off(handle, step=step)
        for n, result in enumerate(await asyncio.gather(*carried)):
            whole(result, 5 + 3 * n)
            for span in result.completion.spans:
                tokens = result.completion.token_ids[span.start : span.end]
                assert {decode_token(t).version for t in tokens} == {span.version}

"""``pause(mode, min_start_version=k)``: work that would be thrown away is not kept (V15)."""

from __future__ import annotations

import asyncio

import pytest

from hotbunk.conformance.backends.oracle_kit import ask, load, request, running
from hotbunk.conformance.rig import expect
from hotbunk.rollout.contract import FinishReason, PauseMode, Version
from hotbunk.rollout.errors import Unsupported, UsageError
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.partial import PartialRollout
from hotbunk.rollout.replica import Replica

pytestmark = pytest.mark.anyio
KEPT = [PauseMode.KEEP, PauseMode.WAIT]


async def switch(replica: Replica, step: int) -> None:
    """New weights under what runs."""
    await replica.pause_generation(PauseMode.KEEP)
    await load(replica, step)
    await replica.resume_generation()


@pytest.mark.parametrize("mode", KEPT)
async def test_only_what_began_before_it_is_ended(mode: PauseMode) -> None:
    async with running() as (replica, _):
        old = await ask(replica, "old", 300).started()
        await switch(replica, 1)
        mid = await ask(replica, "mid", 60).started()
        await switch(replica, 2)
        new = await ask(replica, "new", 60).started()
        report = await replica.pause_generation(mode, min_start_version=Version(0, 1))
        assert report.aborted == ("old",)
        ended = await old.task
        assert (ended.finish_reason, ended.retryable) == (FinishReason.ABORT, False)
        assert ended.error == "begun by 0.0, before 0.1"
        assert ended.spans[-1].version == Version(0, 2)
        stand = ("mid", "new") if mode is PauseMode.KEEP else ()
        assert report.frozen == stand
        await replica.resume_generation()
        for one in (mid, new):
            done = await one.task
            assert (done.finish_reason, len(done.token_ids)) == (FinishReason.LENGTH, 60)


async def test_what_is_frozen_already_is_ended_too() -> None:
    async with running() as (replica, engine):
        old = await ask(replica, "old", 300).started()
        await replica.pause_generation(PauseMode.KEEP)
        made = engine.scheduler.tokens_generated
        report = await replica.pause_generation(
            PauseMode.WAIT, owner="other", min_start_version=Version(0, 1)
        )
        assert report.aborted == ("old",)
        assert (await old.task).finish_reason is FinishReason.ABORT
        assert engine.scheduler.tokens_generated == made  # nothing was computed again for it
        await replica.resume_generation()
        await replica.resume_generation(owner="other")


async def test_a_request_that_has_waited_in_the_engine_is_as_new_as_its_first_token() -> None:
    async with running(max_running=1) as (replica, _):
        first = await ask(replica, "first", 20).started()
        queued = ask(replica, "queued", 300)
        await switch(replica, 1)
        await first.task
        await queued.started()
        report = await replica.pause_generation(PauseMode.KEEP, min_start_version=Version(0, 1))
        assert (report.aborted, report.frozen) == ((), ("queued",))
        await replica.resume_generation()
        await queued.task


async def test_without_a_token_it_may_be_sent_again() -> None:
    async with running(max_running=1) as (replica, _):
        first = await ask(replica, "first", 300).started()
        queued = ask(replica, "queued", 5)
        await replica.pause_generation(PauseMode.KEEP, min_start_version=Version(0, 1))
        assert not (await first.task).retryable
        ended = await queued.task
        assert (ended.token_ids, ended.retryable) == ((), True)
        await replica.resume_generation()


async def test_a_continuation_is_as_old_as_what_it_continues() -> None:
    """Cut off and sent again, it began when its first token was made; running or held."""
    async with running() as (replica, _):
        client = PartialRollout([LocalHandle(replica)])
        carried = asyncio.create_task(client.generate(request("carried", 300)))
        await asyncio.sleep(1)
        await replica.pause_generation(PauseMode.ABORT)
        await load(replica, 1)
        assert (await replica.status()).held == ("carried",)
        least = Version(0, 1)
        keep = {"owner": "other", "min_start_version": least}
        report = await replica.pause_generation(PauseMode.KEEP, **keep)
        assert report.aborted == ("carried",)
        result = await carried
        assert (result.continuations, result.completion.retryable) == (1, False)
        assert result.completion.error == "continues what began before 0.1"
        assert result.versions == (Version(0, 0),)
        await replica.resume_generation()
        await replica.resume_generation(owner="other")
        again = await ask(replica, "again", 300, start_version=Version(0, 0)).started()
        report = await replica.pause_generation(PauseMode.KEEP, **keep)
        assert report.aborted == ("again",)
        assert (await again.task).spans[0].version == least
        await replica.resume_generation(owner="other")


async def test_with_abort_it_is_an_argument_error() -> None:
    async with running() as (replica, _):
        one = await ask(replica, "one", 60).started()
        await expect(
            UsageError, replica.pause_generation(PauseMode.ABORT, min_start_version=Version(0, 0))
        )
        assert not (await replica.status()).is_paused
        assert len((await one.task).token_ids) == 60


@pytest.mark.parametrize("mode", KEPT)
async def test_an_engine_without_abort_cannot(mode: PauseMode) -> None:
    async with running(unsupported=["abort"]) as (replica, _):
        one = await ask(replica, "one", 60).started()
        await expect(Unsupported, replica.pause_generation(mode, min_start_version=Version(0, 1)))
        assert not (await replica.status()).is_paused
        assert len((await one.task).token_ids) == 60

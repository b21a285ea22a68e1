"""Verbs, pauses and requests that meet at the wrong moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hotbunk.conformance.backends.oracle_kit import ask, load, request, running
from hotbunk.conformance.rig import expect
from hotbunk.conformance.transfers import FailedElsewhere, Hanging
from hotbunk.rollout.backends.oracle import FaultPlan
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    FinishReason,
    PauseMode,
    Retention,
    Version,
    emulated,
)
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    EngineFailed,
    SessionError,
)
from hotbunk.rollout.status import Deadlines

pytestmark = pytest.mark.anyio


async def test_a_slow_resume_does_not_overtake_the_pause_after_it() -> None:
    """The engine's resume is under way when a pause comes: it ends paused (H1)."""
    faults = FaultPlan()
    async with running(faults=faults) as (replica, engine):
        await replica.pause_generation()
        faults.delays("resume_generation", 5.0)
        resuming = asyncio.create_task(replica.resume_generation())
        await asyncio.sleep(1)
        early = ask(replica, "early")
        await replica.pause_generation()
        await resuming
        assert engine.scheduler.mode is PauseMode.ABORT
        late = ask(replica, "late")
        await asyncio.sleep(60)
        assert not late.tokens
        assert (await early.task).finish_reason is FinishReason.ABORT
        await replica.release()
        late.task.cancel()


async def test_an_owner_that_resumes_before_its_pause_began_leaves_no_pause_behind() -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, engine):
        await replica.pause_generation()
        faults.delays("resume_generation", 5.0)
        resuming = asyncio.create_task(replica.resume_generation())
        await asyncio.sleep(1)
        pausing = asyncio.create_task(replica.pause_generation())
        await asyncio.sleep(1)
        await replica.resume_generation()
        await resuming
        await expect(SessionError, pausing)
        assert engine.scheduler.mode is None
        assert (await ask(replica, "x").task).token_ids


async def test_a_resume_that_fails_can_be_repeated() -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, _):
        await replica.pause_generation()
        faults.raises("resume_generation", OSError("connection reset"))
        await expect(EngineFailed, replica.resume_generation())
        await replica.resume_generation()
        assert (await ask(replica, "x").task).token_ids


async def test_a_verb_does_not_turn_a_keep_into_a_drain() -> None:
    """keep and a KV release at the same time: the kept request is frozen, not finished."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await asyncio.gather(replica.pause_generation(PauseMode.KEEP), replica.release_kv_cache())
        assert len(request.tokens) < 5
        assert not request.done
        await replica.resume_kv_cache()
        await replica.resume_generation()
        assert len((await request.task).token_ids) == 50


async def test_a_drain_waits_for_the_verb_in_progress() -> None:
    """wait after keep would let the frozen run in the middle of an update: only after it."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await replica.pause_generation(PauseMode.KEEP)
        kept = len(request.tokens)
        hanging = Hanging(weights_at(1), version=Version(0, 1), at=0)
        hanging.reached = asyncio.Event()
        update = asyncio.create_task(
            replica.update_weights(hanging, version=Version(0, 1), deadline=5)
        )
        await hanging.reached.wait()
        await expect(DeadlineExceeded, replica.pause_generation(PauseMode.WAIT, deadline=2))
        assert len(request.tokens) == kept, "a frozen request ran during an update"
        await expect(DeadlineExceeded, update)
        assert (await request.task).finish_reason is FinishReason.ABORT
        await replica.resume_generation()


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"]])
async def test_nothing_is_drained_from_missing_content(tags: list[str]) -> None:
    """keep, release, then a pause with wait: the frozen stay frozen, and finish after."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await replica.pause_generation(PauseMode.KEEP)
        kept = len(request.tokens)
        await replica.release(tags, retention=Retention.BACKUP)
        report = await replica.pause_generation(PauseMode.WAIT, owner="other")
        assert report.frozen == ("x",)
        await asyncio.sleep(60)
        assert len(request.tokens) == kept
        await replica.resume()
        await replica.resume_generation()
        await replica.resume_generation(owner="other")
        assert len((await request.task).token_ids) == 50


async def test_release_after_abort_does_not_wait_for_slow_readers() -> None:
    """An aborted request is not a kept one, though its client has not read the end yet."""
    async with running(unsupported=["keep_release"]) as (replica, _):
        stream = replica.generate(request("x", 50))
        await anext(stream)  # and then the client is busy elsewhere
        await replica.pause_generation(PauseMode.ABORT)
        await replica.release()
        await replica.resume()
        assert [c.finish_reason async for c in stream][-1] is FinishReason.ABORT


async def test_a_slow_reader_of_a_poisoned_replica_is_let_go() -> None:
    """It was frozen when the update broke; healing does not bring it back."""
    async with running() as (replica, _):
        stream = replica.generate(request("x", 50))
        await anext(stream)
        await replica.pause_generation(PauseMode.KEEP)
        with pytest.raises(Exception, match="rank 1"):
            await load(replica, 1, FailedElsewhere)
        await load(replica, 1)
        await replica.resume_generation()
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert rest[-1].retryable
        assert "poisoned" in rest[-1].error


async def test_cancelled_waits_leave_nothing_behind() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        request = await ask(replica, "x").started()
        releasing = asyncio.create_task(replica.release())
        await asyncio.sleep(0.1)
        releasing.cancel()
        await asyncio.wait({releasing})
        assert len((await request.task).token_ids) == 50
        assert not (await replica.status()).is_paused
        assert (await ask(replica, "y").task).token_ids


async def test_verbs_take_turns() -> None:
    """Many at once, from many callers: one after the other, and the end is consistent."""
    async with running() as (replica, _):
        await asyncio.gather(
            *(replica.sleep(1) for _ in range(5)),
            *(replica.wake_up() for _ in range(5)),
            *(replica.release_kv_cache() for _ in range(5)),
        )
        await replica.wake_up()
        await load(replica, 1)
        assert (await ask(replica, "x").task).token_ids


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
async def test_a_drain_at_the_gate_ends_when_a_later_pause_stops_the_engine(
    mode: PauseMode,
) -> None:
    """An engine without a wait of its own: keep after wait freezes the rest, and both return."""
    async with running() as (replica, engine):
        pause = {**engine.capabilities.pause, PauseMode.WAIT: emulated("drained at the gate")}
        engine.capabilities = replace(engine.capabilities, pause=pause)
        long = ask(replica, "long", tokens=500)
        await long.started()
        waiting = asyncio.create_task(replica.pause_generation(PauseMode.WAIT, owner="other"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await replica.pause_generation(mode)
        report = await asyncio.wait_for(waiting, 1)
        assert report.frozen == (("long",) if mode is PauseMode.KEEP else ())
        assert not long.done or mode is PauseMode.ABORT
        long.task.cancel()


async def test_generation_opens_in_the_moment_in_which_a_frozen_request_waited_too_long() -> None:
    """Its own timeout was taken for one that the engine raised, and answered as a failure of it."""
    async with running(deadlines=Deadlines(hold=5.0)) as (replica, _):
        frozen = await ask(replica, "frozen", 500).started()
        await replica.pause_generation(PauseMode.KEEP)
        loop = asyncio.get_running_loop()
        until = replica._gate.entries["frozen"].until
        assert until is not None
        loop.call_at(until, replica._gate.thaw)  # as a resume does, right after the timeout
        ended = await frozen.task
        assert (ended.finish_reason, ended.retryable) == (FinishReason.ABORT, True)
        assert "held longer than 5 s" in ended.error
        await replica.resume_generation()

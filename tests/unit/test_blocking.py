"""The blocking facade: verbs, streams, deadlines, and nothing that goes on behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.conformance.backends.oracle_kit import load, request, running
from hotbunk.conformance.backends.oracle_pool import Carrier, Noting, Weights
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import FaultPlan, decode_token
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Deployment, FinishReason, Version
from hotbunk.sync import BlockingManager, LoopThread

kept: list[AsyncExitStack] = []


def making(replicas: int = 2, plan: FaultPlan | None = None) -> Callable[[], Awaitable[Any]]:
    async def make() -> CheckpointEngineManager:
        stack = AsyncExitStack()
        handles = []
        for n in range(replicas):
            replica, _ = await stack.enter_async_context(running(faults=plan or FaultPlan()))
            replica.name = f"r{n}"
            await load(replica, 1)
            handles.append(Noting(replica, []))
        manager = CheckpointEngineManager(
            handles, Carrier(), deployment=Deployment.STANDALONE, policy=SyncPolicy()
        )
        await manager.adopt()
        kept.append(stack)  # the replicas end with the manager
        return manager

    return make


def test_a_script_syncs_and_generates() -> None:
    let_go: list[str] = []
    with BlockingManager(making()) as it:
        assert len(it.statuses()) == 2
        report = it.update_weights(
            Weights(2), Version(0, 2), let_go=lambda: let_go.append(threading.current_thread().name)
        )
        assert report.ok
        assert let_go != [threading.current_thread().name]
        done = it.generate([request(f"q{n}", 12) for n in range(5)])
        assert [len(responses) for responses in done] == [1] * 5
        for (response,) in done:
            assert {decode_token(t).version for t in response.token_ids} == {Version(0, 2)}
        assert set(it.release_kv_replicas()) == {"r0", "r1"}
        it.resume_kv_replicas()
        assert it.remove_replica("r0").name == "r0"
        assert [h.name for h in it.manager.routable()] == ["r1"]


def test_a_stream_that_is_dropped_ends_its_request() -> None:
    with BlockingManager(making(1)) as it:
        (handle,) = it.manager.routable()
        stream = it.stream(handle, request("long", 900))
        assert next(stream).token_ids
        assert it.statuses()[0].running == ("long",)
        stream.close()
        assert it.statuses()[0].running == ()
        whole = list(it.stream(handle, request("short", 7)))
        assert whole[-1].finish_reason is FinishReason.LENGTH


def test_a_call_that_hangs_is_cut_off_and_names_its_deadline() -> None:
    plan = FaultPlan()
    it = BlockingManager(making(1, plan), deadline=0.5)
    try:
        plan.at("update/commit", Fault(Action.DELAY, seconds=30.0))
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.5 s"):
            it.update_weights(Weights(2), Version(0, 2))
        assert time.monotonic() - began < 20
        assert it.statuses()[0].name == "r0", "the facade itself still answers"
    finally:
        it.close()


def test_errors_are_the_managers_own_and_closing_is_idempotent() -> None:
    it = BlockingManager(making(1))
    with pytest.raises(errors.UsageError, match="nobody"):
        it.remove_replica("nobody")
    it.close()
    it.close()
    with pytest.raises(errors.SessionError):
        it.statuses()
    assert "hotbunk" not in {thread.name for thread in threading.enumerate()}


def test_what_cannot_be_built_leaves_no_thread() -> None:
    async def make() -> CheckpointEngineManager:
        raise errors.ConfigError("no such thing")

    with pytest.raises(errors.ConfigError):
        BlockingManager(make)
    assert "hotbunk" not in {thread.name for thread in threading.enumerate()}


def test_a_blocking_call_on_its_own_loop_is_refused() -> None:
    thread = LoopThread()

    async def inside() -> None:
        thread.run(lambda: asyncio.sleep(0))

    try:
        with pytest.raises(errors.SessionError, match="event loop"):
            thread.run(inside)
    finally:
        thread.close()

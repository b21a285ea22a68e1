"""Threads of recipes: whoever is cancelled waits for memory's sake, and nobody for a user's code."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes.threads import OneThread, in_thread

pytestmark = pytest.mark.anyio


async def test_a_cancelled_wait_ends_after_the_work_it_waited_for() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(10)
        ended.set()

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.02)
        assert not waiting.done(), "the work still uses its memory"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_calls_are_made_in_order_and_errors_come_back() -> None:
    thread, order = OneThread("test"), []

    def fails() -> None:
        raise ConfigError("no")

    calls = [thread.call(order.append, n) for n in range(5)]
    await asyncio.gather(*calls)
    assert order == list(range(5))
    with pytest.raises(ConfigError, match="no"):
        await thread.call(fails)
    assert await thread.call(lambda: 7) == 7
    thread.close()


async def test_a_call_that_never_returns_holds_up_its_successors_alone() -> None:
    thread, never = OneThread("test"), threading.Event()
    ran: list[int] = []
    hung = asyncio.create_task(thread.call(never.wait))
    later = asyncio.create_task(thread.call(ran.append, 1))
    await asyncio.sleep(0.02)
    for task in (hung, later):
        task.cancel()
    await asyncio.wait([hung, later], timeout=1)
    assert hung.cancelled()
    assert later.cancelled()
    never.set()
    assert await thread.call(lambda: 7) == 7
    assert ran == [], "what was cancelled before its turn is not run"
    thread.close()

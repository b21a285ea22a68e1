"""Calls that nobody waits for any more: they are seen to end, and their errors are nobody's loss."""

from __future__ import annotations

import asyncio
import gc

import pytest

from hotbunk.rollout.calls import abandoned, bounded

pytestmark = pytest.mark.anyio  # whose runner fails a test in which an error was never retrieved


async def stubborn(seconds: float) -> None:
    """Cancelled, it takes a while, and then fails in its own way."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
        raise RuntimeError("its own") from None


async def test_a_call_whose_caller_is_cancelled() -> None:
    calling = asyncio.create_task(bounded("verb", stubborn(1), 10, grace=5))
    await asyncio.sleep(1)
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
    gc.collect()


async def test_what_is_abandoned_has_ended_and_is_not_cancelled_twice() -> None:
    one = asyncio.create_task(stubborn(2))
    two = asyncio.create_task(stubborn(4))
    await asyncio.sleep(1)
    leaving = asyncio.create_task(abandoned(one, two))
    await asyncio.sleep(1)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert not two.done()  # its clean-up goes on
    await asyncio.wait({one, two})
    assert not two.cancelled()
    del one, two
    gc.collect()
    await abandoned()

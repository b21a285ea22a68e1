"""Calling an engine: bounded in time, and every failure typed.

This is the one boundary between an engine's code and ours where a blanket ``except`` is right: an
engine may raise anything.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from typing import Any, TypeVar

from hotbunk.rollout.errors import DeadlineExceeded, EngineFailed, HotbunkError, ReplicaLost

T = TypeVar("T")


async def bounded(verb: str, call: Awaitable[T], seconds: float, *, grace: float) -> T:
    """Await an engine's call for at most ``seconds``, then ``grace`` more for its cancellation.

    :raises DeadlineExceeded: it did not end in time, and could be cancelled.
    :raises ReplicaLost: it could not even be cancelled: the engine hangs.
    :raises EngineFailed: the engine raised something of its own.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.add_done_callback(noted)
        await _cancelled(verb, task, grace)
        raise
    # A call that ends in the very moment it is cancelled is taken at its word.
    if not done and not await _cancelled(verb, task, grace):
        raise DeadlineExceeded(verb, seconds)
    try:
        return task.result()
    except HotbunkError:
        raise
    except asyncio.CancelledError:
        raise EngineFailed(f"the engine cancelled its own {verb}") from None
    except Exception as error:
        raise engine_failed(verb, error) from error


async def abandoned(*futures: asyncio.Future[Any]) -> None:
    """Cancel these and see them end. What they raise then is nobody's any more."""
    for future in futures:
        future.add_done_callback(noted)
        future.cancel()
    if futures:  # not gather: who is cancelled here must not cut their clean-up off
        await asyncio.wait(futures)


async def whole(call: Awaitable[T]) -> T:
    """Await it to its end, also when cancelled meanwhile: what it set going elsewhere may still write."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(noted)
        await asyncio.wait({task})
        raise


def noted(future: asyncio.Future[Any]) -> None:
    """A callback: what it raised is taken note of, though nobody waits."""
    if not future.cancelled():
        future.exception()


def engine_failed(verb: str, error: BaseException) -> EngineFailed:
    """An engine's own exception as ours, with its traceback."""
    return EngineFailed(
        f"{verb} raised {type(error).__name__}: {error}",
        remote_traceback="".join(traceback.format_exception(error)),
    )


async def _cancelled(verb: str, task: asyncio.Future[T], grace: float) -> bool:
    """Cancel and wait; whether the call ended by itself after all.

    :raises ReplicaLost: it goes on regardless.
    """
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=grace)
    if not done:
        raise ReplicaLost(
            f"the engine hangs in {verb} and cannot be cancelled", remedy="restart the engine"
        )
    return not task.cancelled()

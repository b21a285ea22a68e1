"""Awaiting what must not be cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def uncut(call: Awaitable[T], stop: Callable[[], None] | None = None) -> T:
    """Await a command to its end, also when cancelled: it works on what is lent, or on state.

    A thread that hangs in it is then known to hang.

    :param stop: called when cancelled, before the command's end is waited for.
    """
    future = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # taken note of: whoever waited is gone
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread, :func:`uncut`: nothing may write once this has ended."""
    return await uncut(asyncio.to_thread(work))

"""Work in other threads, for loops that must not stand still."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` in a thread. Cancelled, however often, this ends after it: its memory must stay."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        raise


class OneThread:
    """Runs other people's functions one at a time, in order, in a thread that nobody waits for.

    A function that never returns holds up those after it, but neither the loop nor the end of the
    process.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``work`` returns or raises. Cancelled before its turn, it does not run."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            if answer.cancelled():
                return
            result, error = None, None
            try:
                result = work(*args, **kwargs)
            # A boundary: it is raised again where it is awaited.
            except BaseException as raised:  # noqa: BLE001
                error = raised
            try:
                loop.call_soon_threadsafe(tell, result, error)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        self._work.put(run)
        return await answer

    def close(self) -> None:
        """End after what is under way."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

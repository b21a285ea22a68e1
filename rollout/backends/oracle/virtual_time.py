"""An event loop whose time is virtual: a wait of 600 s is over at once.

Whenever every task waits, the clock jumps to the next timer instead of sleeping, so deadlines,
hold times and hung engines are tested in microseconds and always in the same order. Sockets and
pipes still work, and what they bring comes first; but a thread or another process works in real
time and would see the virtual clock race past it, so neither belongs on this loop.

Use it as ``asyncio.Runner(loop_factory=VirtualTimeLoop)``, or with anyio's pytest plugin as the
backend ``("asyncio", {"loop_factory": VirtualTimeLoop})``.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class Deadlock(RuntimeError):
    """Every task waits, and no timer or file is left that could wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """A real selector that is only ever polled; the waiting is done by moving the clock."""

    def __init__(self, patience: float) -> None:
        self.now = 0.0
        self._patience = patience
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            ready = self._real.select(self._patience)
            if not ready:
                raise Deadlock(
                    f"every task waits, no timer is set, and nothing came in {self._patience:g} s"
                )
            return ready
        self.now += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop. ``time()`` starts at 0 and moves only while every task waits.

    :param patience: real seconds to wait for a file when no timer is set, before the program is
        declared deadlocked.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._jumping = _JumpingSelector(patience)
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

"""The engine's own thread: commands between steps, steps while there is work, sleep otherwise."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from hotbunk.rollout.errors import EngineFailed, ReplicaLost

T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineThread:
    """Runs ``step`` while ``has_work`` says so, and commands in order between steps.

    A paused or idle engine blocks on a condition: it burns no CPU. ``on_death`` is called in the
    thread, once, with the error that ended it.
    """

    def __init__(
        self,
        step: Callable[[], None],
        has_work: Callable[[], bool],
        on_death: Callable[[EngineFailed], None],
    ) -> None:
        self._step = step
        self._has_work = has_work
        self._on_death = on_death
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._stopping = False
        self.failure: EngineFailed | None = None
        self.loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="hotbunk-engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], T]) -> Awaitable[T]:
        """Run ``command`` in the thread, between steps."""
        future: asyncio.Future[T] = self.loop.create_future()
        with self._wake:
            self.check_alive()
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def check_alive(self) -> None:
        """:raises ReplicaLost: a step raised, or the engine was closed."""
        if self.failure is not None or self._stopping:
            why = str(self.failure or "the engine is closed")
            raise ReplicaLost(why, remedy="restart the engine")

    def stop(self, seconds: float = 10.0) -> bool:
        """End the thread after the step in progress; whether it ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self._has_work()):
                        self._wake.wait()
                    commands = list(self._commands)
                    self._commands.clear()
                    if self._stopping and not commands:
                        return
                for command, future in commands:
                    self._answer(command, future)
                if not commands and self._has_work():
                    self._step()
        # The step loop is a named boundary: whatever a model raises becomes a typed error.
        except Exception as error:
            log.exception("the engine thread died")
            self._die(error)

    def _answer(self, command: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = command()
        except Exception as error:  # noqa: BLE001 - carried to the caller, who types it
            self.post(_settle, future, None, error)
        else:
            self.post(_settle, future, result, None)

    def _die(self, error: Exception) -> None:
        failure = EngineFailed(f"a step raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._wake:
            self.failure = failure
            orphans = list(self._commands)
            self._commands.clear()
        for _, future in orphans:
            self.post(_settle, future, None, failure)
        self._on_death(failure)

    def post(self, *call: Any) -> None:
        """Have the event loop call something."""
        try:
            self.loop.call_soon_threadsafe(*call)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("an answer came after the event loop was closed")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # cancelled by a deadline
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

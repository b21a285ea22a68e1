"""The line to one engine: calls bounded in time, errors located, and nothing after it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hotbunk.rollout import errors
from hotbunk.rollout.calls import bounded
from hotbunk.rollout.contract import Engine
from hotbunk.rollout.status import Deadlines

T = TypeVar("T")


class EngineLine:
    """What every verb of a replica has in common when it asks the engine.

    :param name: of the replica, for errors.
    :param on_lost: told once more each time it is found lost, and why.
    """

    def __init__(
        self, engine: Engine, name: str, deadlines: Deadlines, on_lost: Callable[[str], object]
    ) -> None:
        self.name = name
        self.lost = ""  # why only a restart heals it
        self._engine = engine
        self._deadlines = deadlines
        self._on_lost = on_lost

    def check_alive(self) -> None:
        """:raises ReplicaLost: it is lost."""
        if self.lost:
            raise errors.ReplicaLost(self.lost, where=self.name, remedy="restart the engine")

    def lose(self, why: str) -> None:
        """It hung or died: nothing it says counts any more."""
        self.lost = self.lost or why
        self._on_lost(f"the replica was lost: {why}")

    def require(self, verb: str) -> None:
        """:raises Unsupported: the backend declares that it does not have the verb."""
        caps = self._engine.capabilities
        ability = getattr(caps, verb)
        if not ability:
            raise errors.Unsupported(verb, caps.backend, ability.how)

    async def call(self, verb: str, coro: Awaitable[T], seconds: float) -> T:
        """See :func:`bounded`. An engine that hangs is lost."""
        try:
            result = await bounded(verb, coro, seconds, grace=self._deadlines.grace)
        except errors.ReplicaLost as error:
            self.lose(error.what)
            raise
        self.check_alive()  # what an engine that was lost meanwhile answers is nobody's
        return result

    @contextmanager
    def located(self) -> Iterator[None]:
        """Errors say which replica they are about."""
        try:
            yield
        except errors.HotbunkError as error:
            if self.name not in error.where:
                error.at(self.name)
            raise

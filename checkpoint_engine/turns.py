"""Who may change replicas when: one sync of all of them, or single ones side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hotbunk.checkpoint_engine.transaction import Part
from hotbunk.rollout.contract import ScopeKind, Version


class Turns:
    """What is for the whole fleet is alone; what is for one replica may go on beside its like.

    Whoever waits for the whole fleet comes before those that come for one replica later.
    """

    def __init__(self) -> None:
        self._fleet = asyncio.Lock()
        self._single = 0
        self._none = asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[None]:
        """Alone."""
        async with self._fleet:
            await self._none.wait()
            yield

    @asynccontextmanager
    async def single(self) -> AsyncIterator[None]:
        """Beside others that are for one replica each; who comes for the same one sees to that."""
        async with self._fleet:
            self._single += 1
            self._none.clear()
        try:
            yield
        finally:
            self._single -= 1
            if not self._single:
                self._none.set()

    @property
    def busy(self) -> bool:
        """Whether replicas are being changed right now."""
        return self._fleet.locked() or self._single > 0


class Waiting:
    """A sync that waits for its turn."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.version = parts[-1].version
        self.kinds = {part.scope.kind for part in parts}
        self.superseded_by: Version | None = None

    def meets(self, waiting: Sequence[Waiting]) -> None:
        """Of two full ones the older is not made: the newer brings everything it would."""
        for other in waiting:
            if other is self or self.kinds | other.kinds != {ScopeKind.FULL}:
                continue
            older, newer = sorted((self, other), key=lambda w: w.version)
            if older.version < newer.version:
                older.superseded_by = max(newer.version, older.superseded_by or newer.version)

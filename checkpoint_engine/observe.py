"""Watching a sync from outside: phases as they begin and end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Observer(Protocol):
    """Told of each phase of the manager's work, in the manager's process."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context around the phase."""
        ...


class Unobserved:
    """Nobody watches."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

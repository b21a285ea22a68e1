"""An update in steps, as a control plane takes it: start, update, then finish or abort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar
from weakref import WeakKeyDictionary

from hotbunk.rollout.contract import TARGET, Transfer, UpdateReport, Version
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.server.session import Session


class Steps(ABC):
    """One client's weight session; whoever comes after it ends it.

    A step out of turn is a ``SessionError`` and changes nothing. What becomes of an update is its own
    word, as everywhere.
    """

    past_the_front: ClassVar[bool] = False
    """Whether what it does goes past the replica that the cases speak to, which never hears of it."""

    @abstractmethod
    async def start(self) -> None:
        """Begin a session."""

    @abstractmethod
    async def update(self, transfer: Transfer) -> UpdateReport:
        """One update of the session, to its end."""

    @abstractmethod
    async def finish(self, version: Version | None = None) -> Version:
        """End it: the version that it committed. ``version``: what that must be."""

    @abstractmethod
    async def abort(self) -> None:
        """End it, whatever it did."""

    @abstractmethod
    async def label(self) -> Version | None:
        """The version that is resident behind the control plane."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of the connection."""


_SESSIONS: WeakKeyDictionary[Replica, Session] = WeakKeyDictionary()


class StepsHere(Steps):
    """hotbunk's own control plane, as ``hotbunk serve`` has it, in front of a replica in this process."""

    def __init__(self, replica: Replica, session: Session, generation: int) -> None:
        self._replica, self._session, self._generation = replica, session, generation

    @staticmethod
    async def begun(replica: Replica) -> StepsHere:
        """As another client than all before."""
        session = _SESSIONS.setdefault(replica, Session(replica))
        return StepsHere(replica, session, await session.init())

    async def start(self) -> None:
        self._session.start(self._generation)

    async def update(self, transfer: Transfer) -> UpdateReport:
        manifest = transfer.manifest
        return await self._session.update(
            self._generation, transfer, manifest.version, manifest.scope, None
        )

    async def finish(self, version: Version | None = None) -> Version:
        return self._session.finish(self._generation, version).version

    async def abort(self) -> None:
        await self._session.abort(self._generation)

    async def label(self) -> Version | None:
        return (await self._replica.status()).versions.get(TARGET)

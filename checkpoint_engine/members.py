"""The replicas of one manager, and which of them may be sent requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.checkpoint_engine.transaction import Run
from hotbunk.rollout.contract import TARGET, Scope, ScopeKind, Version
from hotbunk.rollout.errors import UsageError, closest
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus


class Members:
    """Handles by name, and the version each was last seen to serve (None: it serves none)."""

    def __init__(self, handles: Sequence[ReplicaHandle]) -> None:
        self.current: Version | None = None
        self._handles: dict[str, ReplicaHandle] = {}
        self._serves: dict[str, Version | None] = {}
        names = [handle.name for handle in handles]
        if len(set(names)) != len(names):
            raise UsageError(f"replica names must differ: {names}")
        for handle in handles:
            self.add(handle)

    def add(self, handle: ReplicaHandle) -> None:
        """:raises UsageError: the name is taken."""
        if handle.name in self._handles:
            raise UsageError(f"there is a replica {handle.name!r} already")
        self._handles[handle.name] = handle
        self._serves[handle.name] = None

    def remove(self, name: str) -> ReplicaHandle:
        """:raises UsageError: no replica of that name."""
        if name not in self._handles:
            raise UsageError(f"no replica {name!r}{closest(name, self._handles)}")
        del self._serves[name]
        return self._handles.pop(name)

    def get(self, name: str) -> ReplicaHandle | None:
        """The handle of that name, if it is still here."""
        return self._handles.get(name)

    def handles(self, names: Collection[str] | None = None) -> list[ReplicaHandle]:
        """All, or those named. :raises UsageError: one that is not here."""
        for name in names or ():
            if name not in self._handles:
                raise UsageError(f"no replica {name!r}{closest(name, self._handles)}")
        return [h for name, h in self._handles.items() if names is None or name in names]

    def routable(self) -> tuple[ReplicaHandle, ...]:
        """Those that serve the current version."""
        return tuple(
            handle
            for name, handle in self._handles.items()
            if self._serves[name] is not None and self._serves[name] == self.current
        )

    def saw(self, status: ReplicaStatus) -> None:
        """A replica's own word."""
        if status.name not in self._handles:
            return
        version = status.versions.get(TARGET)
        serves = status.health is Health.OK and status.servable and not status.is_paused
        self._serves[status.name] = version if serves else None
        if version is not None and (self.current is None or version > self.current):
            self.current = version

    def ended(self, run: Run, version: Version, scope: Scope) -> None:
        """A sync of ``version`` ended for a replica. An adapter's version is not the replica's."""
        name, of_base = run.handle.name, scope.kind is not ScopeKind.ADAPTER
        if of_base and run.committed and (self.current is None or version > self.current):
            self.current = version
        if name not in self._handles:
            return  # removed meanwhile
        if run.outcome is Outcome.COMMITTED:
            if of_base:
                self._serves[name] = version
        elif run.outcome is not Outcome.ROLLED_BACK:
            self._serves[name] = None

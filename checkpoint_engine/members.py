"""The replicas of one manager, and which of them may be sent requests."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from hotbunk.checkpoint_engine.policy import Outcome, SyncReport
from hotbunk.checkpoint_engine.run import Run
from hotbunk.rollout.contract import TARGET, Version
from hotbunk.rollout.errors import UsageError, closest
from hotbunk.rollout.gate import SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health, ReplicaStatus

log = logging.getLogger(__name__)


class Adapters:
    """What was last sent of each adapter, to notice a trainer that sends the same again and again."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Version, int]] = {}

    def came(self, name: str, report: SyncReport) -> None:
        """A sync of the adapter committed somewhere."""
        sent = {u.fingerprint for o in report.outcomes for u in o.updates[-1:] if not u.skipped}
        if len(sent) != 1:
            return
        payload = sent.pop()
        version, before = self._last.get(name, (report.version, 0))
        if payload and payload == before and version != report.version:
            log.warning(
                "adapter %r has the same content at %s as at %s: is it trained, and are its current "
                "tensors the ones that are sent?",
                name,
                report.version,
                version,
            )
        self._last[name] = (report.version, payload)


class Members:
    """Handles by name, and the version each was last seen to serve (None: it serves none)."""

    def __init__(self, handles: Sequence[ReplicaHandle]) -> None:
        self.current: Version | None = None
        self.max_lag = 0  # steps a routable replica may serve behind the current version
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
        """Those that serve the current version, or one that may lag so far."""
        return tuple(
            handle
            for name, handle in self._handles.items()
            if self.near(self._serves[name], self.current)
        )

    def near(self, serves: Version | None, wanted: Version | None) -> bool:
        """Whether who serves ``serves`` need not be brought to ``wanted`` at once."""
        if serves is None or wanted is None or serves.incarnation != wanted.incarnation:
            return False
        return 0 <= wanted.step - serves.step <= self.max_lag

    def serves(self) -> dict[str, Version | None]:
        """Each one's version, by name."""
        return dict(self._serves)

    def has_current(self, status: ReplicaStatus) -> bool:
        """Whether a replica says that it holds the current version."""
        return self.current is not None and status.versions.get(TARGET) == self.current

    def may_wait(self, status: ReplicaStatus) -> bool:
        """Whether a replica may take the current version in its own time."""
        if status.health is not Health.OK or any(p.owner == SYNC for p in status.pauses):
            return False  # an earlier sync went wrong there
        if status.is_sleeping:
            return True  # it serves nobody
        return status.servable and self.near(status.versions.get(TARGET), self.current)

    def published(self, version: Version, max_lag: int) -> None:
        """``version`` is there for whoever takes it; it is the current one from now on."""
        self.current, self.max_lag = version, max_lag

    def saw(self, status: ReplicaStatus) -> None:
        """A replica's own word."""
        if status.name not in self._handles:
            return
        version = status.versions.get(TARGET)
        serves = status.health is Health.OK and status.servable and not status.is_paused
        self._serves[status.name] = version if serves else None
        newest = max((v for v in (version, status.newest.get(TARGET)) if v), default=None)
        if newest is not None and (self.current is None or newest > self.current):
            self.current = newest

    def ended(self, run: Run, version: Version | None) -> None:
        """A sync ended for a replica; ``version`` of its weights, None if they were no part of it."""
        name = run.handle.name
        has_it = run.committed or run.outcome is Outcome.COMMITTED
        if version is not None and has_it and (self.current is None or version > self.current):
            self.current = version
        if self._handles.get(name) is not run.handle:
            return  # removed meanwhile, or replaced
        if run.outcome is Outcome.COMMITTED:
            self._serves[name] = version or self._serves[name]
        elif run.outcome is not Outcome.ROLLED_BACK:
            self._serves[name] = None

"""How a sync is to be done, and what came of it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hotbunk.checkpoint_engine.held import PeakMemory
from hotbunk.rollout.contract import PauseMode, UpdateReport, Version
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.status import TimelineEvent

_ROLLING = re.compile(r"rolling\((\d+)\)")
LAZY = "lazy"
CONTROL = 180.0  # seconds for the steps around an update: pauses, memory verbs


class Verify(StrEnum):
    """How far a sync is checked."""

    OFF = "off"
    TRANSFER = "transfer"  # what arrived is what was sent
    APPLIED = "applied"  # what lies in the engine is what was sent


class ReleaseKV(StrEnum):
    """Whether KV memory is given back around a sync."""

    AUTO = "auto"  # where sleep does it anyway
    ALWAYS = "always"
    NEVER = "never"


class OnFailure(StrEnum):
    """What becomes of a replica that was rolled back while others have the new version."""

    KEEP = "keep"  # it serves its old version to whoever comes to it; it is not routable
    FENCE = "fence"  # it is held shut until a sync commits there


class SyncPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value, everywhere a sync is asked for.

    ``pause`` is what happens to requests that run; ``clear_cache`` whether their KV is computed
    again with the new weights. ``deadline`` is for one replica's update, in seconds.
    ``strategy``: ``all`` replicas at once; ``rolling(k)``, k at a time, so that the others serve; or
    ``lazy``: the version is published, and a replica takes it when it stands still, wakes, or is
    told to. One that would then serve more than ``max_lag`` steps behind is updated at once.
    ``on_failure``: what becomes of a replica that was rolled back while others have the version.
    """

    pause: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    release_kv: ReleaseKV = ReleaseKV.AUTO
    verify: Verify = Verify.APPLIED
    strategy: str = "all"
    max_lag: int = 1
    on_failure: OnFailure = OnFailure.KEEP
    bucket_bytes: int = 32 << 20
    deadline: float = 600.0

    def __post_init__(self) -> None:
        if self.deadline <= 0:
            raise ConfigError(f"deadline={self.deadline} must be above 0 seconds")
        if self.max_lag < 0:
            raise ConfigError(f"max_lag={self.max_lag} steps")
        if self.at_once(1) < 1:
            raise ConfigError(f"strategy={self.strategy!r} rolls over no replica at all")

    def at_once(self, replicas: int) -> int:
        """How many of so many replicas are updated at a time.

        :raises ConfigError: ``strategy`` is none of those there are.
        """
        if self.strategy in ("all", LAZY):
            return max(replicas, 1)
        found = _ROLLING.fullmatch(self.strategy)
        if found is None:
            raise ConfigError(
                f"strategy={self.strategy!r} is unknown", remedy="use all, rolling(k) or lazy"
            )
        return int(found[1])

    @property
    def lazy(self) -> bool:
        """Whether replicas take new versions in their own time."""
        return self.strategy == LAZY

    @property
    def longest(self) -> float:
        """Seconds after which a handle that has not answered is given up; the replica's own
        deadlines come first."""
        return 2 * self.deadline + CONTROL


class Outcome(StrEnum):
    """How a sync ended for one replica."""

    COMMITTED = "committed"
    FENCED = "committed, fenced"  # the weights are new, but it does not serve
    ROLLED_BACK = "rolled back"  # weights, residency and pauses as before
    POISONED = "poisoned"  # half-written; a full resend heals it
    LOST = "lost"  # hung or dead; only a restart heals it
    IN_DOUBT = "in doubt"  # could not be asked
    DEFERRED = "deferred"  # lazy: it serves what it did, and takes the version in its own time


class ReplicaOutcome(msgspec.Struct, frozen=True):
    """One replica's part of a sync. ``phases`` are seconds, ``timeline`` has when they began.

    ``version`` is what it holds now, as far as is known. ``updates``: one for each thing the sync
    brought (a base and its adapter), ``update`` the last. ``fenced``: it was rolled back and is held
    shut, as the policy wants it while others have the new version. ``memory``: the most it was seen to
    hold, by phase; without a phase in which it could not be measured.
    """

    replica: str
    outcome: Outcome
    version: Version | None = None
    update: UpdateReport | None = None
    error: str = ""
    error_type: str = ""
    phases: Mapping[str, float] = msgspec.field(default_factory=dict)
    timeline: tuple[TimelineEvent, ...] = ()
    updates: tuple[UpdateReport, ...] = ()
    fenced: bool = False
    memory: Mapping[str, PeakMemory] = msgspec.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Its phases, summed."""
        return sum(self.phases.values())


class SyncReport(msgspec.Struct, frozen=True):
    """A whole sync. ``phases`` are wall-clock seconds over all replicas and sum to ``seconds``.

    ``superseded_by``: nothing was sent, because a newer version was asked for meanwhile.
    """

    version: Version
    outcomes: tuple[ReplicaOutcome, ...]
    phases: Mapping[str, float]
    seconds: float
    superseded_by: Version | None = None

    @property
    def ok(self) -> bool:
        """Every replica has the version and serves, or (lazy) will take it in its own time."""
        fine = (Outcome.COMMITTED, Outcome.DEFERRED)
        return self.superseded_by is None and all(o.outcome in fine for o in self.outcomes)

    @property
    def deferred(self) -> tuple[str, ...]:
        """Replicas that still serve an older version, as ``lazy`` lets them."""
        return tuple(o.replica for o in self.outcomes if o.outcome is Outcome.DEFERRED)

    @property
    def slowest(self) -> str:
        """The replica that took longest, or nothing."""
        return max(self.outcomes, key=lambda o: o.seconds).replica if self.outcomes else ""

    @property
    def nbytes(self) -> int:
        """Payload bytes written, over all replicas."""
        return sum(update.nbytes for o in self.outcomes for update in o.updates)

    def spread(self) -> dict[str, tuple[float, float, float]]:
        """Per phase, the least, median and most seconds over the replicas."""
        taken: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            for name, seconds in outcome.phases.items():
                taken.setdefault(name, []).append(seconds)
        return {n: (min(t), statistics.median(t), max(t)) for n, t in taken.items()}

    def memory(self) -> dict[str, tuple[PeakMemory, str]]:
        """Per phase, the peak of the replica that held most (bytes), and its name.

        Replicas are not added up: each may have a device of its own.
        """
        most: dict[str, tuple[PeakMemory, str]] = {}
        for outcome in self.outcomes:
            for name, peak in outcome.memory.items():
                if name not in most or peak.total > most[name][0].total:
                    most[name] = peak, outcome.replica
        return most

    def summary(self) -> str:
        """One line a replica that did not commit."""
        fine = (Outcome.COMMITTED, Outcome.DEFERRED)
        bad = [o for o in self.outcomes if o.outcome not in fine]
        return "; ".join(f"{o.replica} {o.outcome.value}: {o.error}" for o in bad)

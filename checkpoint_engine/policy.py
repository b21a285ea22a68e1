"""How a sync is to be done, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hotbunk.rollout.contract import PauseMode, UpdateReport, Version
from hotbunk.rollout.errors import ConfigError


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


class SyncPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value, everywhere a sync is asked for.

    ``pause`` is what happens to requests that run; ``clear_cache`` whether their KV is computed
    again with the new weights. ``deadline`` is for one replica's update, in seconds.
    """

    pause: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    release_kv: ReleaseKV = ReleaseKV.AUTO
    verify: Verify = Verify.APPLIED
    bucket_bytes: int = 64 << 20
    deadline: float = 600.0

    def __post_init__(self) -> None:
        if self.deadline <= 0:
            raise ConfigError(f"deadline={self.deadline} must be above 0 seconds")


class Outcome(StrEnum):
    """How a sync ended for one replica."""

    COMMITTED = "committed"
    FENCED = "committed, fenced"  # the weights are new, but it does not serve
    ROLLED_BACK = "rolled back"  # weights, residency and pauses as before
    POISONED = "poisoned"  # half-written; a full resend heals it
    LOST = "lost"  # hung or dead; only a restart heals it
    IN_DOUBT = "in doubt"  # could not be asked


class ReplicaOutcome(msgspec.Struct, frozen=True):
    """One replica's part of a sync. ``phases`` are seconds."""

    replica: str
    outcome: Outcome
    version: Version | None = None
    update: UpdateReport | None = None
    error: str = ""
    error_type: str = ""
    phases: Mapping[str, float] = msgspec.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Its phases, summed."""
        return sum(self.phases.values())


class SyncReport(msgspec.Struct, frozen=True):
    """A whole sync. ``phases`` are wall-clock seconds over all replicas and sum to ``seconds``."""

    version: Version
    outcomes: tuple[ReplicaOutcome, ...]
    phases: Mapping[str, float]
    seconds: float

    @property
    def ok(self) -> bool:
        """Every replica has the version and serves."""
        return all(o.outcome is Outcome.COMMITTED for o in self.outcomes)

    @property
    def slowest(self) -> str:
        """The replica that took longest, or nothing."""
        return max(self.outcomes, key=lambda o: o.seconds).replica if self.outcomes else ""

    @property
    def nbytes(self) -> int:
        """Payload bytes written, over all replicas."""
        return sum(o.update.nbytes for o in self.outcomes if o.update)

    def summary(self) -> str:
        """One line a replica that did not commit."""
        bad = [o for o in self.outcomes if o.outcome is not Outcome.COMMITTED]
        return "; ".join(f"{o.replica} {o.outcome.value}: {o.error}" for o in bad)

"""Rules of the replica, broken."""

from __future__ import annotations

from typing import Any

from hotbunk.conformance.mutants import Patches, mutant, nothing
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.gate import CALLER, SLEEP, Gate
from hotbunk.rollout.lifecycle import WEIGHT_RULES, Event, Residency, Weights
from hotbunk.rollout.parking import Parking
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.updates import Updates


@mutant("another_rank_fails")
def dirty_weights_serve(patch: Patches) -> None:
    """Half-written weights make tokens (N7)."""
    patch.setitem(WEIGHT_RULES, (Weights.DIRTY, Event.GENERATE), Weights.DIRTY)


@mutant("discarded_weights_never_serve")
def empty_weights_serve(patch: Patches) -> None:
    """Weights that are mapped and empty make tokens (G1)."""
    patch.setitem(WEIGHT_RULES, (Weights.EMPTY, Event.GENERATE), Weights.EMPTY)


@mutant("discarded_weights_never_serve")
def a_discard_resumes_as_content(patch: Patches) -> None:
    """What was discarded counts as content once it is mapped (G2)."""
    patch.setitem(WEIGHT_RULES, (Weights.DISCARDED, Event.RESUME), Weights.RESIDENT)


@mutant("a_discard_does_not_open_the_door")
def released_weights_take_updates(patch: Patches) -> None:
    """Offers are not checked against the state table (G13, V11)."""
    patch.setattr(Residency, "check_offer", nothing)


@mutant("another_rank_fails")
def no_dirty_mark(patch: Patches) -> None:
    """Content counts as resident until the update commits (N7)."""
    patch.setattr(Residency, "written", nothing)
    patch.setitem(WEIGHT_RULES, (Weights.RESIDENT, Event.COMMIT), Weights.RESIDENT)
    patch.setitem(WEIGHT_RULES, (Weights.EMPTY, Event.COMMIT), Weights.RESIDENT)


@mutant("the_old_version_heals")
def the_label_moves_first(patch: Patches) -> None:
    """The newest version is noted when an update is offered (V8)."""
    original = Residency.check_offer

    def early(self: Residency, groups: Any, scope: Any, version: Any) -> None:
        original(self, groups, scope, version)
        self._newest.update(dict.fromkeys(groups, version))

    patch.setattr(Residency, "check_offer", early)


@mutant("a_discard_does_not_open_the_door")
def a_discard_forgets_the_newest_version(patch: Patches) -> None:
    """A stale sender gets in through an empty engine (V11)."""
    original = Residency.released

    def forgetful(self: Residency, tags: Any, retention: Any) -> None:
        original(self, tags, retention)
        self._newest.clear()

    patch.setattr(Residency, "released", forgetful)


@mutant("callers_pause_survives_a_wake")
def a_wake_ends_a_callers_pause(patch: Patches) -> None:
    """A wake un-pauses what a caller paused (H17)."""
    original = Parking.resume

    async def rude(self: Parking, tags: Any) -> Any:
        report = await original(self, tags)
        self._gate.drop(CALLER)
        return report

    patch.setattr(Parking, "resume", rude)


@mutant("golden_after_a_backup_cycle")
def a_wake_leaves_sleeps_pause(patch: Patches) -> None:
    """Nothing is served after a wake until somebody resumes (H17)."""
    original = Gate.drop

    def keep_asleep(self: Gate, owner: str) -> None:
        if owner != SLEEP:
            original(self, owner)

    patch.setattr(Gate, "drop", keep_asleep)


@mutant("owners_do_not_open_for_each_other")
def any_resume_opens(patch: Patches) -> None:
    """One owner's resume ends everybody's pause (H21)."""
    original = Gate.drop

    def drop_all(self: Gate, owner: str) -> None:
        for each in list(self.pauses):
            if not each.startswith("verb"):
                original(self, each)
        original(self, owner)

    patch.setattr(Gate, "drop", drop_all)


@mutant("poison_frees_who_waits")
def nobody_is_let_go(patch: Patches) -> None:
    """Who waits for a poisoned replica waits on (N7)."""
    patch.setattr(Gate, "let_go", nothing)


@mutant("frozen_requests_end_at_the_deadline")
def frozen_requests_wait_for_ever(patch: Patches) -> None:
    """A frozen request has no deadline (contract, Verbs: pauses have owners)."""
    patch.setattr(Gate, "freeze", nothing)


@mutant("release_waits_or_refuses")
def verbs_do_not_quiesce(patch: Patches) -> None:
    """Memory goes while steps run (K1)."""

    async def careless(self: EnginePauses, verb: str, deadline: Any) -> None:
        return None

    patch.setattr(EnginePauses, "quiesce", careless)
    patch.setattr(OracleEngine, "_require_quiet", nothing)


@mutant("same_version_is_sent_where_content_is_missing")
def the_same_version_is_believed(patch: Patches) -> None:
    """Skipped by its label, though there is no content under it (H19)."""
    from hotbunk.rollout.contract import UpdateReport

    async def gullible(self: Updates, groups: Any, scope: Any, version: Any) -> Any:
        newest = [self._residency._newest.get(group) for group in groups]
        return UpdateReport(version, skipped=True) if set(newest) == {version} else None

    patch.setattr(Updates, "already_there", gullible)


@mutant("walk_resident", unsupported=["retention.resident"])
def unsupported_falls_back(patch: Patches) -> None:
    """A retention that is not declared is replaced in silence (F4)."""
    original = Replica.release

    async def fall_back(
        self: Replica, tags: Any = None, *, retention: Any = Retention.DISCARD, **more: Any
    ) -> Any:
        if retention not in self.capabilities.retentions:
            retention = Retention.DISCARD
        return await original(self, tags, retention=retention, **more)

    patch.setattr(Replica, "release", fall_back)


@mutant("a_pinned_request_is_made_by_its_version_alone")
def pins_do_not_outlast_a_pause(patch: Patches) -> None:
    """A pinned request goes on under other weights (V6)."""
    patch.setattr(Gate, "pinned_to_others", lambda self, version: [])

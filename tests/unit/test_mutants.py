"""Every rule of the replica, broken once: the conformance suite must notice each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotbunk.conformance.backends.oracle_kit import first_failure
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.gate import CALLER, SLEEP, Gate
from hotbunk.rollout.lifecycle import WEIGHT_RULES, Event, Residency, Weights
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.updates import Updates

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def mutant(apply: Mutant) -> Mutant:
    MUTANTS[apply.__name__] = apply
    return apply


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


@mutant
def dirty_weights_serve(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(WEIGHT_RULES, (Weights.DIRTY, Event.GENERATE), Weights.DIRTY)  # type: ignore[misc]


@mutant
def empty_weights_serve(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(WEIGHT_RULES, (Weights.EMPTY, Event.GENERATE), Weights.EMPTY)  # type: ignore[misc]


@mutant
def a_discard_resumes_as_content(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(WEIGHT_RULES, (Weights.DISCARDED, Event.RESUME), Weights.RESIDENT)  # type: ignore[misc]


@mutant
def released_weights_take_updates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Residency, "check_offer", nothing)


@mutant
def no_dirty_mark(patch: pytest.MonkeyPatch) -> None:
    """Content counts as resident until the update commits."""
    patch.setattr(Residency, "written", nothing)
    patch.setitem(WEIGHT_RULES, (Weights.RESIDENT, Event.COMMIT), Weights.RESIDENT)  # type: ignore[misc]
    patch.setitem(WEIGHT_RULES, (Weights.EMPTY, Event.COMMIT), Weights.RESIDENT)  # type: ignore[misc]


@mutant
def the_label_moves_first(patch: pytest.MonkeyPatch) -> None:
    original = Residency.check_offer

    def early(self: Residency, groups: Any, scope: Any, version: Any) -> None:
        original(self, groups, scope, version)
        self._newest.update(dict.fromkeys(groups, version))

    patch.setattr(Residency, "check_offer", early)


@mutant
def a_discard_forgets_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    original = Residency.released

    def forgetful(self: Residency, tags: Any, retention: Any) -> None:
        original(self, tags, retention)
        self._newest.clear()

    patch.setattr(Residency, "released", forgetful)


@mutant
def a_wake_ends_a_callers_pause(patch: pytest.MonkeyPatch) -> None:
    original = Replica._resume

    async def rude(self: Replica, tags: Any) -> Any:
        report = await original(self, tags)
        self._gate.drop(CALLER)
        return report

    patch.setattr(Replica, "_resume", rude)


@mutant
def a_wake_leaves_sleeps_pause(patch: pytest.MonkeyPatch) -> None:
    original = Gate.drop

    def keep_asleep(self: Gate, owner: str) -> None:
        if owner != SLEEP:
            original(self, owner)

    patch.setattr(Gate, "drop", keep_asleep)


@mutant
def any_resume_opens(patch: pytest.MonkeyPatch) -> None:
    original = Gate.drop

    def drop_all(self: Gate, owner: str) -> None:
        for each in list(self.pauses):
            if not each.startswith("verb"):
                original(self, each)
        original(self, owner)

    patch.setattr(Gate, "drop", drop_all)


@mutant
def nobody_is_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "let_go", nothing)


@mutant
def frozen_requests_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "freeze", nothing)


@mutant
def verbs_do_not_quiesce(patch: pytest.MonkeyPatch) -> None:
    async def careless(self: EnginePauses, verb: str, deadline: Any) -> None:
        return None

    patch.setattr(EnginePauses, "quiesce", careless)
    patch.setattr(OracleEngine, "_require_quiet", nothing)


@mutant
def the_same_version_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Skipped by its label, though there is no content under it."""
    from hotbunk.rollout.contract import UpdateReport

    async def gullible(self: Updates, groups: Any, scope: Any, version: Any) -> Any:
        newest = [self._residency._newest.get(group) for group in groups]
        return UpdateReport(version, skipped=True) if set(newest) == {version} else None

    patch.setattr(Updates, "already_there", gullible)


@mutant
def unsupported_falls_back(patch: pytest.MonkeyPatch) -> None:
    """A retention that is not declared is replaced in silence."""
    original = Replica.release

    async def fall_back(
        self: Replica, tags: Any = None, *, retention: Any = Retention.DISCARD, **more: Any
    ) -> Any:
        if retention not in self.capabilities.retentions:
            retention = Retention.DISCARD
        return await original(self, tags, retention=retention, **more)

    patch.setattr(Replica, "release", fall_back)


@mutant
def pins_do_not_outlast_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "pinned_to_others", lambda self, version: [])


OPTIONS: dict[str, dict[str, Any]] = {
    "unsupported_falls_back": {"unsupported": ["retention.resident"]}
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert first_failure(**OPTIONS.get(name, {})), "the suite passes although the rule is broken"


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=str)
def test_nothing_is_caught_where_nothing_is_broken(options: dict[str, Any]) -> None:
    assert not first_failure(**options)

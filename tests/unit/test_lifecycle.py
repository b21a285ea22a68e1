"""The state table: every row, and the residency that applies it."""

from __future__ import annotations

import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.contract import FULL, Retention, Scope, Tag, Version
from hotbunk.rollout.lifecycle import (
    KV,
    KV_RULES,
    WEIGHT_RULES,
    Event,
    GroupState,
    Residency,
    Weights,
    groups_of,
    step,
)

V1, V2, V3 = (Version(0, n) for n in (1, 2, 3))

# Written again from CONTRACT.md, one line a state, in the order of EVENTS.
EVENTS = (
    Event.RELEASE_RESIDENT,
    Event.RELEASE_BACKUP,
    Event.RELEASE_DISCARD,
    Event.RESUME,
    Event.OFFER,
    Event.FIRST_BYTE,
    Event.COMMIT,
    Event.FAIL,
    Event.GENERATE,
)
TABLE = {
    "RESIDENT": "RESIDENT BACKED_UP DISCARDED RESIDENT RESIDENT DIRTY SessionError RESIDENT RESIDENT",
    "BACKED_UP": "BACKED_UP BACKED_UP DISCARDED RESIDENT WeightsNotResident WeightsNotResident "
    "SessionError BACKED_UP WeightsNotLoaded",
    "DISCARDED": "DISCARDED DISCARDED DISCARDED EMPTY WeightsNotResident WeightsNotResident "
    "SessionError DISCARDED WeightsNotLoaded",
    "EMPTY": "EMPTY DISCARDED DISCARDED EMPTY EMPTY DIRTY SessionError EMPTY WeightsNotLoaded",
    "DIRTY": "DIRTY DISCARDED DISCARDED DIRTY DIRTY DIRTY RESIDENT DIRTY WeightsPoisoned",
}
ROWS = [
    (Weights[state], event, outcome)
    for state, outcomes in TABLE.items()
    for event, outcome in zip(EVENTS, outcomes.split(), strict=True)
]


def test_the_table_is_complete() -> None:
    assert set(WEIGHT_RULES) == {(s, e) for s in Weights for e in Event}
    assert {(s, e) for s, e, _ in ROWS} == set(WEIGHT_RULES)
    kv_events = {Event.RESUME, Event.GENERATE} | {e for e in Event if "release" in e.value}
    assert set(KV_RULES) == {(s, e) for s in KV for e in kv_events}


@pytest.mark.parametrize("state, event, outcome", ROWS)
def test_row(state: Weights, event: Event, outcome: str) -> None:
    now = GroupState(state, V1 if state in (Weights.RESIDENT, Weights.BACKED_UP) else None)
    error = getattr(errors, outcome, None)
    if error is not None:
        with pytest.raises(error):
            step("target", now, event, V2)
        return
    then = step("target", now, event, V2)
    assert then.state is Weights[outcome]
    if then.state in (Weights.RESIDENT, Weights.BACKED_UP):
        assert then.version == (V2 if event is Event.COMMIT else V1)
    else:
        assert then.version is None


@pytest.mark.parametrize("event", [e for e in EVENTS if "release" in e.value])
def test_kv_content_is_never_retained(event: Event) -> None:
    assert KV_RULES[KV.RESIDENT, event] is KV.RELEASED
    assert KV_RULES[KV.RELEASED, event] is KV.RELEASED


def test_kv_resume_and_generate() -> None:
    assert KV_RULES[KV.RELEASED, Event.RESUME] is KV_RULES[KV.RESIDENT, Event.RESUME] is KV.RESIDENT
    assert KV_RULES[KV.RELEASED, Event.GENERATE] is errors.KVNotResident


def residency(**versions: Version | None) -> Residency:
    return Residency(
        versions or {"target": V1, "draft": V1},
        fed=["target"],
        retentions=list(Retention),
    )


def states(res: Residency) -> dict[str, str]:
    return {name: str(state) for name, state in res.groups.items()}


def test_unfed_groups_are_never_discarded() -> None:
    res = residency()
    assert res.overrides(Retention.DISCARD) == {"draft": Retention.BACKUP}
    res.released([Tag.WEIGHTS], Retention.DISCARD)
    assert states(res) == {"target": "DISCARDED", "draft": "BACKED_UP(0.1)"}
    res.resumed([Tag.WEIGHTS])
    assert states(res) == {"target": "EMPTY", "draft": "RESIDENT(0.1)"}


def test_without_backups_unfed_groups_stay() -> None:
    res = Residency({"target": V1, "draft": V1}, fed=["target"], retentions=[Retention.DISCARD])
    res.released([Tag.WEIGHTS], Retention.DISCARD)
    assert states(res) == {"target": "DISCARDED", "draft": "RESIDENT(0.1)"}


def test_unfed_groups_without_content_are_not_kept() -> None:
    res = residency(target=V1, draft=None)
    assert res.overrides(Retention.DISCARD) == {}
    res.released([Tag.WEIGHTS], Retention.DISCARD)
    assert states(res) == {"target": "DISCARDED", "draft": "DISCARDED"}


def test_there_is_nothing_to_back_up_where_there_is_no_content() -> None:
    res = residency(target=V1, draft=None)
    res.written(["target"])
    assert res.overrides(Retention.BACKUP) == dict.fromkeys(("target", "draft"), Retention.DISCARD)
    res.released([Tag.WEIGHTS], Retention.BACKUP)
    assert states(res) == {"target": "DISCARDED", "draft": "DISCARDED"}


def test_an_update_marks_then_labels() -> None:
    res = residency(target=V1)
    res.check_offer(["target"], FULL, V2)
    assert states(res) == {"target": "RESIDENT(0.1)"}
    res.written(["target"])
    assert res.poisoned() == {"target"}
    assert res.versions() == {}
    assert not res.servable()
    res.committed(["target"], V2)
    assert res.versions() == {"target": V2}
    assert res.servable()


def test_versions_only_rise_even_over_nothing() -> None:
    res = residency(target=V2)
    res.released([Tag.WEIGHTS], Retention.DISCARD)
    res.resumed([Tag.WEIGHTS])
    with pytest.raises(errors.VersionRegression):
        res.check_offer(["target"], FULL, V1)
    res.check_offer(["target"], FULL, V2)
    res.check_offer(["target"], FULL, Version(1, 0))


def test_patches_need_their_base() -> None:
    res = residency(target=V2)
    res.check_offer(["target"], Scope.partial(V2), V3)
    for scope in (Scope.partial(V1), Scope.delta(V1), Scope.adapter("a", V1)):
        with pytest.raises(errors.BaseMismatch):
            res.check_offer(groups_of(scope, ["target"]), scope, V3)
    with pytest.raises(errors.VersionRegression):
        res.check_offer(["target"], Scope.partial(V2), V2)
    res.written(["target"])
    with pytest.raises(errors.BaseMismatch):
        res.check_offer(["target"], Scope.partial(V2), V3)


def test_adapters_have_their_own_state() -> None:
    res = residency(target=V1)
    scope = Scope.adapter("a", V1)
    groups = groups_of(scope, ["ignored"])
    assert groups == {"adapter:a"}
    res.check_offer(groups, scope, V1)
    assert "adapter:a" not in res.groups
    res.written(groups)
    with pytest.raises(errors.WeightsPoisoned):
        res.check_generate("a")
    res.check_generate()
    with pytest.raises(errors.WeightsNotLoaded):
        res.check_generate("b")
    res.committed(groups, V1)
    res.check_generate("a")


def test_mapped_tags() -> None:
    res = residency()
    assert res.mapped() == frozenset(Tag)
    res.released([Tag.KV_CACHE], Retention.DISCARD)
    assert res.mapped() == {Tag.WEIGHTS}
    with pytest.raises(errors.KVNotResident):
        res.check_generate()
    res.released([Tag.WEIGHTS], Retention.DISCARD)
    assert res.mapped() == frozenset()
    res.resumed([Tag.KV_CACHE])
    assert res.mapped() == {Tag.KV_CACHE}


def test_a_manifest_without_groups_is_about_the_target() -> None:
    assert groups_of(FULL, []) == {"target"}
    assert groups_of(FULL, ["draft", "target", "draft"]) == {"target", "draft"}

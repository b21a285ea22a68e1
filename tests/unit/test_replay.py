"""Groups on their way to training: how many there may be, and how old they get."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotbunk.rollout.contract import Completion, FinishReason, Version, VersionSpan
from hotbunk.rollout.errors import SessionError
from hotbunk.rollout.partial import PartialResult
from hotbunk.trainer_hooks.recipes.config import Overdue, TrainerConfig
from hotbunk.trainer_hooks.recipes.producer import partial_policy
from hotbunk.trainer_hooks.recipes.replay import (
    Group,
    Replay,
    percentile,
    staleness_counts,
    steps_behind,
)
from hotbunk.trainer_hooks.recipes.tasks import Sample

pytestmark = pytest.mark.anyio
SAMPLE = Sample("1=", "1")


def at(step: int) -> Version:
    return Version(0, step)


def replay(batch: int = 2, limit: int = 1, step: int = 0, **options: Any) -> Replay:
    return Replay(batch, limit, at(step), at(step), **options)


def begin(target: Replay, number: int, *versions: int) -> Group:
    """Start a group; some of its responses have tokens of these versions."""
    group = Group(number, SAMPLE, [1], {f"r{v}": at(v) for v in versions}, tokens=3 * len(versions))
    target.start(group)
    return group


def result(*spans: tuple[int, int, int], tokens: int | None = None) -> PartialResult:
    made = tuple(VersionSpan(at(v), start, end) for v, start, end in spans)
    count = made[-1].end if tokens is None else tokens
    ids, logprobs = (7,) * count, (-0.1,) * count
    return PartialResult(Completion("r", ids, logprobs, made, FinishReason.LENGTH))


# -- how many may start ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 50])
async def test_room_counts_from_the_restored_step_v14(step: int) -> None:
    """Room is (1 + S) batches at a start, wherever that is; with totals since step 0 it would be
    50 batches more."""
    target = replay(batch=4, limit=2, step=step)
    assert target.room() == 12


async def test_room_shrinks_while_engines_are_behind_and_returns_with_a_sync() -> None:
    target = replay(batch=2, limit=1)
    groups = [begin(target, n, 0) for n in range(4)]
    assert target.room() == 0
    for group in groups:
        target.finish(group)
    assert target.room() == 0, "a finished group waits for the trainer: it counts"
    assert target.take() == groups[:2]
    assert target.room() == 0, "engines serve 0, and 1 is trained next"
    target.sent(at(1))
    assert target.room() == 2


async def test_without_staleness_nothing_starts_before_the_next_version_is_served() -> None:
    target = replay(batch=2, limit=0)
    for group in [begin(target, n, 0) for n in range(2)]:
        target.finish(group)
    assert target.take() is not None
    assert target.room() == 0
    with pytest.raises(SessionError, match="no room"):
        begin(target, 2)
    target.sent(at(1))
    assert target.room() == 2


async def test_a_failed_group_makes_room_and_its_tokens_are_lost() -> None:
    target = replay()
    group = begin(target, 0, 0)
    target.fail(group)
    assert target.room() == 4
    assert target.snapshot().grown["tokens_lost"] == 3


# -- the next batch -------------------------------------------------------------------------------


async def test_the_oldest_finished_groups_are_next_whatever_order_they_ended_in() -> None:
    target = replay(batch=2, limit=1)
    groups = [begin(target, n, 0) for n in range(4)]
    for group in (groups[3], groups[0], groups[2]):
        target.finish(group)
    assert target.take() == [groups[0], groups[2]]
    assert target.take() is None


async def test_an_overdue_group_is_left_out_and_counted() -> None:
    """A straggler: it began with version 0 and ends when 2 is trained next, with S = 1."""
    target = replay(batch=1, limit=1)
    slow, *others = [begin(target, n, 0) for n in range(2)]
    for step in (1, 2):
        target.finish(others.pop())
        assert target.take() is not None
        target.sent(at(step))
        others.append(begin(target, 1 + step, step))
    assert target.doomed() == [slow]
    target.finish(slow)
    now = target.snapshot()
    assert (now.grown["overdue_groups"], now.grown["tokens_overdue"], now.backlog) == (1, 3, 0)


async def test_what_waits_may_become_overdue_as_a_batch_is_taken() -> None:
    """A later group may have begun with older weights: an earlier one was held for longer."""
    target = replay(batch=1, limit=1, step=1)
    first, second = begin(target, 0, 1), begin(target, 1, 0)
    for group in (second, first):
        target.finish(group)
    assert target.take() == [first]
    assert target.snapshot().grown["overdue_groups"] == 1
    assert target.take() is None


async def test_one_old_response_makes_a_group_overdue() -> None:
    target = replay(batch=1, limit=0)
    target.now = at(3)
    target.served = at(3)
    group = begin(target, 0, 3, 2)
    assert target.doomed() == [group], "advantages are relative to the whole group"


async def test_reweight_keeps_what_drop_leaves_out() -> None:
    target = replay(batch=1, limit=0, overdue=Overdue.REWEIGHT)
    target.now = target.served = at(3)
    group = begin(target, 0, 0)
    assert target.doomed() == []
    target.finish(group)
    assert target.take() == [group]


async def test_cut_groups_are_counted_and_make_room() -> None:
    target = replay(batch=1, limit=0)
    group = begin(target, 0, 0)
    target.now = target.served = at(1)
    target.cut(group)
    assert target.room() == 1
    assert target.snapshot().grown["cut_groups"] == 1


async def test_a_snapshot_tells_growth_once() -> None:
    target = replay()
    target.counts.tokens += 5
    assert target.snapshot().grown["tokens"] == 5
    assert target.snapshot().grown["tokens"] == 0


async def test_waiting_ends_with_a_change_or_in_time() -> None:
    target = replay()
    waiting = asyncio.create_task(target.change(30))
    await asyncio.sleep(0)
    target.sent(at(0))
    async with asyncio.timeout(1):
        await waiting
        await target.change(0.001)


# -- versions -------------------------------------------------------------------------------------


async def test_staleness_is_counted_by_token_from_spans_v6_v7() -> None:
    group = Group(0, SAMPLE, [1], results=[result((3, 0, 57), (5, 57, 128)), result((5, 0, 2))])
    assert staleness_counts([group], at(5)) == Counter({0: 73, 2: 57})


@pytest.mark.parametrize(
    "broken",
    [result((3, 0, 4), tokens=5), result((3, 0, 4), (4, 5, 6)), result((3, 1, 4))],
    ids=["uncovered", "gap", "late"],
)
async def test_a_token_without_a_version_is_not_trained_on(broken: PartialResult) -> None:
    with pytest.raises(SessionError, match="which version made"):
        staleness_counts([Group(0, SAMPLE, [1], results=[broken])], at(5))


@pytest.mark.parametrize("version", [Version(0, 6), Version(1, 0), Version(-1, 9)])
async def test_staleness_is_never_negative_v11(version: Version) -> None:
    with pytest.raises(SessionError, match="cannot be trained"):
        steps_behind(version, at(5))


@given(st.lists(st.integers(0, 9), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_the_nearest_rank(values: list[int], share: float) -> None:
    ranked = sorted(values)
    least = next(
        v for v in ranked if sum(other <= v for other in values) >= share * len(values) - 1e-9
    )
    assert percentile(Counter(values), share) == least


def test_a_response_is_not_carried_beyond_its_use() -> None:
    config = TrainerConfig(name="grpo_async", max_staleness=2, offload=False)
    assert partial_policy(config).version_age == 2
    again = TrainerConfig(name="grpo_async", max_staleness=2, partial_rollout=False)
    assert partial_policy(again).from_prompt
    kept = TrainerConfig(name="grpo_async", max_staleness=2, overdue=Overdue.REWEIGHT)
    assert partial_policy(kept).version_age is None


# -- whatever happens -----------------------------------------------------------------------------


class Anything(RuleBasedStateMachine):
    """Starts, ends, syncs and batches in any order that a run could have."""

    batch, limit, overdue = 2, 1, Overdue.DROP

    def __init__(self) -> None:
        super().__init__()
        self.target = Replay(self.batch, self.limit, at(7), at(7), self.overdue)
        self.running: list[Group] = []
        self.number = self.failed = 0
        self.published = 7

    @precondition(lambda self: self.target.room())
    @rule()
    def start(self) -> None:
        group = Group(self.number, SAMPLE, [1])
        self.number += 1
        self.target.start(group)
        self.running.append(group)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def token(self, data: st.DataObject) -> None:
        """Engines make a token with what they serve."""
        group = data.draw(st.sampled_from(self.running))
        group.tokens += 1
        group.versions.setdefault("r", self.target.served)

    @precondition(lambda self: any(g.versions for g in self.running))
    @rule(data=st.data(), ends=st.sampled_from(["finish", "finish", "fail"]))
    def end(self, data: st.DataObject, ends: str) -> None:
        group = data.draw(st.sampled_from([g for g in self.running if g.versions]))
        self.running.remove(group)
        getattr(self.target, ends)(group)

    @rule()
    def cut(self) -> None:
        for group in self.target.doomed():
            self.running.remove(group)
            self.target.cut(group)

    @rule()
    def take(self) -> None:
        now = self.target.now
        taken = self.target.take()
        if taken is None:
            return
        assert len(taken) == self.batch
        assert [g.number for g in taken] == sorted(g.number for g in taken)
        ages = [steps_behind(g.oldest, now) for g in taken if g.oldest is not None]
        assert len(ages) == self.batch
        assert self.overdue is not Overdue.DROP or max(ages) <= self.limit
        self.published = now.step + 1

    @rule()
    def sync(self) -> None:
        self.target.sent(at(self.published))

    @invariant()
    def bounded_and_accounted_for(self) -> None:
        now, counts = self.target.snapshot(), self.target.counts
        assert now.in_flight + now.backlog <= (1 + self.limit) * self.batch
        assert now.in_flight == len(self.running)
        ended = counts.trained_groups + counts.overdue_groups + counts.cut_groups
        assert self.number == ended + counts.failed_groups + now.in_flight + now.backlog


class Tight(Anything):
    limit = 0


class Wide(Anything):
    batch, limit = 3, 3


class Reweighted(Anything):
    overdue = Overdue.REWEIGHT


for machine in (Anything, Tight, Wide, Reweighted):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestAnything, TestTight, TestWide = Anything.TestCase, Tight.TestCase, Wide.TestCase
TestReweighted = Reweighted.TestCase


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.booleans(), max_size=60))
def test_first_in_first_out_nothing_is_ever_overdue(
    batch: int, limit: int, syncs: list[bool]
) -> None:
    """The rule's promise: groups that end in order, with the version they began with, are taken."""
    target = Replay(batch, limit, at(0), at(0))
    number = 0
    for sync in syncs:
        while target.room():
            group = Group(number, SAMPLE, [1], {"r": target.served})
            target.start(group)
            target.finish(group)
            number += 1
        target.take()
        if sync:
            target.sent(target.now)
    assert target.counts.overdue_groups == 0

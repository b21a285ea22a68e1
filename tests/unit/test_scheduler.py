"""The reference engine's scheduler: fair, never stuck, and no KV is read that others made."""

from __future__ import annotations

from typing import Any

import pytest

from hotbunk.rollout.backends.reference.scheduler import Admission
from hotbunk.rollout.contract import PauseMode


def test_equal_prompts_share_what_was_computed_before_c1(world_of: Any) -> None:
    world = world_of(blocks=16, size=2, budget=16)
    world.add("a", [1, 2, 1, 2, 1], 3)
    world.run()
    [b] = world.add("b", [1, 2, 1, 2, 1], 3)
    world.run()
    assert b.cached == 4
    assert world.scheduler.cached_tokens == 4
    assert world.done["a/0"].tokens == b.tokens
    world.version = 2
    [c] = world.add("c", [1, 2, 1, 2, 1], 3)
    [d] = world.add("d", [1, 2, 1, 2, 1], 3, adapter="x")
    world.run()
    assert (c.cached, d.cached) == (0, 0)


def test_a_whole_prompt_that_is_cached_leaves_one_token_to_compute(world_of: Any) -> None:
    world = world_of(blocks=16, size=2)
    for name in "ab":
        world.add(name, [1, 2, 1, 2], 1)
        world.run()
    assert world.done["b/0"].cached == 2


def test_one_token_prompts_and_responses(world_of: Any) -> None:
    world = world_of(blocks=2, size=1, budget=1, seqs=1)
    for name in "abc":
        world.add(name, [1], 1)
    world.run()
    assert world.finished == ["a", "b", "c"]


def test_a_long_prompt_does_not_stop_those_under_way(world_of: Any) -> None:
    world = world_of(blocks=64, size=4, budget=4)
    world.add("short", [1], 40)
    world.step()
    world.add("long", [2] * 60, 1)
    for _ in range(10):
        plan = world.step()
        assert [c.sequence.id for c in plan.decode] == ["short"]
        assert sum(c.count for c in plan.chunks) == 4, "room of the budget is left unused"
    world.run()


def test_max_num_seqs_is_kept_first_come_first_served(world_of: Any) -> None:
    world = world_of(blocks=64, seqs=2, budget=64)
    for n in range(6):
        world.add(str(n), [n % 3, 1], 2 + n % 2)
    world.run()
    assert sorted(world.finished, key=int) == world.finished


def test_preemption_takes_the_youngest_and_the_oldest_never_waits(world_of: Any) -> None:
    world = world_of(blocks=6, size=2, budget=64)
    for n in range(4):
        world.add(str(n), [n, n], 9)
    world.run()
    assert world.scheduler.preemptions > 0
    assert world.finished[0] == "0"
    starts = [world.first[f"{n}/0"] for n in range(4)]
    assert starts == sorted(starts)


def test_a_preempted_twin_is_not_planned_twice_in_one_step(world_of: Any) -> None:
    """It finds the copy of its prefix that its twin computed, so it would fit in again at once."""
    world = world_of(blocks=7, size=1, budget=64)
    [a] = world.add("a", [1, 2], 5)
    world.add("b", [1, 2], 5)  # computes its own copy: nothing is known yet
    world.step()
    world.step()
    world.scheduler.drop_kv(a)  # so a comes after b in the step, and takes its room
    world.step()
    assert world.scheduler.preemptions > 0
    world.run()
    assert world.done["a/0"].tokens == world.done["b/0"].tokens


def test_samples_of_one_request_share_its_prompt_once_it_is_computed(world_of: Any) -> None:
    world = world_of(blocks=32, size=2, seqs=1, budget=64)
    samples = world.add("a", [1, 2, 1, 2, 1], 2, n=3)
    world.run()
    assert [s.cached for s in samples] == [0, 4, 4]
    assert len({s.seed for s in samples}) == 3


def test_kv_of_several_versions_is_nobodys_prefix_c2(world_of: Any) -> None:
    """clear_cache=False over an update: what the request computes afterwards is for itself alone."""
    world = world_of(blocks=32, size=2, budget=64)
    world.add("kept", [1, 2, 1], 9)
    world.step()
    world.scheduler.pause(PauseMode.KEEP)
    world.pool.forget_all()
    world.version = 2
    world.scheduler.resume()
    world.run()
    kept = world.done["kept/0"].tokens
    [late] = world.add("late", kept, 1)
    world.run()
    assert late.cached == 0


def test_a_request_that_never_started_counts_no_tokens_of_older_weights_as_cached_c1(
    world_of: Any,
) -> None:
    world = world_of(blocks=32, size=2, budget=4)
    world.add("a", [1] * 8, 1)
    world.run()
    [b] = world.add("b", [1] * 16, 1)
    world.step()
    assert (b.produced, b.cached) == (0, 8)
    world.scheduler.pause(PauseMode.KEEP)
    world.scheduler.drop_kv(b)
    world.pool.forget_all()
    world.version = 2
    world.scheduler.resume()
    world.run()
    assert b.cached == 0


def test_a_pause_freezes_or_drains_and_newcomers_wait_h4(world_of: Any) -> None:
    world = world_of(blocks=32, budget=64)
    world.add("a", [1, 2], 3)
    world.step()
    world.scheduler.pause(PauseMode.KEEP)
    world.add("late", [1, 2], 1)
    assert not world.scheduler.has_work
    assert world.scheduler.quiet
    world.scheduler.pause(PauseMode.WAIT)
    assert not world.scheduler.quiet
    world.run()
    assert world.finished == ["a"]
    assert world.scheduler.quiet
    assert [s.id for s in world.scheduler.arrived] == ["late"]
    world.scheduler.resume()
    assert world.scheduler.admission is Admission.OPEN
    world.run()
    assert world.finished == ["a", "late"]


def test_dropped_kv_is_computed_again_from_what_others_left(world_of: Any) -> None:
    world = world_of(blocks=32, size=2, budget=64)
    [a] = world.add("a", [1, 2, 1, 2, 1], 4)
    world.step()
    before = world.computed_tokens
    world.scheduler.pause(PauseMode.KEEP)
    world.scheduler.drop_kv(a)
    assert (a.lost, world.scheduler.lost()) == (True, 1)
    world.scheduler.resume()
    world.step()
    assert world.computed_tokens - before == 2, "the prefix that is still known was not used"
    assert (a.lost, world.scheduler.lost()) == (False, 0)
    world.run()


def test_weights_that_changed_under_the_same_name_leave_nobody_their_kv_c1(world_of: Any) -> None:
    """A resend of the same version: the label alone does not say what made the KV."""
    world = world_of(blocks=32, size=2, budget=64)
    [kept] = world.add("kept", [1, 2, 1], 9)
    world.step()
    world.scheduler.pause(PauseMode.KEEP)
    world.pool.forget_all()
    world.scheduler.outdated([kept])
    world.scheduler.resume()
    world.add("new", [1, 2, 1], 1)  # brings the beginning back under the same name
    world.run()
    [late] = world.add("late", kept.tokens, 1)
    world.run()
    assert late.cached == 2, "it may find what the new one computed, and no more"


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_the_smallest_pool_that_holds_one_request_serves_them_all(
    world_of: Any, size: int, budget: int
) -> None:
    world = world_of(blocks=-(-9 // size), size=size, budget=budget)
    for n in range(8):
        world.add(str(n), [n % 2, 1, 2, 0, 1], 4)
    world.run()
    assert len(world.finished) == 8
    assert world.pool.used == 0

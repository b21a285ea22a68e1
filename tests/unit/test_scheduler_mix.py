"""The reference engine's scheduler under any mix of requests, pauses, updates and drops."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.rollout.contract import PauseMode

REQUESTS = st.tuples(
    st.integers(1, 9),  # prompt tokens
    st.integers(0, 1),  # of which kind
    st.integers(1, 9),  # response tokens
    st.sampled_from([None, None, "x"]),
    st.integers(1, 3),  # n
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("keep"), st.booleans()),
    st.tuples(st.just("wait"), st.booleans()),
    st.tuples(st.just("abort"), st.booleans()),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 1)),
    st.tuples(st.just("resume"), st.none()),
)


def act(world: Any, kind: str, what: Any) -> None:
    """One thing that can happen between steps."""
    scheduler = world.scheduler
    if kind == "add":
        length, of_kind, tokens, adapter, n = what
        name = f"r{len(world.expected)}"
        prompt = [(of_kind + position) % 3 for position in range(length)]
        world.expected[name] = n
        world.add(name, prompt, tokens, adapter, n)
    elif kind == "step":
        for _ in range(what):
            if scheduler.has_work:
                world.step()
    elif kind == "drop":
        for sequence in scheduler.everyone()[what : what + 1]:
            scheduler.remove(sequence)
            world.dropped += 1
    elif kind == "abort":
        for sequence in scheduler.in_flight():
            scheduler.remove(sequence)
            world.dropped += 1
        scheduler.pause(PauseMode.ABORT)
    elif kind in ("keep", "wait"):
        scheduler.pause(PauseMode(kind))
        if what and scheduler.quiet:  # clear_cache
            for sequence in scheduler.in_flight():
                scheduler.drop_kv(sequence)
            world.pool.forget_all()
    elif kind == "lose" and scheduler.quiet:  # what a release and an update do to some
        for sequence in scheduler.in_flight()[what::2]:
            scheduler.drop_kv(sequence)
    elif kind == "update" and scheduler.quiet:
        world.version += what  # False: the same version again
        world.pool.forget_all()
    elif kind == "resume":
        scheduler.resume()
    scheduler.check_invariants()


@settings(max_examples=250, deadline=None)
@given(
    spare=st.integers(0, 12),
    size=st.integers(1, 4),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 12),
    caching=st.booleans(),
    actions=st.lists(ACTIONS, min_size=5, max_size=40),
)
def test_any_mix_of_requests_pauses_and_drops_comes_to_an_end(
    world_of: Any, spare: int, size: int, seqs: int, budget: int, caching: bool, actions: list[Any]
) -> None:
    """Blocks never leak or are read by strangers, FCFS, no deadlock, nobody lost (K3, C1, C2)."""
    world = world_of(-(-18 // size) + spare, size, seqs=seqs, budget=budget, caching=caching)
    world.expected, world.dropped = {}, 0
    for kind, what in actions:
        act(world, kind, what)
    world.scheduler.resume()
    world.run()
    assert len(world.done) + world.dropped == sum(world.expected.values())
    assert world.pool.used == 0
    assert not world.scheduler.everyone()
    if not caching:
        assert world.scheduler.cached_tokens == 0

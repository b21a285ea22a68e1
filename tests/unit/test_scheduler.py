"""The reference engine's scheduler: fair, never stuck, and no KV is read that others made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.rollout.backends.reference.blocks import BlockPool
from hotbunk.rollout.backends.reference.scheduler import Admission, Plan, Scheduler, Sequence
from hotbunk.rollout.contract import GenerateRequest, PauseMode, Sampling

Stamp = tuple[bytes, frozenset[str]]


def digest(tokens: SequenceOf[int]) -> bytes:
    return hashlib.blake2b(bytes(tokens), digest_size=8).digest()


class World:
    """A scheduler and the engine around it, with KV slots that remember what was written to them.

    A slot holds the digest of all tokens up to it, and who computed any of them; every step checks
    what it would read. Tokens follow from their context, so equal prompts go on equally.
    """

    def __init__(
        self,
        blocks: int = 8,
        size: int = 2,
        *,
        seqs: int = 8,
        budget: int = 8,
        caching: bool = True,
    ) -> None:
        self.pool = BlockPool(blocks, size, caching=caching)
        self.scheduler = Scheduler(self.pool, max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.budget = budget
        self.seqs = seqs
        self.version = 1
        self.kv: dict[int, Stamp] = {}
        self.done: dict[str, Sequence] = {}
        self.finished: list[str] = []
        self.first: dict[str, int] = {}  # step of the first token
        self.steps = 0
        self.computed_tokens = 0

    def made_by(self, adapter: str | None) -> str:
        return f"{self.version}/{adapter or ''}"

    def add(
        self,
        name: str,
        prompt: SequenceOf[int],
        tokens: int,
        adapter: str | None = None,
        n: int = 1,
    ) -> list[Sequence]:
        sampling = Sampling(0.0, max_tokens=tokens, n=n)
        request = GenerateRequest(name, tuple(prompt), sampling, adapter=adapter)
        made = [Sequence(request, index) for index in range(n)]
        for sequence in made:
            self.scheduler.add(sequence)
        return made

    def slot(self, s: Sequence, position: int) -> int:
        return s.blocks[position // self.pool.size] * self.pool.size + position % self.pool.size

    def step(self) -> Plan:
        """One engine step, with everything about its plan checked."""
        scheduler, before = self.scheduler, {s: s.computed for s in self.scheduler.running}
        plan = scheduler.plan(self.made_by)
        assert plan.chunks, "work, and nothing planned: the engine would spin"
        self.check_plan(plan, before)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                self.write(chunk.sequence, position)
        scheduler.computed(plan, self.made_by)
        self.steps += 1
        for chunk in plan.chunks:
            s = chunk.sequence
            if not chunk.samples:
                continue
            s.tokens.append((sum(s.tokens) + len(s.tokens)) % 3)
            self.first.setdefault(f"{s.id}/{s.index}", self.steps)
            if s.produced == s.request.sampling.max_tokens:
                scheduler.remove(s)
                self.done[f"{s.id}/{s.index}"] = s
                self.finished.append(s.id)
        scheduler.check_invariants()
        return plan

    def check_plan(self, plan: Plan, before: dict[Sequence, int]) -> None:
        scheduler = self.scheduler
        planned = [c.sequence for c in plan.chunks]
        assert len(set(planned)) == len(planned), "a sequence is planned twice"
        assert sum(c.count for c in plan.chunks) <= self.budget, "more tokens than the budget"
        assert len(scheduler.running) <= self.seqs
        in_flight = scheduler.in_flight()
        oldest = min(in_flight, key=lambda s: s.arrival)
        assert oldest in planned, "the oldest request stands still while others go on"
        assert all(r.arrival < w.arrival for r in scheduler.running for w in scheduler.waiting), (
            "a younger request passed an older one"
        )
        for chunk in plan.chunks:
            s = chunk.sequence
            assert s in scheduler.running
            assert chunk.count >= 1
            assert chunk.start == s.computed
            assert chunk.start + chunk.count <= len(s.tokens)
            assert len(s.blocks) * self.pool.size >= chunk.start + chunk.count, "no room for it"
            for position in range(chunk.start):
                wrote, makers = self.kv[self.slot(s, position)]
                assert wrote == digest(s.tokens[: position + 1]), f"{s.id} reads another's KV"
                if not before.get(s, 0):  # it was found, not computed by itself
                    assert makers == {self.made_by(s.request.adapter)}, f"{s.id} reads {makers}"
        for chunk in plan.decode:
            assert (chunk.count, chunk.samples) == (1, True)
            assert chunk.start > 0

    def write(self, s: Sequence, position: int) -> None:
        slot = self.slot(s, position)
        others = [o for o in self.scheduler.everyone() if o is not s]
        for other in others:
            readable = range(min(other.computed, len(other.blocks) * self.pool.size))
            assert slot not in {self.slot(other, p) for p in readable}, "wrote into another's KV"
        before = self.kv[self.slot(s, position - 1)][1] if position else frozenset()
        makers = before | {self.made_by(s.request.adapter)}
        self.kv[slot] = (digest(s.tokens[: position + 1]), makers)
        self.computed_tokens += 1

    def run(self, limit: int = 3000) -> None:
        """Until everybody has finished."""
        while self.scheduler.has_work:
            self.step()
            limit -= 1
            assert limit, "it does not come to an end"


# -- one thing at a time ----------------------------------------------------------------------


def test_equal_prompts_share_what_was_computed_before_c1() -> None:
    world = World(blocks=16, size=2, budget=16)
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


def test_a_whole_prompt_that_is_cached_leaves_one_token_to_compute() -> None:
    world = World(blocks=16, size=2)
    for name in "ab":
        world.add(name, [1, 2, 1, 2], 1)
        world.run()
    assert world.done["b/0"].cached == 2


def test_one_token_prompts_and_responses() -> None:
    world = World(blocks=2, size=1, budget=1, seqs=1)
    for name in "abc":
        world.add(name, [1], 1)
    world.run()
    assert world.finished == ["a", "b", "c"]


def test_a_long_prompt_does_not_stop_those_under_way() -> None:
    world = World(blocks=64, size=4, budget=4)
    world.add("short", [1], 40)
    world.step()
    world.add("long", [2] * 60, 1)
    for _ in range(10):
        plan = world.step()
        assert [c.sequence.id for c in plan.decode] == ["short"]
        assert sum(c.count for c in plan.chunks) == 4, "room of the budget is left unused"
    world.run()


def test_max_num_seqs_is_kept_first_come_first_served() -> None:
    world = World(blocks=64, seqs=2, budget=64)
    for n in range(6):
        world.add(str(n), [n % 3, 1], 2 + n % 2)
    world.run()
    assert sorted(world.finished, key=int) == world.finished


def test_preemption_takes_the_youngest_and_the_oldest_never_waits() -> None:
    world = World(blocks=6, size=2, budget=64)
    for n in range(4):
        world.add(str(n), [n, n], 9)
    world.run()
    assert world.scheduler.preemptions > 0
    assert world.finished[0] == "0"
    starts = [world.first[f"{n}/0"] for n in range(4)]
    assert starts == sorted(starts)


def test_a_preempted_twin_is_not_planned_twice_in_one_step() -> None:
    """It finds the copy of its prefix that its twin computed, so it would fit in again at once."""
    world = World(blocks=7, size=1, budget=64)
    [a] = world.add("a", [1, 2], 5)
    world.add("b", [1, 2], 5)  # computes its own copy: nothing is known yet
    world.step()
    world.step()
    world.scheduler.drop_kv(a)  # so a comes after b in the step, and takes its room
    world.step()
    assert world.scheduler.preemptions > 0
    world.run()
    assert world.done["a/0"].tokens == world.done["b/0"].tokens


def test_samples_of_one_request_share_its_prompt_once_it_is_computed() -> None:
    world = World(blocks=32, size=2, seqs=1, budget=64)
    samples = world.add("a", [1, 2, 1, 2, 1], 2, n=3)
    world.run()
    assert [s.cached for s in samples] == [0, 4, 4]
    assert len({s.seed for s in samples}) == 3


def test_kv_of_several_versions_is_nobodys_prefix_c2() -> None:
    """clear_cache=False over an update: what the request computes afterwards is for itself alone."""
    world = World(blocks=32, size=2, budget=64)
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


def test_a_request_that_never_started_counts_no_tokens_of_older_weights_as_cached_c1() -> None:
    world = World(blocks=32, size=2, budget=4)
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


def test_a_pause_freezes_or_drains_and_newcomers_wait_h4() -> None:
    world = World(blocks=32, budget=64)
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


def test_dropped_kv_is_computed_again_from_what_others_left() -> None:
    world = World(blocks=32, size=2, budget=64)
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


def test_weights_that_changed_under_the_same_name_leave_nobody_their_kv_c1() -> None:
    """A resend of the same version: the label alone does not say what made the KV."""
    world = World(blocks=32, size=2, budget=64)
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
def test_the_smallest_pool_that_holds_one_request_serves_them_all(size: int, budget: int) -> None:
    world = World(blocks=-(-9 // size), size=size, budget=budget)
    for n in range(8):
        world.add(str(n), [n % 2, 1, 2, 0, 1], 4)
    world.run()
    assert len(world.finished) == 8
    assert world.pool.used == 0


# -- any mix ----------------------------------------------------------------------------------

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


def act(world: World, kind: str, what: Any) -> None:
    """One thing that can happen between steps."""
    scheduler = world.scheduler
    if kind == "add":
        length, of_kind, tokens, adapter, n = what
        name = f"r{len(world.expected)}"  # type: ignore[attr-defined]
        prompt = [(of_kind + position) % 3 for position in range(length)]
        world.expected[name] = n  # type: ignore[attr-defined]
        world.add(name, prompt, tokens, adapter, n)
    elif kind == "step":
        for _ in range(what):
            if scheduler.has_work:
                world.step()
    elif kind == "drop":
        for sequence in scheduler.everyone()[what : what + 1]:
            scheduler.remove(sequence)
            world.dropped += 1  # type: ignore[attr-defined]
    elif kind == "abort":
        for sequence in scheduler.in_flight():
            scheduler.remove(sequence)
            world.dropped += 1  # type: ignore[attr-defined]
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
    spare: int, size: int, seqs: int, budget: int, caching: bool, actions: list[Any]
) -> None:
    """Blocks never leak or are read by strangers, FCFS, no deadlock, nobody lost (K3, C1, C2)."""
    world: Any = World(-(-18 // size) + spare, size, seqs=seqs, budget=budget, caching=caching)
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

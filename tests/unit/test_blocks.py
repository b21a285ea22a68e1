"""KV blocks of the reference engine: owned, shared, found again, and never of other weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hotbunk.rollout.backends.reference.blocks import ROOT, BlockPool, block_key

SIZE = 4


def keys(tokens: list[int], made_by: str = "v1") -> list[bytes]:
    """The chain of keys of a sequence's full blocks."""
    found = [ROOT]
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        found.append(block_key(found[-1], tokens[at : at + SIZE], made_by))
    return found[1:]


def fill(pool: BlockPool, tokens: list[int], made_by: str = "v1") -> list[int]:
    """Blocks of a sequence that was computed to its end; still held."""
    blocks = pool.take(-(-len(tokens) // SIZE))
    assert blocks is not None
    for block, key in zip(blocks, keys(tokens, made_by), strict=False):
        pool.filled(block, key)
    return blocks


def found(pool: BlockPool, tokens: list[int], made_by: str = "v1") -> list[int]:
    """What the pool finds of a sequence; gains its users."""
    out = []
    for key in keys(tokens, made_by):
        block = pool.find(key)
        if block is None:
            break
        out.append(block)
    return out


# -- keys -------------------------------------------------------------------------------------


def test_a_key_says_tokens_maker_and_everything_before_c1() -> None:
    tokens = [1, 2, 3, 4]
    base = block_key(ROOT, tokens, "0.1//")
    others = {
        block_key(ROOT, [1, 2, 3, 5], "0.1//"),
        block_key(ROOT, [1, 2, 4, 3], "0.1//"),
        block_key(ROOT, tokens, "0.2//"),
        block_key(ROOT, tokens, "0.1/a/0.1"),
        block_key(base, tokens, "0.1//"),
        block_key(block_key(ROOT, [9, 9, 9, 9], "0.1//"), tokens, "0.1//"),
    }
    assert len(others) == 6
    assert base not in others
    assert base == block_key(ROOT, tokens, "0.1//")


def test_large_token_ids_do_not_collide() -> None:
    ids = [0, 1, 255, 256, 65535, 65536, 151_935]
    assert len({block_key(ROOT, [i] * SIZE, "") for i in ids}) == len(ids)


# -- taking, sharing, giving back -------------------------------------------------------------


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(3, SIZE, caching=True)
    held = pool.take(2)
    assert held is not None
    assert len(set(held)) == 2
    assert pool.take(2) is None
    assert (pool.available, pool.used) == (1, 2)
    assert pool.take(0) == []
    pool.give_back(held)
    assert (pool.available, pool.used) == (3, 0)
    pool.check_invariants([])


def test_a_shared_block_is_free_only_when_its_last_user_left() -> None:
    pool = BlockPool(2, SIZE, caching=True)
    mine = fill(pool, [1, 2, 3, 4])
    theirs = found(pool, [1, 2, 3, 4])
    assert theirs == mine
    pool.give_back(mine)
    assert pool.take(2) is None, "a block in use was given away"
    pool.check_invariants(theirs)
    pool.give_back(theirs)
    assert pool.take(2) is not None


def test_an_unused_prefix_is_found_until_the_room_is_needed() -> None:
    pool = BlockPool(3, SIZE, caching=True)
    pool.give_back(fill(pool, [1] * 8))
    assert pool.used == 0
    again = found(pool, [1] * 8)
    assert len(again) == 2
    pool.give_back(again)
    everything = pool.take(3)
    assert everything is not None
    assert found(pool, [1] * 8) == []
    pool.check_invariants(everything)


def test_tails_go_before_their_prefixes_and_the_oldest_first() -> None:
    pool = BlockPool(4, SIZE, caching=True)
    pool.give_back(fill(pool, [1] * 8))
    pool.give_back(fill(pool, [2] * 8))
    assert pool.take(1) is not None
    assert len(found(pool, [1] * 8)) == 1, "the head of the older prefix went before its tail"
    assert len(found(pool, [2] * 8)) == 2, "the younger prefix went first"


def test_the_first_of_two_equal_blocks_stays_known() -> None:
    pool = BlockPool(2, SIZE, caching=True)
    first, second = fill(pool, [7] * 4), fill(pool, [7] * 4)
    assert found(pool, [7] * 4) == first
    pool.give_back(second)
    assert pool.available == 1
    pool.check_invariants([*first, *first])


def test_an_orphan_whose_prefix_was_evicted_is_never_found() -> None:
    pool = BlockPool(3, SIZE, caching=True)
    blocks = fill(pool, [5] * 8)
    pool.give_back(blocks[:1])  # only the head is unused
    taken = pool.take(2)
    assert taken is not None
    assert blocks[0] in taken
    assert found(pool, [5] * 8) == []
    pool.check_invariants([blocks[1], *taken])


def test_forget_all_leaves_blocks_with_their_users() -> None:
    pool = BlockPool(3, SIZE, caching=True)
    held = fill(pool, [1] * 4)
    pool.give_back(fill(pool, [2] * 4))
    pool.forget_all()
    assert found(pool, [1] * 4) == found(pool, [2] * 4) == []
    assert (pool.used, pool.available) == (1, 2)
    pool.check_invariants(held)
    pool.give_back(held)
    assert pool.available == 3


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, SIZE, caching=False)
    pool.give_back(fill(pool, [1] * 8))
    assert found(pool, [1] * 8) == []
    pool.check_invariants([])


@pytest.mark.parametrize("made_by", ["0.2//", "0.1/a/0.1", "1.1//"])
def test_nothing_is_found_across_versions_or_adapters_c1(made_by: str) -> None:
    pool = BlockPool(4, SIZE, caching=True)
    pool.give_back(fill(pool, [1] * 8, "0.1//"))
    assert found(pool, [1] * 8, made_by) == []
    assert len(found(pool, [1] * 8, "0.1//")) == 2


# -- any history ------------------------------------------------------------------------------


class Pool(RuleBasedStateMachine):
    """A pool against a plain record of who holds what, and what each block was last filled with."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, SIZE, caching=True)
        self.held: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}  # block -> the key of what was written to it
        self.count = 0

    def hold(self, blocks: list[int]) -> int:
        self.count += 1
        self.held[self.count] = blocks
        return self.count

    @rule(target=holders, n=st.integers(0, 4))
    def take(self, n: int) -> int:
        room = self.pool.available
        blocks = self.pool.take(n)
        assert (blocks is None) is (n > room)
        in_use = {b for held in self.held.values() for b in held}
        assert not in_use & set(blocks or ()), "a block in use was handed out"
        for block in blocks or ():
            self.content.pop(block, None)
        return self.hold(blocks or [])

    @rule(holder=holders, kind=st.integers(0, 2), maker=st.sampled_from(["v1", "v2"]))
    def compute(self, holder: int, kind: int, maker: str) -> None:
        blocks = self.held.get(holder, [])
        for block, key in zip(blocks, keys([kind] * SIZE * len(blocks), maker), strict=True):
            # Content is written once: a block others may read is never written again.
            if block not in self.content:
                self.content[block] = key
                self.pool.filled(block, key)

    @rule(target=holders, kind=st.integers(0, 2), maker=st.sampled_from(["v1", "v2"]))
    def reuse(self, kind: int, maker: str) -> int:
        wanted = keys([kind] * SIZE * 3, maker)
        blocks = found(self.pool, [kind] * SIZE * 3, maker)
        assert [self.content[b] for b in blocks] == wanted[: len(blocks)], "found other content"
        return self.hold(blocks)

    @rule(holder=consumes(holders))
    def leave(self, holder: int) -> None:
        self.pool.give_back(self.held.pop(holder, []))

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        assert all(found(self.pool, [kind] * SIZE, "v1") == [] for kind in range(3))

    @invariant()
    def nothing_leaks(self) -> None:
        held = [b for blocks in self.held.values() for b in blocks]
        self.pool.check_invariants(held)
        assert self.pool.used == len(Counter(held))


TestPool: Any = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

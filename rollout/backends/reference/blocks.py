"""KV blocks: who owns which, and which hold a prefix that someone may use again.

A full block is found again by what it holds *and what made it*: its tokens, the version of the
weights, the adapter, and the same of every block before it. So a prefix can never be served from
KV of other weights, whatever was or was not cleared. Blocks nobody uses keep their content until
somebody needs the room; the one unused longest goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes
ROOT: Key = b""


def block_key(parent: Key, tokens: Sequence[int], made_by: str) -> Key:
    """The key of a full block: ``made_by`` names the weights that computed it."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(made_by.encode())
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


class BlockPool:
    """A fixed number of blocks of ``size`` tokens each."""

    def __init__(self, count: int, size: int, *, caching: bool) -> None:
        self.count = count
        self.size = size
        self._caching = caching
        self._free: list[int] = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._key_of: dict[int, Key] = {}
        self._cached: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unused, oldest first

    @property
    def available(self) -> int:
        """Blocks that can be had now, at the cost of cached prefixes."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks some request holds."""
        return self.count - self.available

    def unused(self) -> list[int]:
        """Blocks nobody holds, in order."""
        return [block for block, users in enumerate(self._users) if not users]

    def take(self, n: int) -> list[int] | None:
        """``n`` blocks without content, or None if there are not so many."""
        if n > self.available:
            return None
        taken = []
        for _ in range(n):
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                self._forget(oldest)
                self._free.append(oldest)
            block = self._free.pop()
            self._users[block] = 1
            taken.append(block)
        return taken

    def find(self, key: Key) -> int | None:
        """The block that holds this prefix; it gains a user. None: nobody computed it."""
        block = self._cached.get(key)
        if block is None:
            return None
        self._users[block] += 1
        self._idle.pop(block, None)
        return block

    def filled(self, block: int, key: Key) -> None:
        """A block is full: others may find it. The first of two equal ones stays known."""
        if self._caching and key not in self._cached and block not in self._key_of:
            self._cached[key] = block
            self._key_of[block] = key

    def give_back(self, blocks: Sequence[int]) -> None:
        """A request lets go of its blocks, the last one first: prefixes outlive their tails."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def forget_all(self) -> None:
        """No prefix is found any more. Blocks in use stay with their users."""
        for block in list(self._key_of):
            self._forget(block)
        self._free.extend(reversed(self._idle))
        self._idle.clear()

    def _forget(self, block: int) -> None:
        self._cached.pop(self._key_of.pop(block), None)

    def check_invariants(self, held: Sequence[int]) -> None:
        """``held``: every block of every request, once per request.

        :raises AssertionError: blocks leaked, or have other owners than requests say.
        """
        counted = [0] * self.count
        for block in held:
            counted[block] += 1
        assert counted == self._users, "blocks are held by others than requests say"
        everyone = sorted([*self._free, *self._idle, *(b for b, n in enumerate(counted) if n)])
        assert everyone == list(range(self.count)), "KV blocks leaked or are free twice"
        assert all(self._cached[key] == block for block, key in self._key_of.items())
        assert len(self._cached) == len(self._key_of)
        assert not set(self._free) & self._key_of.keys(), "a free block still has a prefix"

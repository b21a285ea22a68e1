"""Who runs in the next step. Plain Python: no tensors, no threads, no clock.

First come, first served. A request takes KV blocks as it grows; when there are none, the one that
came last gives its blocks up and is computed again later (preemption by recompute), so the oldest
always goes on and nothing can wait for itself. Pauses change what may be planned: ``OPEN``
everything, ``DRAINING`` only what was there before the pause, ``FROZEN`` nothing.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from hotbunk.rollout.backends.reference.blocks import ROOT, BlockPool, Key, block_key
from hotbunk.rollout.contract import GenerateRequest, PauseMode

_arrivals = itertools.count()
_MIXED = "mixed"


MadeBy = Callable[[str | None], str]  # names the weights, with an adapter or without


class Admission(StrEnum):
    """What the scheduler may start."""

    OPEN = "open"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(slots=True, eq=False)
class Sequence:
    """One response's progress: ``tokens`` is prompt and response, ``computed`` have their KV.

    ``index`` is which of the request's ``n`` responses it is. ``keys`` are those of its leading
    blocks that are full and known to be of one kind; ``cached`` counts prompt tokens whose KV
    somebody else had computed, when those of its first token were (-1: not yet).
    """

    request: GenerateRequest
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    cached: int = -1
    maker: str = ""  # the weights that computed its KV
    seed: int = 0
    recomputed: int = 0
    arrival: int = field(default_factory=lambda: next(_arrivals))

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        seed = self.request.sampling.seed
        self.seed = random.getrandbits(63) if seed is None else seed + self.index

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def produced(self) -> int:
        """Response tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def lost(self) -> bool:
        """Whether its KV is gone and will be computed again."""
        return self.recomputed > 0 and self.computed == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a new one is drawn."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it is a single token of a sequence under way."""
        return self.count == 1 and self.start > 0 and self.samples


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: single tokens of sequences under way, then pieces of prompts."""

    decode: tuple[Chunk, ...]
    prefill: tuple[Chunk, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of it, in the order in which tokens are laid into the batch."""
        return self.decode + self.prefill


class Scheduler:
    """Queues, blocks and the pause state of one engine."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.admission = Admission.OPEN
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.arrived: deque[Sequence] = deque()  # during a pause
        self.preemptions = 0
        self.cached_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.pool.size)

    # -- requests -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A new request; during a pause it waits apart."""
        queue = self.waiting if self.admission is Admission.OPEN else self.arrived
        queue.append(sequence)

    def everyone(self) -> list[Sequence]:
        """All requests, oldest first within each queue."""
        return [*self.running, *self.waiting, *self.arrived]

    def in_flight(self) -> list[Sequence]:
        """Requests a pause acts on: not those that arrived during it."""
        return [*self.running, *self.waiting]

    def find(self, ids: Collection[str] | None) -> list[Sequence]:
        """Requests by id; None is all."""
        return [s for s in self.everyone() if ids is None or s.id in ids]

    def remove(self, sequence: Sequence) -> None:
        """Forget a request and free its blocks."""
        self._give_back(sequence)
        for queue in (self.running, self.waiting, self.arrived):
            if sequence in queue:
                queue.remove(sequence)

    def drop_kv(self, sequence: Sequence) -> None:
        """Its KV is gone; it will be computed again from its tokens."""
        self._give_back(sequence)
        sequence.recomputed += sequence.computed
        sequence.computed, sequence.keys, sequence.maker = 0, [], ""
        if not sequence.produced and sequence.cached >= 0:  # what it found served nobody
            self.cached_tokens -= sequence.cached
            sequence.cached = -1

    def lost(self) -> int:
        """How many requests' KV is gone and will be computed again."""
        return len({s.id for s in self.everyone() if s.lost})

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []

    # -- pauses -------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Change what may start. The caller ends requests for ABORT."""
        self.admission = Admission.DRAINING if mode is PauseMode.WAIT else Admission.FROZEN

    def resume(self) -> None:
        """Everything may run; requests that arrived during the pause queue up."""
        self.admission = Admission.OPEN
        self.waiting.extend(self.arrived)
        self.arrived.clear()

    @property
    def quiet(self) -> bool:
        """No step can start until :meth:`resume`."""
        if self.admission is Admission.DRAINING:
            return not self.running and not self.waiting
        return self.admission is Admission.FROZEN

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.admission is not Admission.FROZEN and bool(self.running or self.waiting)

    # -- steps --------------------------------------------------------------------------------

    def plan(self, made_by: MadeBy) -> Plan:
        """Choose the next step's tokens, and admit what fits.

        ``made_by`` names the weights that will compute them: KV is shared among its like only.
        """
        # By sequence: one that is preempted and comes back in the same step is planned anew.
        chosen: dict[Sequence, Chunk] = {}
        budget = self._max_tokens
        for single in (True, False):  # those under way first: a long prompt must not stop them
            for s in list(self.running):
                if s not in self.running or (self._single(s) is not single):
                    continue
                if not s.blocks:
                    self._reuse(s, made_by)
                count = min(len(s.tokens) - s.computed, budget)
                if count and self._grow(s, s.computed + count):
                    chosen[s] = Chunk(s, s.computed, count)
                    budget -= count
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            s = self.waiting[0]
            if not self._admit(s, made_by):
                break
            self.running.append(self.waiting.popleft())
            count = min(len(s.tokens) - s.computed, budget)
            chosen[s] = Chunk(s, s.computed, count)
            budget -= count
        left = [c for c in chosen.values() if c.sequence.blocks]  # without those preempted
        return Plan(tuple(c for c in left if c.decodes), tuple(c for c in left if not c.decodes))

    def computed(self, plan: Plan, made_by: MadeBy) -> None:
        """A step ran: its tokens have their KV, and blocks that are full may be found by others."""
        for chunk in plan.chunks:
            s = chunk.sequence
            s.computed = chunk.start + chunk.count
            maker = made_by(s.request.adapter)
            if s.maker != maker:
                # KV of several versions in one request: nobody else may have what follows.
                s.maker = maker if chunk.start == 0 else _MIXED
            if s.maker == _MIXED:
                continue
            for n in range(len(s.keys), s.computed // self.pool.size):
                tokens = s.tokens[n * self.pool.size : (n + 1) * self.pool.size]
                s.keys.append(block_key(s.keys[-1] if s.keys else ROOT, tokens, maker))
                self.pool.filled(s.blocks[n], s.keys[-1])

    def outdated(self, sequences: Iterable[Sequence]) -> None:
        """The weights that computed their KV have changed, whatever these are called now."""
        for sequence in sequences:
            if sequence.computed:
                sequence.maker = _MIXED

    @staticmethod
    def _single(sequence: Sequence) -> bool:
        return sequence.computed > 0 and sequence.computed == len(sequence.tokens) - 1

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens; the youngest give theirs up. False: it was the youngest."""
        while True:
            missing = self.blocks_for(tokens) - len(sequence.blocks)
            taken = self.pool.take(missing) if missing > 0 else []
            if taken is not None:
                sequence.blocks.extend(taken)
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.drop_kv(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _reuse(self, sequence: Sequence, made_by: MadeBy) -> None:
        """Take over blocks that others computed. One token at least is left to compute."""
        maker = made_by(sequence.request.adapter)
        sequence.maker = maker
        for n in range((len(sequence.tokens) - 1) // self.pool.size):
            tokens = sequence.tokens[n * self.pool.size : (n + 1) * self.pool.size]
            key = block_key(sequence.keys[-1] if sequence.keys else ROOT, tokens, maker)
            block = self.pool.find(key)
            if block is None:
                break
            sequence.blocks.append(block)
            sequence.keys.append(key)
        sequence.computed = len(sequence.blocks) * self.pool.size
        if not sequence.produced:
            self.cached_tokens += sequence.computed - max(sequence.cached, 0)
            sequence.cached = sequence.computed

    def _admit(self, sequence: Sequence, made_by: MadeBy) -> bool:
        """Blocks for all its tokens: found where others computed them, new for the rest."""
        self._reuse(sequence, made_by)
        missing = self.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        rest = self.pool.take(missing)
        if rest is None:
            sequence.computed = 0  # found, not computed: nothing is lost
            self.drop_kv(sequence)
            return False
        sequence.blocks.extend(rest)
        return True

    def check_invariants(self) -> None:
        """:raises AssertionError: blocks, progress or order are not what they should be."""
        self.pool.check_invariants([b for s in self.everyone() for b in s.blocks])
        for s in self.everyone():
            assert s.computed <= len(s.tokens), f"{s.id} computed more than it has"
            assert s.computed <= len(s.blocks) * self.pool.size, f"{s.id} computed without blocks"
            assert len(s.keys) * self.pool.size <= s.computed, f"{s.id} shares what it has not"
        for queue in (self.running, self.waiting):
            order = [s.arrival for s in queue]
            assert order == sorted(order), "a younger request passed an older one"

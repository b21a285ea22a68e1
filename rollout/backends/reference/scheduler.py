"""Who runs in the next step. Plain Python: no tensors, no threads, no clock.

A request reserves KV blocks for its whole length when it is admitted, so a running one never
waits for memory. First come, first served. Pauses change what may be planned: ``OPEN`` everything,
``DRAINING`` only what was there before the pause, ``FROZEN`` nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from hotbunk.rollout.contract import GenerateRequest, PauseMode


class Admission(StrEnum):
    """What the scheduler may start."""

    OPEN = "open"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's progress: ``tokens`` is prompt and response, ``computed`` have their KV."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    draws: random.Random = field(default_factory=random.Random)
    recomputed: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        if self.request.sampling.seed is not None:
            self.draws = random.Random(self.request.sampling.seed)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def produced(self) -> int:
        """Response tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def most_tokens(self) -> int:
        """Prompt and response at their longest."""
        return len(self.request.prompt) + self.request.sampling.max_tokens


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

    def __init__(
        self, *, blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.free: list[int] = list(range(blocks))
        self.admission = Admission.OPEN
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.arrived: deque[Sequence] = deque()  # during a pause
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

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

    def remove(self, sequence: Sequence) -> None:
        """Forget a request and free its blocks."""
        self.drop_kv(sequence)
        for queue in (self.running, self.waiting, self.arrived):
            if sequence in queue:
                queue.remove(sequence)

    def find(self, ids: Collection[str] | None) -> list[Sequence]:
        """Requests by id; None is all."""
        return [s for s in self.everyone() if ids is None or s.id in ids]

    def drop_kv(self, sequence: Sequence) -> None:
        """Its KV is gone; it will be computed again from its tokens."""
        self.free.extend(reversed(sequence.blocks))
        sequence.blocks = []
        if sequence.computed:
            sequence.recomputed += sequence.computed
        sequence.computed = 0

    def drop_all_kv(self, among: Iterable[Sequence] | None = None) -> int:
        """Drop KV of these (default: all); how many must be computed again, now or since before."""
        chosen = self.everyone() if among is None else list(among)
        for sequence in chosen:
            self.drop_kv(sequence)
        return sum(1 for s in chosen if s.recomputed)

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

    def plan(self) -> Plan:
        """Admit what fits, and choose the next step's tokens."""
        self._admit()
        prefill: list[Chunk] = []
        decode = [
            Chunk(s, s.computed, 1)
            for s in self.running
            if s.computed and s.computed == len(s.tokens) - 1
        ]
        budget = max(self._max_tokens - len(decode), 1)
        for s in self.running:
            left = len(s.tokens) - s.computed
            if budget and (left > 1 or not s.computed):
                count = min(left, budget)
                prefill.append(Chunk(s, s.computed, count))
                budget -= count
        return Plan(tuple(decode), tuple(prefill))

    def _admit(self) -> None:
        # Sequences whose KV was dropped are running still; they take blocks first.
        for s in self.running:
            self._reserve(s)
        while self.waiting and len(self.running) < self._max_num_seqs:
            if not self._reserve(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())

    def _reserve(self, sequence: Sequence) -> bool:
        missing = self.blocks_for(sequence.most_tokens) - len(sequence.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            sequence.blocks.append(self.free.pop())
        return True

    def check_invariants(self) -> None:
        """:raises AssertionError: a block has two owners or none."""
        owned = [b for s in self.everyone() for b in s.blocks]
        assert sorted(owned + self.free) == list(range(self.blocks)), "KV blocks leaked or shared"
        assert all(s.computed <= len(s.tokens) for s in self.everyone())

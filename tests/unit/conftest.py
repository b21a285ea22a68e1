"""Fixtures of the unit tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.backends.oracle import VirtualTimeLoop
from hotbunk.rollout.backends.reference.blocks import BlockPool
from hotbunk.rollout.backends.reference.scheduler import Plan, Scheduler, Sequence
from hotbunk.rollout.contract import GenerateRequest, Sampling


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Coroutine tests run in virtual time: a deadline of minutes passes at once.

    A module whose tests use threads or other processes defines its own, on a real clock.
    """
    return "asyncio", {"loop_factory": VirtualTimeLoop}


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA library, as the C tests built it, or built now."""
    for found in sorted(ROOT.glob("build/native-*/tests/libfake_cuda.so")):
        sources = [*ROOT.glob("csrc/pool/*.h"), ROOT / "csrc/tests/fake_cuda.cpp"]
        if found.stat().st_mtime > max(s.stat().st_mtime for s in sources):
            return found
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("fake_cuda") / "libfake_cuda.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Icsrc/include"]
    subprocess.run([*command, "csrc/tests/fake_cuda.cpp", "-o", str(library)], check=True, cwd=ROOT)
    return library


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


@pytest.fixture(scope="session")
def world_of() -> type[World]:
    """``world_of(blocks, size, ...)``: a scheduler of the reference engine that is checked."""
    return World

"""Shorthands for tests that drive a replica on an oracle by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from hotbunk.conformance.rig import Running
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.backends.oracle import OracleEngine, create
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import GenerateRequest, Sampling, UpdateReport, Version
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines

PROMPT = tuple(range(1, 10))


@asynccontextmanager
async def running(
    *,
    deadlines: Deadlines | None = None,
    fed_groups: Collection[str] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Replica, OracleEngine]]:
    """A started replica named ``r`` on an oracle; its invariants are checked at the end."""
    engine = create(**options)
    replica = Replica(engine, name="r", deadlines=deadlines, fed_groups=fed_groups)
    await replica.start()
    try:
        yield replica, engine
        await replica.check_invariants()
    finally:
        await replica.close()


def request(
    name: str, tokens: int = 8, prompt: tuple[int, ...] = PROMPT, **more: Any
) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(name, prompt, Sampling(0, max_tokens=tokens), **more)


def ask(replica: Replica, name: str, tokens: int = 50, **more: Any) -> Running:
    """Start reading a request in the background."""
    return Running(replica.generate(request(name, tokens, **more)))


async def load(
    replica: Replica, step: int, kind: type[MemoryTransfer] = MemoryTransfer
) -> UpdateReport:
    """A full update to the weights of ``step``, labelled 0.step."""
    version = Version(0, step)
    return await replica.update_weights(kind(weights_at(step), version=version), version=version)


def now() -> float:
    """The loop's time in seconds."""
    return asyncio.get_running_loop().time()

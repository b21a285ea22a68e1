"""What a sync costs the requests that run in it: tokens lost, tokens computed again, time stood still.

An engine in a process of its own generates a batch; half-way new weights are switched in over shared
memory, once for each way of pausing. The peer is what stock engines offer a client: abort, and the
request begun again from its prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from hotbunk.benchmarks.rows import Row
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.contract import (
    Deployment,
    GenerateRequest,
    PauseMode,
    Sampling,
    TokenChunk,
    Version,
)
from hotbunk.rollout.partial import PartialPolicy, PartialRollout
from hotbunk.rollout.process import start_replica
from hotbunk.trainer_hooks.recipes.models import build_tiny, load_model

PEER = "abort, begun again from the prompt"


class Size(msgspec.Struct, frozen=True):
    """What is generated. The sync begins when every request has ``begun`` tokens."""

    requests: int = 16
    prompt: int = 64
    tokens: int = 128
    begun: int = 64
    hidden: int = 256
    layers: int = 4
    repeats: int = 5
    warm_up: int = 1


class Way(msgspec.Struct, frozen=True):
    """A way to pause, and what a client does with what is cut off."""

    pause: PauseMode
    clear_cache: bool = True
    from_prompt: bool = False


WAYS: Mapping[str, Way] = {
    "keep": Way(PauseMode.KEEP),
    "keep_stale_kv": Way(PauseMode.KEEP, clear_cache=False),
    "abort": Way(PauseMode.ABORT),
    "wait": Way(PauseMode.WAIT),
}
STOCK = Way(PauseMode.ABORT, from_prompt=True)


class Dip(msgspec.Struct, frozen=True):
    """One sync. ``still``: the longest time without a token around it; ``late``: how long a request
    that came while it was held waited for its first. Milliseconds."""

    lost: int
    recomputed: int
    still: float
    late: float


def run(tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """Rows a way: tokens lost, tokens computed again, milliseconds stood still, and late."""
    return measured(Size(), tell)


def measured(size: Size, tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """See :func:`run`."""
    with tempfile.TemporaryDirectory(prefix="hotbunk-dip-") as folder:
        dips, idle = asyncio.run(_measure(size, Path(folder), tell))
    stock = dips.pop(PEER)
    rows = []
    for name, ours in dips.items():
        for what, unit in (("lost", "tokens"), ("recomputed", "tokens")):
            rows.append(_row(f"dip_{name}_{what}", unit, _of(ours, what), _of(stock, what), None))
        rows.append(_row(f"dip_{name}_still", "ms", _of(ours, "still"), _of(stock, "still"), idle))
        rows.append(_row(f"dip_{name}_late", "ms", _of(ours, "late"), _of(stock, "late"), idle))
    settings = (
        f"One sync; {size.requests} requests, prompts of {size.prompt} tokens, {size.begun} to "
        f"{size.tokens} tokens into their responses; a Llama of {size.layers} layers, {size.hidden} "
        "wide, in a process of its own, weights over shm; the limit is a sync with nothing in flight; "
        "less is better, and a ratio above 1 is better than the peer"
    )
    return rows, settings


def _of(dips: Sequence[Dip], what: str) -> list[float]:
    return [float(getattr(dip, what)) for dip in dips]


def _row(
    name: str, unit: str, ours: list[float], peer: list[float], limit: list[float] | None
) -> Row:
    mine, theirs = median(ours), median(peer)
    least = None if limit is None else median(limit)
    return Row(
        name,
        mine,
        theirs,
        least,
        unit,
        theirs / mine if mine else None,
        None if least is None or not mine else least / mine,
        len(ours),
        [min(ours), max(ours), min(peer), max(peer)],
        PEER,
    )


async def _measure(
    size: Size, folder: Path, tell: Callable[[str], None]
) -> tuple[dict[str, list[Dip]], list[float]]:
    model = build_tiny(folder / "model", hidden=size.hidden, layers=size.layers, scale=4)
    handle = await start_replica(
        "reference", {"model": str(model), "kv_cache_tokens": 2 * size.requests * 512}
    )
    manager = CheckpointEngineManager([handle], ShmTransport(), deployment=Deployment.STANDALONE)
    bench = _Bench(size, manager, module_source(load_model(model)))
    ways = {**WAYS, PEER: STOCK}
    dips: dict[str, list[Dip]] = {name: [] for name in ways}
    idle: list[float] = []
    try:
        for turn in range(1 - size.warm_up, size.repeats + 1):
            for name, way in ways.items():
                tell(f"{name}, {turn} of {size.repeats}")
                dip = await bench.dip(way)
                if turn > 0:
                    dips[name].append(dip)
            began = time.perf_counter()
            await bench.sync(SyncPolicy())
            idle += [(time.perf_counter() - began) * 1e3] if turn > 0 else []
    finally:
        await manager.close()
    return dips, idle


@dataclass
class _Bench:
    size: Size
    manager: CheckpointEngineManager
    source: Any
    steps: Any = field(default_factory=lambda: itertools.count(1))
    ids: Any = field(default_factory=itertools.count)

    async def sync(self, policy: SyncPolicy) -> None:
        """New weights, of another version."""
        version = Version(0, next(self.steps))
        await self.manager.update_weights(self.source, version, policy=policy)

    async def dip(self, way: Way) -> Dip:
        """A batch with a sync in it."""
        policy = PartialPolicy(from_prompt=way.from_prompt)
        rollout = PartialRollout(self.manager.replicas, policy)
        arrivals: list[float] = []
        begun = asyncio.Event()
        tokens: dict[str, int] = {}

        def seen(chunk: TokenChunk) -> None:
            if chunk.token_ids:
                arrivals.append(time.perf_counter())
            tokens[chunk.request_id] = tokens.get(chunk.request_id, 0) + len(chunk.token_ids)
            if len(tokens) == self.size.requests and min(tokens.values()) >= self.size.begun:
                begun.set()

        running = [
            asyncio.create_task(rollout.generate(self._request(), seen=seen))
            for _ in range(self.size.requests)
        ]
        await begun.wait()
        began = time.perf_counter()
        syncing = asyncio.create_task(
            self.sync(SyncPolicy(pause=way.pause, clear_cache=way.clear_cache))
        )
        handle = self.manager.replicas[0]
        while not (syncing.done() or (await handle.status()).is_paused):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        held, came = time.perf_counter(), list[float]()

        def first(chunk: TokenChunk) -> None:
            if chunk.token_ids:
                came.append(time.perf_counter())

        await rollout.generate(self._request(tokens=1), seen=first)
        await syncing
        results = await asyncio.gather(*running)
        times = sorted([*arrivals, *came])
        gaps = [b - a for a, b in itertools.pairwise(times) if b >= began]
        resent = sum(r.resent_tokens for r in results)
        switched = sum(r.switched_tokens for r in results)
        return Dip(
            sum(r.dropped_tokens for r in results),
            resent + switched * way.clear_cache,
            max(gaps) * 1e3,
            (came[0] - held) * 1e3,
        )

    def _request(self, tokens: int | None = None) -> GenerateRequest:
        number = next(self.ids)
        prompt = tuple((7 * number + 3 * place) % 200 for place in range(self.size.prompt))
        sampling = Sampling(1.0, tokens or self.size.tokens, number, ignore_eos=True)
        return GenerateRequest(f"r{number}", prompt, sampling)

"""A whole non-naive sync over 1, 8 and 64 replicas that cost nothing.

What is left is the manager's own: pauses, phases, deadlines, an offer, outcomes. ``manager_N`` has
replicas whose verbs return at once (benchmarks/free.py), as the peer's do; ``rules_N`` has real ones, the
rules of each in this same process, in front of simulated engines of a few hundred bytes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hotbunk.benchmarks.free import FreeHandle, FreeSource, FreeTransport
from hotbunk.benchmarks.rows import Row
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import ReleaseKV, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.source import TensorSource, WeightSource
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.backends.oracle import create
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import TARGET, Deployment, Version
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.handle import LocalHandle, ReplicaHandle
from hotbunk.rollout.replica import Replica

SIZES = (1, 8, 64)
REPEATS = 31
PEER = "verl's CheckpointEngineManager"
PEER_SECONDS = 300.0  # importing verl takes a while


def run(tell: Callable[[str], None], *, peer_python: Path | None = None) -> tuple[list[Row], str]:
    """A sync and a replica's share of it in microseconds; in milliseconds one with replicas' rules.

    The peer asks no replica how it is, has no deadlines, no undo and no outcomes.

    :param peer_python: an interpreter that has verl; its manager is the peer.
    """
    # As `hotbunk train` does, and the peer here: the collector need not walk what torch brought.
    gc.collect()
    gc.freeze()
    tell("the peer")
    peer = _peer(peer_python) if peer_python is not None else {}
    rows = []
    for count in SIZES:
        tell(f"{count} replicas")
        both = [_ms(asyncio.run(_free(count))), peer.get(count, [])]
        whole = [[ms * 1e3 for ms in taken] for taken in both]
        rows.append(_row(f"manager_{count}", *whole, unit="us"))
        each = [[us / count for us in taken] for taken in whole]
        rows.append(_row(f"manager_{count}_per_replica", *each, unit="us"))
    for count in SIZES:
        tell(f"{count} replicas and their rules")
        reports = asyncio.run(_ruled(count))
        rows.append(_row(f"rules_{count}", _ms(reports)))
        own = [(report.seconds - _slowest(report)) * 1e3 for report in reports]
        rows.append(_row(f"rules_{count}_beside_updates", own))
    return rows, "KV released around each sync, one process; goal: 10 ms + the slowest replica"


def _peer(python: Path) -> dict[int, list[float]]:
    """Milliseconds of verl's syncs, by replicas. :raises ConfigError: it cannot be run there."""
    program = Path(__file__).with_name("verl_manager.py")
    command = [str(python), "-P", str(program), str(REPEATS), *map(str, SIZES)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the peer cannot be run: {error}") from error
    if done.returncode:
        raise ConfigError(
            f"the peer failed: {done.stderr.strip().splitlines()[-1:]}",
            remedy="give an interpreter that has verl and what it imports",
        )
    said = json.loads(done.stdout.splitlines()[-1])
    return {int(count): [s * 1e3 for s in seconds] for count, seconds in said.items()}


def _row(
    name: str, values: Sequence[float], peer: Sequence[float] = (), *, unit: str = "ms"
) -> Row:
    spread = [min(values), max(values)]
    ours = statistics.median(values)
    if not peer:
        return Row(name, ours, None, None, unit, None, None, len(values), spread)
    theirs = statistics.median(peer)
    spread += [min(peer), max(peer)]
    return Row(name, ours, theirs, None, unit, theirs / ours, None, len(values), spread, PEER)


def _ms(reports: Sequence[SyncReport]) -> list[float]:
    return [report.seconds * 1e3 for report in reports]


def _slowest(report: SyncReport) -> float:
    return max(one.update.seconds for one in report.outcomes if one.update is not None)


async def _free(count: int) -> list[SyncReport]:
    handles: list[Any] = [FreeHandle(f"r{n}") for n in range(count)]
    return await _syncs(handles, FreeTransport(), lambda step: FreeSource())


async def _ruled(count: int) -> list[SyncReport]:
    replicas = [Replica(create(fed=(TARGET,)), name=f"r{n}") for n in range(count)]
    for replica in replicas:
        await replica.start()
    return await _syncs([LocalHandle(r) for r in replicas], NaiveTransport(), _source)


async def _syncs(
    handles: Sequence[ReplicaHandle], transport: Transport, source: Callable[[int], WeightSource]
) -> list[SyncReport]:
    manager = CheckpointEngineManager(
        handles,
        transport,
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(release_kv=ReleaseKV.ALWAYS),
    )
    try:
        reports = [
            await manager.update_weights(source(step), Version(0, step))
            for step in range(1, REPEATS + 2)
        ]
    finally:
        await manager.close()
    return reports[1:]  # the first one warms up


def _source(step: int) -> TensorSource:
    named = []
    for spec, content in weights_at(step):
        if spec.group == TARGET:
            raw = torch.tensor(list(content), dtype=torch.uint8)
            named.append((spec.name, raw.view(dtype_from(spec.dtype)).reshape(spec.shape)))
            named += [(alias, named[-1][1]) for alias in spec.aliases]
    return TensorSource(lambda: named)

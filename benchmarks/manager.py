"""A whole non-naive sync over 1, 8 and 64 replicas whose engines cost next to nothing.

What is left is the manager's own: pauses, phases, an offer, outcomes. The engines are oracles in
this process (simulated engines: a few hundred bytes of weights each), so nothing travels far.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import torch

from hotbunk.benchmarks.rows import Row
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import ReleaseKV, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.source import TensorSource
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.backends.oracle import create
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import TARGET, Deployment, Version
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.replica import Replica

SIZES = (1, 8, 64)
REPEATS = 15


def run(tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """Rows in milliseconds: a sync, and what of it is not its slowest replica's update.

    No peer is measured here: verl's manager needs verl, whose pins are its own.
    """
    rows = []
    for count in SIZES:
        tell(f"{count} replicas")
        reports = asyncio.run(_syncs(count))
        whole = [report.seconds * 1e3 for report in reports]
        rows.append(_row(f"manager_{count}", whole))
        own = [(report.seconds - _slowest(report)) * 1e3 for report in reports]
        rows.append(_row(f"manager_{count}_own", own))
        rows.append(_row(f"manager_{count}_per_replica", [ms / count for ms in own]))
    return rows, "simulated engines (oracles) in one process, KV released around each sync"


def _row(name: str, values: list[float]) -> Row:
    spread = [min(values), max(values)]
    return Row(name, statistics.median(values), None, None, "ms", None, None, len(values), spread)


def _slowest(report: SyncReport) -> float:
    return max(one.update.seconds for one in report.outcomes if one.update is not None)


async def _syncs(count: int) -> list[SyncReport]:
    replicas = [Replica(create(fed=(TARGET,)), name=f"r{n}") for n in range(count)]
    for replica in replicas:
        await replica.start()
    manager = CheckpointEngineManager(
        [LocalHandle(replica) for replica in replicas],
        NaiveTransport(),
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(release_kv=ReleaseKV.ALWAYS),
    )
    reports = []
    try:
        for step in range(1, REPEATS + 2):
            began = time.perf_counter()
            report = await manager.update_weights(_source(step), Version(0, step))
            assert report.seconds <= time.perf_counter() - began
            reports.append(report)
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

"""What is true of a replica now: one coherent snapshot, whatever its engine is busy with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hotbunk.rollout import errors
from hotbunk.rollout.calls import bounded
from hotbunk.rollout.contract import BackendStatus, Engine
from hotbunk.rollout.gate import SLEEP, Gate, Stage
from hotbunk.rollout.lifecycle import Residency, Weights
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.status import Deadlines, Health, PauseInfo, ReplicaStatus


async def looked(
    backend: Engine,
    line: EngineLine,
    gate: Gate,
    state: Residency,
    deadlines: Deadlines,
    health: Callable[[], Health],
) -> ReplicaStatus:
    """The snapshot. An engine that does not answer in time is busy: what is known here counts."""
    try:
        said = await bounded(
            "status", _asked(backend, line), deadlines.inspect, grace=deadlines.grace
        )
    except (errors.DeadlineExceeded, errors.EngineFailed, errors.ReplicaLost):
        said = BackendStatus(busy=True)
    now = asyncio.get_running_loop().time()
    return ReplicaStatus(
        name=line.name,
        health=health(),  # after the engine was asked
        groups={name: str(group) for name, group in state.groups.items()},
        versions=state.versions(),
        kv=state.kv,
        pauses=tuple(PauseInfo(p.owner, p.mode, now - p.since) for p in gate.pauses.values()),
        held=gate.ids(Stage.HELD),
        running=gate.ids(Stage.RUNNING),
        is_paused=gate.closed,
        is_sleeping=SLEEP in gate.pauses,
        servable=state.servable() and not line.lost,
        backend=said,
        newest=state.newest(),
    )


async def check(
    status: Callable[[], Awaitable[ReplicaStatus]],
    line: EngineLine,
    gate: Gate,
    state: Residency,
    pauses: EnginePauses,
    locked: Callable[[], bool],
) -> None:
    """As :meth:`Replica.check_invariants`; ``locked``: whether a verb is in progress."""
    known = set(gate.ids(Stage.RUNNING))  # one that ends meanwhile is no stranger
    said = await status()
    if line.lost or locked() or said.backend.busy:
        return
    assert not pauses.open or not gate.closed, "engine open behind a closed gate"
    assert not pauses.open or said.servable, "engine open without content"
    for name, group in state.groups.items():
        if group.state is Weights.RESIDENT:
            told = said.backend.versions.get(name)
            assert told == group.version, f"{name}: engine says {told}, state says {group.version}"
    unseen = set(said.backend.running) - set(said.running) - known
    assert not unseen, f"engine runs requests the gate does not know: {unseen}"


async def _asked(backend: Engine, line: EngineLine) -> BackendStatus:
    try:
        return await backend.status()
    except errors.ReplicaLost as error:
        line.lose(error.what)  # the engine's own word: it is dead, not slow
        raise

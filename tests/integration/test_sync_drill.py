"""The drill: promises hold under random faults, and one that does not hold is seen."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.cli.sync_drill import run
from hotbunk.conformance.drill.plan import BUCKET, POINTS, Fault, How, draw
from hotbunk.conformance.drill.run import TRANSPORTS, Round, drill
from hotbunk.rollout.contract import Deployment, PauseMode

FAULTS = int(os.environ.get("HOTBUNK_DRILL_FAULTS", "7"))  # more in `make soak`


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.timeout(60 + 12 * FAULTS)
@pytest.mark.parametrize("ranks, transports", [(1, ["shm", "disk"]), (2, [])])
def test_every_promise_holds(ranks: int, transports: list[str], tmp_path: Path) -> None:
    """Random faults in engines and source, other replicas untouched, healed, nothing left behind.

    Once in engines without torch, once over every transport.
    """
    file = tmp_path / "rounds.json"
    code = run(
        faults=FAULTS,
        seed=11 + ranks,
        transports=transports,
        replicas=2,
        ranks=ranks,
        only=None,
        json=file,
    )
    rounds = json.loads(file.read_text())
    assert [one["broken"] for one in rounds if one["broken"]] == []
    assert code == 0
    assert len(rounds) == FAULTS


@pytest.mark.anyio
async def test_a_promise_that_does_not_hold_is_seen() -> None:
    """Engines that never mark their weights dirty: half-written ones would be served. And a trainer
    that leaves something behind."""
    fault = Fault(0, "shm", 0, 0, BUCKET, 1, How.RAISE, PauseMode.ABORT, 64)
    seen: list[Round] = []
    leaked: list[Any] = []

    def tell(one: Round) -> None:
        seen.append(one)
        leaked.append(subprocess.Popen(["sleep", "60"]))
        leaked.append(socket.socket())
        leaked.append(os.fdopen(os.memfd_create("leaked"), "wb"))

    try:
        await drill(
            [fault],
            replicas=2,
            ranks=1,
            tell=tell,
            setup="hotbunk.conformance.drill.engine:sabotaged",
        )
    finally:
        leaked[0].kill()
        leaked[0].wait()
        for one in leaked[1:]:
            one.close()
    (one,) = seen
    assert one.outcomes[0] != "poisoned"
    assert any("r0 ended" in text for text in one.broken), one.broken
    assert any("serves other tokens" in text or "other weights" in text for text in one.broken)
    left = one.broken[-1]
    assert all(text in left for text in (f"process {leaked[0].pid}", "socket:", "leaked")), left
    assert left.count(",") == 2, left


def test_faults_are_drawn_alike_and_cover_what_there_is() -> None:
    faults = draw(400, 3, TRANSPORTS, replicas=3, ranks=2)
    assert faults == draw(400, 3, TRANSPORTS, replicas=3, ranks=2)
    assert {fault.transport for fault in faults} == set(TRANSPORTS)
    assert {fault.how for fault in faults} == set(How)
    assert {fault.replica for fault in faults} == {0, 1, 2}
    assert {fault.rank for fault in faults} == {0, 1}
    assert {fault.point for fault in faults} == set(POINTS)
    assert {fault.deployment for fault in faults} == set(Deployment)
    assert all(fault.at.sleeping in (None, fault.sleeps) for fault in faults)
    assert set(Outcome) - {*(one for fault in faults for one in fault.allowed())} == {
        Outcome.IN_DOUBT,
        Outcome.DEFERRED,
    }

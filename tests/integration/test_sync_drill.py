"""The drill: promises hold under random faults, and one that does not hold is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hotbunk.cli.sync_drill import run
from hotbunk.conformance.drill.plan import BUCKET, Fault, How, draw
from hotbunk.conformance.drill.run import TRANSPORTS, Round, drill
from hotbunk.rollout.contract import PauseMode

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
    """Engines that never mark their weights dirty: half-written ones would be served."""
    fault = Fault(0, "shm", 0, 0, BUCKET, 1, How.RAISE, PauseMode.ABORT, 64)
    seen: list[Round] = []
    await drill(
        [fault],
        replicas=2,
        ranks=1,
        tell=seen.append,
        setup="hotbunk.conformance.drill.engine:sabotaged",
    )
    (one,) = seen
    assert one.outcomes[0] != "poisoned"
    assert any("r0 ended" in text for text in one.broken), one.broken
    assert any("serves other tokens" in text or "other weights" in text for text in one.broken)


def test_faults_are_drawn_alike_and_cover_what_there_is() -> None:
    faults = draw(400, 3, TRANSPORTS, replicas=3, ranks=2)
    assert faults == draw(400, 3, TRANSPORTS, replicas=3, ranks=2)
    assert {fault.transport for fault in faults} == set(TRANSPORTS)
    assert {fault.how for fault in faults} == set(How)
    assert {fault.replica for fault in faults} == {0, 1, 2}
    assert {fault.rank for fault in faults} == {0, 1}

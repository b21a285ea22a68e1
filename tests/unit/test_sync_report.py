"""What a sync says of itself: phases, the slowest, counters; as a table, as bars and as a trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("torch")

from rich.console import Console

from hotbunk.checkpoint_engine import show
from hotbunk.checkpoint_engine.counters import FleetCounters
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy, SyncReport
from hotbunk.conformance.backends.oracle_kit import ask
from hotbunk.conformance.backends.oracle_pool import Weights, pool
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Version

pytestmark = pytest.mark.anyio
_ALL = SyncPolicy()


@pytest.fixture
def anyio_backend() -> str:
    """Reports have real seconds."""
    return "asyncio"


def printed(what: Any) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


async def a_report() -> SyncReport:
    """r1 is 60 ms late, r2 refuses."""
    faults = {
        1: ("update/commit", Fault(Action.DELAY, seconds=0.06)),
        2: ("update/accept", Fault(Action.RAISE, errors.UpdateRefused("not now"))),
    }
    async with pool(faults) as (manager, _):
        with pytest.raises(errors.SyncFailed) as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
    report = caught.value.report
    assert isinstance(report, SyncReport)
    return report


async def test_phases_sum_to_the_whole_and_the_slowest_is_named_u2() -> None:
    report = await a_report()
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert min(report.phases.values()) >= 0
    assert report.phases["other"] < 0.5 * report.seconds, "most of it is in no phase"
    assert report.slowest == "r1"
    for one in report.outcomes:
        assert one.seconds <= report.seconds
        # A phase of the whole lasts as long as its slowest replica's, and what surrounds it.
        assert all(seconds <= report.phases[name] for name, seconds in one.phases.items())
    least, middle, most = report.spread()["sync"]
    assert least <= middle < most
    assert most == pytest.approx(0.06, abs=0.05)
    committed = [one for one in report.outcomes if one.outcome is Outcome.COMMITTED]
    assert set(committed[0].phases) == {"pause", "wake_weights", "sync", "wake_kv"}


async def test_a_report_as_a_table_as_bars_and_as_a_trace_u2() -> None:
    report = await a_report()
    text = printed(show.table(report))
    rows = ("r0", "r1 (slowest)", "r2", "least", "median", "most", "wall clock")
    lines = {
        row: line
        for line in text.splitlines()
        for row in rows
        if line.split("  ")[0].strip() == row
    }
    assert set(lines) == set(rows)
    assert "rolled back" in lines["r2"]
    assert "0.1" in lines["r2"], "what it serves still"
    assert "0.2" in lines["r0"]
    for column in ("pause", "sync", "wake kv", "all", "GB/s"):
        assert column in text
    bars = printed(show.timeline(report, width=40)).splitlines()
    assert [bar.index("|") for bar in bars[:3]] == [3, 3, 3]
    assert len({len(bar.rstrip()) for bar in bars[:3]}) == 1
    assert "sync" in bars[3]
    sync = bars[3].split(" sync")[0].split()[-1]
    assert bars[1].count(sync) > bars[2].count(sync)
    events = json.loads(json.dumps(show.trace(report)))
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["r0", "r1", "r2"]
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    assert max(e["ts"] + e["dur"] for e in spans) <= report.seconds * 1e6
    assert any("not now" in e["args"]["error"] for e in spans)


def test_a_report_of_nothing_is_shown_too() -> None:
    report = SyncReport(Version(0, 1), (), {"other": 0.1}, 0.1, Version(0, 2))
    assert "0.2 came meanwhile" in printed(show.table(report))
    assert "no replica" in printed(show.timeline(report))
    assert show.trace(report) == []


async def test_counters_are_of_one_moment_u3() -> None:
    slow = {0: ("update/commit", Fault(Action.DELAY, seconds=0.2))}
    async with pool(slow, strategy="lazy", max_lag=9) as (manager, handles):
        await manager.adopt()
        begun = manager.counters()
        assert (begun.current, begun.syncs, begun.waiting) == (Version(0, 1), 0, 0)
        assert begun.staleness(1.0) == 0
        syncing = [
            asyncio.create_task(manager.update_weights(Weights(n), Version(0, n), policy=_ALL))
            for n in (2, 3, 4)
        ]
        await asyncio.sleep(0.1)
        during = manager.counters()
        assert during.syncing
        assert (during.syncs, during.waiting) == (1, 2)
        await asyncio.gather(*syncing)
        busy = ask(handles[2].replica, "busy", 900)
        await busy.started()
        await manager.update_weights(Weights(7), Version(0, 7))
        await asyncio.sleep(0.1)
        after = manager.counters()
        assert (after.syncs, after.failed, after.superseded, after.waiting) == (3, 0, 1, 0)
        assert dict(after.serves) == {"r0": Version(0, 7), "r1": Version(0, 7), "r2": Version(0, 4)}
        assert [after.staleness(share) for share in (0, 0.5, 0.99, 1)] == [0, 0, 3, 3]
        await handles[2].abort()


def test_staleness_of_nobody_and_of_another_incarnation_u3() -> None:
    def counters(*serves: Version | None) -> FleetCounters:
        named = {str(n): version for n, version in enumerate(serves)}
        return FleetCounters(Version(2, 5), named, 0, False, 0, 0, 0)

    assert counters(None, None).staleness(0.5) is None
    assert counters(Version(1, 9), None).staleness(0.5) == 5
    with pytest.raises(ValueError, match="share"):
        counters().staleness(1.5)

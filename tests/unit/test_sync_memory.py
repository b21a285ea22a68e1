"""What a sync says of memory: the peaks that were measured, phase by phase, and nothing else (U2)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from rich.console import Console

from hotbunk.checkpoint_engine import show
from hotbunk.checkpoint_engine.held import BRIEF, Held
from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.conformance.backends.oracle_kit import now, running
from hotbunk.conformance.backends.oracle_pool import Noting, Weights, pool
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import ArenaReport, Deployment, MemoryReport, Tag, Version

pytestmark = pytest.mark.anyio
PHASES = {"pause", "wake_weights", "sync", "wake_kv"}


def levels(*, weights: int = 0, kv: int = 0, by: str = "process") -> MemoryReport:
    arenas = (ArenaReport("weights", "target", 9, weights), ArenaReport("kv_cache", "", 9, kv))
    return MemoryReport(arenas, measured_by=by)


@pytest.fixture
async def handle() -> AsyncIterator[Noting]:
    async with running() as (replica, _):
        yield Noting(replica, [])


async def test_peaks_are_of_a_tag_and_of_one_moment_u2(handle: Noting) -> None:
    held = Held(handle)
    for report in (levels(weights=5), levels(kv=7), levels(weights=3, kv=3)):
        held.saw("sync", report)
    peak = held.peaks["sync"]
    assert peak.tags == {"weights": 5, "kv_cache": 7}
    assert peak.total == 7, "both were never there together"
    assert (peak.measured_by, peak.samples) == ("process", 3)


async def test_what_was_not_measured_is_absent_u2(
    handle: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(handle)
    held.saw("pause", levels(weights=5, by="accounting"))
    held.saw("pause", MemoryReport())
    assert held.peaks == {}
    counting = dataclasses.replace(handle.capabilities, memory_measured_by="accounting")
    monkeypatch.setattr(handle.replica.backend, "capabilities", counting)
    before = handle.replica.backend.faults.seen.get("memory", 0)  # type: ignore[attr-defined]
    async with Held(handle).during("sync"):
        await asyncio.sleep(1)
    assert handle.replica.backend.faults.seen.get("memory", 0) == before  # type: ignore[attr-defined]


async def test_a_sync_that_wakes_says_what_each_phase_held_u1_u2_m1() -> None:
    async with pool(deployment=Deployment.HYBRID) as (manager, handles):
        weights = (await handles[0].memory()).resident(Tag.WEIGHTS)
        kv = (await handles[0].memory()).resident(Tag.KV_CACHE)
        await manager.sleep_replicas()
        report = await manager.update_weights(Weights(2), Version(0, 2))
    for one in report.outcomes:
        assert set(one.memory) == PHASES
        assert one.memory["pause"].total == 0
        for phase in ("wake_weights", "sync"):
            assert one.memory[phase].tags == {"weights": weights, "kv_cache": 0}
        assert one.memory["wake_kv"].total == weights + kv
    peak, name = report.memory()["wake_kv"]
    assert (peak.total, name) == (weights + kv, "r0")


async def test_what_was_there_before_a_release_counts_u2() -> None:
    async with pool(release_kv="always") as (manager, handles):
        both = (await handles[0].memory()).resident()
        report = await manager.update_weights(Weights(2), Version(0, 2))
    held = report.outcomes[0].memory
    assert held["wake_weights"].total == both, "it began with both"
    assert held["sync"].tags["kv_cache"] == 0


async def test_a_long_phase_is_looked_at_again_and_ever_less_often_u2() -> None:
    slow = {0: ("update/commit", Fault(Action.DELAY, seconds=300))}
    async with pool(slow) as (manager, _):
        report = await manager.update_weights(Weights(2), Version(0, 2))
    assert 60 < report.outcomes[0].memory["sync"].samples < 90


@pytest.mark.parametrize("action", [Action.RAISE, Action.HANG])
async def test_a_look_that_fails_costs_a_figure_and_nothing_else_u2(action: Action) -> None:
    fault = Fault(action, errors.EngineFailed("no memory figures today"))
    async with pool() as (manager, handles):
        handles[1].replica.backend.faults.at("memory", fault, nth=None)  # type: ignore[attr-defined]
        began = now()
        report = await manager.update_weights(Weights(2), Version(0, 2))
        assert now() - began <= 4 * BRIEF + 0.1, "nobody waits for it"
        assert [one.outcome for one in report.outcomes] == [Outcome.COMMITTED] * 3
        assert [set(one.memory) for one in report.outcomes] == [PHASES, set(), PHASES]


async def test_an_answer_that_comes_after_its_phase_is_no_figure_u2() -> None:
    late = Fault(Action.DELAY, seconds=10 * BRIEF)
    async with pool() as (manager, handles):
        handles[0].replica.backend.faults.at("memory", late)  # type: ignore[attr-defined]
        report = await manager.update_weights(Weights(2), Version(0, 2))
        await asyncio.sleep(20 * BRIEF)
        assert set(report.outcomes[0].memory) == PHASES - {"pause"}


async def test_shown_in_the_table_in_the_bars_and_in_the_trace_u2() -> None:
    async with pool() as (manager, handles):
        report = await manager.update_weights(Weights(2), Version(0, 2))
        both = (await handles[0].memory()).resident()
    mb = f"{both / 1e6:.2g}"

    def printed(what: Any) -> str:
        console = Console(width=200, force_terminal=False)
        with console.capture() as captured:
            console.print(what)
        return captured.get()

    (row,) = [line for line in printed(show.table(report)).splitlines() if "peak MB, all" in line]
    assert row.split().count(mb) == len(PHASES)
    assert f"sync {mb} MB" in printed(show.timeline(report))
    counters = [e for e in json.loads(json.dumps(show.trace(report))) if e["ph"] == "C"]
    assert len(counters) == 3 * len(PHASES)
    assert all(sum(e["args"].values()) == both for e in counters)
    bare = msgspec.structs.replace(
        report, outcomes=tuple(msgspec.structs.replace(o, memory={}) for o in report.outcomes)
    )
    assert "peak" not in printed(show.table(bare)), "nothing is guessed"
    assert "MB" not in printed(show.timeline(bare))

"""Weights on their way: the newest of those that wait is sent, and everybody gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome, SyncPolicy, SyncReport
from hotbunk.rollout.contract import TARGET, Version
from hotbunk.rollout.errors import HotbunkError, SyncFailed
from hotbunk.rollout.status import Health
from hotbunk.trainer_hooks.recipes import publish
from hotbunk.trainer_hooks.recipes.publish import Publisher, WeightCopy

pytestmark = pytest.mark.anyio


class Status:
    def __init__(self, name: str, health: Health) -> None:
        self.name, self.health, self.servable = name, health, True
        self.versions: dict[str, Version] = {}


class Handle:
    def __init__(self, name: str) -> None:
        self.name, self.health = name, Health.OK
        self.version: Version | None = None
        self.serves = True


class Fleet:
    """A manager and its hooks as far as a publisher asks them. ``ends`` are outcomes to come."""

    def __init__(self, *names: str) -> None:
        self.manager = self
        self.policy = SyncPolicy()
        self.there = {name: Handle(name) for name in names}
        self.sent: list[tuple[int, tuple[str, ...], float]] = []
        self.ends: dict[str, list[Outcome]] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.began = asyncio.Event()

    async def on_weights_ready(self, source: Any, version: Version) -> SyncReport:
        return await self.update_weights(source, version)

    async def update_weights(
        self, source: Any, version: Version, replicas: Any = None
    ) -> SyncReport:
        names = tuple(self.there if replicas is None else replicas)
        self.began.set()
        await self.open.wait()
        value = float(next(iter(source.tensors())).flatten()[0])
        self.sent.append((version.step, names, value))
        outcomes = tuple(
            ReplicaOutcome(n, self.ends[n].pop(0) if self.ends.get(n) else Outcome.COMMITTED)
            for n in names
        )
        for one in outcomes:
            if one.outcome is Outcome.COMMITTED:
                self.there[one.replica].version = version
                self.there[one.replica].serves = True
        report = SyncReport(version, outcomes, {"sync": 0.5}, 0.5)
        if not report.ok:
            raise SyncFailed("some did not", report)
        return report

    async def statuses(self) -> list[Status]:
        said = []
        for handle in self.there.values():
            status = Status(handle.name, handle.health)
            if handle.version is not None:
                status.versions[TARGET] = handle.version
            status.servable = handle.serves and handle.version is not None
            said.append(status)
        return said


@asynccontextmanager
async def publishing(
    fleet: Fleet, module: Any, told: list[int]
) -> AsyncIterator[tuple[Publisher, asyncio.Task[None]]]:
    publisher = Publisher(
        fleet,  # type: ignore[arg-type]
        module,
        sent=lambda version: told.append(version.step),
    )
    fill(module, 0.0)
    await publisher.begin(Version(0, 0))
    fleet.sent.clear()
    fleet.began.clear()
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, HotbunkError):
            await running


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOOK", 0.01)


@pytest.fixture
def module() -> Any:
    return torch.nn.Linear(2, 2)


def fill(module: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


async def test_a_copy_keeps_its_values_and_ties(module: Any) -> None:
    tied = torch.nn.ModuleDict({"a": module, "b": torch.nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    fill(tied, 1.0)
    copy = WeightCopy(tied)
    copy.refresh()
    fill(tied, 2.0)
    assert all(float(t.flatten()[0]) == 1.0 for t in copy.source.tensors())
    aliases = {spec.name: spec.aliases for spec in copy.source.specs()}
    assert aliases["a.weight"] == ("b.weight",), "sent once, and still one tensor there"


async def test_only_the_newest_of_those_that_wait_is_sent_u3(module: Any) -> None:
    fleet, told = Fleet("r0"), list[int]()
    async with publishing(fleet, module, told) as (publisher, _):
        fleet.open.clear()
        for step in range(1, 6):
            fill(module, float(step))
            await publisher.publish(Version(0, step))
            if step == 1:
                await fleet.began.wait()
        assert not publisher.idle
        fleet.open.set()
        await until(lambda: publisher.idle)
        assert [(step, value) for step, _, value in fleet.sent] == [(1, 1.0), (5, 5.0)]
        assert sorted(set(told)) in ([0, 1, 5], [1, 5])
        done = publisher.take()
        assert (done.syncs, done.superseded, done.seconds) == (2, 3, 1.0)
        assert publisher.take().superseded == 0


async def test_what_is_being_sent_is_not_overwritten(module: Any) -> None:
    """The trainer goes on while version 1 is read: its bytes stay those of version 1."""
    fleet, told = Fleet("r0"), list[int]()
    async with publishing(fleet, module, told) as (publisher, _):
        fleet.open.clear()
        fill(module, 1.0)
        await publisher.publish(Version(0, 1))
        await fleet.began.wait()
        fill(module, 2.0)
        await publisher.publish(Version(0, 2))
        fleet.open.set()
        await until(lambda: publisher.idle)
    assert [value for _, _, value in fleet.sent] == [1.0, 2.0]


async def test_what_is_being_overwritten_is_not_sent(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines are ready for version 2 while its copy becomes version 3: they wait for 3."""
    fleet, told = Fleet("r0"), list[int]()
    async with publishing(fleet, module, told) as (publisher, _):
        fleet.open.clear()
        await publisher.publish(Version(0, 1))
        await fleet.began.wait()
        await publisher.publish(Version(0, 2))
        half, go = threading.Event(), threading.Event()
        real = WeightCopy.refresh

        def slowly(self: WeightCopy) -> None:
            half.set()
            go.wait(10)
            real(self)

        monkeypatch.setattr(WeightCopy, "refresh", slowly)
        publishing_3 = asyncio.create_task(publisher.publish(Version(0, 3)))
        await asyncio.to_thread(half.wait, 10)
        fleet.open.set()
        await until(lambda: 1 in told)
        await asyncio.sleep(0.05)
        go.set()
        await publishing_3
        await until(lambda: 3 in told)
        assert [step for step, _, _ in fleet.sent] == [1, 3]


async def test_one_that_joins_late_gets_the_last_version(module: Any) -> None:
    """A lost replica's successor, before the first new version and after it."""
    fleet, told = Fleet("r0"), list[int]()
    async with publishing(fleet, module, told) as (publisher, _):
        fleet.there["r1"] = Handle("r1")
        await until(lambda: fleet.sent == [(0, ("r1",), 0.0)])
        fill(module, 1.0)
        await publisher.publish(Version(0, 1))
        await until(lambda: 1 in told)
        fleet.there["r1"] = Handle("r1")
        await until(lambda: fleet.sent[-1] == (1, ("r1",), 1.0) and publisher.idle)
        fleet.there["r1"].version = Version(0, 0)  # a server that was started again, with its model
        await until(lambda: fleet.there["r1"].version == Version(0, 1) and publisher.idle)
        fleet.there["r0"].serves = False  # it lost what it had, and kept its label
        await until(lambda: fleet.sent[-1] == (1, ("r0",), 1.0) and publisher.idle)
        assert publisher.take().resent == 4


async def test_the_dead_are_left_to_the_supervisor(module: Any) -> None:
    fleet, told = Fleet("r0", "r1"), list[int]()
    async with publishing(fleet, module, told) as (publisher, running):
        fleet.ends["r1"] = [Outcome.LOST]
        fleet.there["r1"].health = Health.LOST
        await publisher.publish(Version(0, 1))
        await until(lambda: 1 in told and publisher.idle)
        await asyncio.sleep(0.05)
        assert [names for _, names, _ in fleet.sent] == [("r0", "r1")]
        assert not running.done()


async def test_served_is_what_every_replica_has_reached(module: Any) -> None:
    """A deferred one (strategy=lazy) serves what it did: prompts that start there are older."""
    fleet, told = Fleet("r0", "r1"), list[int]()
    async with publishing(fleet, module, told) as (publisher, _):
        fleet.policy = SyncPolicy(strategy="lazy")
        fleet.ends["r1"] = [Outcome.DEFERRED]
        await publisher.publish(Version(0, 1))
        await until(lambda: fleet.sent and publisher.idle)
        await asyncio.sleep(0.05)
        assert set(told) == {0}
        assert [names for _, names, _ in fleet.sent] == [("r0", "r1")], "it is not sent again"
        fleet.there["r1"].version = Version(0, 1)
        await until(lambda: 1 in told)


async def test_one_that_did_not_commit_is_sent_the_whole_again_once(module: Any) -> None:
    fleet, told = Fleet("r0", "r1"), list[int]()
    async with publishing(fleet, module, told) as (publisher, running):
        fleet.ends["r1"] = [Outcome.POISONED]
        await publisher.publish(Version(0, 1))
        await until(lambda: 1 in told and publisher.idle)
        assert [names for _, names, _ in fleet.sent] == [("r0", "r1"), ("r1",)]
        fleet.ends["r1"] = [Outcome.POISONED, Outcome.POISONED]
        await publisher.publish(Version(0, 2))
        with pytest.raises(SyncFailed):
            await asyncio.wait_for(running, 5)

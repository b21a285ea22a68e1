"""Dead replicas are replaced, hopeless ones retired, busy ones left alone. Oracles, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.checkpoint_engine.supervisor import SlotState, Supervision, Supervisor
from hotbunk.conformance.backends.oracle_kit import load, now, running
from hotbunk.conformance.backends.oracle_pool import Noting, Weights, pool
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Version
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import ReplicaStatus

pytestmark = pytest.mark.anyio
RULES = Supervision(backoff=1.0, longest_backoff=8.0, probe=2.0, misses=3, every=0.1)


class Starts:
    """Starts successors at version 0.0, unless told to fail; notes when."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.at: list[float] = []
        self.made: list[Noting] = []
        self.fail: list[BaseException] = []
        self.seconds = 0.0

    async def __call__(self, name: str) -> ReplicaHandle:
        self.at.append(now())
        await asyncio.sleep(self.seconds)
        if self.fail:
            raise self.fail.pop(0)
        replica, _ = await self.stack.enter_async_context(running())
        replica.name = name
        self.made.append(Noting(replica, []))
        return self.made[-1]


Supervised = tuple[CheckpointEngineManager, list[Noting], Supervisor, Starts]


@asynccontextmanager
async def supervised(rules: Supervision = RULES, **options: Any) -> AsyncIterator[Supervised]:
    async with AsyncExitStack() as stack:
        manager, handles = await stack.enter_async_context(pool(**options))
        await manager.adopt()
        starts = Starts(stack)
        yield manager, handles, Supervisor(manager, starts, rules, clock=now), starts


def kill(handle: Any, why: str = "the engine's process was killed") -> None:
    handle.replica.backend.on_lost(why)


async def until(supervisor: Supervisor, met: Callable[[], bool], seconds: float = 300) -> None:
    """Check ten times a second, as :meth:`Supervisor.run` does."""
    for _ in range(int(seconds * 10)):
        await supervisor.check()
        if met():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come to be")


def chain(error: BaseException | None) -> list[str]:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return texts


async def test_a_dead_one_is_replaced_and_routable_at_the_current_version_only_n1_n3() -> None:
    async with supervised() as (manager, handles, supervisor, starts):
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        kill(handles[1])
        await supervisor.check()
        assert supervisor.slots["r1"] is None
        assert [h.name for h in manager.routable()] == ["r0", "r2"]
        await until(supervisor, lambda: supervisor.slots["r1"] is not None)
        assert supervisor.slots["r1"] is starts.made[0]
        assert supervisor.state("r1") is SlotState.ALIVE
        assert [h.name for h in manager.routable()] == ["r0", "r2"], "it serves the first weights"
        report = await manager.update_weights(Weights(3), Version(0, 3))
        assert [one.outcome for one in report.outcomes] == [Outcome.COMMITTED] * 3
        assert {h.name for h in manager.routable()} == {"r0", "r1", "r2"}


async def test_where_there_is_no_room_the_dead_go_and_nobody_comes_n3() -> None:
    async with supervised() as (manager, handles, supervisor, starts):
        kill(handles[1])
        await supervisor.check(start=False)
        await asyncio.sleep(20 * RULES.backoff)
        await supervisor.check(start=False)
        assert (supervisor.slots["r1"], starts.at) == (None, [])
        assert [h.name for h in manager.replicas] == ["r0", "r2"]
        await until(supervisor, lambda: supervisor.slots["r1"] is not None)
        assert len(starts.at) == 1


async def test_under_lazy_the_successor_takes_what_is_published_at_once_n1() -> None:
    async with supervised(strategy="lazy") as (manager, handles, supervisor, _):
        await manager.update_weights(Weights(7), Version(0, 7))
        kill(handles[0])
        await until(supervisor, lambda: manager.serves().get("r0") == Version(0, 7))
        assert "r0" in [h.name for h in manager.routable()]


async def test_one_that_dies_as_it_recovers_is_tried_again_later_and_later_n3() -> None:
    async with supervised() as (_, handles, supervisor, starts):
        starts.fail = [errors.EngineFailed("no device"), RuntimeError("not even typed")]
        kill(handles[0])
        began = now()
        await supervisor.check()
        assert supervisor.state("r0") is SlotState.WAITING
        await until(supervisor, lambda: supervisor.slots["r0"] is not None)
        waits = [at - before for before, at in zip([began, *starts.at], starts.at, strict=False)]
        assert waits == pytest.approx([1, 2, 4], abs=0.5)
        assert supervisor.state("r0") is SlotState.ALIVE
        # One of them joined and was dead: it counts, and leaves no half-known member behind.
        kill(starts.made[0])
        await supervisor.check()
        assert supervisor.state("r0") is SlotState.RETIRED


async def test_the_fourth_death_retires_and_the_minimum_ends_it_n3_n13() -> None:
    rules = Supervision(backoff=1.0, minimum=2, every=0.1)
    async with supervised(rules, replicas=3) as (manager, handles, supervisor, starts):
        starts.fail = [errors.EngineFailed(f"no device, {n}") for n in (2, 3, 4)]
        kill(handles[2], "the root: a cosmic ray")
        running_it = asyncio.create_task(supervisor.run())
        await asyncio.sleep(60)
        assert supervisor.state("r2") is SlotState.RETIRED
        assert isinstance(supervisor.why("r2"), errors.ReplicaRetired)
        assert not running_it.done(), "two are left, and two must be"
        said = chain(supervisor.why("r2"))
        assert "4 times" in said[0]
        assert [any(f"no device, {n}" in text for text in said) for n in (4, 3, 2)] == [True] * 3
        assert "the root: a cosmic ray" in said[-1]
        assert [h.name for h in manager.replicas] == ["r0", "r1"]
        starts.fail = [errors.EngineFailed("still no device") for _ in range(3)]
        kill(handles[0])
        with pytest.raises(errors.TooFewReplicas, match=r"1 .*left, and 2 must") as caught:
            await running_it
        assert "still no device" in "; ".join(chain(caught.value))
        assert len(starts.at) == 6, "a retired replica was started again"


async def test_nothing_known_of_the_dead_one_is_used_for_its_successor_n13() -> None:
    """A sync that was under way when it died ends for the dead one, not for who has its name."""
    slow = {0: ("update/commit", Fault(Action.DELAY, seconds=30.0))}
    async with supervised(faults=slow) as (manager, handles, supervisor, starts):
        syncing = asyncio.create_task(manager.update_weights(Weights(2), Version(0, 2)))
        await asyncio.sleep(5)
        kill(handles[0], "it died with all it had")
        await until(supervisor, lambda: supervisor.slots["r0"] is not None)
        with pytest.raises(errors.SyncFailed, match="it died with all it had"):
            await syncing
        assert manager.serves()["r0"] != Version(0, 2)
        assert "r0" not in [h.name for h in manager.routable()]
        before = await starts.made[0].status()
        assert before.versions["target"] == Version(0, 0)
        assert not before.pauses, "a pause of the old sync was held, or undone, in the new engine"
        assert (await manager.update_weights(Weights(3), Version(0, 3))).ok


class Silent(Noting):
    """Answers no probe while it is silent."""

    silent = False

    async def status(self) -> ReplicaStatus:
        if self.silent and asyncio.current_task() in self.probes:
            await asyncio.sleep(3600)
        return await super().status()

    probes: Any = ()


async def test_one_that_is_silent_in_a_sync_is_busy_and_watched_again_after_it_n12() -> None:
    async with AsyncExitStack() as stack:
        replica, _ = await stack.enter_async_context(running())
        replica.name = "r"
        await load(replica, 1)
        handle, starts = Silent(replica, []), Starts(stack)
        fleet = await stack.enter_async_context(pool(replicas=0))
        manager = fleet[0]
        await manager.add_replica(handle)
        supervisor = Supervisor(manager, starts, RULES, clock=now)

        async def checked(times: int) -> None:
            for _ in range(times):
                task = asyncio.create_task(supervisor.check())
                # The probe is a task of the check's own.
                handle.probes = _Everyone(but=syncing)
                await task

        slow = Fault(Action.DELAY, seconds=60.0)
        replica.backend.faults.at("update/commit", slow)  # type: ignore[attr-defined]
        syncing = asyncio.create_task(manager.update_weights(Weights(2), Version(0, 2)))
        await asyncio.sleep(1)
        handle.silent = True
        await checked(10)
        assert supervisor.state("r") is SlotState.BUSY
        assert supervisor.slots["r"] is handle
        handle.silent = False
        assert (await syncing).ok
        await checked(1)
        assert supervisor.state("r") is SlotState.ALIVE
        handle.silent = True
        await checked(RULES.misses - 1)
        assert supervisor.slots["r"] is handle
        await checked(1)
        assert supervisor.slots["r"] is None, "monitoring stayed off after the sync"
        assert isinstance(supervisor.why("r"), errors.DeadlineExceeded)


class _Everyone:
    def __init__(self, but: asyncio.Task[Any]) -> None:
        self.but = but

    def __contains__(self, task: object) -> bool:
        return task is not self.but


async def test_a_long_life_is_forgiven_its_early_deaths() -> None:
    rules = Supervision(backoff=1.0, forgive=100.0, every=0.1, minimum=0)
    async with supervised(rules, replicas=1) as (_, handles, supervisor, starts):
        victim: Any = handles[0]
        for death in range(6):
            kill(victim)
            await until(supervisor, lambda n=death: len(starts.made) == n + 1)  # type: ignore[misc]
            victim = starts.made[-1]
            await asyncio.sleep(110)
            await supervisor.check()
        assert supervisor.why("r0") is None
        for _ in range(4):
            kill(victim)
            await until(supervisor, lambda: supervisor.state("r0") in _ENDS)
            victim = starts.made[-1]
        assert supervisor.state("r0") is SlotState.RETIRED


_ENDS = (SlotState.ALIVE, SlotState.RETIRED)


async def test_who_joins_is_supervised_and_who_leaves_is_not_n5() -> None:
    async with supervised() as (manager, handles, supervisor, starts):
        await supervisor.check()
        left = await manager.remove_replica("r1")
        await manager.add_replica(await starts("new"))
        await supervisor.check()
        assert set(supervisor.slots) == {"r0", "r2", "new"}
        kill(left)
        kill(starts.made[0])
        await supervisor.check()
        assert supervisor.slots == {"r0": handles[0], "r2": handles[2], "new": None}
        assert "r1" not in manager.serves()


@pytest.mark.parametrize("late", [False, True])
async def test_an_end_of_supervision_leaves_nothing_half_started(late: bool) -> None:
    async with supervised(replicas=2) as (_, handles, supervisor, starts):
        starts.seconds = 50.0
        running_it = asyncio.create_task(supervisor.run())
        kill(handles[0])
        await asyncio.sleep(10)
        assert supervisor.state("r0") is SlotState.STARTING
        if late:  # it is there, and nobody has looked yet
            await asyncio.wait({supervisor._slots["r0"].starting})  # type: ignore[type-var,arg-type]
        running_it.cancel()
        await asyncio.wait({running_it})
        assert running_it.cancelled()
        assert all(made.replica.health.value == "lost" for made in starts.made)
        assert len(starts.made) == late

"""Engines that die between verl's syncs: each a process, behind a handle that outlives it, as Ray's is."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.rollout import process
from hotbunk.rollout.contract import Deployment, GenerateRequest, Sampling, Version, collect
from hotbunk.rollout.errors import ReplicaLost, UsageError
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.status import Health
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.verl import sending
from hotbunk.trainer_hooks.verl.fleet import RankTransport, TrainerRanksCall, VerlFleet
from hotbunk.trainer_hooks.verl.sending import ADAPTERS, WEIGHTS, Part, Sending
from hotbunk.trainer_hooks.verl.sources import EngineSource

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


class Served:
    """A handle to an engine that may be started anew."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def kill(self) -> None:
        os.kill(self.handle.pid, signal.SIGKILL)

    async def restart(self) -> None:
        spec = self.handle.spec
        await self.handle.close()
        self.handle = await process.start(spec)


class Deadly:
    """A fleet of two engines, and a trainer of one rank."""

    def __init__(
        self, engines: list[Served], state: dict[str, Any], deployment: Deployment
    ) -> None:
        self.engines = engines
        self.restarted: list[str] = []
        self.walks = 0

        def weights() -> Any:
            self.walks += 1
            return iter(state.items())

        self.rank = Sending(
            {
                WEIGHTS: Part(EngineSource(weights), dict),
                ADAPTERS: Part(EngineSource(lambda: iter(())), dict),
            },
            lambda: None,
        )
        transport = RankTransport(
            TrainerRanksCall(lambda verb, args: [self.rank.answer(verb, args)]),
            sending.Begin("shm", deadline=60.0),
        )
        self.fleet = VerlFleet(
            CheckpointEngineManager(
                engines,
                transport,
                deployment=deployment,
                policy=SyncPolicy(deadline=60.0, bucket_bytes=4096),
            ),
            transport,
            self._restart,
            adapts=False,
            shares=deployment is Deployment.HYBRID,
            retries=1,
        )

    async def _restart(self, name: str) -> None:
        self.restarted.append(name)
        (one,) = (engine for engine in self.engines if engine.name == name)
        await one.restart()

    async def lost(self, *engines: Served) -> None:
        """Kill them, and wait until that is known."""
        for one in engines:
            one.kill()
        for one in engines:
            while (await one.status()).health is not Health.LOST:
                pass


@pytest.fixture
async def fleet(tiny: Any) -> AsyncIterator[Any]:
    """``await fleet(deployment)``, at step 3."""
    made: list[Deadly] = []

    async def make(deployment: Deployment) -> Deadly:
        model = tiny()
        options = {"model": str(model), "load": "empty", "kv_cache_tokens": 512}
        engines = [
            Served(await process.start(ReplicaSpec("reference", options, name)))
            for name in ("left", "right")
        ]
        made.append(Deadly(engines, dict(load_model(model).state_dict()), deployment))
        await made[-1].fleet.update(3)
        return made[-1]

    yield make
    for one in made:
        await one.rank.close(sending.Close())
        for engine in one.engines:
            await engine.close()


async def answers(engine: Served) -> tuple[int, ...]:
    sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    done = await collect(engine.generate(GenerateRequest("r", (5, 6, 7), sampling)))
    return tuple(done.token_ids)


async def test_who_died_gets_the_step_that_the_others_have(fleet: Any) -> None:
    one = await fleet(Deployment.STANDALONE)
    left, right = one.engines
    before = await answers(right)
    assert await one.fleet.heal(3) == ()
    walks, pid = one.walks, left.pid
    await one.lost(right)
    with pytest.raises(ReplicaLost):
        await answers(right)
    assert await one.fleet.heal(3) == ("right",)
    assert (one.restarted, left.pid) == (["right"], pid)
    assert one.walks == walks + 1
    assert {s.versions["target"] for s in await one.fleet.manager.statuses()} == {Version(0, 3)}
    assert await answers(right) == before
    assert (await one.fleet.update(4))["checkpoint_engine/committed"] == 2


async def test_a_turn_begins_and_ends_without_who_died(fleet: Any) -> None:
    """The trainer's turn comes, and the next sync replaces the dead one."""
    one = await fleet(Deployment.HYBRID)
    left, right = one.engines
    await one.lost(right)
    await one.fleet.abort(reject=False)
    await one.fleet.sleep()
    assert (await left.status()).is_sleeping
    metrics = await one.fleet.update(4)
    assert one.restarted == ["right"]
    assert metrics["checkpoint_engine/committed"] == 2
    await one.fleet.manager.resume_generation_replicas()
    assert await answers(right) == await answers(left)


async def test_a_failure_of_one_that_lives_is_no_death(fleet: Any) -> None:
    one = await fleet(Deployment.HYBRID)
    left, right = one.engines

    async def sleep(*args: Any, **kw: Any) -> Any:
        raise UsageError("not now")

    left.sleep = sleep
    with pytest.raises(UsageError, match="not now"):
        await one.fleet.sleep()
    await one.lost(right)
    with pytest.raises((ReplicaLost, UsageError)):
        await one.fleet.sleep()


async def test_between_local_updates_one_that_is_left_is_enough(fleet: Any) -> None:
    one = await fleet(Deployment.STANDALONE)
    left, right = one.engines
    await one.lost(right)
    await one.fleet.anyone()
    await one.lost(left)
    with pytest.raises(ReplicaLost, match="left, right") as error:
        await one.fleet.anyone()
    assert "resume from the last checkpoint" in error.value.remedy

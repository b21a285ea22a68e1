"""Sleep, update and wake over and over, and engines killed at any moment: nothing adds up, all heals.

Two of each by default; ``make soak ENGINE=vllm`` asks for far more by HOTBUNK_VLLM_CYCLES and
HOTBUNK_VLLM_KILLS.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.rollout import errors
from hotbunk.rollout.contract import GenerateRequest, Sampling, Version, collect
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

CYCLES = int(os.environ.get("HOTBUNK_VLLM_CYCLES", "2"))
KILLS = int(os.environ.get("HOTBUNK_VLLM_KILLS", "2"))
SEED = int(os.environ.get("HOTBUNK_SEED", "7"))
GROWTH = 24 << 20  # bytes that all of it may add to a warm worker: of allocators, not of weights
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(240 + 20 * CYCLES + 90 * KILLS),
]
_ids = count()


def ask(prompt: tuple[int, ...], tokens: int = 8) -> GenerateRequest:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(f"c{next(_ids)}", tuple(prompt), sampling)


def held(it: VllmUnderTest) -> int:
    """Bytes of its own in the worker's process, without files that are mapped."""
    return sum(int(psutil.Process(place["pid"]).memory_full_info().uss) for place in it._ranks)


def folders() -> list[Path]:
    """Where adapters of this process keep sockets."""
    return list(Path(tempfile.gettempdir()).glob(f"hotbunk-vllm-{os.getpid()}-*"))


async def check(replica: Replica, it: VllmUnderTest, version: int, n: int) -> None:
    prompt = it.prompts[n % len(it.prompts)]
    done = await collect(replica.generate(ask(prompt)))
    assert list(done.token_ids) == it.golden(prompt, version, 8), f"cycle {n}"


async def test_sleep_update_and_wake_add_nothing_up(
    replica: Replica, untied: VllmUnderTest
) -> None:
    """Both levels, either order, requests in flight that freeze: right tokens, flat memory."""
    draw = random.Random(SEED)
    shm = load_transport("shm")()
    before: list[int] = []
    try:
        manager = CheckpointEngineManager(
            [LocalHandle(replica)], shm, policy=SyncPolicy(pause="keep", deadline=120.0)
        )
        for n in range(1, CYCLES + 6):  # the first ones touch memory for the first time
            version = n % 3 + 1
            if draw.random() < 0.5:
                running = asyncio.create_task(collect(replica.generate(ask(untied.prompts[0], 64))))
                await manager.update_weights(module_source(untied.model(version)), Version(0, n))
                done = await running
                assert len(done.token_ids) == 64
            else:
                await replica.sleep(draw.choice([1, 2]))
                assert (await replica.memory()).resident() == 0
                await replica.wake_up(["weights"])
                await manager.update_weights(module_source(untied.model(version)), Version(0, n))
                await replica.wake_up()
            await check(replica, untied, version, n)
            if n == 5:
                before.append(held(untied))
        assert held(untied) < before[0] + GROWTH
    finally:
        await shm.close()


async def test_killed_at_any_moment_it_is_lost_and_its_successor_serves(
    untied: VllmUnderTest,
) -> None:
    """Generating, asleep, in an update: a typed error in time, no token after, nothing left behind."""
    draw = random.Random(SEED)
    shm = load_transport("shm")()
    try:
        for n in range(KILLS):
            replica = Replica(await untied.start(), name="vllm", deadlines=untied.deadlines)
            await replica.start()
            manager = CheckpointEngineManager(
                [LocalHandle(replica)], shm, policy=SyncPolicy(deadline=60.0)
            )
            await manager.update_weights(module_source(untied.model(1)), Version(0, 1))
            await check(replica, untied, 1, n)
            doing = asyncio.create_task(busy(replica, manager, untied))
            await asyncio.sleep(draw.random() * 0.5)
            os.kill(untied._where["pid"], signal.SIGKILL)
            async with asyncio.timeout(60.0):
                with suppress(errors.HotbunkError):
                    await doing
                while replica.health is not Health.LOST:
                    await replica.status()
                    await asyncio.sleep(0.05)
            with pytest.raises(errors.ReplicaLost):
                await collect(replica.generate(ask(untied.prompts[0])))
            await replica.close()
            await untied._drop()
            assert not folders()
    finally:
        await shm.close()
    again = await untied.engine()
    done = await collect(again.generate(ask(untied.prompts[0])))
    assert list(done.token_ids) == untied.golden(untied.prompts[0], 0, 8)


async def busy(replica: Replica, manager: Any, it: VllmUnderTest) -> None:
    """All that a replica does, until it cannot."""
    for n in count(2):
        running = [
            asyncio.create_task(collect(replica.generate(ask(prompt, 64)))) for prompt in it.prompts
        ]
        try:
            await manager.update_weights(module_source(it.model(n % 3)), Version(0, n))
            await replica.sleep(1)
            await replica.wake_up()
            if (await replica.status()).health is Health.LOST:
                return
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

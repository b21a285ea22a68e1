"""Cases of a manager and of a trainer's hooks, over the wire: H11, H12, H19.

Two real server processes; one is stopped where a case wants it to answer late.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Deployment, collect
from hotbunk.trainer_hooks.hooks import TrainerHooks

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
PROMPT = [5, 6, 7]
TICK = 0.05  # seconds that a watchdog may be kept waiting


@pytest.fixture
async def manager(
    server: Any, ranked: Any, key_file: Path, kit: Any, model: Path
) -> AsyncIterator[CheckpointEngineManager]:
    """Of both servers. In the end they have the weights that others expect."""
    handles = [
        await HttpHandle.connect(HttpOptions(one.url, api_key_file=str(key_file)), f"r{number}")
        for number, one in enumerate((server, ranked))
    ]
    made = CheckpointEngineManager(
        handles, ShmTransport(), deployment=Deployment.STANDALONE, policy=SyncPolicy()
    )
    held = await made.adopt()
    assert held is not None
    yield made
    ranked.process.send_signal(signal.SIGCONT)
    last = await made.adopt()
    assert last is not None
    assert (await made.update_weights(kit.source(model), made.next_version(last.step + 1))).ok
    await made.close()


async def test_nobody_opens_before_a_late_server_has_answered_h12(
    manager: CheckpointEngineManager, ranked: Any, kit: Any, other: Path
) -> None:
    """One server answers late; what the other is asked meanwhile waits, and gets the new weights."""
    prompt, _ = manager.replicas  # which answers at once
    held = await manager.adopt()
    assert held is not None
    version = manager.next_version(held.step + 1)
    ranked.process.send_signal(signal.SIGSTOP)
    syncing = asyncio.create_task(manager.update_weights(kit.source(other), version))
    async with asyncio.timeout(10):
        while not (await prompt.status()).is_paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asked = asyncio.create_task(collect(prompt.generate(kit.request(PROMPT, 5))))
    await asyncio.sleep(1.5)
    assert not syncing.done()
    assert not asked.done(), "it opened before all had answered"
    assert (await prompt.status()).is_paused
    ranked.process.send_signal(signal.SIGCONT)
    assert (await syncing).ok
    done = await asked
    assert [span.version for span in done.spans] == [version]
    assert list(done.token_ids) == kit.golden(other, PROMPT, 5)


async def test_a_managers_loop_runs_on_while_servers_are_updated_h11(
    manager: CheckpointEngineManager, kit: Any, model: Path, other: Path
) -> None:
    """What blocks it does so in each sync; what the machine does, in some: one of ten will do."""
    waits: list[float] = []

    async def watchdog() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            waits.append(time.perf_counter() - began)

    watching = asyncio.create_task(watchdog())
    longest: list[float] = []
    while len(longest) < 10 and not any(one < TICK for one in longest):
        held = await manager.adopt()
        assert held is not None
        source = kit.source((other, model)[len(longest) % 2])
        waits.clear()
        assert (await manager.update_weights(source, manager.next_version(held.step + 1))).ok
        assert waits, "the watchdog never ran"
        longest.append(max(waits))
    watching.cancel()
    await asyncio.wait({watching})
    assert min(longest) < TICK, longest


class Share:
    """A trainer's share that has nothing to give away."""

    async def offload(self) -> None:
        pass

    async def restore(self) -> None:
        pass


async def test_a_step_that_left_the_weights_alone_sends_a_server_nothing_h19(
    server: Any, kit: Any, model: Path, other: Path
) -> None:
    """It is asked, verified, and serves the old version."""
    handle = await HttpHandle.connect(HttpOptions(server.url), "r0")
    manager = CheckpointEngineManager([handle], ShmTransport(), free_cache_engine=False)
    held = await manager.adopt()
    assert held is not None
    hooks = TrainerHooks(manager, Share())
    version = manager.next_version(held.step + 1)
    try:
        assert (await hooks.on_weights_ready(kit.source(other), version)).nbytes > 0
        await hooks.on_rollout_end()
        await hooks.on_train_begin()
        await hooks.on_train_end(updated=False)
        report = await hooks.on_weights_ready(kit.source(other), version)
        assert report.nbytes == 0
        assert report.outcomes[0].update is not None
        assert report.outcomes[0].update.skipped
        await hooks.on_rollout_begin()
        done = await collect(handle.generate(kit.request(PROMPT, 5)))
        assert [span.version for span in done.spans] == [version]
        assert list(done.token_ids) == kit.golden(other, PROMPT, 5)
        last = manager.next_version(version.step + 1)
        assert (await manager.update_weights(kit.source(model), last)).ok
    finally:
        await manager.close()
    assert server.process.poll() is None, "the server outlives its manager"

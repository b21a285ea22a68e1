"""A trainer's process is killed, and another one takes its server over.

Engines that a trainer started die with it (docs/architecture.md, "An engine in its own process"), so a
manager can only return to replicas that are not its children: servers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Deployment, Version, collect
from hotbunk.rollout.status import Health

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).parents[1] / "programs" / "manage.py"
PROMPT = [5, 6, 7]


class Trainer:
    """manage.py as a process."""

    def __init__(self, **told: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def says(self, what: str) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = await asyncio.to_thread(self._process.stdout.readline)
        assert what in line, f"it said {line!r}"
        return json.loads(line)[what]

    def go_on(self) -> None:
        """With the next step: its sync would cut off what is served in the meantime."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    made: list[Trainer] = []
    yield made
    for one in made:
        one.kill()


async def test_a_killed_manager_is_replaced_and_its_server_never_stopped_serving(
    serve: Any, model: Path, other: Path, kit: Any, trainers: list[Trainer]
) -> None:
    server = serve("--preset", "tiny", "--dev")  # its own: others expect incarnation 0
    handle = await HttpHandle.connect(HttpOptions(server.url), "r0")

    async def serving() -> tuple[Version, list[Path]]:
        done = await collect(handle.generate(kit.request(PROMPT, 8)))
        made = list(done.token_ids)
        found = [path for path in (model, other) if kit.golden(path, PROMPT, 8) == made]
        return done.spans[0].version, found

    def trainer(*models: Path, at: int = -1) -> Trainer:
        trainers.append(Trainer(urls=[server.url], models=list(map(str, models)), at=at))
        return trainers[-1]

    def parsed(text: str) -> Version:
        return Version(*map(int, text.split(".")))

    try:
        first = trainer(other)
        before = parsed(await first.says("adopted"))
        synced = parsed(await first.says("synced"))
        first.kill()
        # Killed: what was committed is served, and its successor goes on from there.
        assert synced == Version(before.incarnation, before.step + 1)
        assert await serving() == (synced, [other])
        second = trainer(model, other, at=9)
        assert parsed(await second.says("adopted")) == synced
        continued = parsed(await second.says("synced"))
        assert continued == Version(synced.incarnation, synced.step + 1)
        assert await serving() == (continued, [model])
        # Killed in the middle of a sync, with bytes on their way: nobody serves half of it.
        second.go_on()
        assert await second.says("hangs") == 9
        second.kill()
        for _ in range(500):
            status = await handle.status()
            if status.health is Health.POISONED:
                break
            await asyncio.sleep(0.02)
        assert (status.health, status.versions) == (Health.POISONED, {})
        done = await collect(handle.generate(kit.request(PROMPT, 8)))
        assert (done.token_ids, done.retryable) == ((), True)
        # Its successor went back to a checkpoint: a new incarnation, above what was ever served.
        manager = CheckpointEngineManager(
            [handle], ShmTransport(), deployment=Deployment.STANDALONE, policy=SyncPolicy()
        )
        assert await manager.adopt() == continued
        assert manager.routable() == ()
        back = manager.next_version(0)
        assert back == Version(continued.incarnation + 1, 0)
        assert (await manager.update_weights(kit.source(other), back)).ok
        assert manager.routable() == (handle,)
        assert await serving() == (back, [other])
        await manager.transport.close()
    finally:
        await handle.close()

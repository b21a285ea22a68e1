"""A trainer's process: a manager over servers. Reads one JSON object from its arguments.

``urls``; ``models``: whose weights, a step each from the newest one on; ``at``: of the last of them, hang
before that tensor (-1: nowhere). Says ``{"adopted": ...}``, a ``{"synced": ...}`` each, after which it waits for a line
before the next step, and stays until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Deployment


class Hanging:
    """A source that hangs before tensor ``at``."""

    def __init__(self, inner: Any, at: int) -> None:
        self.inner, self.at = inner, at

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        for n, tensor in enumerate(self.inner.tensors()):
            if n == self.at:
                say(hangs=n)
                time.sleep(3600)
            yield tensor


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main(urls: list[str], models: list[str], at: int) -> None:
    handles = [await HttpHandle.connect(HttpOptions(url), f"r{n}") for n, url in enumerate(urls)]
    manager = CheckpointEngineManager(
        handles,
        ShmTransport(),
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(bucket_bytes=1 << 14, deadline=60.0),
    )
    adopted = await manager.adopt()
    say(adopted=str(adopted), routable=[h.name for h in manager.routable()])
    for number, model in enumerate(models, 1):
        assert manager.version is not None
        version = manager.next_version(manager.version.step + 1)
        source = Hanging(SafetensorsSource(Path(model)), at if number == len(models) else -1)
        await manager.update_weights(source, version)
        say(synced=str(version))
        await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(3600)


asyncio.run(main(**json.loads(sys.argv[1])))

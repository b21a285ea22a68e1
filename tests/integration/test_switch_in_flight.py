"""Two processes, weights switched under a request in flight: what follows is a fresh engine's.

Tokens before the switch are the old weights'; from the switch on every token is the one that a fresh
engine on the new weights gives for the same prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import ReleaseKV, SyncPolicy
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.checkpoint_engine.transports.collective import CollectiveTransport
from hotbunk.checkpoint_engine.transports.disk import DiskTransport
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.conformance.kit import greedy
from hotbunk.conformance.rig import check_spans
from hotbunk.rollout import native
from hotbunk.rollout.contract import Deployment, PauseMode, Version
from hotbunk.rollout.partial import PartialRollout
from hotbunk.rollout.process import ProcessHandle, start_replica

pytestmark = pytest.mark.anyio
TOKENS = 120
Make = Callable[[Path], tuple[Transport, dict[str, Any]]]

WAYS: dict[str, Make] = {
    "shm": lambda folder: (ShmTransport(), {}),
    "onecopy": lambda folder: (ShmTransport(), {"share_weights": True}),
    "disk": lambda folder: (DiskTransport(folder / "published"), {}),
    "collective": lambda folder: (CollectiveTransport(), {}),
    "ipc": lambda folder: (IpcTransport("fake"), {}),  # simulated: no device
}
CASES = [
    (release_kv, mode, way)
    for release_kv in (ReleaseKV.NEVER, ReleaseKV.ALWAYS)
    for mode in (PauseMode.KEEP, PauseMode.ABORT)
    for way in WAYS
    if way != "ipc" or (native.available() and mode is PauseMode.KEEP)  # shm has the same offers
]


@pytest.mark.parametrize("release_kv, mode, way", CASES)
async def test_what_follows_a_switch_is_a_fresh_engines(
    tiny: Any, kit: Any, tmp_path: Path, way: str, mode: PauseMode, release_kv: ReleaseKV
) -> None:
    transport, options = WAYS[way](tmp_path)
    old, new = tiny(seed=0), tiny(seed=1)
    handle = await start_replica(
        "reference", {"model": str(old), "kv_cache_tokens": 4096, **options}
    )
    manager = CheckpointEngineManager(
        [handle],
        transport,
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(pause=mode, release_kv=release_kv, bucket_bytes=50_000),
    )
    try:
        done = await _through_a_sync(manager, handle, kit, kit.source(new))
    finally:
        await manager.close()
    models = {Version(0, 0): kit.loaded(old), Version(0, 1): kit.loaded(new)}
    for prompt, one in done:
        check_spans(one)
        assert [span.version for span in one.spans] == [Version(0, 0), Version(0, 1)]
        for span in one.spans:
            before = [*prompt, *one.token_ids[: span.start]]
            expected = greedy(models[span.version], before, span.end - span.start)
            assert list(one.token_ids[span.start : span.end]) == expected


async def _through_a_sync(
    manager: CheckpointEngineManager, handle: ProcessHandle, kit: Any, source: Any
) -> list[tuple[list[int], Any]]:
    prompts = kit.prompts(4, longest=20)
    partial = PartialRollout([handle])
    tasks = [asyncio.create_task(partial.generate(kit.request(p, TOKENS))) for p in prompts]
    async with asyncio.timeout(30):
        while (await handle.status()).backend.tokens_generated < 5 * len(prompts):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    report = await manager.update_weights(source, Version(0, 1))
    assert report.outcomes[0].update is not None
    assert report.outcomes[0].update.verified == "applied"
    done = await asyncio.gather(*tasks)
    return [(p, one.completion) for p, one in zip(prompts, done, strict=True)]

"""The RL end-to-end of two phases, over HTTP: weights switched under requests in flight.

Phase one: a server generates, its trainer pauses it with ``keep``, sends new weights by ticket or has
it read a directory, and resumes. Phase two: what came after the switch is what a fresh engine on the
new weights makes of the same prefix, token for token.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.conformance.kit import greedy
from hotbunk.conformance.rig import check_spans
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Completion, Deployment, PauseMode, Version, collect

pytestmark = pytest.mark.anyio
TOKENS = 180


async def _switched(
    handle: HttpHandle, kit: Any, switch: Any
) -> list[tuple[list[int], Completion]]:
    """Phase one: four requests, each with a few tokens before ``switch`` and the rest after."""
    prompts = kit.prompts(4, longest=20)
    streams = [handle.generate(kit.request(prompt, TOKENS)) for prompt in prompts]
    begun = await asyncio.gather(*(anext(stream) for stream in streams))

    async def whole(first: Any, stream: Any) -> Completion:
        async def both() -> Any:
            yield first
            async for chunk in stream:
                yield chunk

        return await collect(both())

    reading = [
        asyncio.create_task(whole(first, stream))
        for first, stream in zip(begun, streams, strict=True)
    ]
    await switch()
    done = await asyncio.gather(*reading)
    return list(zip(prompts, done, strict=True))


def _check(done: Any, models: dict[Version, Any]) -> None:
    """Phase two."""
    old, new = sorted(models)
    for prompt, one in done:
        check_spans(one)
        assert len(one.token_ids) == TOKENS, "keep loses no token"
        assert [span.version for span in one.spans] == [old, new]
        for span in one.spans:
            before = [*prompt, *one.token_ids[: span.start]]
            expected = greedy(models[span.version], before, span.end - span.start)
            assert list(one.token_ids[span.start : span.end]) == expected


async def test_by_ticket_under_a_manager(
    ranked: Any, kit: Any, model: Path, other: Path, key_file: Path
) -> None:
    handle = await HttpHandle.connect(HttpOptions(ranked.url, api_key_file=str(key_file)))
    manager = CheckpointEngineManager(
        [handle],
        ShmTransport(),
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(pause=PauseMode.KEEP, bucket_bytes=50_000),
    )

    source = kit.source(other)

    async def switch() -> None:
        await handle.pause_generation(PauseMode.KEEP)
        report = await manager.update_weights(source, Version(0, 1))
        await handle.resume_generation()
        assert report.outcomes[0].update is not None
        assert report.outcomes[0].update.verified == "applied"

    try:
        assert handle.capabilities.ranks == 2
        done = await _switched(handle, kit, switch)
        _check(done, {Version(0, 0): kit.loaded(model), Version(0, 1): kit.loaded(other)})
        assert ranked.get("/weight_info")["session"] == "open"
        assert ranked.is_paused() is False
    finally:
        await manager.close()


async def test_from_disk_by_curl(
    ranked: Any, kit: Any, model: Path, other: Path, key_file: Path
) -> None:
    """The same with nothing but the endpoints: pause, update_weights_from_disk, resume."""
    handle = await HttpHandle.connect(HttpOptions(ranked.url, api_key_file=str(key_file)))

    async def load(path: Path, version: str) -> None:
        body = {"model_path": str(path), "weight_version": version}
        told = await asyncio.to_thread(ranked.ok, "/update_weights_from_disk", body)
        assert told["ranks"] == 2

    async def switch() -> None:
        await asyncio.to_thread(ranked.ok, "/pause", mode="keep")
        await load(other, "1.1")
        await asyncio.to_thread(ranked.ok, "/resume")

    try:
        await load(model, "1.0")
        done = await _switched(handle, kit, switch)
        _check(done, {Version(1, 0): kit.loaded(model), Version(1, 1): kit.loaded(other)})
    finally:
        await handle.close()

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
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Deployment, PauseMode, Version

pytestmark = pytest.mark.anyio
LONGEST = 900  # tokens; more than are made before the switch
AFTER = 25  # tokens that are read after it

Tokens = list[tuple[int, Version]]


async def _switched(handle: HttpHandle, kit: Any, switch: Any) -> list[tuple[list[int], Tokens]]:
    """Phase one: four requests in flight, and the first tokens of each after ``switch``."""
    prompts = kit.prompts(4, longest=20)
    streams = [handle.generate(kit.request(prompt, LONGEST)) for prompt in prompts]
    made: list[Tokens] = [[] for _ in streams]

    def note(number: int, chunk: Any) -> Version:
        made[number] += [(token, chunk.version) for token in chunk.token_ids]
        return chunk.version

    begun = await asyncio.gather(*(anext(stream) for stream in streams))
    old = {note(number, chunk) for number, chunk in enumerate(begun)}
    assert len(old) == 1

    async def read(number: int) -> None:
        new = 0
        async for chunk in streams[number]:
            new += note(number, chunk) not in old
            if new == AFTER:
                await streams[number].aclose()
                return
        raise AssertionError(f"it ended with {new} tokens after the switch")

    reading = [asyncio.create_task(read(number)) for number in range(len(streams))]
    await switch()
    await asyncio.gather(*reading)
    return list(zip(prompts, made, strict=True))


def _check(done: list[tuple[list[int], Tokens]], models: dict[Version, Any]) -> None:
    """Phase two: every token is its own version's, for the same prefix."""
    old, new = sorted(models)
    for prompt, made in done:
        before = [token for token, version in made if version == old]
        after = [token for token, version in made if version == new]
        assert [version for _, version in made] == [old] * len(before) + [new] * len(after)
        assert before == greedy(models[old], prompt, len(before))
        assert after == greedy(models[new], [*prompt, *before], len(after))


def _next(server: Any) -> int:
    """An incarnation later than all that this server, which others used before, has held."""
    return int(server.get("/weight_version")["weight_version"].partition(".")[0]) + 1


async def _loaded(server: Any, path: Path, version: Version) -> None:
    body = {"model_path": str(path), "weight_version": str(version)}
    told = await asyncio.to_thread(server.ok, "/update_weights_from_disk", body)
    assert told["ranks"] == 2


async def test_by_ticket_under_a_manager(
    ranked: Any, kit: Any, model: Path, other: Path, key_file: Path
) -> None:
    old, new = (Version(_next(ranked), step) for step in (0, 1))
    await _loaded(ranked, model, old)
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
        report = await manager.update_weights(source, new)
        await handle.resume_generation()
        assert report.outcomes[0].update is not None
        assert report.outcomes[0].update.verified == "applied"

    try:
        assert handle.capabilities.ranks == 2
        done = await _switched(handle, kit, switch)
        _check(done, {old: kit.loaded(model), new: kit.loaded(other)})
        assert ranked.get("/weight_info")["session"] == "open"
        assert ranked.is_paused() is False
    finally:
        await manager.close()


async def test_from_disk_by_curl(
    ranked: Any, kit: Any, model: Path, other: Path, key_file: Path
) -> None:
    """The same with nothing but the endpoints: pause, update_weights_from_disk, resume."""
    handle = await HttpHandle.connect(HttpOptions(ranked.url, api_key_file=str(key_file)))

    old, new = (Version(_next(ranked), step) for step in (0, 1))

    async def switch() -> None:
        await asyncio.to_thread(ranked.ok, "/pause", mode="keep")
        await _loaded(ranked, other, new)
        await asyncio.to_thread(ranked.ok, "/resume")

    try:
        await _loaded(ranked, model, old)
        done = await _switched(handle, kit, switch)
        _check(done, {old: kit.loaded(model), new: kit.loaded(other)})
    finally:
        await handle.close()

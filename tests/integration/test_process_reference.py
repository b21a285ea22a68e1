"""The reference engine in a process of its own: the same tokens, and a fork that costs little."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.contract import FinishReason, PauseMode, Tag, Version, collect
from hotbunk.rollout.process import ProcessHandle, shutdown, start, start_replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
SETUP = "hotbunk.conformance.tickets:register"
Start = Callable[..., Awaitable[ProcessHandle]]


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture
async def process(tiny: Any) -> AsyncIterator[Start]:
    """``await process(model_dir, name=..., **options)``: a replica in a process, closed afterwards."""
    made: list[ProcessHandle] = []

    async def begin(
        model: Path | None = None, *, name: str = "r0", **options: Any
    ) -> ProcessHandle:
        options = {"model": str(model or tiny()), **options}
        handle = await start_replica("reference", options, name=name, setup=SETUP)
        made.append(handle)
        return handle

    yield begin
    for handle in made:
        await handle.close()


async def running_one(handle: ProcessHandle) -> None:
    for _ in range(1000):
        if (await handle.status()).running:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing runs")


async def test_tokens_are_those_of_transformers_through_sleep_and_update(
    process: Start, tiny: Any, kit: Any
) -> None:
    one, two = tiny(seed=0), tiny(seed=1)
    handle = await process(one)
    prompts = kit.prompts(12)
    done = await asyncio.gather(*(kit.complete(handle, p) for p in prompts))
    assert [list(c.token_ids) for c in done] == [kit.golden(one, p) for p in prompts]
    slept = await handle.sleep(2)
    assert slept.resident() == 0
    assert (await handle.status()).is_sleeping
    await handle.wake_up([Tag.WEIGHTS])
    told = ticket(1, weights=str(two / "model.safetensors"), bucket_bytes=70_001)
    report = await handle.update_weights(told, version=Version(0, 1))
    assert (report.verified, report.version) == ("applied", Version(0, 1))
    await handle.wake_up([Tag.KV_CACHE])
    done = await asyncio.gather(*(kit.complete(handle, p) for p in prompts))
    assert [list(c.token_ids) for c in done] == [kit.golden(two, p) for p in prompts]
    assert {s.version for c in done for s in c.spans} == {Version(0, 1)}


async def test_frozen_requests_go_on_and_aborted_ones_end(
    process: Start, tiny: Any, kit: Any
) -> None:
    handle = await process()
    prompt = kit.prompts(1)[0]
    stream = handle.generate(kit.request(prompt, 60, name="a"))
    begun = await kit.first_tokens(stream, 5)
    assert (await handle.pause_generation(PauseMode.KEEP)).frozen == ("a",)
    await handle.resume_generation()
    rest = await collect(stream)
    assert [*begun, *rest.token_ids] == kit.golden(tiny(), prompt, 60)
    running = asyncio.create_task(kit.complete(handle, prompt, 200, name="b"))
    await running_one(handle)
    assert (await handle.abort()).aborted == ("b",)
    assert (await running).finish_reason is FinishReason.ABORT


async def test_killed_in_the_middle_it_is_replaced_in_less_than_a_start(
    process: Start, kit: Any
) -> None:
    """The server keeps what is heavy loaded: a successor need not load it again."""
    handle = await process()
    running = asyncio.create_task(kit.complete(handle, kit.prompts(1)[0], 200))
    await running_one(handle)
    os.kill(handle.pid, signal.SIGKILL)
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert (await handle.status()).health is Health.LOST
    began = time.monotonic()
    again = await start(handle.spec)
    try:
        assert time.monotonic() - began < 5.0
        assert len((await kit.complete(again, kit.prompts(1)[0], 5)).token_ids) == 5
    finally:
        await again.close()
    assert not psutil.pid_exists(handle.pid)
    assert not psutil.pid_exists(again.pid)


async def test_a_model_that_is_not_there_is_said_as_here(process: Start, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        await process(tmp_path)


async def test_the_server_forks_with_one_thread(process: Start) -> None:
    """A second thread would hold locks that nobody in the new process ever gives back."""
    handle = await process()
    server = psutil.Process(psutil.Process(handle.pid).ppid())
    assert server.num_threads() == 1

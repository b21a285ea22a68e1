"""However a server ends, its clients are told and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import FinishReason, PauseMode, collect
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.status import Health


def test_sigterm_ends_streams_with_a_retryable_abort_and_exits_0(
    serve: Callable[..., Any], model: Path
) -> None:
    """Running, held and whole requests, a client that does not read; and nothing is left."""
    one = serve("--model", str(model), "--dev")
    children = psutil.Process(one.process.pid).children(recursive=True)
    assert children, "the engine has a process of its own"
    running = one.stream("Once upon a time", 900).started()
    one.ok("/pause", mode="keep")
    held = one.stream("A late one", 5)
    one.until(lambda status: len(status["held"]) == 1)
    began = time.monotonic()
    assert one.end(20) == 0
    assert time.monotonic() - began < 15
    for stream in (running, held):
        stream.result()
        assert stream.ended_well
        assert stream.last["finish_reason"] == "abort"
        assert stream.last["retryable"] is True
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    with pytest.raises(httpx.ConnectError):
        one.http.get("/health")


@pytest.mark.anyio
async def test_killed_it_takes_its_engine_along(
    serve: Callable[..., Any], model: Path, kit: Any
) -> None:
    """And whoever asked is told by name, within a bound: streams, a drain, what comes after."""
    one = serve("--model", str(model), "--dev")
    children = psutil.Process(one.process.pid).children(recursive=True)
    running = one.stream("Once upon a time", 900).started()
    handle = await HttpHandle.connect(HttpOptions(one.url))
    streams = [handle.generate(kit.request(prompt, 900)) for prompt in kit.prompts(4)]
    for stream in streams:
        await anext(stream)
    ends = [asyncio.create_task(collect(stream)) for stream in streams]
    drain = asyncio.create_task(handle.pause_generation(PauseMode.WAIT))
    await asyncio.to_thread(one.until, lambda status: status["is_paused"])
    shared = {m.path for p in children for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
    one.killed = True
    os.kill(one.process.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        for end in ends:
            done = await end
            assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
        with pytest.raises(ReplicaLost):
            await drain
        with pytest.raises(ReplicaLost):
            await handle.resume_generation()
        with pytest.raises(ReplicaLost):
            await collect(handle.generate(kit.request([1], 1)))
    assert (await handle.status()).health is Health.LOST
    await handle.close()
    running.result(10)
    assert running.error is not None
    assert not running.ended_well, "nobody may take this for an end"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(filter(os.path.exists, shared))

"""However a server ends, its clients are told and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest


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


def test_killed_it_takes_its_engine_along(serve: Callable[..., Any], model: Path) -> None:
    one = serve("--model", str(model), "--dev")
    children = psutil.Process(one.process.pid).children(recursive=True)
    before = set(os.listdir("/dev/shm"))
    running = one.stream("Once upon a time", 900).started()
    one.killed = True
    os.kill(one.process.pid, signal.SIGKILL)
    running.result(10)
    assert running.error is not None
    assert not running.ended_well, "nobody may take this for an end"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert set(os.listdir("/dev/shm")) <= before

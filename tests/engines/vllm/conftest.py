"""Real vLLM: one engine a session for each model, on one event loop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.contract import Engine
from hotbunk.rollout.replica import Replica

START_SECONDS = 200.0

# Elsewhere than in .venv-vllm there is nothing to test.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # vLLM leaves its sockets' context to the garbage collector, which may come after the tests.
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # What vLLM deprecates, leaks and forgets to close at its end is not ours.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def untied(anyio_backend: str) -> AsyncIterator[BackendUnderTest]:
    it = under_test("vllm")
    yield it
    await it.finish()


@pytest.fixture(scope="session")
async def tied(anyio_backend: str) -> AsyncIterator[BackendUnderTest]:
    it = under_test("vllm", tied=True, tokenizer=False)
    yield it
    await it.finish()


@pytest.fixture(scope="session")
async def sharded(anyio_backend: str) -> AsyncIterator[VllmUnderTest]:
    """Two workers that hold halves."""
    it = under_test("vllm", tensor_parallel_size=2)
    assert isinstance(it, VllmUnderTest)
    yield it
    await it.finish()


@pytest.fixture(scope="session")
async def copied(anyio_backend: str) -> AsyncIterator[VllmUnderTest]:
    """Two engine cores that hold the same."""
    it = under_test("vllm", data_parallel_size=2)
    assert isinstance(it, VllmUnderTest)
    yield it
    await it.finish()


@pytest.fixture(scope="session")
async def apart(anyio_backend: str) -> AsyncIterator[VllmUnderTest]:
    """In a process of its own."""
    it = under_test("vllm_process")
    assert isinstance(it, VllmUnderTest)
    yield it
    await it.finish()


@pytest.fixture
async def engine(untied: VllmUnderTest) -> Engine:
    """The running engine, at version 0."""
    return await untied.engine()


@pytest.fixture
async def replica(untied: VllmUnderTest) -> AsyncIterator[Replica]:
    it = Replica(await untied.start(), name="vllm", deadlines=untied.deadlines)
    await it.start()
    yield it
    await it.close()


@contextmanager
def _served(*arguments: str) -> Iterator[str]:
    """``hotbunk serve --backend vllm`` as a process: its URL. It must end well."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "hotbunk", "serve", "--backend", "vllm", "--port", "0"),
            *("--dev", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    watch = threading.Timer(START_SECONDS, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watch.cancel()
        found = re.search(r"http://\S+", line)
        assert found, f"it did not start: {process.communicate()[1][-3000:]}"
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.communicate()[1][-3000:]
    finally:
        watch.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def served() -> Any:
    """``with served(*arguments) as url``."""
    return _served

"""Real vLLM: one engine a session for each model, on one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.contract import Engine
from hotbunk.rollout.replica import Replica

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

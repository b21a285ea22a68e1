"""Servers on a test's own event loop, over oracles, and handles to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
import msgspec

from hotbunk.conformance.tickets import register
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.server.app import create_app
from hotbunk.rollout.server.running import bind, make_server
from hotbunk.rollout.server.settings import Settings
from hotbunk.rollout.status import Deadlines

QUICK = Deadlines(hold=3.0, drain=3.0, memory=3.0, update=3.0, inspect=0.3, grace=0.3)
HOST = "127.0.0.1"
ROOMY = {"step_time": 0.002, "kv_blocks": 60_000, "kv_block_bytes": 8}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Bytes:
    """A tokenizer of bytes; the oracle's tokens are larger and say nothing."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(one["content"] for one in messages))

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode("latin-1")


class Served:
    """A server of this loop, and what it was asked."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.asked: list[str] = []
        self.stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, port: int = 0, **settings: Any) -> Served:
        settings = {"model": "oracle", "context": 10_000, "control": True, **settings}
        self.app = app = create_app(self.handle, Bytes(), Settings(**settings))

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.asked.append(scope["path"])
            await app(scope, receive, send)

        ready = asyncio.Event()
        self.server = make_server(app, ready.set)
        self.server.config.app = noting
        self.server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        self._sock = sock = bind(HOST, port)
        self.port = sock.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self._task = asyncio.create_task(self.server.serve([sock]))
        await ready.wait()
        return self

    def count(self, path: str) -> int:
        return self.asked.count(path)

    async def stop(self) -> None:
        if self._task is not None and not self.stopped:
            self.stopped = True
            self.server.stop()
            await self._task
            self._sock.close()


class Place:
    """Servers and handles of one test."""

    def __init__(self) -> None:
        self.closing: list[Callable[[], Awaitable[None]]] = []

    async def oracle(
        self, settings: Mapping[str, Any] | None = None, hold: float = 3.0, **options: Any
    ) -> Served:
        options = {**ROOMY, **options}
        deadlines = msgspec.structs.replace(QUICK, hold=hold)
        replica = Replica(create_backend("oracle", **options), name="r", deadlines=deadlines)
        await replica.start()
        self.closing.append(replica.close)
        return await self.serve(LocalHandle(replica), **(settings or {}))

    async def serve(self, handle: Any, port: int = 0, **settings: Any) -> Served:
        served = await Served(handle).start(port, **settings)
        self.closing.append(served.stop)
        return served

    async def client(self, url: str, **more: Any) -> Any:
        client = httpx.AsyncClient(base_url=url, timeout=20, **more)
        self.closing.append(client.aclose)
        return client

    async def connect(self, url: str, **options: Any) -> HttpHandle:
        options.setdefault("deadlines", QUICK)
        handle = await HttpHandle.connect(HttpOptions(url, **options))
        self.closing.append(handle.close)
        return handle


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    register()
    here = Place()
    yield here
    for close in reversed(here.closing):
        await close()

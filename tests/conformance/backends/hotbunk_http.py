"""A server over HTTP, as the suite sees it.

The server is a real one, on a socket of this machine; it runs in a thread of this process, with the
reference engine and a replica of its own, so that the suite can look past it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.backends.steps_there import StepsThere
from hotbunk.conformance.kit import text_of
from hotbunk.conformance.steps import Steps
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Engine
from hotbunk.rollout.errors import ConfigError, DeadlineExceeded
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.options import convert
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.server.app import create_app
from hotbunk.rollout.server.running import bind, make_server
from hotbunk.rollout.server.settings import Settings

HOST = "127.0.0.1"
START_SECONDS = 30.0


class HttpUnderTest(ReferenceUnderTest):
    """Options that are not of the backend (``relay``, ``attempts``) go to the reference engine."""

    name = "hotbunk_http"

    def __init__(self, *, relay: str = "shm", **options: Any) -> None:
        if "url" in options:
            raise ConfigError("the suite brings its own server: its weights have known goldens")
        super().__init__(**options)
        self.expected_not_run["verification_reads_memory"] = (
            "the last tensor is still under way when the sender is asked for its fingerprints"
        )
        self._relay = relay
        self._server: Served | None = None

    async def start(self) -> Engine:
        engine = await super().start()
        served = self._server = Served(engine, self.deadlines)
        await asyncio.get_running_loop().run_in_executor(None, served.start)
        return create_backend(
            "hotbunk_http", url=served.url, relay=self._relay, deadlines=self.deadlines
        )

    async def steps(self, replica: Replica) -> Steps:
        assert self._server is not None
        where = {"url": self._server.url, "relay": self._relay, "deadlines": self.deadlines}
        return await StepsThere.begun(convert(where, HttpOptions, "backend hotbunk_http"))

    async def stop(self) -> None:
        served, self._server = self._server, None
        if served is not None:
            await asyncio.get_running_loop().run_in_executor(None, served.stop)


class Served:
    """One engine behind a replica and a server, in a thread with a loop of its own.

    ``replica`` is looked at on ``loop``.
    """

    def __init__(self, engine: Engine, deadlines: Any) -> None:
        self._engine = engine
        self._deadlines = deadlines
        self._ready = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._failed: BaseException | None = None
        self.replica: Replica
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="server under test", daemon=True)
        self._sock = bind(HOST, 0)
        self.url = f"http://{HOST}:{self._sock.getsockname()[1]}"

    def start(self) -> None:
        """:raises BaseException: what kept it from starting."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise DeadlineExceeded("starting the server under test", START_SECONDS)
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """End it; it has ended when this returns."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop)
            self._thread.join(START_SECONDS)
            if self._thread.is_alive():
                raise DeadlineExceeded("ending the server under test", START_SECONDS)

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        # Whatever it is, it is raised where the server was started.
        except BaseException as error:  # noqa: BLE001
            self._failed = error
        finally:
            self._ready.set()
            self._sock.close()
            self.loop.close()

    async def _serve(self) -> None:
        self.replica = replica = Replica(self._engine, name="served", deadlines=self._deadlines)
        await replica.start()
        try:
            settings = Settings(model="suite", context=1 << 20, control=True)
            app = create_app(LocalHandle(replica), _Hexadecimal(), settings)
            server = make_server(app, self._ready.set)
            self._stop = server.stop
            await server.serve([self._sock])
        finally:
            await replica.close()


class _Hexadecimal:
    """The tokenizer of the suite's models, as far as a server needs one."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return [int(text[at : at + 2], 16) for at in range(0, len(text), 2)]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, ids: Any) -> str:
        return text_of(ids)

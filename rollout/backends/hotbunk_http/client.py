"""Calls to one server: bounded, watched, repeated where that is harmless, their errors ours again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random

from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import GenerateRequest, TokenChunk, Version
from hotbunk.rollout.errors import DeadlineExceeded, EngineFailed, ReplicaLost
from hotbunk.rollout.gate import Entry
from hotbunk.rollout.server.problems import from_problem

T = TypeVar("T")
BOOT_HEADER = "x-hotbunk-boot"
_WAIT = wait_exponential(multiplier=0.1, max=2.0) + wait_random(0, 0.1)  # seconds


class Client:
    """One server. It is lost when it cannot be reached, hangs, or is not the one it was."""

    def __init__(self, options: HttpOptions) -> None:
        self.url = options.url.rstrip("/")
        self.lost = ""
        self._options = options
        self._deadlines = options.deadlines
        self._boot = ""
        key = options.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Two lanes: however many streams there are, a pause never waits for one of them.
        connect = httpx.Timeout(None, connect=self._look)
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._control = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=connect, limits=unlimited, trust_env=False
        )
        self._streams = httpx.AsyncClient(
            base_url=(options.generate_url or self.url).rstrip("/"),
            headers=headers,
            timeout=connect,
            limits=unlimited,
            trust_env=False,
        )
        self._version = Version()

    @property
    def _look(self) -> float:
        """Seconds in which a living server answers that it lives."""
        return self._deadlines.inspect + self._deadlines.grace

    async def close(self) -> None:
        """Idempotent. The server goes on."""
        await self._control.aclose()
        await self._streams.aclose()

    async def get(self, path: str, into: type[T]) -> T:
        """:raises HotbunkError: the server's, or ``ReplicaLost``."""
        body = await self._retried("GET", path, self._look, None, None)
        return self._decoded(path, body, into)

    async def call(
        self,
        path: str,
        seconds: float,
        *,
        query: Mapping[str, Any] | None = None,
        content: Any = None,
        repeat: bool = True,
    ) -> bytes:
        """POST. ``repeat``: the call is idempotent, so one that does not get through is made again.

        :raises DeadlineExceeded: no answer within ``seconds`` from a server that lives.
        :raises HotbunkError: the server's, or ``ReplicaLost``.
        """
        if repeat:
            return await self._retried("POST", path, seconds, query, content)
        return await self._once("POST", path, seconds, query, content)

    async def _retried(
        self, method: str, path: str, seconds: float, query: Any, content: Any
    ) -> bytes:
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._options.attempts),
            wait=_WAIT,
            retry=retry_if_exception_type(_Unreached),
            reraise=True,
        )
        try:
            async for attempt in attempts:
                with attempt:
                    return await self._once(method, path, seconds, query, content)
        except _Unreached as error:
            self._lose(error.what)
            raise self.gone() from error
        raise AssertionError("tenacity ends with a result or an error")

    async def _once(
        self, method: str, path: str, seconds: float, query: Any, content: Any
    ) -> bytes:
        self.check_alive()
        sent = content if content is None else msgspec.json.encode(content)
        headers = {} if content is None else {"Content-Type": "application/json"}
        asking = asyncio.ensure_future(
            self._control.request(method, path, params=query, content=sent, headers=headers)
        )
        try:
            answer = await self._watched(path, asking, seconds)
        except httpx.HTTPError as error:
            raise _Unreached(f"{self.url}{path}: {_said(error)}", where=self.url) from error
        self._check_boot(answer)
        if answer.status_code != 200:
            raise from_problem(answer.status_code, answer.content)
        return answer.content

    async def _watched(self, path: str, asking: asyncio.Future[T], seconds: float) -> T:
        """Its result; while it takes long, the server is asked now and then whether it lives."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds + self._deadlines.grace
        try:
            while True:
                left = min(self._look, until - loop.time())
                done, _ = await asyncio.wait({asking}, timeout=max(left, 0))
                if done:
                    return asking.result()
                if loop.time() >= until:
                    raise DeadlineExceeded(path.strip("/"), seconds, where=self.url)
                if path != "/health":
                    await self._alive()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def _alive(self) -> None:
        """:raises ReplicaLost: it hangs, or is gone, or another answers."""
        try:
            answer = await self._control.get("/health", timeout=self._look)
            self._check_boot(answer)
        except httpx.HTTPError as error:
            self._lose(f"no word from {self.url}: {_said(error)}")
            raise self.gone() from error

    # -- streams ------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream one request. A server that goes in the middle ends it with a retryable abort."""
        self.check_alive()
        entry = Entry(request)
        body = msgspec.json.encode(request)
        headers = {"Content-Type": "application/json"}
        sent = self._streams.build_request("POST", "/v1/generate", content=body, headers=headers)
        answer: httpx.Response | None = None
        try:
            opening = asyncio.ensure_future(self._streams.send(sent, stream=True))
            answer = await self._next(opening)
            if answer.status_code != 200:
                raise from_problem(answer.status_code, await answer.aread())
            if self._options.generate_url is None:
                self._check_boot(answer)
            lines = answer.aiter_lines()
            while (line := await self._next(_line(lines))) is not None:
                if line == "event: error":
                    said = await self._next(_line(lines)) or ""
                    raise from_problem(500, said.removeprefix("data: ").encode())
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    chunk = self._decoded("generate", line[6:].encode(), TokenChunk)
                    self._version = max(self._version, chunk.version)
                    if chunk.finish_reason is not None:
                        entry.left.discard(chunk.index)
                    yield chunk
            raise httpx.RemoteProtocolError("the stream ended without its end")
        except (httpx.HTTPError, ReplicaLost) as error:
            if answer is None:  # nothing was begun
                if isinstance(error, ReplicaLost):
                    raise
                raise ReplicaLost(f"{self.url}: {_said(error)}", where=self.url) from error
            entry.reason = f"the replica was lost: {_said(error)}"
            for chunk in entry.ended(self._version):
                yield chunk
        finally:
            if answer is not None:
                with suppress(httpx.HTTPError):
                    await answer.aclose()

    async def _next(self, waiting: Any) -> Any:
        """The next piece, however long it takes while the server lives."""
        asking = asyncio.ensure_future(waiting)
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=self._look)
                if done:
                    return asking.result()
                await self._alive()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    # -- inside -------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """:raises ReplicaLost: it was lost before."""
        if self.lost:
            raise self.gone()

    def gone(self) -> ReplicaLost:
        """The error to raise."""
        return ReplicaLost(
            self.lost, where=self.url, remedy="start the server again, and reconnect"
        )

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why

    def _check_boot(self, answer: httpx.Response) -> None:
        """A server that was started again has neither our pauses nor our weights."""
        boot = answer.headers.get(BOOT_HEADER, "")
        if self._boot and boot != self._boot:
            self._lose(
                "another server answers: it was started again, or a balancer stands before it"
            )
            raise self.gone()
        self._boot = boot

    def _decoded(self, path: str, body: bytes, into: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=into)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self.url} answered {path} with nonsense: {error}") from error

    def report(self, path: str, body: bytes, into: type[T]) -> T:
        """The report within a verb's answer."""
        told = self._decoded(path, body, _Told)
        return self._decoded(path, bytes(told.report), into)


class _Unreached(ReplicaLost):
    """A call did not get through, or its answer did not get back."""


class _Told(msgspec.Struct):
    """A verb's answer."""

    ranks: int
    report: msgspec.Raw


async def _line(lines: Any) -> str | None:
    return await anext(lines, None)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__

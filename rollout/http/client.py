"""Calls to one server: bounded, watched, repeated where that is harmless."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random

from hotbunk.rollout.calls import abandoned
from hotbunk.rollout.errors import DeadlineExceeded, EngineFailed, HotbunkError, ReplicaLost
from hotbunk.rollout.http.connection import Connection

T = TypeVar("T")
_WAIT = wait_exponential(multiplier=0.1, max=2.0) + wait_random(0, 0.1)  # seconds


class ServerClient(ABC):
    """One server. It is lost when it cannot be reached, hangs, or is not the one it was.

    :param generate_url: where streams go instead, say a balancer.
    """

    def __init__(self, options: Connection, generate_url: str | None = None) -> None:
        self.url = options.url.rstrip("/")
        self.lost = ""
        self._options = options
        self._deadlines = options.deadlines
        key = options.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Two lanes: however many streams there are, a pause never waits for one of them.
        connect = httpx.Timeout(None, connect=self._look)
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._control = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=connect, limits=unlimited, trust_env=False
        )
        self._streams = httpx.AsyncClient(
            base_url=(generate_url or self.url).rstrip("/"),
            headers=headers,
            timeout=connect,
            limits=unlimited,
            trust_env=False,
        )
        self._same_server = generate_url is None

    @property
    def _look(self) -> float:
        """Seconds in which a living server answers that it lives."""
        return self._deadlines.inspect + self._deadlines.grace

    async def close(self) -> None:
        """Idempotent. The server goes on."""
        await self._control.aclose()
        await self._streams.aclose()

    async def get(self, path: str, into: type[T], seconds: float | None = None) -> T:
        """:raises HotbunkError: the server's, or ``ReplicaLost``."""
        return self.decoded(path, await self.text(path, seconds), into)

    async def text(self, path: str, seconds: float | None = None) -> bytes:
        """GET, as it came. Errors as :meth:`get`."""
        limit = self._look if seconds is None else seconds
        return await self._retried("GET", path, limit, None, None)

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
            self.lose(error.what)
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
            raise _Unreached(f"{self.url}{path}: {in_words(error)}", where=self.url) from error
        self.check_answer(answer)
        if answer.status_code != 200:
            raise self.refusal(answer.status_code, answer.content)
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
            await abandoned(asking)

    async def _alive(self) -> None:
        """:raises ReplicaLost: it hangs, or is gone, or another answers."""
        try:
            answer = await self._control.get("/health", timeout=self._look)
            self.check_answer(answer)
        except httpx.HTTPError as error:
            self.lose(f"no word from {self.url}: {in_words(error)}")
            raise self.gone() from error

    # -- streams ------------------------------------------------------------------------------

    async def open(self, path: str, content: Any) -> httpx.Response:
        """POST, and the answer as soon as it begins; the caller's to close.

        :raises HotbunkError: the server's, or ``ReplicaLost``; nothing was begun.
        """
        self.check_alive()
        body = msgspec.json.encode(content)
        headers = {"Content-Type": "application/json"}
        sent = self._streams.build_request("POST", path, content=body, headers=headers)
        answer: httpx.Response | None = None
        try:
            answer = await self._next(self._streams.send(sent, stream=True))
            assert answer is not None
            if answer.status_code != 200:
                raise self.refusal(answer.status_code, await answer.aread())
            if self._same_server:
                self.check_answer(answer)
            return answer
        except BaseException as error:
            if answer is not None:
                with suppress(httpx.HTTPError):
                    await answer.aclose()
            if isinstance(error, httpx.HTTPError):
                raise ReplicaLost(f"{self.url}: {in_words(error)}", where=self.url) from error
            raise

    async def lines(self, answer: httpx.Response) -> AsyncGenerator[str, None]:
        """Its lines, however long they take while the server lives.

        :raises httpx.HTTPError: the connection broke. :raises ReplicaLost: the server went.
        """
        reading = answer.aiter_lines()
        while (line := await self._next(anext(reading, None))) is not None:
            yield line

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
            await abandoned(asking)

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

    def lose(self, why: str) -> None:
        """It is lost from now on; the first reason stands."""
        self.lost = self.lost or why

    @abstractmethod
    def refusal(self, status: int, body: bytes) -> HotbunkError:
        """What an answer that is no 200 says."""

    @abstractmethod
    def check_answer(self, answer: httpx.Response) -> None:
        """Whatever an answer says of the server itself.

        :raises ReplicaLost: that it is not the one it was, or is dead.
        """

    def decoded(self, path: str, body: bytes, into: type[T]) -> T:
        """:raises EngineFailed: it is not what it should be."""
        try:
            return msgspec.json.decode(body, type=into)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self.url} answered {path} with nonsense: {error}") from error


class _Unreached(ReplicaLost):
    """A call did not get through, or its answer did not get back."""


def in_words(error: Exception) -> str:
    """What it says, or else its class."""
    return str(error) or type(error).__name__

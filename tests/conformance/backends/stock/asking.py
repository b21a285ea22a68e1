"""Calls to a stock server, and what came of the streams that were asked of it.

A call that means nothing must be answered with 422 (CONTRACT.md, the HTTP control plane); anything else
is said as it came. No wait is longer than a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, TypeVar, cast

import httpx

from hotbunk.conformance.backends.stock.dialect import Call, Dialect
from hotbunk.conformance.rig import Unseen
from hotbunk.rollout.contract import TARGET, FinishReason, TokenChunk
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    EngineFailed,
    KVNotResident,
    ReplicaLost,
    UsageError,
    WeightsNotLoaded,
)
from hotbunk.rollout.status import Deadlines

T = TypeVar("T")
MEANINGLESS = 422  # how a server has to answer what cannot be meant
UNAVAILABLE = 503  # how generation answers where content is missing


class Server:
    """A connection to one; its words are the dialect's."""

    def __init__(self, url: str, key: str | None, dialect: Dialect, deadlines: Deadlines) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self._dialect, self._deadlines = url.rstrip("/"), dialect, deadlines
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=None,
            trust_env=False,
        )

    async def close(self) -> None:
        """Stop listening to it. It goes on."""
        await self._client.aclose()

    async def ask(
        self,
        call: Call,
        *,
        meant: bool = True,
        wrong: type[UsageError] = UsageError,
        seconds: float | None = None,
    ) -> Any:
        """Its answer. ``meant``: the call makes sense; else it must be refused, which is ``wrong``.

        :raises DeadlineExceeded: none came in ``seconds`` (default: the memory deadline).
        :raises ReplicaLost: it is not there.
        :raises EngineFailed: another answer than the contract says.
        """
        limit = self._deadlines.memory if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                answer = await self._client.request(
                    call.method, call.path, params=cast(Any, call.query), json=call.body
                )
        except TimeoutError:
            raise DeadlineExceeded(call.path, limit, where=self.url) from None
        except httpx.HTTPError as error:
            raise self._lost(call, error) from error
        status, said = answer.status_code, answer.text[:300]
        shown = f"{call.method} {answer.request.url.raw_path.decode()} answered {status}: {said}"
        if not meant:
            if status == MEANINGLESS:
                raise wrong(shown)
            raise EngineFailed(f"{shown} (the contract says {MEANINGLESS})", where=self.url)
        if status != httpx.codes.OK:
            raise EngineFailed(shown, where=self.url)
        return (
            answer.text if "json" not in answer.headers.get("content-type", "") else answer.json()
        )

    async def lines(self, call: Call, kv_away: Callable[[], bool]) -> AsyncGenerator[str, None]:
        """Of a streamed answer. ``kv_away``: whether what is missing at a 503 is the KV cache.

        :raises Unseen: it holds the request for longer than the suite waits: its own setting.
        """
        sent = self._client.build_request(call.method, call.path, json=call.body)
        try:
            answer = await self._patiently(self._client.send(sent, stream=True))
            if answer.status_code != httpx.codes.OK:
                raise self._refusal(answer.status_code, await answer.aread(), kv_away())
            try:
                lines = answer.aiter_lines()
                while (line := await self._patiently(anext(lines, None))) is not None:
                    yield line
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise self._lost(call, error) from error

    async def _patiently(self, waiting: Awaitable[T]) -> T:
        asking = asyncio.ensure_future(waiting)
        try:
            while True:
                limit = 2 * self._deadlines.hold
                done, _ = await asyncio.wait({asking}, timeout=limit)
                if done:
                    return asking.result()
                seen = await self._dialect.seen(self.ask)
                if seen.paused or seen.sleeping:
                    raise Unseen(
                        f"it holds a request for more than {limit:g} s: for how long is its own"
                    )
                raise EngineFailed(f"no token in {limit:g} s, and it is not paused", where=self.url)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    def _lost(self, call: Call, error: httpx.HTTPError) -> ReplicaLost:
        return ReplicaLost(f"{call.path}: {str(error) or type(error).__name__}", where=self.url)

    def _refusal(self, status: int, body: bytes, kv_away: bool) -> Exception:
        said = f"{status}: {body[:300].decode(errors='replace')}"
        if status == UNAVAILABLE and kv_away:
            return KVNotResident(where=self.url)
        if status == UNAVAILABLE:
            return WeightsNotLoaded(TARGET, said, where=self.url)
        if httpx.codes.is_client_error(status):
            return UsageError(said, where=self.url)
        return EngineFailed(f"a request was answered {said}", where=self.url)


class Came:
    """What came of a request so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.reason: FinishReason | None = None
        self.over = asyncio.Event()

    def add(self, chunk: TokenChunk) -> None:
        """One more chunk."""
        self.tokens += len(chunk.token_ids)
        self.reason = chunk.finish_reason or self.reason


async def ended(streams: Collection[Came], seconds: float) -> None:
    """Until they are over, or it takes too long."""
    waiting = [asyncio.ensure_future(stream.over.wait()) for stream in streams]
    if waiting:
        _, late = await asyncio.wait(waiting, timeout=seconds)
        for one in late:
            one.cancel()

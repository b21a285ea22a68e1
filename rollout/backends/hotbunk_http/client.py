"""Calls to a server of ``hotbunk serve``: its errors ours again, its streams chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TypeVar

import httpx
import msgspec

from hotbunk.rollout.contract import GenerateRequest, TokenChunk, Version
from hotbunk.rollout.errors import HotbunkError, ReplicaLost
from hotbunk.rollout.gate import Entry
from hotbunk.rollout.http.client import ServerClient, in_words
from hotbunk.rollout.http.connection import Connection
from hotbunk.rollout.server.problems import from_problem

T = TypeVar("T")
BOOT_HEADER = "x-hotbunk-boot"


class Client(ServerClient):
    """One such server; after a restart it is another, and the one it was is lost."""

    def __init__(self, options: Connection, generate_url: str | None = None) -> None:
        super().__init__(options, generate_url)
        self._boot = ""
        self._version = Version()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream one request. A server that goes in the middle ends it with a retryable abort."""
        entry = Entry(request)
        answer = await self.open("/v1/generate", request)
        try:
            async with aclosing(self.lines(answer)) as lines:
                async for line in lines:
                    if line == "event: error":
                        said = await anext(lines, "")
                        raise from_problem(500, said.removeprefix("data: ").encode())
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        chunk = self.decoded("generate", line[6:].encode(), TokenChunk)
                        self._version = max(self._version, chunk.version)
                        if chunk.finish_reason is not None:
                            entry.left.discard(chunk.index)
                        yield chunk
            raise httpx.RemoteProtocolError("the stream ended without its end")
        except (httpx.HTTPError, ReplicaLost) as error:
            entry.reason = f"the replica was lost: {in_words(error)}"
            for chunk in entry.ended(self._version):
                yield chunk
        finally:
            with suppress(httpx.HTTPError):
                await answer.aclose()

    def refusal(self, status: int, body: bytes) -> HotbunkError:
        return from_problem(status, body)

    def check_answer(self, answer: httpx.Response) -> None:
        """A server that was started again has neither our pauses nor our weights."""
        boot = answer.headers.get(BOOT_HEADER, "")
        if self._boot and boot != self._boot:
            self.lose(
                "another server answers: it was started again, or a balancer stands before it"
            )
            raise self.gone()
        self._boot = boot

    def report(self, path: str, body: bytes, into: type[T]) -> T:
        """The report within a verb's answer."""
        told = self.decoded(path, body, _Told)
        return self.decoded(path, bytes(told.report), into)


class _Told(msgspec.Struct):
    """A verb's answer."""

    ranks: int
    report: msgspec.Raw

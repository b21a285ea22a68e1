"""Requests in, tokens out: what is asked of a generator, and what streams back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from hotbunk.rollout.vocabulary import FinishReason, Version


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn, and when to stop. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy; ``seed`` makes a draw repeatable. ``min_p``, ``top_k`` (0: off)
    and ``top_p`` narrow the distribution, in that order, after the temperature. A token of
    ``stop_token_ids`` ends the response and is part of it; so does the model's own end-of-sequence
    token, unless ``ignore_eos``; a string of ``stop`` ends it with the token that completes it.
    ``n`` responses share the prompt (chunks say their ``index``; the i-th draws with ``seed + i``).
    ``logprobs`` asks for that many most likely alternatives a token.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    logprobs: int = 0


class GenerateRequest(msgspec.Struct, frozen=True):
    """Token ids in. ``media`` holds image, video and audio payloads, passed through unread.

    The last ``continued`` tokens of the prompt are a response that was cut off: a stop string may
    begin in them. ``start_version`` is that of the first of them, where they are known to be older
    than what this request will make.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    adapter: str | None = None
    version: Version | None = None  # pinned: never made by another
    media: Mapping[str, Any] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    continued: int = 0
    start_version: Version | None = None


class TokenChunk(msgspec.Struct, frozen=True):
    """Token ids out: a few tokens, all made by the weights of ``version``.

    ``logprobs`` has one entry a token: log-softmax at the request's temperature (1 when greedy),
    before any truncation of the distribution. ``finish_reason`` is set on the last chunk only; a
    chunk that ends a request which may be sent again says so in ``error`` and ``retryable``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: Version = Version()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was reused; on the first chunk
    routed_experts: Any = None
    error: str = ""
    retryable: bool = False
    index: int = 0  # which of a request's ``n`` responses
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # a token: (id, log-prob) pairs


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a response were made by ``version``."""

    version: Version
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """A finished request: all its chunks put together. Spans are contiguous and cover it."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    error: str = ""
    retryable: bool = False
    index: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class _Joined:
    """Chunks of one response, put together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.cached = 0
        self.last: TokenChunk | None = None

    def add(self, chunk: TokenChunk) -> None:
        if self.last is not None and self.last.finish_reason is not None:
            raise ValueError(f"request {chunk.request_id!r} went on after it finished")
        start = len(self.ids)
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top.extend(chunk.top_logprobs)
        self.cached = max(self.cached, chunk.cached_tokens)
        if chunk.token_ids:
            if self.spans and self.spans[-1].version == chunk.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(chunk.version, start, len(self.ids)))
        self.last = chunk

    def completion(self) -> Completion:
        if self.last is None or self.last.finish_reason is None:
            raise ValueError("the stream ended without a finish reason")
        return Completion(
            self.last.request_id,
            tuple(self.ids),
            tuple(self.logprobs),
            tuple(self.spans),
            self.last.finish_reason,
            self.cached,
            self.last.error,
            self.last.retryable,
            self.last.index,
            tuple(self.top),
        )


async def collect_all(chunks: AsyncIterator[TokenChunk]) -> list[Completion]:
    """Read a whole stream of one or more responses, by index.

    :raises ValueError: a response ends without a finish reason, or goes on after one.
    """
    joined: dict[int, _Joined] = {}
    async for chunk in chunks:
        joined.setdefault(chunk.index, _Joined()).add(chunk)
    return [joined[index].completion() for index in sorted(joined)]


async def collect(chunks: AsyncIterator[TokenChunk]) -> Completion:
    """Read a whole stream of one response.

    :raises ValueError: as :func:`collect_all`, or the stream holds another number of responses.
    """
    done = await collect_all(chunks)
    if len(done) != 1:
        raise ValueError(f"the stream held {len(done)} responses")
    return done[0]

"""Requests to a vLLM server and what comes back, in either of its two dialects.

``/inference/v1/generate`` takes and gives token ids, and says with a response's last piece which
weights made which of its tokens; ``/v1/completions`` says nothing of weights.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx
import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.requests import Reading, drawing
from hotbunk.rollout.backends.vllm_http.client import VllmClient
from hotbunk.rollout.backends.vllm_http.probe import COMPLETIONS, TOKENS
from hotbunk.rollout.contract import GenerateRequest, TokenChunk, Version
from hotbunk.rollout.http.client import in_words

Span = tuple[str, int, int]  # label, start, end


class Piece(msgspec.Struct):
    """One choice of one event. ``spans`` are all the response's, with its last piece."""

    index: int
    ids: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]
    reason: str | None = None
    spans: list[Span] | None = None


class Dialect(ABC):
    """How one route is spoken to."""

    path: str
    prefix: str  # of the ids under which the server keeps requests

    @abstractmethod
    def body(self, request: GenerateRequest, served: str, salt: str) -> dict[str, Any]:
        """The request as it goes out."""

    @abstractmethod
    def piece(self, choice: Any, wanted: int) -> Piece:
        """A choice as it came in. ``wanted``: alternatives a token.

        :raises EngineFailed: tokens without their log-probs.
        """

    @abstractmethod
    def internal_id(self, request_id: str) -> str:
        """What ``/abort_requests`` knows the request by."""


class TokensDialect(Dialect):
    """``/inference/v1/generate``."""

    path = TOKENS

    def body(self, request: GenerateRequest, served: str, salt: str) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "model": served,
            "request_id": request.request_id,
            "token_ids": request.prompt,
            "sampling_params": {
                **drawing(sampling),
                "logprobs": sampling.logprobs,
                "detokenize": bool(sampling.stop),
            },
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def piece(self, choice: Any, wanted: int) -> Piece:
        ids = list(choice.get("token_ids") or ())
        said = (choice.get("logprobs") or {}).get("content") or []
        if len(said) != len(ids):
            raise errors.EngineFailed("vLLM gave tokens without their log-probs")
        top = [
            tuple(
                (int(it["token_id"]), float(it["logprob"]))
                for it in sorted(one["top_logprobs"], key=lambda it: -it["logprob"])[:wanted]
            )
            for one in said
        ]
        spans = choice.get("weight_versions")
        return Piece(
            int(choice["index"]),
            ids,
            [float(one["logprob"]) for one in said],
            top if wanted else [],
            choice.get("finish_reason"),
            None if spans is None else [(s["version"], s["start"], s["end"]) for s in spans],
        )

    def internal_id(self, request_id: str) -> str:
        return f"generate-tokens-{request_id}"


class CompletionsDialect(Dialect):
    """``/v1/completions``, with vLLM's own keys."""

    path = COMPLETIONS

    def body(self, request: GenerateRequest, served: str, salt: str) -> dict[str, Any]:
        return {
            "model": served,
            "request_id": request.request_id,
            "prompt": request.prompt,
            **drawing(request.sampling),
            "logprobs": request.sampling.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def piece(self, choice: Any, wanted: int) -> Piece:
        ids = list(choice.get("token_ids") or ())
        said = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
        own = [float(value) for value in said["token_logprobs"]]
        if len(own) != len(ids):
            raise errors.EngineFailed("vLLM gave tokens without their log-probs")
        top = [
            tuple(
                (int(name.removeprefix("token_id:")), float(value))
                for name, value in sorted((table or {}).items(), key=lambda kv: -kv[1])[:wanted]
            )
            for table in said["top_logprobs"]
        ]
        return Piece(
            int(choice["index"]), ids, own, top if wanted else [], choice.get("finish_reason")
        )

    def internal_id(self, request_id: str) -> str:
        return f"cmpl-{request_id}-0"


class Stream(Reading):
    """One request at the server.

    Which weights made a token is certain at once while the weights stay what they are. Once they
    have changed under a request, its further tokens are held back until the server says, with the
    last of them.
    """

    def __init__(
        self,
        request: GenerateRequest,
        dialect: Dialect,
        version: Version,
        labels: Mapping[str, Version],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(request, dialect.internal_id(request.request_id), labels, changed)
        self._dialect = dialect
        self._version = version
        self._crossed = False
        self._held: dict[int, list[tuple[Piece, int]]] = {}
        self._last: list[TokenChunk] = []

    def begin(self, client: VllmClient, answer: httpx.Response) -> None:
        """Read what comes."""
        name = f"vllm_http {self.request.request_id}"
        self._pump = asyncio.create_task(self._run(client, answer), name=name)

    def stop(self) -> None:
        """Read no further; the server ends the request of a client that left."""
        super().stop()
        self.ended.set()

    def weights_change(self) -> None:
        """Called before the label moves: what has been read until now is of the old version."""
        self._crossed = True

    async def _run(self, client: VllmClient, answer: httpx.Response) -> None:
        try:
            done = False
            async with aclosing(client.lines(answer)) as lines:
                async for line in lines:
                    if line == "data: [DONE]":
                        done = True
                        break
                    if line.startswith("data: "):
                        self._take(client, line[6:].encode())
            if not done:
                raise httpx.RemoteProtocolError("the stream ended without its end")
            for chunk in self._last:
                self.items.put_nowait(chunk)
            if left := set(range(self.request.sampling.n)) - self.reasons.keys():
                raise errors.EngineFailed(f"vLLM never ended response(s) {sorted(left)}")
        except errors.HotbunkError as error:
            self.items.put_nowait(error)
        except httpx.HTTPError as error:
            client.lose(f"{client.url}: {in_words(error)}")
            self.items.put_nowait(client.gone())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.items.put_nowait(errors.EngineFailed(f"vLLM answered with nonsense: {error!r}"))
        finally:
            self.ended.set()
            self._changed()
            with suppress(httpx.HTTPError):
                await answer.aclose()

    def _take(self, client: VllmClient, data: bytes) -> None:
        said = msgspec.json.decode(data)
        if "error" in said:
            raise client.refusal(int(said["error"].get("code") or 500), data)
        details = (said.get("usage") or {}).get("prompt_tokens_details") or {}
        if cached := int(details.get("cached_tokens") or 0):
            self.cached = cached
            self._last = [
                msgspec.structs.replace(chunk, cached_tokens=cached) for chunk in self._last
            ]
        for choice in said["choices"]:
            self._piece(self._dialect.piece(choice, self.request.sampling.logprobs))

    def _piece(self, piece: Piece) -> None:
        start = self.produced.get(piece.index, 0)
        self.produced[piece.index] = start + len(piece.ids)
        self._finished(piece.index, piece.reason)
        held = self._held.setdefault(piece.index, [])
        held.append((piece, start))
        if piece.reason is None and self._crossed:
            return
        total = self.produced[piece.index]
        spans = self._spans(piece.spans, total)
        chunks = [chunk for it, first in held for chunk in self._chunks(it, first, spans)]
        held.clear()
        if piece.reason is not None:  # the last one waits for the count of cached tokens
            self._last.append(chunks.pop())
        for chunk in chunks:
            self.items.put_nowait(chunk)

    def _spans(self, told: Sequence[Span] | None, total: int) -> list[tuple[Version, int, int]]:
        """Versions of the tokens ``[0, total)``.

        :raises EngineFailed: they are of weights that we did not bring, or nobody says whose.
        """
        if told is None:
            if self._crossed and total:
                raise errors.EngineFailed(
                    f"vLLM does not say which weights made request {self.request.request_id!r}"
                )
            return [(self._version, 0, total)]
        strange = sorted({label for label, *_ in told} - self._labels.keys())
        if strange:
            raise errors.EngineFailed(
                f"tokens of request {self.request.request_id!r} are of weights {strange}, which "
                "somebody else brought",
                remedy="let one client update a server",
            )
        return [(self._labels[label], start, end) for label, start, end in told]

    def _chunks(
        self, piece: Piece, first: int, spans: Sequence[tuple[Version, int, int]]
    ) -> Iterator[TokenChunk]:
        """A piece as chunks of one version each; one, if it has no token."""
        end = first + len(piece.ids)
        cuts = [
            (max(first, start), min(end, last), version)
            for version, start, last in spans
            if max(first, start) < min(end, last)
        ]
        if sum(last - start for start, last, _ in cuts) != len(piece.ids):
            raise self._unsaid(first, end)
        if not cuts:
            cuts = [(first, end, spans[-1][0] if spans else self._version)]
        reason = None if piece.reason is None else self.reasons[piece.index]
        for start, last, version in cuts:
            cut = slice(start - first, last - first)
            yield TokenChunk(
                self.request.request_id,
                tuple(piece.ids[cut]),
                tuple(piece.logprobs[cut]),
                version,
                reason if last == end else None,
                index=piece.index,
                top_logprobs=tuple(piece.top[cut]),
            )

"""Tokens as OpenAI's answers: whole or in pieces, with vLLM's extras."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from hotbunk.rollout.contract import FinishReason, TokenChunk, VersionSpan
from hotbunk.rollout.server.asking import Asked, ChatBody, Job
from hotbunk.rollout.server.plane import Plane
from hotbunk.rollout.server.text import Decoder, Stops

LEAST = -9999.0  # a log-prob that JSON can say, for one that is minus infinity


class Choice:
    """One response as it grows: text, log-probs, versions."""

    def __init__(self, plane: Plane, body: Asked, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.spans: list[VersionSpan] = []
        self._plane = plane
        self._body = body
        self._decoder = Decoder(plane.texts)
        self._stops = Stops(() if body.include_stop_str_in_output else body.stops)
        self._characters = 0
        self._begun = False
        self._chat = isinstance(body, ChatBody)

    def add(self, chunk: TokenChunk) -> dict[str, Any]:
        """A chunk as a piece of this choice."""
        last = chunk.finish_reason is not None
        text = self._decoder.push(chunk.token_ids, last=last)
        text = self._stops.push(text, last=last)
        logprobs = self._logprobs(chunk) if self._body.alternatives is not None else None
        self._characters += len(text)
        self._span(chunk)
        self.tokens.extend(chunk.token_ids)
        piece: dict[str, Any] = {"index": self.number}
        if self._chat:
            piece["delta"] = (
                {"content": text} if self._begun else {"role": "assistant", "content": text}
            )
            self._begun = True
        else:
            piece["text"] = text
        piece |= {
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
            "stop_reason": self._reason(chunk) if last else None,
        }
        if self._body.return_token_ids:
            piece["token_ids"] = list(chunk.token_ids)
        if self._body.return_weight_versions:
            piece["weight_version"] = str(chunk.version)
            if last:
                piece["weight_versions"] = [_span(one) for one in self.spans]
        if last and (chunk.error or chunk.retryable):
            piece |= {"error": chunk.error, "retryable": chunk.retryable}
        return piece

    def _span(self, chunk: TokenChunk) -> None:
        if not chunk.token_ids:
            return
        start, end = len(self.tokens), len(self.tokens) + len(chunk.token_ids)
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(chunk.version, start, end))

    def _reason(self, chunk: TokenChunk) -> int | str | None:
        """What stopped it: a string, or a token that was asked for; None for the model's own end."""
        if chunk.finish_reason is not FinishReason.STOP:
            return None
        if self._stops.hit is not None:
            return self._stops.hit
        final = self.tokens[-1] if self.tokens else None
        return final if final in (self._body.stop_token_ids or ()) else None

    def _named(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._plane.texts.decode([token])

    def _logprobs(self, chunk: TokenChunk) -> dict[str, Any]:
        most = self._body.alternatives or 0
        # An engine asked for no alternatives tells none; the token itself always counts as one.
        tops: Sequence[Sequence[tuple[int, float]]] = chunk.top_logprobs or ((),) * len(
            chunk.token_ids
        )
        told = list(zip(chunk.token_ids, chunk.logprobs, tops, strict=True))
        if self._chat:
            return {"content": [self._entry(t, p, top[:most]) for t, p, top in told]}
        return {
            "tokens": [self._named(token) for token, _, _ in told],
            "token_logprobs": [max(p, LEAST) for _, p, _ in told],
            "top_logprobs": [
                {self._named(t): max(p, LEAST) for t, p in [(token, own), *top[:most]]}
                for token, own, top in told
            ],
            "text_offset": [self._characters] * len(told),
        }

    def _entry(
        self, token: int, own: float, top: Sequence[tuple[int, float]] | None = None
    ) -> dict[str, Any]:
        name = self._named(token)
        entry: dict[str, Any] = {
            "token": name,
            "logprob": max(own, LEAST),
            "bytes": list(name.encode()),
        }
        if top is not None:
            entry["top_logprobs"] = [self._entry(t, p) for t, p in top]
        return entry


def _span(span: VersionSpan) -> dict[str, Any]:
    return {"version": str(span.version), "start": span.start, "end": span.end}


class Telling:
    """The answer to one job."""

    def __init__(self, plane: Plane, body: Asked, job: Job) -> None:
        self._plane = plane
        self._body = body
        self._job = job
        self._created = int(time.time())
        self._chat = isinstance(body, ChatBody)
        self._choices: dict[int, Choice] = {}
        self._cached = [0] * len(job.requests)
        self._first = set(range(len(job.requests)))

    def piece(self, prompt: int, chunk: TokenChunk) -> dict[str, Any]:
        """A chunk of the request for that prompt, as a choice or a part of one."""
        number = prompt * self._body.n + chunk.index
        if number not in self._choices:
            self._choices[number] = Choice(self._plane, self._body, number)
        self._cached[prompt] = max(self._cached[prompt], chunk.cached_tokens)
        piece = self._choices[number].add(chunk)
        if self._body.return_token_ids and prompt in self._first:
            self._first.discard(prompt)
            piece["prompt_token_ids"] = list(self._job.requests[prompt].prompt)
        return piece

    def event(self, piece: dict[str, Any]) -> bytes:
        """A piece as an event of a stream."""
        return _event(self._envelope([piece], ".chunk" if self._chat else ""))

    def closing(self) -> bytes:
        """The end of a stream."""
        options = self._body.stream_options
        usage = b""
        if options is not None and options.include_usage:
            told = self._envelope([], ".chunk" if self._chat else "")
            usage = _event(told | {"usage": self._usage()})
        return usage + b"data: [DONE]\n\n"

    def whole(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All pieces as one answer."""
        joined: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            number = piece["index"]
            joined[number] = _join(joined[number], piece) if number in joined else piece
        choices = [joined[number] for number in sorted(joined)]
        for choice in choices if self._chat else ():
            choice["message"] = {"role": "assistant"} | choice.pop("delta")
        return self._envelope(choices, "") | {"usage": self._usage()}

    def _envelope(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": ("chat.completion" if self._chat else "text_completion") + kind,
            "created": self._created,
            "model": self._job.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        asked = sum(len(request.prompt) for request in self._job.requests)
        made = sum(len(choice.tokens) for choice in self._choices.values())
        details = None
        if self._plane.settings.prompt_tokens_details:
            details = {"cached_tokens": sum(self._cached)}
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
            "prompt_tokens_details": details,
        }


def _join(so_far: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Two parts of one choice as one."""
    for key, value in piece.items():
        have = so_far.get(key)
        if key in ("text", "token_ids"):
            so_far[key] = have + value
        elif key == "delta":
            so_far[key]["content"] += value["content"]
        elif key == "logprobs" and have is not None:
            so_far[key] = {name: have[name] + value[name] for name in have}
        else:
            so_far[key] = value
    return so_far


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"

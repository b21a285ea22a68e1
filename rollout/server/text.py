"""Tokens and text: one tokenizer for a server, text that streams, stop strings cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from hotbunk.rollout.errors import UsageError

UNKNOWN = "\ufffd"
LONGEST = 3  # bytes of a UTF-8 character that may still be waiting for its last one


class Tokenizer(Protocol):
    """What a server needs of one. Every id is in ``[0, vocab_size)``."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to the assistant's turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens are left out."""


class Texts:
    """The tokenizer, off the event loop where it may take long, and never twice at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        self._thread = ThreadPoolExecutor(1, "hotbunk-tokenizer")

    async def encode(self, text: str) -> list[int]:
        """:raises UsageError: it cannot be tokenized."""
        return await self._run("prompt", lambda: self._tokenizer.encode(text))

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """:raises UsageError: the model's chat template does not take this conversation."""
        return await self._run("conversation", lambda: self._tokenizer.encode_chat(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Their text. A model may have more rows than its tokenizer has ids: those say nothing."""
        return self._tokenizer.decode([token for token in ids if token < self._size])

    def close(self) -> None:
        """Idempotent."""
        self._thread.shutdown(wait=False)

    async def _run(self, what: str, work: Callable[[], list[int]]) -> list[int]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        # A boundary: templates and tokenizers raise classes of their own.
        except Exception as error:
            raise UsageError(f"the {what} cannot be tokenized: {error}") from error


class Decoder:
    """The text of tokens as they come: all pieces together are the text of all tokens.

    Ends of characters that are not whole yet are held back. Only a window of tokens is decoded.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._ids: list[int] = []
        self._from = 0  # where the window begins
        self._read = 0  # tokens whose text has gone out
        self._sent = 0  # characters of the window that have gone out

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """More tokens; the text that is certain now."""
        self._ids.extend(ids)
        window = self._texts.decode(self._ids[self._from :])
        whole = len(window)
        if not last:
            tail = window[-LONGEST:]
            whole -= len(tail) - len(tail.rstrip(UNKNOWN))
        piece = window[self._sent : whole]
        self._sent = max(self._sent, whole)
        if whole == len(window) and not last:
            # Clean here: the next window begins with the tokens whose text went out last.
            self._from, self._read = self._read, len(self._ids)
            self._sent = len(self._texts.decode(self._ids[self._from :]))
        return piece


class Stops:
    """Text up to the first stop string; an end that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str, *, last: bool = False) -> str:
        """More text; what is certain to be before any stop string."""
        if self.hit is not None or not self._stops:
            return "" if self.hit is not None else text
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return held[:at]
        keep = 0 if last else max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)

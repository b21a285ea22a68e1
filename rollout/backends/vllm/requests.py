"""Requests to vLLM, in its own process or over its server: what both ways have in common.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from hotbunk.rollout import errors
from hotbunk.rollout.contract import FinishReason, GenerateRequest, Sampling, TokenChunk, Version

Item = TokenChunk | errors.HotbunkError
_REASONS = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def drawing(sampling: Sampling) -> dict[str, Any]:
    """The contract's sampling under vLLM's names; every field that changes what is drawn."""
    temperature, top_k = sampling.temperature, sampling.top_k
    if not temperature and sampling.n > 1:
        # vLLM refuses greedy samples of one request; the best of one is the same token.
        temperature, top_k = 1.0, 1
    return {
        "n": sampling.n,
        "temperature": temperature,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "top_k": top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def check_length(request: GenerateRequest, limit: int) -> None:
    """:raises UsageError: it may grow longer than the model takes."""
    tokens = len(request.prompt) + request.sampling.max_tokens
    if tokens > limit:
        raise errors.UsageError(
            f"request {request.request_id!r} may grow to {tokens} tokens and max_model_len is {limit}"
        )


class Reading:
    """One request in vLLM. A task of its own reads what comes, whether or not anybody reads us.

    So what has ended is known at once, and a slow reader holds up nobody. ``produced`` counts
    tokens by response index; ``ended`` is set when vLLM is done with the request.

    :param internal_id: what vLLM itself knows the request by.
    :param labels: versions by the labels that vLLM stamps tokens with.
    :param changed: called when it ends.
    """

    def __init__(
        self,
        request: GenerateRequest,
        internal_id: str,
        labels: Mapping[str, Version],
        changed: Callable[[], None],
    ) -> None:
        self.request = request
        self.internal_id = internal_id
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self.produced: dict[int, int] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.ended = asyncio.Event()
        self.read = False  # to its end
        self.cached = 0
        self._labels = labels
        self._changed = changed
        self._pump: asyncio.Task[None] | None = None

    @property
    def aborted(self) -> bool:
        """Whether some response was cut short."""
        return FinishReason.ABORT in self.reasons.values()

    @property
    def tokens(self) -> int:
        """Tokens so far, over all responses."""
        return sum(self.produced.values())

    @property
    def computed(self) -> int:
        """Tokens whose KV it holds, as far as can be told from what came back."""
        prompt = len(self.request.prompt)
        return sum(prompt + count - 1 for count in self.produced.values() if count)

    async def next(self) -> TokenChunk:
        """What comes next. :raises HotbunkError: what came instead."""
        item = await self.items.get()
        if isinstance(item, errors.HotbunkError):
            raise item
        self.read = self.ended.is_set() and self.items.empty()
        return item

    def stop(self) -> None:
        """Read no further."""
        if self._pump is not None:
            self._pump.cancel()

    def _finished(self, index: int, said: str | None) -> FinishReason | None:
        """Why a response has ended, in the contract's words; None: it has not.

        :raises EngineFailed: for a reason that is not known here.
        """
        if said is None:
            return None
        if said not in _REASONS:
            raise errors.EngineFailed(f"vLLM ended a request with {said!r}")
        self.reasons[index] = _REASONS[said]
        return self.reasons[index]

    def _unsaid(self, start: int, end: int) -> errors.EngineFailed:
        return errors.EngineFailed(
            f"vLLM does not say which weights made tokens {start} to {end} of request "
            f"{self.request.request_id!r}"
        )

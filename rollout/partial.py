"""A client that goes on where a pause cut a request off.

A pause with mode ``abort`` ends requests with their partial tokens. :class:`PartialRollout` sends
the prompt and those tokens again, with what is left of the budget, and joins what comes: tokens,
log-probs, versions, alternatives and routed experts each exactly once. It is the client's part of
partial rollouts as verl, slime and others do them; the engine knows nothing of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    Version,
    VersionSpan,
)
from hotbunk.rollout.errors import ContractError, EngineFailed, RequestRejected, UsageError
from hotbunk.rollout.fingerprint import mix
from hotbunk.rollout.handle import ReplicaHandle


class PartialPolicy(msgspec.Struct, frozen=True):
    """How far a request is carried on.

    ``continuations``: how often at most. ``version_age``: steps between the oldest and the newest
    version in one response, None without limit; a token beyond it is not taken, and the request
    ends with ``abort``. Another incarnation is beyond any limit.
    ``from_prompt``: throw partial tokens away and start again, so that one version makes it all.
    """

    continuations: int = 16
    version_age: int | None = None
    from_prompt: bool = False

    def __post_init__(self) -> None:
        if self.continuations < 0 or (self.version_age is not None and self.version_age < 0):
            raise UsageError("continuations and version_age must not be negative")


class GivenUp(StrEnum):
    """Why a response was not carried on, though it was not whole."""

    TOO_OLD = "too old"  # its versions would lie further apart than ``version_age``
    CUT_OFF = "cut off too often"
    NO_REPLICA = "no replica left"


class PartialResult(msgspec.Struct, frozen=True):
    """A response, whole or given up on.

    ``dropped_tokens`` were made and thrown away (``from_prompt``). ``routed_experts`` holds one
    entry a chunk that brought some, in order. ``resent_tokens``: of prompt and response, sent again
    by continuations and not found in the prefix cache, so their KV was computed twice.
    ``switched_tokens``: the context that stood when weights changed under a request that ran on
    (``keep``); its KV was computed again, or is stale, as the sync's ``clear_cache`` says.
    """

    completion: Completion
    continuations: int = 0
    dropped_tokens: int = 0
    routed_experts: tuple[Any, ...] = ()
    resent_tokens: int = 0
    switched_tokens: int = 0
    given_up: GivenUp | None = None

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that made it, oldest first."""
        return tuple(span.version for span in self.completion.spans)


class PartialRollout:
    """Generates over one or more replicas; a request that is cut off goes on at the next one.

    :param replicas: a list, or what gives those that may be asked now (a manager's ``routable``).
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle] | Callable[[], Sequence[ReplicaHandle]],
        policy: PartialPolicy | None = None,
    ) -> None:
        if callable(replicas):
            self._replicas = replicas
        elif replicas:
            chosen = list(replicas)
            self._replicas = lambda: chosen
        else:
            raise UsageError("a partial rollout needs a replica")
        self._policy = policy or PartialPolicy()
        self._turn = -1

    async def generate(
        self,
        request: GenerateRequest,
        *,
        seen: Callable[[TokenChunk], object] = lambda chunk: None,
    ) -> PartialResult:
        """One response, carried over however many pauses, under one request id.

        Ends with ``abort`` where the policy's limits are reached, or where somebody aborted the
        request itself: then it is not carried on. A replica that cannot serve (it turns requests
        away, was poisoned, lost or died) is left for the next one; when none is left, a response
        that has tokens ends with them, and ``abort``. ``seen`` is told of each chunk as it comes.

        :raises UsageError: the request asks for several responses, or for no token.
        :raises RequestRejected, ContractError, EngineFailed: no replica served so much as a token.
        """
        if request.sampling.n != 1 or request.sampling.max_tokens < 1:
            raise UsageError(
                f"request {request.request_id!r} asks for n={request.sampling.n} and "
                f"max_tokens={request.sampling.max_tokens}; n is 1 here, max_tokens 1 or more"
            )
        so_far = _Response(request, self._policy, seen)
        self._turn += 1
        turn, turned_away, times = self._turn, 0, 0
        while so_far.left:
            handles = self._replicas()
            try:
                if not handles:
                    raise RequestRejected(f"no replica serves request {request.request_id!r} now")
                handle = handles[turn % len(handles)]
                turn += 1
                last = await so_far.read(handle.generate(so_far.remaining(handle)))
            except (RequestRejected, ContractError, EngineFailed) as error:
                turned_away += 1
                if turned_away < len(handles):
                    continue
                if not so_far.ids:
                    raise
                return so_far.result(_ended(request, str(error)), times, GivenUp.NO_REPLICA)
            turned_away = 0
            if so_far.too_old:
                limit = self._policy.version_age
                why = f"its versions would lie more than {limit} steps apart"
                return so_far.result(_ended(request, why), times, GivenUp.TOO_OLD)
            if last is not None and not (
                last.finish_reason is FinishReason.ABORT and last.retryable
            ):
                return so_far.result(last, times)
            if so_far.left == 0:  # the pause came with the last token: nothing to go on with
                break
            if times >= self._policy.continuations:
                why = f"cut off {times + 1} times"
                return so_far.result(_ended(request, why), times, GivenUp.CUT_OFF)
            if self._policy.from_prompt:
                so_far.restart()
            times += 1
        return so_far.result(_ended(request, "", FinishReason.LENGTH), times)


def _ended(
    request: GenerateRequest, error: str, reason: FinishReason = FinishReason.ABORT
) -> TokenChunk:
    return TokenChunk(request.request_id, finish_reason=reason, error=error, retryable=bool(error))


class _Response:
    """What came so far of one request."""

    def __init__(
        self,
        request: GenerateRequest,
        policy: PartialPolicy,
        seen: Callable[[TokenChunk], object],
    ) -> None:
        self.request = request
        self.ids: list[int] = []
        self.too_old = False  # the next token would be too much newer than the first
        self._policy = policy
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._spans: list[VersionSpan] = []
        self._experts: list[Any] = []
        self._cached: int | None = None
        self._dropped = self._resent = self._switched = 0
        self._had_kv = False  # an earlier call has brought tokens
        self._seen = seen

    @property
    def left(self) -> int:
        """Tokens of the budget that are not used up."""
        return self.request.sampling.max_tokens - len(self.ids)

    def remaining(self, handle: ReplicaHandle) -> GenerateRequest:
        """The request for what is missing."""
        sampling: dict[str, Any] = {"max_tokens": self.left}
        seed = self.request.sampling.seed
        if seed is not None and self.ids and not handle.capabilities.positional_draws:
            # The engine would draw the numbers of the beginning again.
            sampling["seed"] = mix(seed % (1 << 64) ^ mix(len(self.ids))) >> 1
        return msgspec.structs.replace(
            self.request,
            prompt=(*self.request.prompt, *self.ids),
            continued=self.request.continued + len(self.ids),
            start_version=self._spans[0].version if self._spans else self.request.start_version,
            sampling=msgspec.structs.replace(self.request.sampling, **sampling),
        )

    async def read(self, chunks: AsyncIterator[TokenChunk]) -> TokenChunk | None:
        """Join what one call brings; its last chunk, or None where we stopped reading.

        :raises EngineFailed: it ended without a finish reason.
        """
        context = len(self.request.prompt) + len(self.ids)
        again, running = self._had_kv, False
        try:
            async for chunk in chunks:
                self._seen(chunk)
                if chunk.token_ids:
                    if again and not running:
                        self._resent += max(0, context - chunk.cached_tokens)
                    elif running and self._spans and self._spans[-1].version != chunk.version:
                        self._switched += len(self.request.prompt) + len(self.ids)
                    self._had_kv = running = True
                    if self._stops_at(chunk.version):
                        return None
                self._add(chunk)
                if chunk.finish_reason is not None:
                    return chunk
        finally:
            # The id is used again, so the call must be over.
            await chunks.aclose()  # type: ignore[attr-defined]
        raise EngineFailed(f"request {self.request.request_id!r} ended without a finish reason")

    def _stops_at(self, version: Version) -> bool:
        """Whether a token of that version must not be joined to those that are here."""
        if not self._spans or self._spans[-1].version == version:
            return False
        if self._policy.from_prompt:
            return True
        limit, first = self._policy.version_age, self._spans[0].version
        if limit is not None:
            same = version.incarnation == first.incarnation
            self.too_old = not same or version.step - first.step > limit
        return self.too_old

    def _add(self, chunk: TokenChunk) -> None:
        start = len(self.ids)
        self.ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._top.extend(chunk.top_logprobs)
        if chunk.routed_experts is not None:
            self._experts.append(chunk.routed_experts)
        if self._cached is None:  # of the prompt; later calls count our own tokens
            self._cached = chunk.cached_tokens
        if chunk.token_ids:
            if self._spans and self._spans[-1].version == chunk.version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(chunk.version, start, len(self.ids)))

    def restart(self) -> None:
        """Forget the tokens: the response begins again."""
        self._dropped += len(self.ids)
        self.ids, self._logprobs, self._top = [], [], []
        self._spans, self._experts, self._cached = [], [], None

    def result(
        self, last: TokenChunk, times: int, given_up: GivenUp | None = None
    ) -> PartialResult:
        """The response, ended as ``last`` did."""
        assert last.finish_reason is not None
        joined = Completion(
            self.request.request_id,
            tuple(self.ids),
            tuple(self._logprobs),
            tuple(self._spans),
            last.finish_reason,
            self._cached or 0,
            last.error,
            last.retryable,
            top_logprobs=tuple(self._top),
        )
        return PartialResult(
            joined,
            times,
            self._dropped,
            tuple(self._experts),
            self._resent,
            self._switched,
            given_up,
        )

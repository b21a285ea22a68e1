"""A client that goes on where a pause cut a request off.

A pause with mode ``abort`` ends requests with their partial tokens. :class:`PartialRollout` sends
the prompt and those tokens again, with what is left of the budget, and joins what comes: tokens,
log-probs, versions, alternatives and routed experts each exactly once. It is the client's part of
partial rollouts as verl, slime and others do them; the engine knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    Version,
    VersionSpan,
    collect,
)
from hotbunk.rollout.errors import RequestRejected, UsageError
from hotbunk.rollout.fingerprint import mix
from hotbunk.rollout.handle import ReplicaHandle


class PartialPolicy(msgspec.Struct, frozen=True):
    """How far a request is carried on.

    ``continuations``: how often at most. ``version_age``: steps between the oldest and the newest
    version in one response, None without limit; beyond it the request ends with ``abort``.
    ``from_prompt``: throw partial tokens away and start again, so that one version makes it all.
    """

    continuations: int = 16
    version_age: int | None = None
    from_prompt: bool = False

    def __post_init__(self) -> None:
        if self.continuations < 0 or (self.version_age is not None and self.version_age < 0):
            raise UsageError("continuations and version_age must not be negative")


class PartialResult(msgspec.Struct, frozen=True):
    """A response, whole or given up on.

    ``dropped_tokens`` were made and thrown away (``from_prompt``). ``routed_experts`` holds one
    entry a chunk that brought some, in order.
    """

    completion: Completion
    continuations: int = 0
    dropped_tokens: int = 0

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that made it, oldest first."""
        return tuple(span.version for span in self.completion.spans)


class PartialRollout:
    """Generates over one or more replicas; a request that is cut off goes on at the next one."""

    def __init__(
        self, replicas: Sequence[ReplicaHandle], policy: PartialPolicy | None = None
    ) -> None:
        if not replicas:
            raise UsageError("a partial rollout needs a replica")
        self._replicas = list(replicas)
        self._policy = policy or PartialPolicy()
        self._turn = 0

    async def generate(self, request: GenerateRequest) -> PartialResult:
        """One response, carried over however many pauses.

        Ends with ``abort`` where the policy's limits are reached, or where somebody aborted the
        request itself: then it is not carried on.

        :raises UsageError: the request asks for several responses.
        :raises RequestRejected: every replica turned it away in a row.
        """
        if request.sampling.n != 1:
            raise UsageError(f"request {request.request_id!r} asks for n={request.sampling.n}")
        so_far = _Response(request)
        rejected = times = 0
        while True:
            handle = self._next()
            try:
                part = await collect(handle.generate(so_far.remaining(times, handle)))
            except RequestRejected:
                rejected += 1
                if rejected >= len(self._replicas):
                    raise
                continue
            rejected = 0
            so_far.add(part)
            carried_on = part.finish_reason is FinishReason.ABORT and part.retryable
            if not carried_on:
                return so_far.result(part, times)
            if so_far.left == 0:  # the pause came with the last token: nothing to go on with
                done = msgspec.structs.replace(part, finish_reason=FinishReason.LENGTH, error="")
                return so_far.result(done, times)
            why = self._given_up(so_far, times)
            if why:
                return so_far.result(msgspec.structs.replace(part, error=why), times)
            if self._policy.from_prompt:
                so_far.restart()
            times += 1

    def _next(self) -> ReplicaHandle:
        self._turn += 1
        return self._replicas[self._turn % len(self._replicas)]

    def _given_up(self, so_far: _Response, times: int) -> str:
        if times >= self._policy.continuations:
            return f"cut off {times + 1} times"
        limit, steps = self._policy.version_age, [span.version.step for span in so_far.spans]
        if limit is not None and steps and max(steps) - min(steps) > limit:
            return f"its versions lie more than {limit} steps apart"
        return ""


class _Response:
    """What came so far of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.spans: list[VersionSpan] = []
        self.cached = 0
        self.dropped = 0
        self._parts = 0

    @property
    def left(self) -> int:
        """Tokens of the budget that are not used up."""
        return self.request.sampling.max_tokens - len(self.ids)

    def remaining(self, times: int, handle: ReplicaHandle) -> GenerateRequest:
        """The request for what is missing."""
        sampling: dict[str, Any] = {"max_tokens": self.left}
        seed = self.request.sampling.seed
        if seed is not None and times and not handle.capabilities.positional_draws:
            # The engine would draw the numbers of the beginning again.
            sampling["seed"] = mix(seed % (1 << 64) ^ mix(times)) >> 1
        return msgspec.structs.replace(
            self.request,
            request_id=f"{self.request.request_id}+{times}" if times else self.request.request_id,
            prompt=(*self.request.prompt, *self.ids),
            sampling=msgspec.structs.replace(self.request.sampling, **sampling),
        )

    def add(self, part: Completion) -> None:
        """Join what one call brought."""
        offset = len(self.ids)
        self.ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        self.top.extend(part.top_logprobs)
        for span in part.spans:
            start, end = span.start + offset, span.end + offset
            if self.spans and self.spans[-1].version == span.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, start, end))
        if self._parts == 0:
            self.cached = part.cached_tokens  # of the prompt; later ones count our own tokens
        self._parts += 1

    def restart(self) -> None:
        """Forget the tokens: the response begins again."""
        self.dropped += len(self.ids)
        self.ids, self.logprobs, self.top, self.spans = [], [], [], []

    def result(self, last: Completion, times: int) -> PartialResult:
        """The response, ended as ``last`` did."""
        joined = msgspec.structs.replace(
            last,
            request_id=self.request.request_id,
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            cached_tokens=self.cached,
            top_logprobs=tuple(self.top),
        )
        return PartialResult(joined, times, self.dropped)

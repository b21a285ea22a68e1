"""Keeps prompts in flight: as many groups as the replay has room for, each a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hotbunk.rollout.contract import FinishReason, GenerateRequest, TokenChunk
from hotbunk.rollout.errors import ContractError, EngineFailed, RequestRejected
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.partial import GivenUp, PartialPolicy, PartialResult, PartialRollout
from hotbunk.trainer_hooks.recipes.config import Overdue, TrainerConfig
from hotbunk.trainer_hooks.recipes.overlap import Overlap
from hotbunk.trainer_hooks.recipes.replay import Group, Replay

ATTEMPTS = 10  # of a request, where replicas say that they serve and it fails
CONTINUATIONS = 64  # of a response: a bound, not a policy
PAUSE = 0.1  # seconds before the second attempt; doubled each time, up to
LONGEST = 2.0
LOOK = 1.0  # seconds between looks, should nothing change

# What a group's task is made from: its requests, and what its responses are worth.
Requests = Callable[[int], tuple[Group, Sequence[GenerateRequest]]]
Score = Callable[[Group], Coroutine[Any, Any, Sequence[float]]]


def partial_policy(config: TrainerConfig) -> PartialPolicy:
    """How a response that a sync cuts off goes on.

    A response whose versions lie further apart than ``max_staleness`` would be left out for its
    age, so it is not carried that far.
    """
    drops = config.overdue is Overdue.DROP and config.partial_rollout
    return PartialPolicy(
        CONTINUATIONS,
        config.max_staleness if drops else None,
        from_prompt=not config.partial_rollout,
    )


class Producer:
    """Starts groups in the order of their numbers, from ``first`` on.

    :param routable: the replicas that may be asked now.
    """

    def __init__(
        self,
        config: TrainerConfig,
        replay: Replay,
        routable: Callable[[], Sequence[ReplicaHandle]],
        requests: Requests,
        score: Score,
        overlap: Overlap,
        *,
        first: int,
    ) -> None:
        self._replay = replay
        self._routable = routable
        self._requests = requests
        self._score = score
        self._overlap = overlap
        self._next = first
        self._whole = not config.partial_rollout
        self._rollout = PartialRollout(routable, partial_policy(config))
        self._tasks: dict[asyncio.Task[None], Group] = {}

    async def run(self) -> None:
        """Start groups as there is room, until cancelled; then all of them are ended.

        :raises ConfigError: a reward function failed.
        :raises RequestRejected, ContractError, EngineFailed: a request failed again and again.
        """
        try:
            while True:
                while self._replay.room():
                    self._start()
                self._cut()
                for task in [task for task in self._tasks if task.done()]:
                    del self._tasks[task]
                    if not task.cancelled():
                        task.result()
                await self._replay.change(LOOK)
        finally:
            await self._end(list(self._tasks))

    def _start(self) -> None:
        group, requests = self._requests(self._next)
        self._next += 1
        self._replay.start(group)
        task = asyncio.create_task(self._make(group, requests))
        task.add_done_callback(lambda done: self._replay.wake())
        self._tasks[task] = group

    def _cut(self) -> None:
        """End what could only be left out: nobody computes its context again after the next sync."""
        doomed = self._replay.doomed()
        for task, group in self._tasks.items():
            # One whose responses are whole waits for its reward only: it is dropped as it ends.
            if group in doomed and not group.results and not task.done():
                task.cancel()
                self._replay.cut(group)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _make(self, group: Group, requests: Sequence[GenerateRequest]) -> None:
        """A group's whole way, up to its rewards."""
        making = [asyncio.create_task(self._respond(group, request)) for request in requests]
        try:
            results = await asyncio.gather(*making)
        finally:
            await self._end(making)
        counts = self._replay.counts
        counts.continuations += sum(r.continuations for r in results)
        counts.tokens_lost += sum(r.dropped_tokens for r in results)
        counts.tokens_resent += sum(r.resent_tokens for r in results)
        counts.tokens_switched += sum(r.switched_tokens for r in results)
        group.results = results
        group.tokens = sum(len(r.completion.token_ids) for r in results)
        group.versions = {
            r.completion.request_id: min(r.versions) for r in results if r.completion.spans
        }
        for response in results:
            if not response.completion.token_ids:
                raise EngineFailed(
                    f"request {response.completion.request_id!r} ended without a token"
                )
        if any(r.given_up is GivenUp.TOO_OLD for r in results):
            self._replay.cut(group)
            return
        if any(r.completion.finish_reason is FinishReason.ABORT for r in results):
            self._replay.fail(group)
            return
        group.rewards = await self._score(group)
        self._replay.finish(group)

    async def _respond(self, group: Group, request: GenerateRequest) -> PartialResult:
        """One response. Where no replica serves, it waits for one."""
        key = request.request_id

        def seen(chunk: TokenChunk) -> None:
            self._replay.counts.tokens += len(chunk.token_ids)
            group.tokens += len(chunk.token_ids)
            if not chunk.token_ids:
                return
            if self._whole:  # one version makes it all, the last that was seen
                group.versions[key] = chunk.version
            else:
                group.versions.setdefault(key, chunk.version)

        wait = PAUSE
        for attempt in range(ATTEMPTS):
            while not self._routable():
                await self._replay.change(PAUSE)
            try:
                with self._overlap.request():
                    result = await self._rollout.generate(request, seen=seen)
            except (RequestRejected, ContractError, EngineFailed):
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                if result.given_up is not GivenUp.NO_REPLICA:
                    return result
                self._replay.counts.tokens_lost += len(result.completion.token_ids)
                self._replay.counts.tokens_lost += result.dropped_tokens
                self._replay.counts.tokens_resent += result.resent_tokens
                self._replay.counts.tokens_switched += result.switched_tokens
            group.versions.pop(key, None)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST)
        raise EngineFailed(f"request {key!r} was not finished in {ATTEMPTS} attempts")

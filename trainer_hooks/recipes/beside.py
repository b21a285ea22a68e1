"""GRPO with generation beside training: ``trainer=grpo_async``.

    producer    as many groups in flight as staleness allows (replay.py)   engines, each a process
    scorer      rewards, in a thread of their own, as groups end
    this        takes finished groups, trains, leaves a copy of its weights
    publisher   sends the newest copy: pause(keep | abort | wait), switch, go on
    supervisor  replaces replicas that die; the publisher brings their successors up to date

With ``max_staleness`` 0 nothing overlaps, and a run is the one that ``trainer=grpo`` makes. Above
it prompts and seeds are still functions of seed and group number, but which version makes a token,
and which groups end first, is a matter of time: such a run is not repeated bit by bit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hotbunk.checkpoint_engine.supervisor import Supervision, Supervisor
from hotbunk.rollout.contract import GenerateRequest, PauseMode
from hotbunk.rollout.errors import DeadlineExceeded, EngineFailed, ReplicaLost
from hotbunk.trainer_hooks.recipes.grpo import Batch, group_advantages, make_batch
from hotbunk.trainer_hooks.recipes.job import Job, Parts, Stopping, seconds_of
from hotbunk.trainer_hooks.recipes.meter import TOTAL
from hotbunk.trainer_hooks.recipes.overlap import Overlap, Shares, SyncPhases
from hotbunk.trainer_hooks.recipes.producer import Producer
from hotbunk.trainer_hooks.recipes.publish import Publisher, Sent
from hotbunk.trainer_hooks.recipes.replay import (
    Group,
    Replay,
    Snapshot,
    percentile,
    staleness_counts,
)
from hotbunk.trainer_hooks.recipes.successors import Successors
from hotbunk.trainer_hooks.recipes.tasks import Sample
from hotbunk.trainer_hooks.recipes.threads import OneThread, in_thread

log = logging.getLogger(__name__)
LOOK = 0.2  # seconds between looks at whether to stop
SAMPLE = 0.2  # seconds between samples of memory and requests
FLUSH = 60.0  # seconds for the last version to reach the engines, beyond a sync's own deadline


class BesideJob(Job):
    """See the module."""

    def __init__(self, parts: Parts) -> None:
        self._overlap = Overlap()
        phases = SyncPhases(parts.recorder, self._overlap, self._in_transaction)
        super().__init__(parts, phases, None)
        first = self.version(self.plan.first_step)
        config = self.config
        self._successors = Successors(parts.handles, parts.stack)
        self._replay = Replay(config.prompts, config.max_staleness, first, first, config.overdue)
        self._publisher = Publisher(self.hooks, self.learner.model, sent=self._replay.sent)
        self._supervisor = Supervisor(
            self.hooks.manager,
            self._successors.start,
            Supervision(most_deaths=config.restarts, every=LOOK),
        )
        self._producer = Producer(
            config,
            self._replay,
            self.hooks.manager.routable,
            self._group,
            self._score,
            self._overlap,
            first=first.step * config.prompts,
        )
        self._scorer = OneThread("rewards")
        self._drawn: tuple[int, list[Sample], list[GenerateRequest]] | None = None
        self._background: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        await self._publisher.begin(self._replay.now)
        self.settle()
        self.meter.watch("step")
        self._stack.push_async_callback(self._stop)
        works = (self._publisher, self._supervisor, self._producer)
        for work in (*(one.run() for one in works), self._sample()):
            task = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._replay.wake())
            self._background.append(task)

    async def step(self, number: int, stopping: Stopping) -> dict[str, object] | None:
        clock = asyncio.get_running_loop().time
        began = clock()
        with self.recorder.phase("wait"):
            groups = await self._take(stopping)
        if groups is None:
            return None
        trained = self.version(number)
        ages = staleness_counts(groups, trained)
        batch, rewards = self._batch(groups, number)
        with self.recorder.phase("train"), self._overlap.training():
            stats = await in_thread(self.learner.step, batch, number)
        self.check(number, stats)
        with self.recorder.phase("publish"):
            await self._publisher.publish(self.version(number + 1))
        generation = await self.gauges.take()
        await self._look_at_memory()
        # One moment: nothing is awaited between here and the record.
        peaks = self.meter.peaks("step")
        self.meter.watch("step")
        timings = self.recorder.take_timings()
        seconds = clock() - began
        oldest = [v for g in groups for v in g.versions.values()]
        newest = max(r.versions[-1] for g in groups for r in g.results)
        best = groups[0].results[0].completion
        metrics: dict[str, object] = {
            **self.learned(rewards, stats),
            "rollout/version": newest.step,
            "rollout/incarnation": newest.incarnation,
            "rollout/versions": len({v for g in groups for r in g.results for v in r.versions}),
            "rollout/version_oldest": min(oldest).step,
            "rollout/staleness_p50": percentile(ages, 0.5),
            "rollout/staleness_p99": percentile(ages, 0.99),
            "rollout/staleness_max": max(ages),
            "rollout/fresh_tokens": stats.fresh,
            "rollout/trained_tokens": sum(ages.values()),
            **self._generation(self._replay.snapshot(), self._overlap.take(), seconds),
            **{f"rollout/{name}": value for name, value in generation.items()},
            "rollout/sample": f"{groups[0].sample.prompt} -> {self.text(best)}"[:200],
            "train/weight": stats.weight,
            "train/truncated": stats.truncated,
            **_syncs(self._publisher.take()),
            "rollout/restarts": self._successors.take(),
            # None where no sample could be taken: a replica was away.
            "memory/weights_bytes": peaks.get("weights"),
            "memory/kv_cache_bytes": peaks.get("kv_cache"),
            "memory/trainer_bytes": peaks.get("trainer"),
            "memory/peak_bytes": peaks.get(TOTAL),
            **seconds_of(
                {n: timings.get(n, 0.0) for n in ("wait", "train", "publish")}, "timing_s"
            ),
            "timing_s/step": seconds,
        }
        self.recorder.record(number, metrics)
        return metrics

    async def finish(self) -> None:
        """The last version reaches the engines, too."""
        limit = self.plan.config.sync.longest + FLUSH
        try:
            async with asyncio.timeout(limit):
                while not self._publisher.idle:
                    self._raise_failed()
                    await self._replay.change(LOOK)
        except TimeoutError:
            raise DeadlineExceeded("the last sync", limit) from None

    # -- taking a batch -----------------------------------------------------------------------

    async def _take(self, stopping: Stopping) -> list[Group] | None:
        """The next batch. None: the run is to stop.

        :raises DeadlineExceeded: there was none within ``patience``.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self.config.patience
        while True:
            self._raise_failed()
            groups = self._replay.take()
            if groups is not None:
                return groups
            if stopping():
                return None
            left = until - clock()
            if left <= 0:
                raise DeadlineExceeded(
                    "waiting for a batch of finished groups",
                    self.config.patience,
                    remedy=f"{self._replay.describe()}; trainer.patience is how long that may take",
                )
            await self._replay.change(min(LOOK, left))

    def _raise_failed(self) -> None:
        for task in self._background:
            if task.done():
                task.result()

    def _batch(self, groups: Sequence[Group], number: int) -> tuple[Batch, torch.Tensor]:
        """Groups side by side, as version ``number`` trains them; and their rewards."""
        rewards = torch.tensor([reward for group in groups for reward in group.rewards])
        completions = [result.completion for group in groups for result in group.results]
        prompts = [group.prompt for group in groups for _ in group.results]
        advantages = group_advantages(rewards, self.config.group_size)
        pad = self.bundle.tokenizer.pad_id
        sync = self.plan.config.sync
        batch = make_batch(
            prompts,
            completions,
            advantages,
            pad,
            number,
            stale_kv=sync.pause is PauseMode.KEEP and not sync.clear_cache,
        )
        return batch, rewards

    # -- for the producer and the publisher ---------------------------------------------------

    def _group(self, number: int) -> tuple[Group, Sequence[GenerateRequest]]:
        """Group ``number``: one prompt of step ``number // prompts``, as the other recipe draws it."""
        step, index = divmod(number, self.config.prompts)
        if self._drawn is None or self._drawn[0] != step:
            samples, encoded = self.draw(step)
            self._drawn = (step, samples, self.requests(step, encoded))
        _, samples, requests = self._drawn
        size = self.config.group_size
        mine = requests[index * size : (index + 1) * size]
        return Group(number, samples[index], mine[0].prompt), mine

    async def _score(self, group: Group) -> Sequence[float]:
        texts = [self.text(result.completion) for result in group.results]

        def rewards() -> list[float]:
            return [self.plan.task.reward(group.sample, text) for text in texts]

        return await self._scorer.call(rewards)

    def _in_transaction(self) -> float:
        there, sync = len(self.hooks.manager.replicas), self.plan.config.sync
        at_once = 1 if sync.lazy else sync.at_once(there)
        return min(1.0, at_once / there) if there else 1.0

    # -- looking ------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE)
            await self._look_at_memory()
            await self.gauges.sample()

    async def _look_at_memory(self) -> None:
        with suppress(ReplicaLost, EngineFailed):  # that is the publisher's to notice
            await self.meter.sample()

    def _generation(self, now: Snapshot, shares: Shares, seconds: float) -> dict[str, Any]:
        grown = dict(now.grown)
        switched = grown.pop("tokens_switched")
        cleared = self.plan.config.sync.clear_cache
        tokens = grown.pop("tokens")
        return {
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / seconds,
            "rollout/tokens_recomputed": grown.pop("tokens_resent") + switched * cleared,
            "rollout/tokens_stale_kv": switched * (not cleared),
            **{f"rollout/{name}": count for name, count in grown.items()},
            "rollout/backlog": now.backlog,
            "rollout/in_flight": now.in_flight,
            "rollout/stalled_s": shares.stalled,
            "rollout/generating_s": shares.generating,
            "rollout/overlap": shares.overlap,
        }

    async def _stop(self) -> None:
        """Whatever happened: nothing is in flight, and nothing is sent any more."""
        self._scorer.close()
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        for task in self._background:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.debug("ended by: %s", error)


def _syncs(sent: Sent) -> dict[str, object]:
    return {
        "rollout/superseded": sent.superseded,
        "sync/count": sent.syncs,
        "sync/resent": sent.resent,
        "sync/bytes": sent.nbytes,
        "sync/buckets": sent.buckets,
        "sync/seconds": sent.seconds,
        **seconds_of(sent.phases, "sync"),
    }

"""GRPO with trainer and engines taking turns on the same memory.

Uses only the contract and the hooks; everything an engine does is behind a replica's handle.

An engine that dies costs time and nothing else: what it owed is generated again, token for token,
once its successor has the same version. Successors are started when the trainer has let go.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import torch

from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import Completion, GenerateRequest, collect
from hotbunk.rollout.handle import LocalHandle, ReplicaHandle
from hotbunk.trainer_hooks.recipes.grpo import Batch, group_advantages, make_batch
from hotbunk.trainer_hooks.recipes.job import (
    Job,
    Parts,
    StepPhases,
    Stopping,
    metered,
    seconds_of,
)
from hotbunk.trainer_hooks.recipes.judge import NAME as JUDGE
from hotbunk.trainer_hooks.recipes.judge import Judge
from hotbunk.trainer_hooks.recipes.meter import TOTAL
from hotbunk.trainer_hooks.recipes.successors import TurnsKeeper, only_deaths
from hotbunk.trainer_hooks.recipes.tasks import Sample
from hotbunk.trainer_hooks.recipes.threads import in_thread

VALIDATE = "validate"  # a phase


class TurnsJob(Job):
    """Generate, sleep, train, wake: ``trainer=grpo``."""

    tenants: tuple[str, ...] = ("trainer",)  # tags of memory on the trainer's side
    compute: tuple[str, ...] = ("train",)  # phases in which it computes

    def __init__(self, parts: Parts) -> None:
        share = metered(parts)
        super().__init__(parts, StepPhases(parts.recorder), share)
        self._share = share
        self._judge: Judge | None = None
        self._keeper: TurnsKeeper | None = None
        if not any(isinstance(handle, LocalHandle) for handle in parts.handles):
            self._keeper = TurnsKeeper(
                self.hooks.manager, parts.handles, parts.stack, self.config.restarts
            )

    async def begin(self) -> None:
        await self.hooks.manager.sleep_replicas()
        if self.plan.config.judge.used:
            self._judge = await Judge.start(self.plan.config.judge, self._stack)
            self.meter.add(JUDGE, self._judge.handle)
        await self.sync(self.plan.first_step)
        self.settle()

    async def finish(self) -> None:
        """Nothing is: engines hold what the trainer holds."""

    async def sync(self, step: int) -> SyncReport:
        """The trainer's weights become the engines', as version ``step``; also those of successors."""
        while True:
            await self._replace()
            try:
                return await self.hooks.on_weights_ready(self.learner.source, self.version(step))
            except errors.SyncFailed as error:
                if not only_deaths(error) or not await self._reaped():
                    raise

    async def step(self, number: int, stopping: Stopping) -> dict[str, object]:
        config, recorder, meter = self.config, self.recorder, self.meter
        clock = asyncio.get_running_loop().time
        began = clock()
        meter.watch("step")
        drawn, encoded = self.draw(number)
        requests = self.requests(number, encoded)
        async with meter.sampling(also=self.gauges.sample):
            with recorder.phase("generate"):
                completions = await self._rollout(number, requests)
        generation = await self.gauges.take()
        await self._despite_deaths(self.hooks.on_rollout_end)
        asleep = await meter.sample()

        texts = [self.text(c) for c in completions]
        samples = [s for s in drawn for _ in range(config.group_size)]
        rewards = await self._rewards(samples, texts)
        prompts = [request.prompt for request in requests]
        batch = make_batch(
            prompts, completions, torch.zeros(len(rewards)), self.bundle.tokenizer.pad_id
        )
        advantages, appraisal = await self.appraise(number, batch, rewards)
        batch = dataclasses.replace(batch, advantages=advantages)
        await self._despite_deaths(self.hooks.on_train_begin)
        async with meter.sampling():
            with recorder.phase("train"):
                stats = await in_thread(self.learner.step, batch, number)
        await self.hooks.on_train_end()
        self.check(number, stats)

        meter.watch("update")
        report = await self.sync(number + 1)
        update_peaks = meter.peaks("update")  # until the trainer let go; KV came back after that
        await meter.sample()
        validated = await self._validated(number + 1)
        peaks = meter.peaks("step")
        timings = recorder.take_timings()
        tokens = int(batch.mask.sum())
        served = {span.version for c in completions for span in c.spans}
        metrics: dict[str, object] = {
            **self.learned(rewards, stats),
            **appraisal,
            **validated,
            "rollout/version": max(served).step,
            "rollout/incarnation": max(served).incarnation,
            "rollout/versions": len(served),
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / timings["generate"],
            **{f"rollout/{name}": value for name, value in generation.items()},
            "rollout/restarts": self._keeper.successors.take() if self._keeper else 0,
            "rollout/sample": f"{samples[0].prompt} -> {texts[0]}"[:200],
            "sync/bytes": report.nbytes,
            "sync/buckets": sum(o.update.buckets for o in report.outcomes if o.update),
            "memory/weights_bytes": peaks["weights"],
            "memory/kv_cache_bytes": peaks["kv_cache"],
            **{f"memory/{tag}_bytes": peaks[tag] for tag in (*self.tenants, JUDGE) if tag in peaks},
            "memory/bucket_bytes": peaks["bucket"],
            "memory/weights_bytes_asleep": asleep["weights"],
            "memory/kv_cache_bytes_asleep": asleep["kv_cache"],
            "memory/peak_bytes": peaks[TOTAL],
            "memory/update_peak_bytes": update_peaks[TOTAL],
            **{
                f"timing_s/{name}": timings.get(name, 0.0)
                for name in ("generate", "sleep", *self.compute, JUDGE, VALIDATE)
                if name in timings or name not in (JUDGE, VALIDATE)
            },
            "timing_s/update_weights": report.seconds,
            **seconds_of(report.phases, "phase_s"),
            "timing_s/step": clock() - began,
        }
        recorder.record(number, metrics)
        return metrics

    async def appraise(
        self, number: int, batch: Batch, rewards: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, object]]:
        """What responses were worth, [responses] or [responses, tokens - 1]; and metrics of it.

        Engines and the policy's trainer have let go of their memory.
        """
        return group_advantages(rewards, self.config.group_size), {}

    async def _rewards(self, samples: Sequence[Sample], texts: Sequence[str]) -> torch.Tensor:
        """What responses are worth, [responses]. Engines and trainer are away."""
        own = torch.tensor(
            [self.plan.task.reward(s, t) for s, t in zip(samples, texts, strict=True)]
        )
        if self._judge is None:
            return own
        with self.recorder.phase(JUDGE):
            async with self.meter.sampling():
                judged = torch.tensor(await self._judge.score(samples, texts))
        share = self.plan.config.judge.weight
        return share * judged + (1 - share) * own

    async def _validated(self, done: int) -> dict[str, object]:
        """After ``done`` steps, where one is due: metrics of greedy answers to held-out prompts.

        A judge needs the device, so engines sleep while it speaks; the same version wakes them again.
        """
        every = self.config.validate_every
        if not every or done % every:
            return {}
        with self.recorder.phase(VALIDATE):
            samples, requests = self.validation()
            await self.hooks.on_validation_begin()
            completions = await self._rollout(done, requests)
            texts = [self.text(c) for c in completions]
            if self._judge is not None:
                await self._despite_deaths(self.hooks.on_validation_end)
            rewards = await self._rewards(samples, texts)
            if self._judge is not None:
                await self.sync(done)
        unread = {"judge/unreadable": self._judge.unreadable} if self._judge else {}
        return {
            "validation/reward": float(rewards.mean()),
            "validation/sample": f"{samples[0].prompt} -> {texts[0]}"[:200],
            **unread,
        }

    # -- generation ---------------------------------------------------------------------------

    async def _rollout(self, number: int, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """One response a request, spread over the replicas that serve version ``number``.

        :raises EngineFailed: a response that was not finished, by a replica that lives.
        """
        done: dict[str, Completion] = {}
        while left := [request for request in requests if request.request_id not in done]:
            try:
                await self.hooks.on_rollout_begin()
                failure = await self._generate(left, done)
            except errors.SessionError as error:
                failure = error
            if failure is not None:
                if not await self._reaped():
                    raise failure
                await self._despite_deaths(self.hooks.on_rollout_end)
                await self.sync(number)
        return [done[request.request_id] for request in requests]

    async def _generate(
        self, requests: Sequence[GenerateRequest], done: dict[str, Completion]
    ) -> errors.HotbunkError | None:
        """Put what was finished into ``done``. What kept a request from it, if there is one."""
        handles = self.hooks.manager.replicas
        results = await asyncio.gather(
            *(_one(handles[i % len(handles)], request) for i, request in enumerate(requests))
        )
        failure = None
        for result in results:
            if isinstance(result, Completion):
                done[result.request_id] = result
            else:
                failure = failure or result
        return failure

    # -- who dies -----------------------------------------------------------------------------

    async def _reaped(self) -> bool:
        """Whether a replica had died, and is taken out."""
        return self._keeper is not None and await self._keeper.reap()

    async def _replace(self) -> None:
        """Successors for those that died, asleep like everybody; the trainer lets go for them."""
        if self._keeper is None:
            return
        await self._keeper.reap()
        while self._keeper.missing:
            await self._share.offload()
            await self._keeper.replace()
            await self._despite_deaths(self.hooks.manager.sleep_replicas)

    async def _despite_deaths(self, verb: Callable[[], Awaitable[object]]) -> None:
        """Something that goes to all replicas, again without who died in it."""
        while True:
            try:
                await verb()
                return
            except errors.ReplicaLost:
                if not await self._reaped():
                    raise


async def _one(handle: ReplicaHandle, request: GenerateRequest) -> Completion | errors.HotbunkError:
    """Its response, or why there is none."""
    try:
        completion = await collect(handle.generate(request))
    except errors.ReplicaLost as error:
        return error
    if completion.error or not completion.token_ids:
        return errors.EngineFailed(
            f"request {completion.request_id!r} was not finished: "
            f"{completion.error or completion.finish_reason.value}"
        )
    return completion

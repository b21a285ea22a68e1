"""GRPO with trainer and engines taking turns on the same memory.

Uses only the contract and the hooks; everything an engine does is behind a replica's handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import Completion, GenerateRequest, collect
from hotbunk.trainer_hooks.recipes.grpo import group_advantages, make_batch
from hotbunk.trainer_hooks.recipes.job import (
    Job,
    Parts,
    StepPhases,
    Stopping,
    metered,
    seconds_of,
)
from hotbunk.trainer_hooks.recipes.meter import TOTAL
from hotbunk.trainer_hooks.recipes.threads import in_thread


class TurnsJob(Job):
    """Generate, sleep, train, wake: ``trainer=grpo``."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, StepPhases(parts.recorder), metered(parts))
        self.handles = parts.handles

    async def begin(self) -> None:
        await self.hooks.manager.sleep_replicas()
        await self.sync(self.plan.first_step)
        self.settle()

    async def finish(self) -> None:
        """Nothing is: engines hold what the trainer holds."""

    async def sync(self, step: int) -> SyncReport:
        """The trainer's weights become the engines', as version ``step``."""
        return await self.hooks.on_weights_ready(self.learner.source, self.version(step))

    async def step(self, number: int, stopping: Stopping) -> dict[str, object]:
        config, recorder, meter = self.config, self.recorder, self.meter
        clock = asyncio.get_running_loop().time
        began = clock()
        meter.watch("step")
        await self.hooks.on_rollout_begin()
        drawn, encoded = self.draw(number)
        requests = self.requests(number, encoded)
        async with meter.sampling(also=self.gauges.sample):
            with recorder.phase("generate"):
                completions = await self._generate(requests)
        generation = await self.gauges.take()
        await self.hooks.on_rollout_end()
        asleep = await meter.sample()

        await self.hooks.on_train_begin()
        texts = [self.text(c) for c in completions]
        samples = [s for s in drawn for _ in range(config.group_size)]
        rewards = torch.tensor(
            [self.plan.task.reward(s, t) for s, t in zip(samples, texts, strict=True)]
        )
        advantages = group_advantages(rewards, config.group_size)
        prompts = [request.prompt for request in requests]
        batch = make_batch(prompts, completions, advantages, self.bundle.tokenizer.pad_id)
        async with meter.sampling():
            with recorder.phase("train"):
                stats = await in_thread(self.learner.step, batch, number)
        await self.hooks.on_train_end()
        self.check(number, stats)

        meter.watch("update")
        report = await self.sync(number + 1)
        update_peaks = meter.peaks("update")  # until the trainer let go; KV came back after that
        await meter.sample()
        peaks = meter.peaks("step")
        timings = recorder.take_timings()
        tokens = int(batch.mask.sum())
        served = {span.version for c in completions for span in c.spans}
        metrics: dict[str, object] = {
            **self.learned(rewards, stats),
            "rollout/version": max(served).step,
            "rollout/incarnation": max(served).incarnation,
            "rollout/versions": len(served),
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / timings["generate"],
            **{f"rollout/{name}": value for name, value in generation.items()},
            "rollout/sample": f"{samples[0].prompt} -> {texts[0]}"[:200],
            "sync/bytes": report.nbytes,
            "sync/buckets": sum(o.update.buckets for o in report.outcomes if o.update),
            "memory/weights_bytes": peaks["weights"],
            "memory/kv_cache_bytes": peaks["kv_cache"],
            "memory/trainer_bytes": peaks["trainer"],
            "memory/bucket_bytes": peaks["bucket"],
            "memory/weights_bytes_asleep": asleep["weights"],
            "memory/kv_cache_bytes_asleep": asleep["kv_cache"],
            "memory/peak_bytes": peaks[TOTAL],
            "memory/update_peak_bytes": update_peaks[TOTAL],
            **{
                f"timing_s/{name}": timings.get(name, 0.0)
                for name in ("generate", "sleep", "train")
            },
            "timing_s/update_weights": report.seconds,
            **seconds_of(report.phases, "phase_s"),
            "timing_s/step": clock() - began,
        }
        recorder.record(number, metrics)
        return metrics

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """One response a request, spread over the replicas.

        :raises EngineFailed: a response that was not finished.
        """
        done = await asyncio.gather(
            *(
                collect(self.handles[i % len(self.handles)].generate(request))
                for i, request in enumerate(requests)
            )
        )
        for completion in done:
            if completion.error or not completion.token_ids:
                raise errors.EngineFailed(
                    f"request {completion.request_id!r} was not finished: "
                    f"{completion.error or completion.finish_reason.value}"
                )
        return list(done)

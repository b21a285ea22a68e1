"""The main job: GRPO, trainer and engines taking turns on the same memory.

Uses only the contract and the hooks; everything an engine does is behind a replica's handle.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

import msgspec
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout import errors
from hotbunk.rollout.arena import MemoryPool
from hotbunk.rollout.contract import Completion, GenerateRequest, Sampling, Version, collect
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.memory import host_pool
from hotbunk.rollout.registry import load_transport
from hotbunk.trainer_hooks.hooks import TrainerHooks
from hotbunk.trainer_hooks.recipes import checkpoint
from hotbunk.trainer_hooks.recipes.config import TransportConfig, save
from hotbunk.trainer_hooks.recipes.gauges import GenerationGauges
from hotbunk.trainer_hooks.recipes.grpo import group_advantages, make_batch
from hotbunk.trainer_hooks.recipes.learner import Learner, StepStats
from hotbunk.trainer_hooks.recipes.meter import TOTAL, MemoryMeter, MeteredShare
from hotbunk.trainer_hooks.recipes.models import ModelBundle, build_tiny, encode_sample, load_bundle
from hotbunk.trainer_hooks.recipes.preflight import TINY, Plan, backend_options
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder
from hotbunk.trainer_hooks.recipes.replicas import start_replicas
from hotbunk.trainer_hooks.recipes.report import write_report
from hotbunk.trainer_hooks.recipes.tasks import Sample

log = logging.getLogger(__name__)


class _Observer:
    """The manager's phases are phases of the step."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)


async def train(
    plan: Plan,
    *,
    on_step: Callable[[Mapping[str, object]], None] = lambda metrics: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Path:
    """Run a plan to its end, or until ``stopping`` says so between two steps.

    Leaves a run directory with config.yaml, metrics.jsonl, timeline.json, report.html and a
    checkpoint, and no thread or memory behind.

    :returns: the run directory.
    :raises HotbunkError: see the recipe's parts; what was recorded until then stays.
    """
    async with AsyncExitStack() as stack:
        job = await _Job.start(plan, stack)
        number = saved = plan.first_step
        while number < plan.config.steps and not stopping():
            on_step(await job.step(number))
            number += 1
            every = plan.config.trainer.save_every
            if every and number % every == 0:
                saved = await job.save(number)
        if number > saved:
            await job.save(number)
    write_report(plan.run_dir)
    return plan.run_dir


class _Job:
    """Everything a run holds, from :meth:`start` until its exit stack unwinds."""

    def __init__(
        self,
        plan: Plan,
        bundle: ModelBundle,
        learner: Learner,
        handles: Sequence[ReplicaHandle],
        hooks: TrainerHooks,
        recorder: RunRecorder,
        meter: MemoryMeter,
        gauges: GenerationGauges,
    ) -> None:
        self.plan = plan
        self.bundle = bundle
        self.learner = learner
        self.handles = handles
        self.hooks = hooks
        self.recorder = recorder
        self.meter = meter
        self.gauges = gauges
        self._files = checkpoint.model_files(bundle.model_dir)
        self._mismatches = 0

    @staticmethod
    async def start(plan: Plan, stack: AsyncExitStack) -> _Job:
        """Build trainer and engine, and bring the first version across."""
        config = plan.config
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.seed)
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        save(config, plan.run_dir / "config.yaml")
        bundle = load_bundle(plan.model_dir or _make_tiny(plan))
        recorder = RunRecorder(plan.run_dir, resume_step=plan.first_step if plan.resumed else None)
        stack.callback(recorder.close)
        pool = host_pool()
        stack.callback(pool.close)
        trainer = config.trainer
        if pool.cannot_release and trainer.offload:
            log.warning("the trainer's memory is not released: %s", pool.cannot_release)
            trainer = msgspec.structs.replace(trainer, offload=False)
        learner = Learner(bundle.model_dir, trainer, pool)
        if plan.resumed is not None:
            checkpoint.load_optimizer(plan.resumed, learner.optimizer)
        handles = await start_replicas(config.rollout, backend_options(plan), stack)
        frees, able = config.rollout.free_cache_engine, handles[0].capabilities.release
        if frees and not able:
            log.warning("the engine's memory is not released: %s", able.how)
            frees = False
        meter = MemoryMeter(handles, pool, recorder)
        transport = _transport(config.transport, pool, meter)
        stack.push_async_callback(transport.close)
        manager = CheckpointEngineManager(
            handles,
            transport,
            deployment=config.rollout.deployment,
            policy=config.sync,
            free_cache_engine=frees,
            observer=_Observer(recorder),
        )
        hooks = TrainerHooks(manager, MeteredShare(learner.share, meter))
        gauges = GenerationGauges(handles, recorder)
        job = _Job(plan, bundle, learner, handles, hooks, recorder, meter, gauges)
        await manager.sleep_replicas()
        await job.sync(plan.first_step)
        recorder.take_timings()
        # What exists now stays: the collector need not walk it again at every step.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        return job

    async def sync(self, step: int) -> SyncReport:
        """The trainer's weights become the engines', as version ``step``."""
        version = Version(self.plan.incarnation, step)
        return await self.hooks.on_weights_ready(self.learner.source, version)

    async def step(self, number: int) -> dict[str, object]:
        """Generate, train, update.

        :returns: the step's metrics, as written to metrics.jsonl.
        :raises LogprobMismatch: in strict mode, where trainer and engine disagree.
        """
        config, recorder, meter = self.plan.config.trainer, self.recorder, self.meter
        clock = asyncio.get_running_loop().time
        began = clock()
        meter.watch("step")
        await self.hooks.on_rollout_begin()
        samples, prompts = self._draw(number)
        async with meter.sampling(also=self.gauges.sample):
            with recorder.phase("generate"):
                completions = await self._generate(prompts, number)
        generation = await self.gauges.take()
        await self.hooks.on_rollout_end()
        asleep = await meter.sample()

        await self.hooks.on_train_begin()
        texts = [self._text(c) for c in completions]
        rewards = torch.tensor(
            [self.plan.task.reward(s, t) for s, t in zip(samples, texts, strict=True)]
        )
        advantages = group_advantages(rewards, config.group_size)
        batch = make_batch(prompts, completions, advantages, self.bundle.tokenizer.pad_id)
        async with meter.sampling():
            with recorder.phase("train"):
                stats = await asyncio.to_thread(self.learner.step, batch, number)
        await self.hooks.on_train_end()
        self._check(number, stats)

        meter.watch("update")
        report = await self.sync(number + 1)
        update_peaks = meter.peaks("update")  # until the trainer let go; KV came back after that
        await meter.sample()
        peaks = meter.peaks("step")
        timings = recorder.take_timings()
        tokens = int(batch.mask.sum())
        served = {span.version for c in completions for span in c.spans}
        metrics: dict[str, object] = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "rollout/version": max(served).step,
            "rollout/incarnation": max(served).incarnation,
            "rollout/versions": len(served),
            "rollout/logprob_diff_max": stats.logprob_diff_max,
            "rollout/logprob_diff_mean": stats.logprob_diff_mean,
            "rollout/logprob_mismatches": self._mismatches,
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / timings["generate"],
            **{f"rollout/{name}": value for name, value in generation.items()},
            "rollout/sample": f"{samples[0].prompt} -> {texts[0]}"[:200],
            "train/loss": stats.loss,
            "train/grad_norm": stats.grad_norm,
            "train/kl": stats.kl,
            "train/clipped": stats.clipped,
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
            **{f"phase_s/{name}": seconds for name, seconds in report.phases.items()},
            "timing_s/step": clock() - began,
        }
        recorder.record(number, metrics)
        return {"step": number, **metrics}

    async def save(self, done: int) -> int:
        """Write a checkpoint after ``done`` steps. The trainer's share is restored for it."""
        await self.learner.share.restore()
        checkpoint.save_checkpoint(
            self.plan.run_dir,
            self._files,
            self.learner.model,
            self.learner.optimizer,
            checkpoint.TrainerState(done, self.plan.incarnation),
        )
        await self.learner.share.offload()
        return done

    def _draw(self, number: int) -> tuple[list[Sample], list[list[int]]]:
        """The step's prompts, each ``group_size`` times: a function of seed and step alone."""
        config = self.plan.config
        drawn = self.plan.task.sample(
            random.Random(f"{config.seed}/{number}"), config.trainer.prompts
        )
        encoded = [encode_sample(self.bundle.tokenizer, s) for s in drawn]
        times = range(config.trainer.group_size)
        return [s for s in drawn for _ in times], [e for e in encoded for _ in times]

    async def _generate(self, prompts: Sequence[Sequence[int]], number: int) -> list[Completion]:
        """One response a prompt, spread over the replicas.

        :raises EngineFailed: a response that was not finished.
        """
        config = self.plan.config
        seeds = random.Random(f"{config.seed}/{number}/draws")

        def request(index: int, prompt: Sequence[int]) -> GenerateRequest:
            sampling = Sampling(
                config.trainer.temperature,
                self.plan.response_tokens,
                seeds.getrandbits(63),
                (self.bundle.tokenizer.eos_id,),
            )
            return GenerateRequest(f"step{number}-{index}", tuple(prompt), sampling)

        done = await asyncio.gather(
            *(
                collect(self.handles[i % len(self.handles)].generate(request(i, prompt)))
                for i, prompt in enumerate(prompts)
            )
        )
        for completion in done:
            if completion.error or not completion.token_ids:
                raise errors.EngineFailed(
                    f"request {completion.request_id!r} was not finished: "
                    f"{completion.error or completion.finish_reason.value}"
                )
        return list(done)

    def _text(self, completion: Completion) -> str:
        ids = list(completion.token_ids)
        if ids and ids[-1] == self.bundle.tokenizer.eos_id:
            ids.pop()
        return self.bundle.tokenizer.decode(ids)

    def _check(self, number: int, stats: StepStats) -> None:
        """The oracle of the whole job: both sides must agree about the tokens that were drawn."""
        limit = self.plan.config.trainer.logprob_tolerance
        if stats.logprob_diff_max <= limit:
            return
        self._mismatches += 1
        error = errors.LogprobMismatch(stats.logprob_diff_max, limit, where=f"step {number}")
        if self.plan.config.strict:
            raise error
        log.warning("%s", error)


def _transport(config: TransportConfig, pool: MemoryPool, meter: MemoryMeter) -> Transport:
    """The way weights travel. :raises ConfigError: an option it does not have."""
    factory: Callable[..., Transport] = load_transport(config.name)
    if config.name == "naive":  # the one whose bucket is in this process's books
        return factory(pool, meter.mark)
    try:
        return factory(**config.options)
    except TypeError as error:
        raise errors.ConfigError(f"transport {config.name!r}: {error}") from error


def _make_tiny(plan: Plan) -> Path:
    tiny, target = plan.config.tiny, plan.run_dir / TINY
    build_tiny(
        target,
        family=tiny.family,
        seed=plan.config.seed,
        hidden=tiny.hidden,
        layers=tiny.layers,
        context=tiny.context,
    )
    return target

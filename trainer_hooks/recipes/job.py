"""What every recipe's run holds: trainer, engines, manager, records; and what a step is made of."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.observe import Observer
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout import errors
from hotbunk.rollout.arena import MemoryPool
from hotbunk.rollout.contract import Completion, GenerateRequest, Sampling, Version
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.memory import host_pool
from hotbunk.rollout.registry import load_transport
from hotbunk.trainer_hooks.hooks import TrainerHooks, TrainerShare
from hotbunk.trainer_hooks.recipes import checkpoint
from hotbunk.trainer_hooks.recipes.config import TransportConfig, save
from hotbunk.trainer_hooks.recipes.gauges import GenerationGauges
from hotbunk.trainer_hooks.recipes.learner import Learner, StepStats
from hotbunk.trainer_hooks.recipes.meter import MemoryMeter, MeteredShare
from hotbunk.trainer_hooks.recipes.models import ModelBundle, build_tiny, encode_sample, load_bundle
from hotbunk.trainer_hooks.recipes.preflight import TINY, Plan, backend_options
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder
from hotbunk.trainer_hooks.recipes.replicas import start_replicas
from hotbunk.trainer_hooks.recipes.tasks import Sample
from hotbunk.trainer_hooks.recipes.threads import in_thread

log = logging.getLogger(__name__)
Stopping = Callable[[], bool]


@dataclass
class Parts:
    """What is made once, in this order, and undone in the other by ``stack``."""

    plan: Plan
    stack: AsyncExitStack
    bundle: ModelBundle
    recorder: RunRecorder
    learner: Learner
    handles: list[ReplicaHandle]
    meter: MemoryMeter
    gauges: GenerationGauges
    frees: bool
    transport: Transport
    pool: MemoryPool

    def hooks(self, observer: Observer, share: TrainerShare | None) -> TrainerHooks:
        """A manager over these, and its hooks."""
        config = self.plan.config
        manager = CheckpointEngineManager(
            self.handles,
            self.transport,
            deployment=config.rollout.deployment,
            policy=config.sync,
            free_cache_engine=self.frees,
            observer=observer,
        )
        return TrainerHooks(manager, share)


async def make_parts(plan: Plan, stack: AsyncExitStack) -> Parts:
    """Build trainer and engines, and begin the run directory."""
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
    plan = await _above(plan, handles)
    frees, able = config.rollout.free_cache_engine, handles[0].capabilities.release
    if frees and not able:
        log.warning("the engine's memory is not released: %s", able.how)
        frees = False
    meter = MemoryMeter(handles, pool, recorder)
    transport = _transport(config.transport, pool, meter)
    meter.add_buckets(lambda: transport.held)
    stack.push_async_callback(transport.close)
    gauges = GenerationGauges(handles, recorder)
    return Parts(
        plan, stack, bundle, recorder, learner, handles, meter, gauges, frees, transport, pool
    )


async def _above(plan: Plan, handles: Sequence[ReplicaHandle]) -> Plan:
    """Engines that ran before us hold versions; ours are of a later incarnation than any."""
    held = [version for one in handles for version in (await one.status()).versions.values()]
    later = max((version.incarnation + 1 for version in held), default=0)
    return dataclasses.replace(plan, incarnation=max(plan.incarnation, later))


class Job(ABC):
    """A run under way, from :meth:`begin` until its exit stack unwinds."""

    def __init__(self, parts: Parts, observer: Observer, share: TrainerShare | None) -> None:
        self.plan = parts.plan
        self.config = parts.plan.config.trainer
        self.bundle = parts.bundle
        self.learner = parts.learner
        self.recorder = parts.recorder
        self.meter = parts.meter
        self.gauges = parts.gauges
        self.hooks = parts.hooks(observer, share)
        self._stack = parts.stack
        self._files = checkpoint.model_files(parts.bundle.model_dir)
        self._mismatches = 0

    @abstractmethod
    async def begin(self) -> None:
        """Bring the first version across."""

    @abstractmethod
    async def step(self, number: int, stopping: Stopping) -> dict[str, object] | None:
        """One training step.

        :returns: its metrics, as written to metrics.jsonl; None: it was stopped before it trained.
        :raises LogprobMismatch: in strict mode, where trainer and engine disagree.
        """

    @abstractmethod
    async def finish(self) -> None:
        """After the last step: what is still under way ends."""

    def settle(self) -> None:
        """What exists now stays: the collector need not walk it again at every step."""
        self.recorder.take_timings()
        gc.collect()
        gc.freeze()
        self._stack.callback(gc.unfreeze)

    def version(self, step: int) -> Version:
        """The version that ``step`` training steps make."""
        return Version(self.plan.incarnation, step)

    async def save(self, done: int) -> int:
        """Write a checkpoint after ``done`` steps. The trainer's share is restored for it."""
        await self.learner.share.restore()
        await in_thread(
            checkpoint.save_checkpoint,
            self.plan.run_dir,
            self._files,
            self.learner.model,
            self.learner.optimizer,
            checkpoint.TrainerState(done, self.plan.incarnation),
            self.beside(),
        )
        await self.learner.share.offload()
        return done

    def beside(self) -> dict[str, checkpoint.Trained]:
        """What else is trained and belongs into a checkpoint, by name."""
        return {}

    # -- what a step is made of ---------------------------------------------------------------

    def draw(self, number: int) -> tuple[list[Sample], list[list[int]]]:
        """A step's samples and their prompts: a function of seed and step alone."""
        drawn = self.plan.task.sample(
            random.Random(f"{self.plan.config.seed}/{number}"), self.config.prompts
        )
        return drawn, [encode_sample(self.bundle.tokenizer, s) for s in drawn]

    def requests(self, number: int, prompts: Sequence[Sequence[int]]) -> list[GenerateRequest]:
        """A step's requests, ``group_size`` to each prompt, with seeds of their own.

        The same numbers give the same requests; so do the draws of an engine that keys them by
        seed and position.
        """
        seeds = random.Random(f"{self.plan.config.seed}/{number}/draws")
        repeated = [p for p in prompts for _ in range(self.config.group_size)]
        return [
            GenerateRequest(
                f"step{number}-{index}",
                tuple(prompt),
                Sampling(
                    self.config.temperature,
                    self.plan.response_tokens,
                    seeds.getrandbits(63),
                    (self.bundle.tokenizer.eos_id,),
                ),
            )
            for index, prompt in enumerate(repeated)
        ]

    def validation(self) -> tuple[list[Sample], list[GenerateRequest]]:
        """Prompts drawn apart from the steps', the same ones each time, answered greedily."""
        drawn = self.plan.task.sample(
            random.Random(f"{self.plan.config.seed}/validation"), self.config.validate_prompts
        )
        tokenizer = self.bundle.tokenizer
        how = Sampling(0.0, self.plan.response_tokens, 0, (tokenizer.eos_id,))
        return drawn, [
            GenerateRequest(f"validate-{index}", tuple(encode_sample(tokenizer, sample)), how)
            for index, sample in enumerate(drawn)
        ]

    def text(self, completion: Completion) -> str:
        """A response as its reward sees it."""
        ids = list(completion.token_ids)
        if ids and ids[-1] == self.bundle.tokenizer.eos_id:
            ids.pop()
        return self.bundle.tokenizer.decode(ids)

    def check(self, number: int, stats: StepStats) -> None:
        """The oracle of the whole job: both sides must agree about the tokens that were drawn.

        Tokens of older versions prove nothing, and are not compared.
        """
        limit = self.config.logprob_tolerance
        if not stats.fresh or stats.logprob_diff_max <= limit:
            return
        self._mismatches += 1
        error = errors.LogprobMismatch(stats.logprob_diff_max, limit, where=f"step {number}")
        if self.plan.config.strict:
            raise error
        log.warning("%s", error)

    def learned(self, rewards: torch.Tensor, stats: StepStats) -> dict[str, object]:
        """The metrics that every recipe has of its trainer."""
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "rollout/logprob_diff_max": stats.logprob_diff_max,
            "rollout/logprob_diff_mean": stats.logprob_diff_mean,
            "rollout/logprob_mismatches": self._mismatches,
            "train/loss": stats.loss,
            "train/grad_norm": stats.grad_norm,
            "train/kl": stats.kl,
            "train/entropy": stats.entropy,
            "train/clipped": stats.clipped,
        }


class StepPhases:
    """An observer: the manager's phases are phases of the step."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)


def metered(parts: Parts) -> MeteredShare:
    """The trainer's share, for engines that take turns with it."""
    return MeteredShare(parts.learner.share, parts.meter)


def seconds_of(phases: Mapping[str, float], prefix: str) -> dict[str, object]:
    """Phases as metrics."""
    return {f"{prefix}/{name}": seconds for name, seconds in phases.items()}


def _transport(config: TransportConfig, pool: MemoryPool, meter: MemoryMeter) -> Transport:
    """The way weights travel. :raises ConfigError: an option it does not have."""
    factory: Callable[..., Transport] = load_transport(config.name)
    if config.name == "naive":  # the one whose bucket is in this process's books
        return factory(pool, meter.mark)
    try:
        return factory(**config.options)
    except TypeError as error:
        raise errors.ConfigError(f"transport {config.name!r}: {error}") from error


def _make_tiny(plan: Plan) -> Any:
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

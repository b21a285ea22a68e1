"""What a run's memory will be, phase by phase; whether it fits; what taking turns costs.

The phases are those of docs/architecture.md's two paths. Activations of the trainer and what an
engine needs beside weights and KV are not counted: they depend on lengths that are not known yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from hotbunk.checkpoint_engine.policy import ReleaseKV
from hotbunk.rollout.contract import Deployment, Retention
from hotbunk.rollout.errors import ConfigError, HotbunkError
from hotbunk.rollout.memory import host_pool
from hotbunk.trainer_hooks.recipes.config import RunConfig
from hotbunk.trainer_hooks.recipes.sizes import ModelShapes, Parts, buckets_stay, parts_of

GIB = 1 << 30
CRITIC, JUDGE = "critic", "judge"


class Phase(msgspec.Struct, frozen=True):
    """What is resident in one phase of a step, by who has it; ``host`` are backups beside it."""

    name: str
    levels: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.levels.values())


class Rates(msgspec.Struct, frozen=True):
    """Seconds a GiB, measured on this host a moment ago."""

    release: float
    resume: float
    backup: float
    restore: float


class SwitchCost(msgspec.Struct, frozen=True):
    """What taking turns costs a step, in seconds, and what keeping everything costs in bytes."""

    seconds: float
    peak_bytes: int
    kept_peak_bytes: int


class Change(msgspec.Struct, frozen=True):
    """One thing to change, as overrides, and the peak it leads to."""

    overrides: tuple[str, ...]
    peak_bytes: int
    fits: bool


class MemoryPlan(msgspec.Struct, frozen=True):
    """The forecast of a run on a device of ``memory`` bytes. ``switch`` is None where this host is
    not what engines run on, so that its speed says nothing."""

    device: str
    memory: int
    parameters: int
    parts: Parts
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_phase: str
    fits: bool
    switch: SwitchCost | None
    changes: tuple[Change, ...]


def takes_turns(config: RunConfig) -> bool:
    """Whether engines give their memory away while the trainer trains."""
    rollout = config.rollout
    return rollout.free_cache_engine and rollout.deployment is not Deployment.STANDALONE


def phases_of(config: RunConfig, parts: Parts) -> tuple[Phase, ...]:
    """A step's phases in their order."""
    turns, offload = takes_turns(config), config.trainer.offload
    kept = parts.reference_policy
    trainer = parts.trainer
    bucket, kept_bucket = parts.bucket, parts.bucket if buckets_stay(config) else 0
    engine = {"weights": parts.weights, "kv_cache": parts.kv_cache}
    away = {"weights": 0, "kv_cache": 0}
    backs_up = turns and config.rollout.deployment is Deployment.COLOCATED
    beside = config.trainer.decoupled  # generation goes on while the trainer trains
    no_kv = turns or config.sync.release_kv is ReleaseKV.ALWAYS
    loaded = {"weights": parts.weights, "kv_cache": 0 if no_kv else parts.kv_cache}

    def phase(
        name: str, engines: dict[str, int], own: int, moving: int = kept_bucket, host: int = 0
    ) -> Phase:
        levels = {**engines, "trainer": own, "bucket": moving, "reference_policy": kept}
        # They let go in every phase but their own.
        if parts.critic:
            there = name == CRITIC or not offload
            levels[CRITIC] = parts.critic if there else 0
            host += 0 if there else parts.critic_backup
        if parts.judge:
            levels[JUDGE] = parts.judge if name == JUDGE else 0
            host += 0 if name == JUDGE else parts.judge_backup
        return Phase(name, levels, host)

    update = phase("update", loaded, trainer, bucket)
    if beside:
        return (phase("generate and train", engine, trainer), update)
    gone = parts.trainer_backup if offload else 0
    own = 0 if offload else trainer
    asleep, saved = away if turns else engine, parts.weights if backs_up else 0
    phases = [phase("generate", engine, own, host=gone)]
    phases += [
        phase(name, asleep, own, host=gone + saved)
        for name, size in ((JUDGE, parts.judge), (CRITIC, parts.critic))
        if size
    ]
    phases += [phase("train", asleep, trainer, host=saved), update]
    if offload:
        phases.append(phase("trainer lets go", loaded, 0, host=gone))
    return tuple(phases)


def forecast(
    config: RunConfig,
    model: ModelShapes,
    device: str,
    memory: int,
    rates: Rates | None,
    judge: ModelShapes | None = None,
) -> MemoryPlan:
    """:raises Unsupported: nobody knows how this backend divides its memory."""
    parts = parts_of(config, model, memory, judge)
    phases = phases_of(config, parts)
    worst = max(phases, key=lambda phase: phase.total)
    fits = worst.total <= memory
    return MemoryPlan(
        device,
        memory,
        model.parameters,
        parts,
        phases,
        worst.total,
        worst.name,
        fits,
        _cost(config, parts, worst.total, rates) if rates else None,
        () if fits else tuple(_Changes(model, memory, judge).of(config)),
    )


def _cost(config: RunConfig, parts: Parts, peak: int, rates: Rates) -> SwitchCost:
    ours = parts.trainer + parts.reference_policy + parts.critic + parts.judge
    kept = parts.weights + parts.kv_cache + parts.bucket + ours
    seconds = 0.0
    if takes_turns(config):
        engine = (parts.weights + parts.kv_cache) / GIB
        seconds += engine * (rates.release + rates.resume)
        if config.rollout.deployment is Deployment.COLOCATED:
            seconds += parts.weights / GIB * (rates.backup + rates.restore)
    if config.trainer.offload and not config.trainer.decoupled:
        held = (parts.trainer_backup + parts.critic_backup) / GIB
        zeroed = (parts.trainer + parts.critic) / GIB - held
        seconds += parts.judge / GIB * (rates.release + rates.resume)
        seconds += parts.judge_backup / GIB * rates.restore
        seconds += held * (rates.backup + rates.restore) + zeroed * (rates.release + rates.resume)
    return SwitchCost(seconds, peak, kept)


def measure_rates(nbytes: int = 256 << 20) -> Rates | None:
    """Release and resume ``nbytes`` of this host's memory a few times; medians.

    None: the pool here cannot release.
    """
    pool = host_pool()
    try:
        if pool.cannot_release:
            return None
        arena = pool.arena("plan", nbytes)
        arena.view(arena.add("bytes", nbytes))[:] = (
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().data
        )

        def seconds(call: Callable[[], object]) -> float:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * GIB / nbytes

        rows = []
        for _ in range(3):
            backup = seconds(lambda: pool.release(["plan"], Retention.BACKUP))
            restore = seconds(lambda: pool.resume(["plan"]))
            release = seconds(lambda: pool.release(["plan"], Retention.DISCARD))
            resume = seconds(lambda: pool.resume(["plan"]))
            rows.append((release, resume, backup, restore))
        return Rates(*(sorted(column)[1] for column in zip(*rows, strict=True)))
    finally:
        pool.close()


# -- what to change ---------------------------------------------------------------------------


class _Changes:
    """What would make a run fit into ``memory`` bytes."""

    def __init__(self, model: ModelShapes, memory: int, judge: ModelShapes | None) -> None:
        self._model = model
        self._memory = memory
        self._judge = judge

    def of(self, config: RunConfig) -> Iterator[Change]:
        """Each change by itself; and, where none is enough, as many together as it takes."""
        together: list[str] = []
        changed, before = config, self._peak(config)
        enough = False
        for override in self._candidates(config):
            peak = self._peak(_with(config, override))
            if peak < before:
                enough |= peak <= self._memory
                yield Change((override,), peak, peak <= self._memory)
            least = self._peak(changed)
            if least > self._memory and self._peak(_with(changed, override)) < least:
                changed = _with(changed, override)
                together.append(override)
        peak = self._peak(changed)
        if not enough and len(together) > 1:
            yield Change(tuple(together), peak, peak <= self._memory)

    def _peak(self, config: RunConfig) -> int:
        parts = parts_of(config, self._model, self._memory, self._judge)
        return max(phase.total for phase in phases_of(config, parts))

    def _candidates(self, config: RunConfig) -> Iterator[str]:
        """Cheapest first: what costs time, then what costs concurrency, then what costs precision."""
        rollout, trainer = config.rollout, config.trainer
        if not trainer.decoupled:
            if not rollout.free_cache_engine:
                yield "rollout.free_cache_engine=true"
            if rollout.deployment is Deployment.STANDALONE:
                yield "rollout.deployment=hybrid"
            if not trainer.offload:
                yield "trainer.offload=true"
        elif config.sync.release_kv is not ReleaseKV.ALWAYS:
            yield "sync.release_kv=always"
        small = 4 << 20
        if config.sync.bucket_bytes > small:
            yield f"sync.bucket_bytes={small}"
        yield from self._less_kv(config)
        if rollout.replicas > 1:
            yield "rollout.replicas=1"
        if rollout.options.get("dtype") in ("float32", None) and rollout.name == "reference":
            yield "rollout.options.dtype=bfloat16"
        if trainer.kl_coef > 0:
            yield "trainer.kl_coef=0"

    def _less_kv(self, config: RunConfig) -> Iterator[str]:
        """The largest KV cache that fits, where any does; else an eighth of what it is."""
        keys = {"reference": "kv_cache_tokens", "vllm": "kv_cache_memory_bytes"}
        rollout = config.rollout
        key = keys.get(rollout.name)
        now = parts_of(config, self._model, self._memory).kv_cache
        if key is None or not now:
            return
        left = max(now - (self._peak(config) - self._memory), now // 8)
        amount = left // (rollout.replicas * rollout.data_parallel)
        if key == "kv_cache_tokens":
            block = int(rollout.options.get("block_size", 16))
            tokens = int(rollout.options.get("kv_cache_tokens", 8192))
            amount = max(tokens * left // now // block, 1) * block
        yield f"rollout.options.{key}={amount}"


def _with(config: RunConfig, override: str) -> RunConfig:
    """``config`` with one value changed.

    :raises ConfigError: no such key, or a value that cannot be.
    """
    key, _, value = override.partition("=")
    plain: dict[str, Any] = msgspec.to_builtins(config)
    here = plain
    *path, last = key.split(".")
    for part in path:
        here = here[part]
    here[last] = msgspec.yaml.decode(value)
    try:
        return msgspec.convert(plain, RunConfig)
    except (msgspec.ValidationError, HotbunkError) as error:
        raise ConfigError(f"{override!r} cannot be: {error}") from error

"""The main job: a plan, run to its end by the recipe it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from hotbunk.trainer_hooks.recipes.beside import BesideJob
from hotbunk.trainer_hooks.recipes.config import ASYNC, PPO, SYNC
from hotbunk.trainer_hooks.recipes.in_turns import TurnsJob
from hotbunk.trainer_hooks.recipes.job import Job, Parts, make_parts
from hotbunk.trainer_hooks.recipes.preflight import Plan
from hotbunk.trainer_hooks.recipes.report import write_report
from hotbunk.trainer_hooks.recipes.with_critic import CriticJob

JOBS: Mapping[str, Callable[[Parts], Job]] = {SYNC: TurnsJob, ASYNC: BesideJob, PPO: CriticJob}


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
        job = JOBS[plan.config.trainer.name](await make_parts(plan, stack))
        await job.begin()
        number = saved = plan.first_step
        while number < plan.config.steps and not stopping():
            metrics = await job.step(number, stopping)
            if metrics is None:
                break
            on_step({"step": number, **metrics})
            number += 1
            every = plan.config.trainer.save_every
            if every and number % every == 0:
                saved = await job.save(number)
        await job.finish()
        if number > saved:
            await job.save(number)
    write_report(plan.run_dir)
    return plan.run_dir

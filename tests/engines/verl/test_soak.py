"""Jobs in which syncs fail at random, in each trainer mode. ``make soak ENGINE=verl`` has many seeds.

HOTBUNK_VERL_SEEDS (1): how many; HOTBUNK_VERL_FIRST_SEED (0): from which one on; HOTBUNK_VERL_STEPS (8): of each.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import ModuleType

import pytest

MODES = ("grpo", "colocate_async", "separate_async")
STEPS = int(os.environ.get("HOTBUNK_VERL_STEPS", "8"))
SECONDS = 600 + 15 * STEPS
FIRST = int(os.environ.get("HOTBUNK_VERL_FIRST_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("HOTBUNK_VERL_SEEDS", "1")))
FAULTS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.hotbunk_faulty"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_goes_on_whatever_becomes_of_its_syncs(
    seed: int, mode: str, jobs: ModuleType, assets: Path
) -> None:
    """Any sync's first try may fail at the trainer, on its way, or with its engine killed."""
    draw = random.Random(f"{seed} {mode}")
    plan: dict[str, list[int]] = {"cut": [], "scale": [], "kill": []}
    for step in range(1, STEPS + 1):
        kind = draw.choice([*plan, "none"])
        if kind != "none":
            plan[kind].append(step)
    job = jobs.run(
        assets,
        f"+verl=[{mode},cpu,tiny]",
        "actor_rollout_ref.actor.optim.lr=0",  # the oracle compares with the weights of now
        "actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_faulty",
        *(f"+{FAULTS}.{kind}={steps}".replace(" ", "") for kind, steps in plan.items()),
        steps=STEPS,
        seconds=SECONDS,
    )
    assert len(job.steps) == STEPS, f"{plan}\n{jobs.explain(job)}"
    assert job.code == 0, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6
    failed = [step for kind in plan.values() for step in kind]
    assert job.column("checkpoint_engine/failed_attempts") == [
        float(step in failed) for step in range(1, STEPS + 1)
    ]
    assert job.column("checkpoint_engine/committed") == [1] * STEPS

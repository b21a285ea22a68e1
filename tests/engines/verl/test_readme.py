"""The README's verl section runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "README.md").read_text().partition("\n## In verl\n")[2].partition("\n## ")[0]
BLOCKS = dict(re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL))
ORACLE = "training/rollout_probs_diff_max"


def test_all_of_it_is_run_here() -> None:
    assert re.findall(r"```(\w+)\n", SECTION) == ["console", "bash"] == list(BLOCKS)
    for key in re.findall(r"`(?:rollout\.name|checkpoint_engine\.backend)=(\w+)", SECTION):
        assert key.startswith("hotbunk_")
    for mentioned in re.findall(r"`(configs/[\w/]+)`", SECTION):
        assert (ROOT / mentioned).exists(), mentioned


@pytest.mark.timeout(700)
def test_the_readme_trains(jobs: ModuleType) -> None:
    """Its commands, in the checkout, with the folders and the Ray that tests clean up after."""
    make, tiny, train = BLOCKS["bash"].strip().splitlines()
    assert make == "make engine-venv ENGINE=verl"  # that is where this runs
    job = jobs.shell(f"{tiny} && {train}", ROOT, seconds=600)
    assert job.code == 0, jobs.explain(job)
    assert len(job.steps) == 4, jobs.explain(job)
    assert max(job.column(ORACLE)) <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_three_overrides_are_enough(jobs: ModuleType, assets: Path) -> None:
    """Over a command that knows nothing of ours, but for what a machine without an accelerator needs."""
    command, *rest = shlex.split(BLOCKS["console"].replace("\\\n", " ").replace("...", ""))
    assert [command, *rest[:2]] == ["python", "-m", "verl.trainer.main_ppo"]
    overrides = rest[2:]
    assert len(overrides) == 3
    job = jobs.run(
        assets,
        "+verl=[cpu,tiny]",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.calculate_log_probs=true",  # the oracle
        *overrides,
        steps=2,
        seconds=600,
    )
    assert job.code == 0, jobs.explain(job)
    assert len(job.steps) == 2, jobs.explain(job)
    assert max(job.column(ORACLE)) <= 1e-6
    assert job.column("checkpoint_engine/committed") == [1] * 2

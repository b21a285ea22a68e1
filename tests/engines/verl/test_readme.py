"""The README's verl section runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
(BLOCK,) = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_readme_trains(jobs: ModuleType) -> None:
    """Its last command, in the checkout, with the folders and the Ray that tests clean up after."""
    make, tiny, train = BLOCK.strip().splitlines()
    assert make == "make engine-venv ENGINE=verl"  # that is where this runs
    job = jobs.shell(f"{tiny} && {train}", ROOT, seconds=600)
    assert job.code == 0, jobs.explain(job)
    assert len(job.steps) == 4, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6

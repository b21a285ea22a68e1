"""``hotbunk plan`` against runs: what it foretells is what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.forecast import forecast
from hotbunk.trainer_hooks.recipes.sizes import model_directory, shapes_of

WITHIN = 0.1
TAGS = ("weights", "kv_cache", "trainer", "bucket", "critic")


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.offload=false", "rollout.options.dtype=bfloat16"],
        ["rollout.replicas=2", "sync.bucket_bytes=262144"],
        ["rollout.process=true", "transport=shm", "trainer.prompts=8"],
        ["trainer=ppo", "trainer.prompts=8"],
        ["rollout.free_cache_engine=false", "tiny.family=qwen3", "tiny.hidden=256"],
    ],
)
def test_measured_peaks_are_those_of_the_plan(tmp_path: Path, overrides: list[str]) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hotbunk", "train", f"out={out}", "steps=1", *overrides]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    measured = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])

    settings = configuration.load([f"out={out}", *overrides])
    with model_directory(settings) as directory:
        shapes = shapes_of(directory)
    plan = forecast(settings, shapes, "a device", 1 << 30, None)
    for tag in TAGS:
        most = max(phase.levels.get(tag, 0) for phase in plan.phases)
        assert most == pytest.approx(measured.get(f"memory/{tag}_bytes", 0), rel=WITHIN), tag
    update = next(phase for phase in plan.phases if phase.name == "update")
    assert update.total == pytest.approx(measured["memory/update_peak_bytes"], rel=WITHIN)
    assert plan.peak_bytes == pytest.approx(measured["memory/peak_bytes"], rel=WITHIN)

"""``hotbunk plan rollout=vllm`` against runs: what it foretells is what vLLM's workers hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.forecast import forecast
from hotbunk.trainer_hooks.recipes.sizes import model_directory, shapes_of

pytestmark = pytest.mark.timeout(700)
WITHIN = 0.1
TAGS = ("weights", "kv_cache", "trainer", "bucket")
SECONDS = 600.0


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["rollout.options.tensor_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(
            ["rollout.options.data_parallel_size=2", "rollout.options.dtype=bfloat16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["rollout.free_cache_engine=false", "tiny.family=qwen3", "tiny.hidden=256"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_measured_peaks_are_those_of_the_plan(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    out = tmp_path / "run"
    settings = ["rollout=vllm", "preset=tiny", f"out={out}", *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", "train", "steps=1", *settings],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    config = configuration.load(settings)
    with model_directory(config) as directory:
        shapes = shapes_of(directory)
    plan = forecast(config, shapes, "a device", 1 << 30, None)
    for tag in TAGS:
        most = max(phase.levels.get(tag, 0) for phase in plan.phases)
        assert most == pytest.approx(measured[f"memory/{tag}_bytes"], rel=WITHIN), tag
    update = next(phase for phase in plan.phases if phase.name == "update")
    assert update.total == pytest.approx(measured["memory/update_peak_bytes"], rel=WITHIN)
    assert plan.peak_bytes == pytest.approx(measured["memory/peak_bytes"], rel=WITHIN)

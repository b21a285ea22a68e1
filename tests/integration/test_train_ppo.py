"""``trainer=ppo`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.forecast import forecast
from hotbunk.trainer_hooks.recipes.models import build_tiny
from hotbunk.trainer_hooks.recipes.sizes import model_directory, shapes_of

SMALL = ("trainer=ppo", "trainer.prompts=128", "trainer.epochs=2", "seed=3", "strict=true")


def trained(out: Path, *settings: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hotbunk", "train", *settings]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_critic_policy_and_engine_take_turns_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", f"out={tmp_path / 'whole'}", "steps=3", *SMALL)
    for row in whole:
        asleep = row["memory/weights_bytes_asleep"] + row["memory/kv_cache_bytes_asleep"]
        assert asleep == 0
        assert row["memory/critic_bytes"] > row["memory/weights_bytes"]
        # The critic's turn adds nothing to the most that is held: GRPO's is the same.
        engine = row["memory/weights_bytes"] + row["memory/kv_cache_bytes"]
        assert row["memory/peak_bytes"] == max(engine, row["memory/update_peak_bytes"])
        assert row["critic/loss"] >= 0
        assert row["timing_s/critic"] > 0
    assert whole[0]["critic/value_mean"] == 0
    assert whole[-1]["critic/value_mean"] != 0

    out = tmp_path / "parts"
    trained(out, f"out={out}", "steps=2", *SMALL)
    parts = trained(out, f"resume={out}", "steps=3")
    for name in ("reward/mean", "critic/loss", "critic/value_mean", "train/loss"):
        assert [row[name] for row in parts] == [row[name] for row in whole], name


def test_a_run_without_a_critic_cannot_be_resumed_as_one_with(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained(out, f"out={out}", "steps=1", "trainer.prompts=4", "trainer.group_size=4")
    command = [sys.executable, "-m", "hotbunk", "train", f"resume={out}", "steps=2"]
    command.append("trainer.name=ppo")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "has no critic" in done.stderr
    assert "Traceback" not in done.stderr


def test_actor_critic_judge_and_engine_take_turns_validation_included(tmp_path: Path) -> None:
    out = tmp_path / "run"
    judge = build_tiny(tmp_path / "judge", hidden=64, scale=4.0)
    rows = trained(
        out,
        f"out={out}",
        "steps=3",
        *SMALL,
        "trainer.prompts=32",
        "judge=generative",
        f"judge.model={judge}",
        "judge.weight=0.5",
        "+judge.options.kv_cache_tokens=32768",  # the largest of them all
        "trainer.validate_every=2",
        "trainer.validate_prompts=16",
    )
    assert [("validation/reward" in row) for row in rows] == [False, True, False]
    assert 0 <= rows[1]["validation/reward"] <= 1
    assert rows[1]["judge/unreadable"] >= 0
    # The same version wakes the engine after the judge has spoken; strict=true compares its tokens.
    assert [row["rollout/version"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["timing_s/judge"] > 0
        others = row["memory/weights_bytes"] + row["memory/kv_cache_bytes"]
        assert row["memory/judge_bytes"] > max(others, row["memory/update_peak_bytes"])
        assert row["memory/peak_bytes"] == row["memory/judge_bytes"], "nobody else was there"
    settings = configuration.reload(out, [])
    with model_directory(settings) as directory:
        plan = forecast(settings, shapes_of(directory), "a device", 1 << 30, None, shapes_of(judge))
    assert plan.peak_phase == "judge"
    assert plan.peak_bytes == pytest.approx(rows[-1]["memory/peak_bytes"], rel=0.1)

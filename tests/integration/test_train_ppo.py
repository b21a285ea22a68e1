"""``trainer=ppo`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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

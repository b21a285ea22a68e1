"""Real training jobs on real vLLM, by the command line: in turns with real sleep, and beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}
SECONDS = 220.0


def train(out: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[Row]:
    """The rows of ``hotbunk train rollout=vllm preset=tiny`` with these settings."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hotbunk", "train", "rollout=vllm", "preset=tiny"),
            *("trainer.threads=1", "strict=true", f"out={out}", *settings),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def mean(rows: list[Row], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def test_in_turns_with_real_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns, both sides agree about every token, and memory really changes hands."""
    settings = ("steps=50", "task=digit_plus_one", "trainer.lr=2e-3", "trainer.warmup=3")
    rows = train(tmp_path / "run", monkeypatch, *settings)
    assert len(rows) == 50
    assert mean(rows[-8:], "reward/mean") > mean(rows[:8], "reward/mean") + 0.05
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    for tag in ("weights", "kv_cache"):
        assert min(row[f"memory/{tag}_bytes"] for row in rows) > 1 << 20
        assert max(row[f"memory/{tag}_bytes_asleep"] for row in rows) == 0, "it really slept"


def test_beside_with_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests freeze while weights are switched, go on, and say which weights made each token."""
    rows = train(
        *(tmp_path / "run", monkeypatch, "trainer=grpo_async", "steps=8", "task.digits=24"),
        *("trainer.prompts=4", "trainer.group_size=4", "rollout.options.max_num_seqs=4"),
    )
    assert len(rows) == 8
    assert sum(row["rollout/fresh_tokens"] for row in rows) > 0, "the oracle compared something"
    assert sum(row["rollout/continuations"] + row["rollout/tokens_lost"] for row in rows) == 0
    assert max(row["rollout/versions"] for row in rows) > 1, "a response of two versions"
    assert sum(row["sync/count"] for row in rows) >= 6

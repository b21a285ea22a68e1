"""The main job with its engines in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NO_COLOR": "1"}
SMALL = ("trainer.prompts=4", "trainer.group_size=4", "strict=true")
APART = ("transport=shm", "rollout.process=true")


def command(out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "hotbunk", "train", f"out={out}", *SMALL, *APART, *args]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def has_steps(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


@pytest.mark.parametrize(
    "more",
    [("rollout.replicas=2", "rollout.threads=1"), ("rollout.data_parallel=2",)],
    ids=["replicas", "ranks"],
)
def test_it_learns_with_its_engines_elsewhere(more: tuple[str, ...], tmp_path: Path) -> None:
    """Every token's log-prob agrees with the trainer's: the weights arrived, whole, everywhere."""
    out, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        command(out, "steps=3", *more),
        capture_output=True,
        text=True,
        timeout=110,
        env=ENV | {"TMPDIR": str(temporary)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = lines(out)
    assert [line["rollout/version"] for line in metrics] == [0, 1, 2]
    assert {line["rollout/logprob_mismatches"] for line in metrics} == {0}
    assert {line["memory/weights_bytes_asleep"] for line in metrics} == {0}
    assert list(temporary.glob("hotbunk-*")) == [], "sockets' directories are left behind"


def test_kill_9_takes_the_engines_along(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        command(out, "steps=1000", "rollout.replicas=2"),
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as trainer:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until and not has_steps(out):
                time.sleep(0.05)
            family = psutil.Process(trainer.pid).children(recursive=True)
        finally:
            trainer.send_signal(signal.SIGKILL)
    assert len(family) >= 3, "a fork server and two engines"
    _, alive = psutil.wait_procs(family, timeout=10)
    for one in alive:
        one.kill()
    assert not alive

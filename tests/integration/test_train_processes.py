"""The main job with its engines in processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

import torch

from hotbunk.rollout.errors import ReplicaRetired, TooFewReplicas
from hotbunk.rollout.process import ProcessHandle
from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.in_turns import TurnsJob
from hotbunk.trainer_hooks.recipes.learner import Learner
from hotbunk.trainer_hooks.recipes.meter import MeteredShare
from hotbunk.trainer_hooks.recipes.preflight import plan_run
from hotbunk.trainer_hooks.recipes.train import train

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


class Killer:
    """Ends engines of a run with a real kill -9, each at a moment of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.killed: list[int] = []
        self._patch = patch
        begin = TurnsJob.begin

        async def noted(job: TurnsJob) -> None:
            self._manager = job.hooks.manager
            await begin(job)

        patch.setattr(TurnsJob, "begin", noted)

    def at_call(self, number: int, owner: type, verb: str, name: str) -> None:
        """At that call of a verb (from 1) the replica of that name dies first."""
        real, calls = getattr(owner, verb), itertools.count(1)

        def called(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                self._kill(name)
            return real(*args, **kwargs)

        self._patch.setattr(owner, verb, called)

    def _kill(self, name: str) -> None:
        (handle,) = (h for h in self._manager.replicas if h.name == name)
        assert isinstance(handle, ProcessHandle)
        self.killed.append(handle.pid)
        os.kill(handle.pid, signal.SIGKILL)


def run_here(out: Path, *args: str) -> list[dict[str, Any]]:
    settings = configuration.load([f"out={out}", *SMALL, "trainer.threads=1", *args])
    threads = torch.get_num_threads()
    try:
        asyncio.run(train(plan_run(settings)))
    finally:
        torch.set_num_threads(threads)
    return lines(out)


TRAINING = ("reward/mean", "reward/std", "train/loss", "train/grad_norm", "rollout/sample")


def test_engines_that_are_killed_are_replaced_and_retired_and_training_does_not_notice_n3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it generates, in a sync, and (again) while the trainer trains: replaced twice,
    healed, then retired. Every number of the training is that of a run in which nobody died."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calm = run_here(tmp_path / "calm", "steps=5")
    killer = Killer(monkeypatch)
    killer.at_call(12, ProcessHandle, "generate", "replica0")  # of step 0, 11 are under way
    # At the end of the sync after step 1 (0 and 1 have one more each: of the start and the death).
    killer.at_call(5, MeteredShare, "offload", "replica1")
    killer.at_call(4, Learner, "step", "replica0")
    two = ("rollout.replicas=2", "rollout.threads=1", "trainer.restarts=1")
    rows = run_here(tmp_path / "run", "steps=5", *two, *APART)
    assert len(killer.killed) == 3
    assert [row["rollout/restarts"] for row in rows] == [1, 1, 0, 0, 0]
    assert {row["rollout/logprob_mismatches"] for row in rows} == {0}
    assert [row["rollout/version"] for row in rows] == list(range(5))
    for name in TRAINING:
        assert [row[name] for row in rows] == [row[name] for row in calm], name
    one = rows[4]["memory/weights_bytes"]
    assert rows[1]["memory/weights_bytes"] == 2 * one, "the last one serves alone"
    assert not any(psutil.pid_exists(pid) for pid in killer.killed)
    assert list(tmp_path.glob("hotbunk-*")) == []


def test_the_only_engine_may_be_killed_but_not_more_often_than_it_says_n3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.at_call(3, Learner, "step", "replica0")
    with pytest.raises(TooFewReplicas, match="0 replica") as caught:
        run_here(tmp_path / "run", "steps=5", "trainer.restarts=0", *APART)
    assert isinstance(caught.value.__cause__, ReplicaRetired)
    assert len(lines(tmp_path / "run")) == 2
    assert len(killer.killed) == 1

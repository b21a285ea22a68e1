"""The main job with generation beside training: engines are processes, weights are switched in flight."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import typer

pytest.importorskip("torch")

import torch

from hotbunk.benchmarks import dip
from hotbunk.rollout import process
from hotbunk.rollout.errors import ConfigError, DeadlineExceeded, TooFewReplicas
from hotbunk.rollout.memory import host_pool
from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes import grpo
from hotbunk.trainer_hooks.recipes.learner import Learner
from hotbunk.trainer_hooks.recipes.models import build_tiny
from hotbunk.trainer_hooks.recipes.preflight import plan_run
from hotbunk.trainer_hooks.recipes.train import train

# The package's attribute of this name is the command.
cli_train = importlib.import_module("hotbunk.cli.train")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NO_COLOR": "1"}
# One thread each: crews that work at the same time would otherwise wait for one another's threads.
SMALL = (
    "trainer.prompts=4",
    "trainer.group_size=4",
    "trainer.threads=1",
    "rollout.threads=1",
    "strict=true",
)
LONG = ("task.digits=24",)  # a response lasts for several steps of the trainer
# Engines that are never done: every sync finds requests that run, however slow the trainer is.
BUSY = ("rollout.options.max_num_seqs=4",)
Row = Mapping[str, Any]


@pytest.fixture(autouse=True, scope="module")
def one_fork_server() -> Iterator[None]:
    """The runs of this file share it; a run ends it as it ends (`process.trim`)."""
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    patch.setattr(process, "trim", lambda: None)
    yield
    patch.undo()
    process.trim()
    torch.set_num_threads(threads)


_others: set[int] = set()  # what other modules' servers and zygotes have started


def children() -> list[psutil.Process]:
    """Engines of this test that live: what this process's fork servers made."""
    found = [p for p in psutil.Process().children(recursive=True) if p.pid not in _others]
    return [p for p in found if p.ppid() != os.getpid() and p.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def nothing_left(temporary: Path) -> Iterator[None]:
    """Whatever happens inside: no engine, and no file of ours."""
    temporary.mkdir(exist_ok=True)
    _others.clear()
    _others.update(p.pid for p in children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        try:
            yield
        finally:
            _, alive = psutil.wait_procs(children(), timeout=5)
    assert not alive
    assert list(temporary.glob("hotbunk*")) == []


def run(out: Path, *overrides: str, on_step: Any = lambda row: None) -> list[Row]:
    """A run in this process; its metrics. ``on_step`` is told of each step."""
    settings = configuration.load([f"out={out}", "trainer=grpo_async", *SMALL, *overrides])
    with nothing_left(out.parent / "temporary"):
        asyncio.run(train(plan_run(settings), on_step=on_step))
    return rows(out)


def rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def total(metrics: list[Row], name: str) -> float:
    return sum(row[f"rollout/{name}"] for row in metrics)


# -- what it computes -------------------------------------------------------------------------


def test_without_staleness_it_is_the_run_that_takes_turns(tmp_path: Path) -> None:
    """The same prompts, seeds, tokens, rewards and gradients, over processes and another loss, and
    whichever way the weights travel."""
    settings = configuration.load(
        [f"out={tmp_path / 'turns'}", *SMALL[:-2], "strict=true", "steps=3"]
    )
    asyncio.run(train(plan_run(settings)))
    for transport in ("shm", "collective"):
        beside = run(
            tmp_path / transport, "steps=3", "trainer.max_staleness=0", f"transport={transport}"
        )
        for one, other in zip(beside, rows(tmp_path / "turns"), strict=True):
            assert one["reward/mean"] == other["reward/mean"]
            assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)
            assert one["rollout/sample"] == other["rollout/sample"]
        assert {row["rollout/staleness_max"] for row in beside} == {0}
        assert {row["rollout/overlap"] for row in beside} == {0}


@pytest.mark.parametrize(
    "transport, pause, more",
    [
        ("shm", "keep", ()),
        ("disk", "abort", ("rollout.replicas=2",)),
        ("shm", "abort", ("trainer.partial_rollout=false", "trainer.max_staleness=2")),
        ("collective", "wait", ()),
    ],
    ids=["keep", "abort", "abort from the prompt", "wait"],
)
def test_weights_are_switched_under_running_requests(
    transport: str, pause: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """V2, V6, V7, V12: what runs in a sync goes on, or begins again, as it was asked for; and
    every fresh token's log-prob agrees with the trainer's (``strict``)."""
    seen: list[Row] = []
    metrics = run(
        tmp_path / "run",
        "steps=8",
        *LONG,
        *BUSY,
        f"transport={transport}",
        f"sync.pause={pause}",
        *more,
        on_step=seen.append,
    )
    limit = 2 if more[1:] else 1
    assert len(seen) == len(metrics) == 8
    assert max(row["rollout/staleness_max"] for row in metrics) in range(1, limit + 1)
    assert total(metrics, "fresh_tokens") > 0, "the oracle compared something"
    assert total(metrics, "failed_groups") == 0
    assert sum(row["sync/count"] for row in metrics) >= 6
    assert total(metrics, "stalled_s") > 0
    assert total(metrics, "overlap") > 0
    assert (metrics[0]["rollout/versions"], metrics[0]["rollout/version"]) == (1, 0)
    crossed = max(row["rollout/versions"] for row in metrics[1:])
    if pause == "keep":
        assert total(metrics, "continuations") == total(metrics, "tokens_lost") == 0
        assert total(metrics, "tokens_recomputed") > 0, "frozen requests had a context"
        assert crossed > 1
    elif more == ("rollout.replicas=2",):
        assert total(metrics, "continuations") > 0
        assert total(metrics, "tokens_lost") == 0
        assert total(metrics, "tokens_recomputed") > 0
        assert crossed > 1
    elif pause == "wait":
        assert total(metrics, "continuations") == total(metrics, "tokens_lost") == 0
        assert crossed == 1, "who was waited for never met the new weights"
    else:
        assert total(metrics, "tokens_lost") > 0
    for row in metrics:
        oldest = row["rollout/staleness_max"]
        assert 0 <= row["rollout/staleness_p50"] <= row["rollout/staleness_p99"] <= oldest
        assert row["rollout/backlog"] >= 0
        assert row["rollout/superseded"] >= 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Staleness over steps" in page
    assert "tokens; " in page
    share = 100 * median(row["rollout/overlap"] for row in metrics)
    assert f"{share:.0f} %" in page
    assert "of the training time; median step" in page


def test_overdue_tokens_may_stay_and_count_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[float] = []
    real = grpo.overdue_scale

    def noted(staleness: Any, limit: int) -> Any:
        scale = real(staleness, limit)
        scales.append(float(scale.min()))
        return scale

    monkeypatch.setattr("hotbunk.trainer_hooks.recipes.learner.overdue_scale", noted)
    metrics = run(
        tmp_path / "run", "steps=3", "trainer.overdue=reweight", "trainer.max_staleness=1"
    )
    assert len(scales) == len(metrics) == 3
    assert set(scales) == {1.0}, "nothing is overdue where groups end in order"


def test_what_another_version_made_counts_by_its_likelihood_and_no_more_than_the_cap(
    tmp_path: Path,
) -> None:
    """``p / b``, cut to the cap: of two responses one is twice as likely by now, one four times."""
    settings = configuration.load(
        [f"out={tmp_path / 'run'}", "trainer=grpo_async", *SMALL, "trainer.weight_cap=3"]
    )
    config = settings.trainer
    learner = Learner(build_tiny(tmp_path / "model", hidden=32), config, host_pool())
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    ours = grpo.token_logprobs(learner.model, ids, config.temperature).detach()
    mask = torch.tensor([[0.0, 1, 1], [0, 1, 1]])
    behaviour = (ours - torch.tensor([[2.0], [4.0]]).log()) * mask
    nothing = torch.zeros(2, 3)
    batch = grpo.Batch(ids, mask, behaviour, torch.tensor([1.0, -1.0]), nothing + 1, nothing)
    stats = learner.step(batch, 0)
    assert stats.weight == pytest.approx((2 + 3) / 2, rel=1e-4)
    assert stats.truncated == pytest.approx(0.5)


# -- when it goes wrong -----------------------------------------------------------------------


def test_a_killed_replica_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(row: Row) -> None:
        if row["step"] == 1:
            killed.append(children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    metrics = run(tmp_path / "run", "steps=6", *LONG, on_step=kill)
    assert killed
    assert total(metrics, "restarts") == 1
    assert [row["step"] for row in metrics] == list(range(6))


def test_one_that_may_not_be_replaced_ends_the_run(tmp_path: Path) -> None:
    def kill(row: Row) -> None:
        for engine in children():
            engine.kill()

    with pytest.raises(TooFewReplicas, match="0 replica"):
        run(tmp_path / "run", "steps=50", "trainer.restarts=0", *LONG, on_step=kill)


def test_a_trainer_that_raises_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Learner, batch: object, number: int) -> None:
        raise ConfigError("the trainer broke")

    monkeypatch.setattr(Learner, "step", broken)
    with pytest.raises(ConfigError, match="the trainer broke"):
        run(tmp_path / "run", "steps=3")


REWARD = """
import time
def score(prompt, answer, completion):
    {}
"""


def with_reward(folder: Path, body: str) -> tuple[str, ...]:
    (folder / "reward.py").write_text(REWARD.format(body))
    (folder / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    return (
        "task=jsonl",
        f"task.path={folder / 'data.jsonl'}",
        f"task.reward={folder / 'reward.py'}:score",
        "task.max_response_tokens=3",
    )


def test_a_reward_that_never_answers_ends_the_run_in_time(tmp_path: Path) -> None:
    task = with_reward(tmp_path, "time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="8 of them wait for their rewards"):
        run(tmp_path / "run", "steps=3", "trainer.patience=1", *task)
    assert time.monotonic() - began < 30


def test_a_reward_that_raises_is_the_users_error(tmp_path: Path) -> None:
    task = with_reward(tmp_path, "raise KeyError('x')")
    with pytest.raises(ConfigError, match="KeyError"):
        run(tmp_path / "run", "steps=3", *task)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (("transport=naive",), "works within one process"),
        (("rollout.process=false",), "take turns"),
        (("rollout.deployment=hybrid",), "rollout.deployment=standalone"),
        (("trainer.offload=true",), "trainer.offload=false"),
        (("trainer.max_staleness=-1",), "must not be negative"),
        (("trainer.weight_cap=0.5",), "must be 1 or more"),
        (("trainer.overdue=forget",), "overdue"),
        (("trainer.patience=0",), "above 0 seconds"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    overrides: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_run(configuration.load([f"out={tmp_path / 'run'}", "trainer=grpo_async", *overrides]))
    assert not (tmp_path / "run").exists()


def test_interrupted_it_ends_cleanly_and_goes_on_from_its_checkpoint_v14(tmp_path: Path) -> None:
    """Ctrl-C while everything is in flight; what goes on counts staleness from where it stopped."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hotbunk", "train"]
    start = [*command, f"out={out}", "trainer=grpo_async", *SMALL, *LONG, "steps=1000"]
    with subprocess.Popen(start, env=ENV, stdout=subprocess.DEVNULL) as trainer:
        path, until = out / "metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < until and not (path.exists() and path.stat().st_size):
            time.sleep(0.02)
        family = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait(60) == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert len(family) >= 2
    assert not alive
    done = len(rows(out))
    settings = configuration.reload(out, [f"steps={done + 3}"])
    with nothing_left(tmp_path / "temporary"):
        asyncio.run(train(plan_run(settings, resume=True)))
    metrics = rows(out)
    assert [row["step"] for row in metrics] == list(range(done + 3))
    assert metrics[done]["rollout/version"] == done
    assert metrics[-1]["rollout/incarnation"] == 1
    assert max(row["rollout/staleness_max"] for row in metrics) <= 1


def test_the_second_ctrl_c_is_an_end_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(plan: object, **_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    monkeypatch.setattr("hotbunk.trainer_hooks.recipes.train.train", cancelled)
    with pytest.raises(typer.Exit) as ended:
        cli_train.run([f"out={tmp_path / 'run'}"], show=False)
    assert ended.value.exit_code == 130


# -- what a sync costs --------------------------------------------------------------------------


def test_bench_dip_keep_loses_no_token() -> None:
    """The row `dip`: of the ways to pause, only beginning again loses tokens."""
    # So long that the sync comes well before the end, however the processes are scheduled.
    size = dip.Size(3, prompt=8, tokens=160, begun=6, hidden=32, layers=1, repeats=1, warm_up=0)
    made, _ = dip.measured(size, lambda part: None)
    found = {row.name: row for row in made}
    assert len(found) == 4 * len(dip.WAYS)
    for way in dip.WAYS:
        lost = found[f"dip_{way}_lost"]
        assert (lost.ours, lost.unit, lost.ratio_peer) == (0, "tokens", None)
        assert lost.peer is not None
        assert lost.peer >= size.requests * size.begun
        assert found[f"dip_{way}_still"].ours > 0
        assert found[f"dip_{way}_late"].ours > 0
    assert found["dip_keep_recomputed"].ours >= size.requests * (size.prompt + size.begun)
    assert found["dip_abort_recomputed"].ours >= size.requests * (size.prompt + size.begun)
    assert found["dip_keep_stale_kv_recomputed"].ours == found["dip_wait_recomputed"].ours == 0

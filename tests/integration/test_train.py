"""The main job as a user runs it: the command, its run directory, its errors, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hotbunk import cli

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NO_COLOR": "1"}
SMALL = ("trainer.prompts=4", "trainer.group_size=4")


def hotbunk(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotbunk", *args],
        capture_output=True,
        text=True,
        timeout=110,
        env=ENV,
        cwd=cwd,
        check=False,
    )


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    done = hotbunk("train", f"out={out}", "steps=6", "seed=3", "strict=true")
    assert done.returncode == 0, done.stderr
    return out


def test_a_run_directory_is_whole(run: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "timeline.json", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "checkpoints" / "step-000006" / "model.safetensors").is_file()
    assert "<svg" in (run / "report.html").read_text()
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    phases = {
        "generate",
        "sleep",
        "train",
        "pause",
        "wake_weights",
        "sync",
        "let_go",
        "wake_kv",
        "memory",
    }
    assert phases <= names


def test_each_step_is_a_line_with_the_promised_keys(run: Path) -> None:
    rows = lines(run)
    assert [row["step"] for row in rows] == list(range(6))
    keys = {
        "reward/mean",
        "rollout/version",
        "rollout/logprob_diff_max",
        "timing_s/generate",
        "timing_s/train",
        "timing_s/update_weights",
        "timing_s/step",
        "memory/weights_bytes",
        "memory/kv_cache_bytes",
        "memory/weights_bytes_asleep",
        "memory/kv_cache_bytes_asleep",
        "memory/peak_bytes",
    }
    for row in rows:
        assert keys <= row.keys()
        assert row["rollout/version"] == row["step"], "the version that served"
        assert row["rollout/versions"] == 1


def test_both_sides_agree_about_every_token(run: Path) -> None:
    differences = [row["rollout/logprob_diff_max"] for row in lines(run)]
    assert max(differences) < 1e-3
    assert max(differences) > 0, "two computations of one number are never this equal"


def test_memory_really_changes_hands(run: Path) -> None:
    """Under 5 % stays after a release; an update's peak is trainer + weights + one bucket (M1)."""
    for row in lines(run):
        assert row["memory/weights_bytes"] > 1_000_000
        assert row["memory/kv_cache_bytes"] > 100_000
        assert row["memory/weights_bytes_asleep"] < 0.05 * row["memory/weights_bytes"]
        assert row["memory/kv_cache_bytes_asleep"] < 0.05 * row["memory/kv_cache_bytes"]
        bound = (
            row["memory/trainer_bytes"] + row["memory/weights_bytes"] + row["memory/bucket_bytes"]
        )
        assert 0 < row["memory/update_peak_bytes"] <= bound
        assert row["memory/peak_bytes"] < bound + row["memory/kv_cache_bytes"], "taking turns"


def test_the_same_seed_gives_the_same_run(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert hotbunk("train", f"out={again}", "steps=6", "seed=3").returncode == 0
    rewards = [row["reward/mean"] for row in lines(again)]
    assert rewards == [row["reward/mean"] for row in lines(run)]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert hotbunk("train", f"out={whole}", "steps=4", *SMALL).returncode == 0
    assert hotbunk("train", f"out={parts}", "steps=2", *SMALL).returncode == 0
    resumed = hotbunk("train", f"resume={parts}", "steps=4")
    assert resumed.returncode == 0, resumed.stderr
    assert [r["step"] for r in lines(parts)] == [0, 1, 2, 3]
    for one, other in zip(lines(whole), lines(parts), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-5)
    assert lines(parts)[-1]["rollout/incarnation"] == 1, "its steps may have been served before"
    finished = hotbunk("train", f"resume={parts}", "steps=4")
    assert finished.returncode == 2
    assert "has 4 steps already" in finished.stderr


def test_training_options_all_run(tmp_path: Path) -> None:
    options = (
        "trainer.epochs=2",
        "trainer.mini_batches=2",
        "trainer.kl_coef=0.05",
        "trainer.entropy_coef=0.02",
    )
    more = ("trainer.micro_batch=3", "trainer.save_every=1", "tiny.family=qwen3", "strict=true")
    out = tmp_path / "a"
    done = hotbunk("train", f"out={out}", "steps=2", *SMALL, *options, *more)
    assert done.returncode == 0, done.stderr
    assert lines(out)[1]["train/kl"] > 0
    assert 0 < lines(out)[1]["train/entropy"] < 10
    assert len(list((out / "checkpoints").iterdir())) == 2


def test_an_engine_that_never_frees_works_too(tmp_path: Path) -> None:
    """F1: free_cache_engine=false, and a trainer that keeps its share."""
    out = tmp_path / "a"
    done = hotbunk(
        "train",
        f"out={out}",
        "steps=2",
        *SMALL,
        "rollout.free_cache_engine=false",
        "trainer.offload=false",
        "strict=true",
    )
    assert done.returncode == 0, done.stderr
    for row in lines(out):
        assert row["memory/weights_bytes_asleep"] == row["memory/weights_bytes"]


def test_two_engines_share_a_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = hotbunk("train", f"out={out}", "steps=2", *SMALL, "strict=true", "rollout.replicas=2")
    assert done.returncode == 0, done.stderr
    metrics = lines(out)
    assert [line["rollout/version"] for line in metrics] == [0, 1]
    assert {line["rollout/logprob_mismatches"] for line in metrics} == {0}


def test_a_users_jsonl_and_reward_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "ab=", "answer": "ab"}\n' * 3)
    (tmp_path / "score.py").write_text(
        "def score(prompt, answer, completion):\n    return float(completion[:1] == answer[:1])\n"
    )
    done = hotbunk(
        "train",
        "out=run",
        "steps=1",
        *SMALL,
        "task=jsonl",
        "task.path=mine.jsonl",
        "task.reward=score.py:score",
        "task.max_response_tokens=4",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "run")[0]["rollout/tokens"] <= 16 * 4


BAD = {
    "preset": (["preset=tinny"], "there is no preset 'tinny'; did you mean 'tiny'?"),
    "key": (["stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
    "nested key": (["trainer.lrr=1"], "unknown key 'trainer.lrr'; did you mean 'trainer.lr'?"),
    "engine option": (
        ["rollout.options.block_sise=4"],
        "did you mean 'rollout.options.block_size'",
    ),
    "transport option": (
        ["transport=ipc", "transport.options.devise=fake"],
        "did you mean 'transport.options.device'",
    ),
    "value": (["steps=many"], "Expected `int`, got `str` - at `$.steps`"),
    "form": (["steps"], "'steps' is not of the form key=value"),
    "model": (["model=no/such/model"], "no/such/model"),
    "task": (["task=copi"], "there is no task 'copi'; did you mean 'copy'?"),
    "missing path": (["task=jsonl"], "task.path"),
    "kv": (
        ["rollout.options.kv_cache_tokens=4"],
        "KV pool holds 4 tokens and one request may need 7",
    ),
    "context": (["tiny.context=6"], "the model's context is 6"),
    "backend": (
        ["rollout.name=refrence"],
        "no backend named 'refrence'; did you mean 'reference'?",
    ),
    "dtype": (["rollout.options.dtype=int3"], "dtype='int3' is not float32"),
    "resume": (["resume=no/such/run"], "nothing to resume in 'no/such/run'"),
    "a process that naive cannot reach": (
        ["rollout.process=true"],
        (
            "naive works within one process, and rollout.process=true puts the engine into another "
            "(set transport=shm)"
        ),
    ),
    "ranks without processes": (
        ["rollout.data_parallel=2"],
        "needs a process for each rank (set rollout.process=true",
    ),
    "no replicas": (["rollout.replicas=0"], "rollout.replicas=0 must be 1 or more"),
    "group size": (["trainer.group_size=1"], "must be 2 or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, sentence = BAD[case]
    extra = [] if case == "resume" else ["out=run"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hotbunk", "train", *overrides, *extra])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in said
    assert said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())


def test_a_broken_jsonl_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x", "answer": "y"}\n{"prompt": 3\n')
    done = hotbunk("train", "out=run", "task=jsonl", "task.path=bad.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.jsonl:2" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_used_run_directory_is_not_written_over(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    done = hotbunk("train", f"out={run}", "steps=1")
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def started(out: Path, *extra: str) -> subprocess.Popen[str]:
    """A long run, under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hotbunk", "train", f"out={out}", "steps=5000", *SMALL, *extra],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or not lines(out):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_after_the_step_and_can_be_resumed(number: int, tmp_path: Path) -> None:
    out = tmp_path / "a"
    process = started(out)
    process.send_signal(number)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert "Traceback" not in text
    done = len(lines(out))
    assert (out / "report.html").exists()
    resumed = hotbunk("train", f"resume={out}", f"steps={done + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert len(lines(out)) == done + 1


def test_kill_9_leaves_whole_lines_and_no_files(tmp_path: Path) -> None:
    out, temporary = tmp_path / "a", tmp_path / "tmp"
    temporary.mkdir()
    process = started(out, "trainer.save_every=1", f"+rollout.options.backup_dir={temporary}")
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*")):  # written after the step's line
        assert process.poll() is None
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    rows = lines(out)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert not list(temporary.iterdir()), "backups have no names"
    resumed = hotbunk("train", f"resume={out}", f"steps={len(rows) + 3}")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in lines(out)] == list(range(len(rows) + 3))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_closes_its_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Groups, sockets and memory that it keeps from sync to sync go with the run."""
    import asyncio

    from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
    from hotbunk.rollout.errors import TrainerFailed
    from hotbunk.trainer_hooks.recipes import config
    from hotbunk.trainer_hooks.recipes.preflight import plan_run
    from hotbunk.trainer_hooks.recipes.train import train

    closed: list[NaiveTransport] = []

    async def close(self: NaiveTransport) -> None:
        closed.append(self)

    def on_step(metrics: object) -> None:
        if fails:
            raise TrainerFailed("the loop breaks")

    monkeypatch.setattr(NaiveTransport, "close", close)
    settings = config.load([f"out={tmp_path / 'run'}", "steps=1", *SMALL])
    job = train(plan_run(settings, resume=False), on_step=on_step)
    if fails:
        with pytest.raises(TrainerFailed):
            asyncio.run(job)
    else:
        asyncio.run(job)
    assert len(closed) == 1

"""Training jobs whose engine is a server: vLLM's own, and `hotbunk serve` before a vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotbunk.cli.serve import TINY
from hotbunk.conformance.backends.stock_vllm import StockServer
from hotbunk.conformance.backends.vllm_http import EXTENSION
from hotbunk.trainer_hooks.recipes.models import build_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Row = dict[str, Any]
SECONDS = 600.0
TASK = ("task=digit_plus_one", "trainer.lr=2e-3", "trainer.warmup=3", "seed=1")
TURNS = ("steps=50", *TASK)
BESIDE = ("trainer=grpo_async", "sync.pause=keep", "steps=50", *TASK)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes that are trained; its weights are replaced by the first sync."""
    return build_tiny(tmp_path_factory.mktemp("tiny"), **TINY)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stock(tiny: Path) -> Iterator[str]:
    """vLLM's own server, with our weight-transfer engine in its workers: its URL."""
    server = StockServer(
        tiny,
        *("--enable-scale-out", "--worker-extension-cls", EXTENSION),
        *("--weight-transfer-config", json.dumps({"backend": "hotbunk"})),
    ).ready()
    yield server.url
    server.close()


def train(out: Path, *settings: str) -> list[Row]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hotbunk", "train", "preset=tiny", "trainer.threads=1"),
            *("strict=true", f"out={out}", *settings),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def mean(rows: list[Row], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def check_learns(rows: list[Row], steps: int) -> None:
    assert len(rows) == steps
    assert mean(rows[-8:], "reward/mean") > mean(rows[:8], "reward/mean") + 0.05


def test_in_turns_over_vllms_own_server(stock: str, tmp_path: Path) -> None:
    rows = train(tmp_path / "run", "rollout=vllm_http", f"rollout.options.url={stock}", *TURNS)
    check_learns(rows, 50)
    assert {row["rollout/logprob_mismatches"] for row in rows} == {0}


def test_beside_with_keep_over_vllms_own_server(stock: str, tmp_path: Path) -> None:
    rows = train(tmp_path / "run", "rollout=vllm_http", f"rollout.options.url={stock}", *BESIDE)
    check_learns(rows, 50)
    assert sum(row["rollout/tokens_lost"] for row in rows) == 0
    assert sum(row["sync/count"] for row in rows) >= 40


@pytest.mark.parametrize("settings", [TURNS, BESIDE], ids=["in turns", "beside"])
def test_over_our_server_before_vllm(
    settings: tuple[str, ...], tiny: Path, tmp_path: Path, served: Any
) -> None:
    with served("--model", str(tiny), "--set", "dtype=float32") as url:
        rows = train(
            *(tmp_path / "run", "rollout=hotbunk_http", f"rollout.options.url={url}"),
            *("transport=shm", *settings),
        )
    check_learns(rows, 50)
    if settings is TURNS:
        assert {row["rollout/logprob_mismatches"] for row in rows} == {0}
    else:
        assert sum(row["rollout/tokens_lost"] for row in rows) == 0

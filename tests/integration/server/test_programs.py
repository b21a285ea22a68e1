"""Programs that know a server by HTTP alone, against the preset of the documents: a driver, a trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbunk.trainer_hooks.recipes.config import load
from hotbunk.trainer_hooks.recipes.preflight import plan_run
from hotbunk.trainer_hooks.recipes.train import train

DRIVER = Path(__file__).parents[1] / "programs" / "http_driver.py"


def _drive(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(DRIVER), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_independent_driver_holds_entirely(server: Any) -> None:
    done = _drive(server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("checks, 0 broken")
    assert len(done.stdout.splitlines()) > 28


def test_the_driver_tells_what_does_not_hold(ranked: Any, key_file: Path) -> None:
    """A server without its prefix cache, then one that wants a key, then nobody at all."""
    plain = _drive(ranked.url, "--api-key-file", str(key_file), "--without", "lifecycle")
    lines = plain.stdout.splitlines()
    assert plain.returncode == 1
    assert lines[0] == "left out: lifecycle"
    broken = [line for line in lines if line.startswith("BROKEN")]
    whole = [line.split(maxsplit=1)[1] for line in broken]
    assert all(line.startswith(("R0", "R1", "R2", "R3")) for line in whole), plain.stdout
    assert lines[-1].endswith(f"checks, {len(broken)} broken")
    assert broken
    for url in (ranked.url, "http://127.0.0.1:9"):
        nobody = _drive(url)
        assert (nobody.returncode, nobody.stderr) == (1, "")
        assert nobody.stdout.startswith("nobody to ask")
    ranked.ok("/resume")


@pytest.mark.anyio
async def test_a_trainer_drives_it(server: Any, tmp_path: Path) -> None:
    """GRPO with its engine behind HTTP: sleep, wake and sync a step, and the same log-probs."""
    before = server.get("/weight_version")["weight_version"]
    settings = [
        *("rollout=hotbunk_http", f"rollout.options.url={server.url}", "transport=shm"),
        *("steps=2", "strict=true", "trainer.prompts=4", "trainer.group_size=4"),
    ]
    run = await train(plan_run(load([*settings, f"out={tmp_path / 'run'}"])))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["rollout/logprob_mismatches"] for row in rows} == {0}
    incarnation = int(before.split(".")[0]) + 1
    assert {row["rollout/incarnation"] for row in rows} == {incarnation}
    assert server.get("/weight_version") == {"weight_version": f"{incarnation}.2"}
    server.ok("/update_weights_from_disk")

"""Programs that know a server by HTTP alone, against the preset of the documents: a driver, a trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[1] / "programs" / "http_driver.py"


def _drive(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(DRIVER), url],
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


def test_a_trainer_drives_it(server: Any, tmp_path: Path) -> None:
    """GRPO with its engine behind HTTP: sleep, wake and sync a step, and the same log-probs."""
    run, before = tmp_path / "run", server.get("/weight_version")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hotbunk", "train", "rollout=hotbunk_http", "transport=shm"),
            *(f"rollout.options.url={server.url}", "steps=2", "strict=true", f"out={run}"),
            *("trainer.prompts=4", "trainer.group_size=4"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    incarnation = int(before["weight_version"].split(".")[0])
    assert server.get("/weight_version") == {"weight_version": f"{incarnation + 1}.2"}
    server.ok("/update_weights_from_disk")

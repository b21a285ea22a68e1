"""The suite against a server that already runs, seen from outside alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbunk.conformance.backends.served import NEEDS_BYTES, NEEDS_HANDS, ServedUnderTest
from hotbunk.conformance.case import REGISTRY, Level, Status, all_cases
from hotbunk.conformance.command import described
from hotbunk.conformance.runner import accepted, run_case
from hotbunk.rollout.errors import ConfigError, ReplicaLost

CHOSEN = (
    "goldens_of_two_versions",
    "discarded_weights_never_serve",
    "another_rank_fails",
    "an_update_in_steps",
    "finish_without_start",
    "a_start_is_finished_once",
)


@pytest.mark.anyio
async def test_one_server_for_all_cases(server: Any, model: Path) -> None:
    """Each finds it as a fresh engine would be, whatever the last one left; and one that is unseen."""
    all_cases()
    served = ServedUnderTest(url=server.url, model=str(model))
    try:
        for name in (*CHOSEN, CHOSEN[0]):
            result = await run_case(REGISTRY[name], served)
            assert result.status is Status.PASS, f"{name}: {result.detail}"
        result = await run_case(REGISTRY["bytes_are_the_ones_sent"], served)
        assert result.status is Status.NOT_RUN
        assert accepted(result, served)
    finally:
        served.close()
        server.ok("/update_weights_from_disk")


@pytest.mark.timeout(300)
def test_the_command_tries_a_server_that_runs(server: Any, model: Path, tmp_path: Path) -> None:
    """As users do: the sharpest cases pass, and the matrix says what was looked at."""
    where = ["--url", server.url, "--model", str(model), "--level", Level.SMOKE.value]
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", "conformance", *where, "--out", str(tmp_path)],
        check=False,
        text=True,
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    matrix = json.loads((tmp_path / "matrix.json").read_text())
    assert matrix["backend"] == "url"
    assert f"url={server.url}" in matrix["command"]
    assert [one["case"] for one in matrix["cases"]] == [c.name for c in all_cases(Level.SMOKE)]
    assert {one["status"] for one in matrix["cases"]} <= {"pass", "not-run"}
    unrun = {one["case"] for one in matrix["cases"] if one["status"] == "not-run"}
    assert unrun <= {*NEEDS_BYTES, *NEEDS_HANDS}
    server.ok("/update_weights_from_disk")
    assert server.complete([1, 2, 3], 4)["choices"][0]["text"], "it serves nobody after it"


def test_what_is_not_seen_are_cases() -> None:
    assert {*NEEDS_BYTES, *NEEDS_HANDS} <= {one.name for one in all_cases()}


def test_nobody_there_is_said_once(model: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        described("served", {"url": "http://127.0.0.1:9"})
    with pytest.raises(ReplicaLost):
        described("served", {"url": "http://127.0.0.1:9", "model": str(model)})

"""The suite beyond this repository's own engines in one process: ranks in processes, another's package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.backends.reference_process import ReferenceProcessUnderTest
from hotbunk.conformance.case import REGISTRY, Level, Status, all_cases
from hotbunk.conformance.cases import phases
from hotbunk.conformance.runner import accepted, run_case
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.backends.reference.engine import ReferenceEngine
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

TOY = Path(__file__).with_name("toy_backend")
# Beside the sharpest (test_conformance_soak.py): what only processes of their own can show.
IN_RANKS = [
    "a_planted_corruption_is_found",
    "a_sender_is_asked_for_each_step_once",
    "an_update_in_steps",
    "any_bucket_size",
    "the_engine_itself_refuses",
    "killed_and_started_anew",
    "a_resume_without_room_is_undone",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ReferenceProcessUnderTest]:
    all_cases()
    made = ReferenceProcessUnderTest(ranks=2)
    yield made
    made.close()


@pytest.mark.anyio
@pytest.mark.parametrize("name", IN_RANKS)
async def test_two_ranks_in_processes_of_their_own(
    name: str, ranks: ReferenceProcessUnderTest
) -> None:
    result = await run_case(REGISTRY[name], ranks)
    assert result.status is Status.PASS, result.detail
    assert accepted(result, ranks)


@pytest.mark.anyio
async def test_a_rank_that_hangs_while_it_compares_is_lost(
    ranks: ReferenceProcessUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread never returns: each later update would run into its deadline, and nobody would know."""
    monkeypatch.setattr(phases, "UPDATE_POINTS", ("verify",))
    result = await run_case(REGISTRY["an_engine_hangs_in_each_phase"], ranks)
    assert result.status is Status.PASS, result.detail


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's package, built from its own pyproject and installed into a folder."""
    folder = tmp_path_factory.mktemp("toy")
    sources, target = folder / "sources", folder / "target"
    shutil.copytree(TOY, sources, ignore=shutil.ignore_patterns("__pycache__"))
    quiet = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    install = [sys.executable, "-m", "pip", "install", *quiet, "-t", str(target), str(sources)]
    subprocess.run(install, check=True, timeout=100)
    return target


def test_a_backend_of_another_package_is_found_and_tried(installed: Path, tmp_path: Path) -> None:
    """By its entry points; what it does not do it says, and the suite checks that, too."""
    command = ["conformance", "--backend", "toy", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", *command],
        check=False,
        text=True,
        capture_output=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "matrix.json").read_text())["cases"]
    assert [one["case"] for one in found] == [one.name for one in all_cases()]
    statuses = [one["status"] for one in found]
    assert statuses.count("pass") > 40
    assert statuses.count("unsupported-verified") > 40
    assert {one["level"] for one in found} >= {Level.CORE, Level.SYNC, Level.FAULT}


DOCUMENT = TOY.parents[1].parent / "docs" / "conformance.md"


def test_the_matrices_of_engine_developers_name_cases_that_are() -> None:
    table = DOCUMENT.read_text().partition("| row | case |")[2].partition("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    known = {one.name for one in all_cases()}
    assert len(rows) > 35
    for row in rows:
        named = set(re.findall(r"`(\w+)`", row))
        assert named, f"{row} names no case"
        assert named <= known, f"{row} names what is no case"


def test_the_walk_through_is_what_runs() -> None:
    """docs/conformance.md shows the toy's description as it is."""
    document = DOCUMENT.read_text()
    shown = document.partition("```python\n")[2].partition("```")[0]
    assert shown == (TOY / "toy_backend" / "under_test.py").read_text()


@pytest.mark.anyio
@pytest.mark.parametrize("step", ["_outdate_caches", "committed"])
async def test_an_engine_that_hangs_at_the_end_of_an_update_is_lost(step: str) -> None:
    """Not poisoned: no resend could heal a thread that never comes back."""
    described = ReferenceUnderTest()
    engine = await described.start()
    assert isinstance(engine, ReferenceEngine)
    replica = Replica(engine, deadlines=Deadlines(grace=0.3))
    await replica.start()
    over = threading.Event()
    owner = engine if step == "_outdate_caches" else engine._residency
    setattr(owner, step, lambda *args: over.wait())
    transfer = MemoryTransfer(described.weights(1), version=Version(0, 1))
    try:
        with pytest.raises(ReplicaLost):
            await replica.update_weights(transfer, version=Version(0, 1), deadline=0.5)
        assert (await replica.status()).health is Health.LOST
    finally:
        over.set()
        await replica.close()
        described.close()

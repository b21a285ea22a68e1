"""What a run writes is gone with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotbunk.conformance import scratch
from hotbunk.conformance.scratch import OWNER, PREFIX, Scratch, sweep

# A run of a backend that does nothing but wait, after it has said where its folder is.
RUN = """
import asyncio, sys, time
from hotbunk.conformance import backends, runner
from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.command import conformance
from hotbunk.conformance.scratch import Scratch

class Waiting(OracleUnderTest):
    loop_factory = None
    def __init__(self):
        super().__init__()
        self.folder = Scratch()
    async def check_options(self):
        pass
    async def start(self):
        print(self.folder.path, flush=True)
        await asyncio.sleep(600)
    def close(self):
        self.folder.remove()

backends.DESCRIBED["waiting"] = "__main__:Waiting"
sys.argv = ["x", "--backend", "waiting"]
from hotbunk.conformance.command import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def started(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_a_run_and_leaves_nothing(number: int, code: int, folder: Path) -> None:
    process, home = started(folder)
    with process:
        assert home.is_dir()
        process.send_signal(number)
        assert process.wait(30) == code
    assert list(folder.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(folder: Path) -> None:
    process, home = started(folder)
    with process:
        sweep()
        assert home.is_dir(), "its owner lives"
        process.kill()
        process.wait(30)
    assert home.is_dir()
    mine = Scratch()
    assert list(folder.iterdir()) == [mine.path]
    mine.remove()
    mine.remove()
    assert list(folder.iterdir()) == []


def test_what_is_not_a_dead_runs_stays(folder: Path) -> None:
    """One that is being made, a link, a file, somebody else's name."""
    young, old = folder / f"{PREFIX}young", folder / f"{PREFIX}old"
    for one in (young, old):
        one.mkdir()
    os.utime(old, (time.time() - 2 * scratch.UNOWNED_SECONDS,) * 2)
    target = folder / "elsewhere"
    target.mkdir()
    (target / OWNER).touch()
    (folder / f"{PREFIX}link").symlink_to(target)
    (folder / f"{PREFIX}file").touch()
    sweep()
    assert {one.name for one in folder.iterdir()} == {
        young.name,
        "elsewhere",
        f"{PREFIX}link",
        f"{PREFIX}file",
    }
    assert (target / OWNER).exists()

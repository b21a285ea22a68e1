"""A process that is out of descriptors: gloo would end it where it accepts a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.transports.collective import descriptors
from hotbunk.rollout.errors import TransferFailed

PROGRAM = Path(__file__).parent / "programs" / "few_files.py"


def test_groups_are_built_or_refused_and_the_process_lives_whatever_is_left_to_it() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "70", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said[0]["said"] == "TransferFailed"
    assert said[-1]["said"] == "built"
    assert {one["said"] for one in said} <= {"TransferFailed", "DeadlineExceeded", "built"}
    assert {one["left"] for one in said} == {0}, "descriptors stayed open"


def test_what_is_promised_to_one_is_not_promised_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors, "_free", lambda: descriptors.SPARE + 10)
    entered = threading.Event()

    def second() -> None:
        with descriptors.promised(7, "the second", 30.0):
            entered.set()

    with descriptors.promised(7, "the first"):
        third = descriptors.promised(7, "the third")
        with pytest.raises(TransferFailed, match=r"the third needs 7 .* and 42 are free"), third:
            raise AssertionError
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not entered.wait(0.1)
    assert entered.wait(30)
    waiting.join()
    too_much = descriptors.promised(11, "too much", 30.0)
    with pytest.raises(TransferFailed, match="ulimit"), too_much:  # nobody will give any back
        raise AssertionError

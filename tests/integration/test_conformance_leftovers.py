"""A run leaves nothing behind: no process, no file, no shared memory, no socket, and no descriptor of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.case import REGISTRY, all_cases
from hotbunk.conformance.runner import Session, accepted
from hotbunk.conformance.scratch import PREFIX
from hotbunk.conformance.under_test import BackendUnderTest

pytestmark = pytest.mark.timeout(300)
DEPLOYMENTS = ("reference", "reference_process", "hotbunk_http")
MARK = "HOTBUNK_TEST_RUN"  # in the environment of a run, and so of all that it starts
# Senders that break in the middle, engines that are killed, memory that goes, sessions left open.
CASES = (
    "sender_hangs",
    "killed_and_started_anew",
    "golden_after_a_discard_cycle",
    "adapters_serve_who_asks",
    "a_start_is_finished_once",
)
SOON = 15.0  # seconds in which the kernel and fork servers end what is left of a run


class Run:
    """The command in a process of its own, with temporary files in a folder of its own."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder = folder / ("temporary" * 12)  # longer than the address of a socket may be
        self.folder.mkdir(exist_ok=True)
        self._mark = uuid.uuid4().hex
        self._shared = set(os.listdir("/dev/shm"))
        chosen = [word for name in CASES for word in ("--case", name)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotbunk", "conformance", "--backend", backend, *chosen],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "TMPDIR": str(self.folder),
                # torch makes it as soon as it is imported, and keeps it for good.
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
                MARK: self._mark,
            },
        )

    def processes(self) -> list[psutil.Process]:
        """Of the run, wherever they hang in the tree by now."""
        found = []
        for one in psutil.process_iter():
            try:
                mine = one.environ().get(MARK) == self._mark
                if mine and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except psutil.Error:
                continue  # it has ended meanwhile
        return found

    def left(self) -> list[str]:
        """What is still there of it."""
        found = [f"process {one.pid}" for one in self.processes()]
        found += [str(path) for path in self.folder.rglob("*")]
        new = set(os.listdir("/dev/shm")) - self._shared
        # Others on this machine name things there, too.
        found += [f"/dev/shm/{name}" for name in new if "hotbunk" in name]
        unix = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
        return found + [line for line in unix if str(self.folder) in line]

    def end(self) -> tuple[int, str]:
        """Wait for it: its exit code, and what it said."""
        said, _ = self.process.communicate(timeout=250)
        return self.process.returncode, said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    made: list[Run] = []

    def begin(backend: str) -> Run:
        made.append(Run(tmp_path, backend))
        return made[-1]

    yield begin
    for run in made:
        for one in run.processes():
            one.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()


def until(holds: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("backend", DEPLOYMENTS)
def test_a_run_that_ends(backend: str, start: Callable[[str], Run]) -> None:
    run = start(backend)
    code, said = run.end()
    assert code == 0, said
    until(lambda: not run.left(), SOON)
    assert run.left() == []


@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_ended(
    number: signal.Signals, code: int, background: bool, start: Callable[[str], Run]
) -> None:
    """In the middle of a case, with its ranks running. A shell's background jobs begin with SIGINT ignored."""
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler
    )
    try:
        run = start("reference_process")
    finally:
        signal.signal(signal.SIGINT, before)
    assert until(lambda: len(run.processes()) > 3, 100), "its ranks did not start"
    run.process.send_signal(number)
    found, said = run.end()
    assert found == code, said
    until(lambda: not run.left(), SOON)
    assert run.left() == []


def test_a_run_that_is_killed(start: Callable[[str], Run]) -> None:
    """Its processes go with it, and the next run removes what it wrote."""
    run = start("reference_process")
    assert until(lambda: len(run.processes()) > 3, 100), "its ranks did not start"
    run.process.kill()
    run.process.wait()
    until(lambda: not run.processes(), SOON)
    assert run.processes() == []
    assert list(run.folder.glob(f"{PREFIX}*")), "it had written nothing"
    again = start("reference")
    code, said = again.end()
    assert code == 0, said
    assert list(run.folder.glob(f"{PREFIX}*")) == []


def held() -> set[str]:
    """Descriptors of this process and what they are, and its children."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # of the listing itself
    return found | {f"child {one.pid}" for one in psutil.Process().children(recursive=True)}


@pytest.fixture
def described(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    it = under_test(request.param)
    yield it
    it.close()


@pytest.mark.parametrize("described", DEPLOYMENTS, indirect=True)
def test_cases_in_one_process_add_up_to_nothing(described: BackendUnderTest) -> None:
    """What the first round made for good (a fork server, a thread's pipe) stays; a second adds nothing."""
    all_cases()
    rounds = []
    for _ in range(2):
        with Session(described) as session:
            for name in CASES:
                result = session.run(REGISTRY[name])
                assert accepted(result, described), f"{name}: {result.detail}"
        rounds.append(held())
    assert len(rounds[1]) <= len(rounds[0]), f"new: {sorted(rounds[1] - rounds[0])}"

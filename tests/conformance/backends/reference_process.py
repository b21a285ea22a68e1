"""The reference engine in processes of its own, several data-parallel ranks behind one replica.

What a case sends is offered on by a transport between processes; what lies in a rank is read through its
peephole, and is the same in all of them or a failure.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from hotbunk.conformance.backends import peek
from hotbunk.conformance.backends.driven import Driven
from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.rollout.contract import (
    Engine,
    Tag,
)
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.registry import create_backend


class ReferenceProcessUnderTest(ReferenceUnderTest):
    """``ranks`` processes and the one in front of them; other options as for ``reference``."""

    name = "reference_process"
    case_deadline = 240.0

    def __init__(self, *, ranks: int = 2, transport: str = "shm", **options: Any) -> None:
        super().__init__(**options)
        self._ranks, self._transport = ranks, transport
        self._peeks = Path(tempfile.mkdtemp(prefix="peek-", dir=self._folder.path))
        self.expected_not_run["verification_reads_memory"] = (
            "the last tensor is still under way when it is asked for"
        )
        self.expected_not_run.pop("an_engine_hangs_in_each_phase")
        self.expected_not_run.pop("killed_and_started_anew")

    async def check_options(self) -> None:
        create_backend("reference", model=str(self._disk), **self._options)

    async def start(self) -> Engine:
        peek.setup()  # the fork server is asked for by the backend's name
        return Driven(
            ReplicaSpec(
                peek.NAME,
                {"model": str(self._disk), **self._options},
                name=self.name,
                deadlines=self.deadlines,
                data_parallel=self._ranks,
                env={peek.FOLDER: str(self._peeks)},
                setup=f"{peek.__name__}:setup",
            ),
            self._transport,
        )

    def read_weight(self, name: str) -> bytes:
        found = {a.data for a in self._ask("read_weight", name)}
        assert len(found) == 1, f"the ranks hold different bytes of {name}"
        return found.pop()

    def corrupt_weight(self, name: str) -> bool:
        peek.ask(self._peeks, self._ranks - 1, peek.Question("corrupt_weight", name))
        return True

    def sabotage(self, point: str, how: str) -> bool:
        """In the last rank: the others know nothing of it."""
        question = peek.Question("sabotage", f"{point} {how}")
        return bool(peek.ask(self._peeks, self._ranks - 1, question).number)

    def starve(self, tag: Tag) -> bool:
        peek.ask(self._peeks, self._ranks - 1, peek.Question("starve", tag.value))
        return True

    async def kill(self) -> bool:
        os.kill(self._ask("pid")[-1].number, signal.SIGKILL)
        return True

    def resident(self, tag: Tag) -> int:
        return sum(a.number for a in self._ask("resident", tag.value))

    def host_backup(self) -> int:
        return sum(a.number for a in self._ask("host_backup"))

    def _ask(self, what: str, of: str = "") -> list[peek.Answer]:
        question = peek.Question(what, of)
        return [peek.ask(self._peeks, rank, question) for rank in range(self._ranks)]

"""The frame of an update, broken."""

from __future__ import annotations

from typing import Any

from hotbunk.conformance.mutants import Patches, mutant, nothing
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.contract import FULL
from hotbunk.rollout.server.session import Session, Step


@mutant("a_sender_is_asked_for_each_step_once")
def the_vote_is_cast_twice(patch: Patches) -> None:
    """An engine commits to the sender what it has committed already (G9)."""
    original = OracleEngine.update_weights

    async def again(self: OracleEngine, transfer: Any, *, version: Any, scope: Any = FULL) -> Any:
        report = await original(self, transfer, version=version, scope=scope)
        await transfer.commit()
        return report

    patch.setattr(OracleEngine, "update_weights", again)


@mutant("an_update_in_steps")
def a_failed_update_is_finished(patch: Patches) -> None:
    """A finish answers with the last version that was ever committed, whatever came after it (G9)."""
    start = Session.start

    def remember(self: Session, generation: int | None) -> None:
        last = self.last
        start(self, generation)
        self.last = last

    patch.setattr(Session, "start", remember)


@mutant("finish_without_start")
def any_step_is_in_turn(patch: Patches) -> None:
    """Whoever updates or finishes is let, started or not (G9)."""
    patch.setattr(Session, "_check", nothing)


@mutant("a_start_is_finished_once")
def a_start_ends_the_start_before(patch: Patches) -> None:
    """A session that is under way is begun anew by a second start (G9)."""
    original = Session.start

    def anew(self: Session, generation: int | None) -> None:
        if self.step is Step.STARTED:
            self.step = Step.OPEN
        original(self, generation)

    patch.setattr(Session, "start", anew)


@mutant("a_start_is_finished_once")
def clients_that_are_over_go_on(patch: Patches) -> None:
    """A client whose session another has ended finishes it all the same (G9)."""
    original = Session._check

    def ageless(self: Session, generation: int | None, step: Step, verb: str) -> None:
        original(self, None, step, verb)

    patch.setattr(Session, "_check", ageless)

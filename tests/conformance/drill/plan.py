"""What goes wrong in one round of a drill: where, how, and what may come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.rollout.contract import PauseMode


class How(StrEnum):
    """What happens at a point of an engine, or of the source."""

    RAISE = "raise"
    HANG = "hang"  # the call never returns; its process goes on
    STOP = "stop"  # SIGSTOP: the whole process stands still
    DIE = "die"  # SIGKILL
    FLIP = "flip"  # one bit of a bucket, after it came


SOURCE = "source"
PAUSE = "pause"
ACCEPT = "update/accept"
BUCKET = "update/bucket"
# Points of an engine in the order a sync reaches them, with what may happen there.
POINTS: dict[str, tuple[How, ...]] = {
    PAUSE: (How.RAISE, How.STOP, How.DIE),
    ACCEPT: (How.RAISE, How.HANG, How.STOP, How.DIE),
    BUCKET: (How.RAISE, How.HANG, How.STOP, How.DIE, How.FLIP),
    "update/post_load": (How.RAISE, How.HANG, How.DIE),
    "update/verify": (How.RAISE, How.HANG, How.STOP, How.DIE),
    "update/commit": (How.RAISE, How.HANG, How.DIE),
    "update/label": (How.RAISE, How.DIE),
    SOURCE: (How.RAISE, How.HANG),
}
_BEFORE = (PAUSE, ACCEPT)


class Fault(msgspec.Struct, frozen=True):
    """One round: ``how`` at the ``nth`` time that ``point`` is reached in ``replica``, rank ``rank``."""

    number: int
    transport: str
    replica: int
    rank: int
    point: str
    nth: int
    how: How
    pause: PauseMode
    bucket_bytes: int

    def allowed(self) -> frozenset[Outcome]:
        """What the faulty replica may come to, by the contract."""
        if self.point == SOURCE:
            return frozenset({Outcome.ROLLED_BACK, Outcome.POISONED})
        if self.how in (How.DIE, How.STOP):
            return frozenset({Outcome.LOST})
        if self.point == PAUSE:
            return frozenset({Outcome.ROLLED_BACK})
        if self.point == ACCEPT:
            # A call that cannot be cancelled loses the engine.
            return frozenset({Outcome.ROLLED_BACK, Outcome.LOST})
        return frozenset({Outcome.POISONED, Outcome.LOST} - self._never())

    def _never(self) -> set[Outcome]:
        return {Outcome.LOST} if self.how in (How.RAISE, How.FLIP) else set()

    @property
    def all_concerned(self) -> bool:
        """Whether the fault is the sender's own, so that no replica can commit."""
        return self.point == SOURCE


def draw(
    count: int, seed: int, transports: Sequence[str], *, replicas: int, ranks: int
) -> list[Fault]:
    """``count`` faults; the same for the same arguments."""
    rng = random.Random(seed)
    faults = []
    for number in range(count):
        point = rng.choice(list(POINTS))
        how = rng.choice(POINTS[point])
        bucket_bytes = rng.choice((64, 128, 4096))
        # A point that is reached several times: a bucket of 4096 bytes holds all there is.
        several = point == SOURCE or (point == BUCKET and bucket_bytes < 4096)
        faults.append(
            Fault(
                number,
                transports[number % len(transports)],
                rng.randrange(replicas),
                rng.randrange(ranks),
                point,
                rng.choice((0, 1, 2)) if several else 0,
                how,
                rng.choice(list(PauseMode)),
                bucket_bytes,
            )
        )
    return faults

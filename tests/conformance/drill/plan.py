"""What goes wrong in one round of a drill: where, how, and what may come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hotbunk.checkpoint_engine.policy import Outcome
from hotbunk.rollout.contract import Deployment, PauseMode


class How(StrEnum):
    """What happens at a point of an engine, or of the trainer."""

    RAISE = "raise"
    FULL = "full"  # there is no room: a refusal that changes nothing
    HANG = "hang"  # the call never returns; its process goes on
    STOP = "stop"  # SIGSTOP: the whole process stands still
    DIE = "die"  # SIGKILL
    FLIP = "flip"  # one bit of a bucket, after it came


class When(StrEnum):
    """From which moment on the point is the drill's."""

    SLEEP = "sleep"
    SYNC = "sync"
    LET_GO = "let_go"


class Point(msgspec.Struct, frozen=True):
    """A place where something may go wrong; ``reached`` is an engine's name for it, if one has it."""

    reached: str
    how: tuple[How, ...]
    when: When = When.SYNC
    sleeping: bool | None = None  # whether replicas sleep before the sync; None: either way


ANY = (How.RAISE, How.HANG, How.STOP, How.DIE)
SOURCE = "source"
LET_GO = "let_go"
ACCEPT = "update/accept"
BUCKET = "update/bucket"
# In the order a step of a trainer reaches them.
POINTS: dict[str, Point] = {
    "sleep/backup": Point("release/backup", (How.FULL, *ANY), When.SLEEP, True),
    "sleep/unmap": Point("release/unmap", ANY, When.SLEEP, True),
    "pause": Point("pause", (How.RAISE, How.STOP, How.DIE), sleeping=False),
    "release_kv/backup": Point("release/backup", (How.FULL, *ANY), sleeping=False),
    "release_kv/unmap": Point("release/unmap", ANY, sleeping=False),
    "wake_weights/map": Point("resume/map", (How.FULL, *ANY), sleeping=True),
    "wake_weights/restore": Point("resume/restore", ANY, sleeping=True),
    ACCEPT: Point(ACCEPT, ANY),
    BUCKET: Point(BUCKET, (*ANY, How.FLIP)),
    "update/post_load": Point("update/post_load", (How.RAISE, How.HANG, How.DIE)),
    "update/verify": Point("update/verify", ANY),
    "update/commit": Point("update/commit", (How.RAISE, How.HANG, How.DIE)),
    "update/label": Point("update/label", (How.RAISE, How.DIE)),
    SOURCE: Point("", (How.RAISE, How.HANG)),
    LET_GO: Point("", (How.RAISE,), When.LET_GO),
    "wake_kv/map": Point("resume/map", (How.FULL, *ANY), When.LET_GO),
    "wake_kv/restore": Point("resume/restore", ANY, When.LET_GO),
    "open": Point("resume_generation", ANY, When.LET_GO),
}
MEMORY = ("sleep/", "release_kv/", "wake_weights/", "wake_kv/")  # what calls a memory verb


class Fault(msgspec.Struct, frozen=True):
    """One round: ``how`` at the ``nth`` time that ``point`` is reached in ``replica``, rank ``rank``.

    ``release_kv``: a sync that nobody sleeps before gives KV memory back meanwhile.
    """

    number: int
    transport: str
    replica: int
    rank: int
    point: str
    nth: int
    how: How
    pause: PauseMode
    bucket_bytes: int
    deployment: Deployment = Deployment.STANDALONE
    release_kv: bool = False

    @property
    def at(self) -> Point:
        """Where it happens."""
        return POINTS[self.point]

    @property
    def sleeps(self) -> bool:
        """Whether replicas sleep before the sync."""
        return self.deployment is not Deployment.STANDALONE

    def allowed(self) -> frozenset[Outcome]:
        """What the faulty replica may come to, by the contract."""
        if self.point == SOURCE:
            return frozenset({Outcome.ROLLED_BACK, Outcome.POISONED})
        if self.point == LET_GO:
            return frozenset({Outcome.FENCED})
        if self.how in (How.DIE, How.STOP):
            return frozenset({Outcome.LOST})
        if self.point.startswith(MEMORY):
            return frozenset({self._memory()})
        if self.at.when is When.LET_GO:
            return frozenset({Outcome.FENCED, Outcome.LOST} - self._never())
        if self.point == "pause":
            return frozenset({Outcome.ROLLED_BACK})
        if self.point == ACCEPT:
            # A call that cannot be cancelled loses the engine.
            return frozenset({Outcome.ROLLED_BACK, Outcome.LOST})
        return frozenset({Outcome.POISONED, Outcome.LOST} - self._never())

    def _memory(self) -> Outcome:
        """A memory verb that breaks leaves nobody knows what; one that refuses changed nothing."""
        if self.how is not How.FULL:
            return Outcome.LOST
        if self.at.when is When.SLEEP:
            return Outcome.COMMITTED  # it stayed awake
        return Outcome.FENCED if self.at.when is When.LET_GO else Outcome.ROLLED_BACK

    def _never(self) -> set[Outcome]:
        return {Outcome.LOST} if self.how in (How.RAISE, How.FLIP) else set()

    @property
    def all_concerned(self) -> bool:
        """Whether the fault is the trainer's own, so that no replica can commit and serve."""
        return not self.at.reached


def draw(
    count: int, seed: int, transports: Sequence[str], *, replicas: int, ranks: int
) -> list[Fault]:
    """``count`` faults; the same for the same arguments."""
    rng = random.Random(seed)
    faults = []
    for number in range(count):
        point = rng.choice(list(POINTS))
        there = POINTS[point]
        sleeping = rng.random() < 0.5 if there.sleeping is None else there.sleeping
        awake = (Deployment.STANDALONE,)
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
                rng.choice(there.how),
                rng.choice(list(PauseMode)),
                bucket_bytes,
                rng.choice((Deployment.HYBRID, Deployment.COLOCATED) if sleeping else awake),
                # Without, there is no KV to give back or to bring back.
                point.startswith(MEMORY) or rng.random() < 0.5,
            )
        )
    return faults

"""verl's ``global_steps`` as versions."""

from __future__ import annotations

from hotbunk.rollout.contract import Version


def version_of(step: int | None, newest: Version | None) -> Version:
    """The version of a trainer's step, ``newest`` being the last that some replica had.

    verl wakes replicas by updating them to the step they are at: the same version, not a new one.
    A lower step is a trainer that went back to a checkpoint: a new incarnation. No step at all is
    the newest.
    """
    if step is None:
        return newest or Version()
    if newest is None:
        return Version(0, step)
    return Version(newest.incarnation + (step < newest.step), step)

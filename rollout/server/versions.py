"""Versions of weights, as a wire has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt

from hotbunk.rollout.contract import Version
from hotbunk.rollout.server.words import Body

BIGGEST = 2**63 - 1
Count = Annotated[StrictInt, Field(ge=0, le=BIGGEST)]


class VersionBody(Body):
    """A version, as it is written in JSON."""

    incarnation: Count = 0
    step: Count = 0

    def version(self) -> Version:
        return Version(self.incarnation, self.step)


AnyVersion = VersionBody | Count | Annotated[str, Field(pattern=r"^\d{1,18}\.\d{1,18}$")]
VERSION_QUERY = r"^\d{1,18}(\.\d{1,18})?$"


def version_of(said: AnyVersion, like: Version) -> Version:
    """``{"incarnation": 0, "step": 3}``, ``"0.3"``, or ``3`` (in the incarnation of ``like``)."""
    if isinstance(said, VersionBody):
        return said.version()
    if isinstance(said, str) and "." in said:
        incarnation, step = said.split(".")
        return Version(int(incarnation), int(step))
    return Version(like.incarnation, int(said))

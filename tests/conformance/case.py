"""What a case is, and the registry of them all."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from hotbunk.conformance.rig import Rig
from hotbunk.rollout.contract import (
    NATIVE,
    Ability,
    Capabilities,
    Gate,
    PauseMode,
    Retention,
    unsupported,
)

Body = Callable[[Rig], Awaitable[None]]


class Level(StrEnum):
    """How far a claim of conformance goes; a level includes those before it."""

    CORE = "core"


class Status(StrEnum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported-verified"  # refused, as declared, and nothing changed
    NOT_RUN = "not-run"  # nothing to try it on
    ERROR = "suite-error"  # the suite itself, or what the backend brought to it, is broken


class CaseResult(msgspec.Struct, frozen=True):
    """One line of the matrix. ``seconds`` are of the event loop's time."""

    case: str
    level: Level
    capability: str
    status: Status
    seconds: float
    detail: str = ""


class Case(NamedTuple):
    """A named behaviour. ``capabilities`` are those it needs; ``ids`` the bug reports it is about."""

    name: str
    level: Level
    capabilities: tuple[str, ...]
    run: Body
    doc: str
    ids: tuple[str, ...]


REGISTRY: dict[str, Case] = {}


def case(*, level: Level = Level.CORE, capability: str = "") -> Callable[[Body], Body]:
    """Register a coroutine function as a case; it runs against a started Replica.

    ``capability`` names what it needs, separated by blanks (see :func:`ability`). Where the
    backend declares one of them UNSUPPORTED, the negative run takes the case's place.
    """

    def register(body: Body) -> Body:
        name = body.__name__
        if name in REGISTRY:
            raise ValueError(f"two cases are called {name!r}")
        doc = " ".join((body.__doc__ or "").split())
        ids = tuple(re.findall(r"\b[MGCHKVBNLFAU]\d+\b", doc))
        REGISTRY[name] = Case(name, level, tuple(capability.split()), body, doc, ids)
        return body

    return register


def all_cases(level: Level = Level.CORE) -> list[Case]:
    """Every case up to a level, in a stable order."""
    import hotbunk.conformance.cases  # noqa: F401 - registers them

    levels = list(Level)
    return [c for c in REGISTRY.values() if levels.index(c.level) <= levels.index(level)]


def ability(caps: Capabilities, name: str) -> Ability:
    """How a backend keeps the capability of that name.

    Names are the fields of :class:`Capabilities`, or ``retention.<r>``, ``pause.<mode>``, or
    ``gate.in_engine``.
    """
    kind, _, what = name.partition(".")
    if kind == "retention":
        return NATIVE if Retention(what) in caps.retentions else unsupported("not declared")
    if kind == "pause":
        return caps.pause.get(PauseMode(what), unsupported("not declared"))
    if kind == "gate":
        return NATIVE if caps.gate is Gate(what) else unsupported(f"the gate is {caps.gate}")
    found = getattr(caps, name)
    if not isinstance(found, Ability):
        raise TypeError(f"{name!r} is not a capability that is kept or not")
    return found

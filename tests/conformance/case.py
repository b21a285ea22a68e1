"""What a case is, and the registry of them all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from hotbunk.conformance.ids import ids_in
from hotbunk.conformance.rig import Rig
from hotbunk.rollout.contract import (
    NATIVE,
    Ability,
    Capabilities,
    PauseMode,
    Retention,
    unsupported,
)
from hotbunk.rollout.errors import ConfigError, closest

Body = Callable[[Rig], Awaitable[None]]


class Level(StrEnum):
    """What a run looks at. A case belongs to one of core, colocate, sync and fault."""

    SMOKE = "smoke"  # the sharpest of each, in under a minute
    CORE = "core"  # states, pauses, tokens, requests
    COLOCATE = "colocate"  # memory that changes hands
    SYNC = "sync"  # weights that arrive, or are refused
    FAULT = "fault"  # what breaks, hangs or dies
    ALL = "all"


class Status(StrEnum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported-verified"  # refused, as declared, and nothing changed
    NOT_RUN = "not-run"  # nothing to try it on
    ERROR = "suite-error"  # the suite itself, or what the backend brought to it, is broken


class CaseResult(msgspec.Struct, frozen=True):
    """One line of the matrix. ``seconds`` are of the event loop's time.

    ``detail`` says why it did not pass, or what was measured; ``log`` is what was logged last, of a case
    that did not pass; ``measured`` are series of figures, by name.
    """

    case: str
    level: Level
    capability: str
    status: Status
    seconds: float
    detail: str = ""
    log: tuple[str, ...] = ()
    measured: Mapping[str, Sequence[float]] = msgspec.field(default_factory=dict)


class Case(NamedTuple):
    """A named behaviour. ``capabilities`` are those it needs; ``ids`` the bug reports it is about.

    ``smoke``: it is one of the few that tell most.
    """

    name: str
    level: Level
    capabilities: tuple[str, ...]
    run: Body
    doc: str
    ids: tuple[str, ...]
    smoke: bool = False


REGISTRY: dict[str, Case] = {}


def case(
    *, level: Level = Level.CORE, capability: str = "", smoke: bool = False
) -> Callable[[Body], Body]:
    """Register a coroutine function as a case; it runs against a started Replica.

    ``capability`` names what it needs, separated by blanks (see :func:`ability`). Where the
    backend declares one of them UNSUPPORTED, the negative run takes the case's place.
    """
    if level in (Level.SMOKE, Level.ALL):
        raise ValueError(f"{level.value} is a selection of cases, not where one belongs")

    def register(body: Body) -> Body:
        name = body.__name__
        if name in REGISTRY:
            raise ValueError(f"two cases are called {name!r}")
        doc = " ".join((body.__doc__ or "").split())
        needs = tuple(capability.split())
        REGISTRY[name] = Case(name, level, needs, body, doc, ids_in(doc), smoke)
        return body

    return register


def all_cases(level: Level = Level.ALL) -> list[Case]:
    """The cases of a level, in a stable order."""
    import hotbunk.conformance.cases  # noqa: F401 - registers them

    if level is Level.ALL:
        return list(REGISTRY.values())
    if level is Level.SMOKE:
        return [one for one in REGISTRY.values() if one.smoke]
    return [one for one in REGISTRY.values() if one.level is level]


def chosen(level: Level, names: Sequence[str]) -> list[Case]:
    """The cases of these names, or without names those of the level.

    :raises ConfigError: there is no case of that name.
    """
    known = {one.name: one for one in all_cases()}
    for name in names:
        if name not in known:
            raise ConfigError(f"no case {name!r}{closest(name, known)}")
    return [known[name] for name in names] or all_cases(level)


def ability(caps: Capabilities, name: str) -> Ability:
    """How a backend keeps the capability of that name.

    Names are the fields of :class:`Capabilities`, or ``retention.<r>``, ``pause.<mode>``.
    """
    kind, _, what = name.partition(".")
    if kind == "retention":
        return NATIVE if Retention(what) in caps.retentions else unsupported("not declared")
    if kind == "pause":
        return caps.pause.get(PauseMode(what), unsupported("not declared"))
    found = getattr(caps, name)
    if not isinstance(found, Ability):
        raise TypeError(f"{name!r} is not a capability that is kept or not")
    return found

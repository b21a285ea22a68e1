"""The suite, tried: an oracle (and the rules in front of it) with one thing broken at a time.

Each mutant is data: what is broken, how, and the case that must notice. A suite that lets one live has
a hole. They are applied to the classes themselves, one after another, and taken back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from hotbunk.conformance.ids import ids_in

_ABSENT = object()


class Patches(ExitStack):
    """Changes to classes, modules and tables, taken back at the end."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """As :func:`setattr`. A class gets back what it had itself, not what it inherited."""
        had = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if had is _ABSENT:
            self.callback(delattr, target, name)
        else:
            self.callback(setattr, target, name, had)

    def setitem(self, table: Any, key: Any, value: Any) -> None:
        """As ``table[key] = value``, of a table that may be read-only to others."""
        writable: MutableMapping[Any, Any] = table
        had = writable.get(key, _ABSENT)
        writable[key] = value
        if had is _ABSENT:
            self.callback(writable.pop, key)
        else:
            self.callback(writable.__setitem__, key, had)


Apply = Callable[[Patches], None]


class Mutant(NamedTuple):
    """``breaks`` says what, and by which report or rule; ``options`` are the oracle's.

    ``killer`` is the case that must fail: the one that is about that report or rule.
    """

    name: str
    breaks: str
    killer: str
    apply: Apply
    options: dict[str, Any]

    @property
    def ids(self) -> tuple[str, ...]:
        """The bug reports whose fault this is."""
        return ids_in(self.breaks)

    @property
    def section(self) -> str:
        """Of the contract, where nobody's report but a rule of it is what breaks; else empty."""
        found = re.search(r"\(contract, (.+)\)", self.breaks)
        return found[1] if found else ""


_REGISTRY: dict[str, Mutant] = {}


def mutant(killer: str, **options: Any) -> Callable[[Apply], Apply]:
    """Register a function that breaks one thing; its docstring says which."""

    def register(apply: Apply) -> Apply:
        name = apply.__name__
        if name in _REGISTRY:
            raise ValueError(f"two mutants are called {name!r}")
        breaks = " ".join((apply.__doc__ or "").split())
        _REGISTRY[name] = Mutant(name, breaks, killer, apply, options)
        return apply

    return register


def nothing(*args: Any, **kwargs: Any) -> None:
    """What many a broken engine does."""


def all_mutants() -> list[Mutant]:
    """Every mutant, in a stable order."""
    from hotbunk.conformance.mutants import (  # noqa: F401 - registers them
        cycles,
        engine,
        frames,
        rules,
        syncs,
    )

    return list(_REGISTRY.values())

"""Verifiable rewards: the built-in ones, and how a user's own function is found and checked."""

from __future__ import annotations

import importlib
import importlib.util
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast
from zlib import crc32

from hotbunk.rollout.errors import ConfigError, closest

Prompt = str | Sequence[Mapping[str, str]]
RewardFunction = Callable[[Prompt, str, str], object]

# A mean of floats can land a hair outside [0, 1]; more than this is a wrong function.
_SLACK = 1e-6


def exact(prompt: Prompt, answer: str, completion: str) -> float:
    """1 where the completion is the answer, blanks around either aside; else 0."""
    return float(completion.strip() == answer.strip())


def contains(prompt: Prompt, answer: str, completion: str) -> float:
    """1 where the answer occurs in the completion, whatever its case; else 0."""
    return float(answer.strip().casefold() in completion.casefold())


def per_char(prompt: Prompt, answer: str, completion: str) -> float:
    """The share of positions that are right; characters beyond the answer count as wrong."""
    longer = max(len(answer), len(completion))
    if longer == 0:
        return 1.0
    right = sum(a == b for a, b in zip(answer, completion, strict=False))
    return right / longer


BUILT_IN: dict[str, RewardFunction] = {"exact": exact, "contains": contains, "per_char": per_char}


def load_reward(spec: str) -> RewardFunction:
    """The reward function that ``spec`` names.

    ``spec`` is a built-in name, ``path/to/file.py:function`` or ``package.module:function``. The
    file or module is imported, so its top-level code runs.

    :raises ConfigError: nothing of that name, the import failed, or what was found is no function.
    """
    if ":" not in spec:
        if spec in BUILT_IN:
            return BUILT_IN[spec]
        raise ConfigError(
            f"there is no reward {spec!r}{closest(spec, BUILT_IN)}",
            remedy=f"use one of {', '.join(BUILT_IN)}, 'file.py:function' or 'module:function'",
        )
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"reward {spec!r} is not of the form 'file.py:function'")
    module = _from_file(Path(place), spec) if place.endswith(".py") else _from_name(place, spec)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"reward {spec!r}: {place} has no function {name!r}{closest(name, known)}"
        )
    if not callable(function):
        raise ConfigError(f"reward {spec!r}: {name!r} in {place} is not a function")
    return cast(RewardFunction, function)


def call_reward(
    function: RewardFunction, name: str, prompt: Prompt, answer: str, completion: str, where: str
) -> float:
    """``function``'s verdict, checked to be a number in [0, 1].

    :raises ConfigError: it raised, or returned something else; ``where`` locates the sample.
    """
    with _UsersCode(f"reward {name!r}", where):
        value = function(prompt, answer, completion)
    if not isinstance(value, numbers.Real):
        raise ConfigError(
            f"reward {name!r} returned {type(value).__name__}, not a number", where=where
        )
    number = cast(float, value)  # Real compares like one; float() itself could overflow
    if not -_SLACK <= number <= 1 + _SLACK:  # NaN is not within either
        said = "a huge number" if abs(number) > 1e9 else f"{number}"
        raise ConfigError(f"reward {name!r} returned {said}, outside [0, 1]", where=where)
    return min(1.0, max(0.0, float(number)))


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward {spec!r}: there is no file {path}")
    name = f"_hotbunk_reward_{path.stem}_{crc32(str(path.resolve()).encode()):08x}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ConfigError(f"reward {spec!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    with _UsersCode(f"reward {spec!r}: importing {path}"):
        found.loader.exec_module(module)
    return module


def _from_name(name: str, spec: str) -> ModuleType:
    with _UsersCode(f"reward {spec!r}: importing {name}"):
        return importlib.import_module(name)


class _UsersCode:
    """Turns whatever the user's own code raises into a ConfigError that says where it was.

    The one place where any exception is caught: nobody can list what a user's function raises.
    KeyboardInterrupt and SystemExit pass.
    """

    def __init__(self, what: str, where: str = "") -> None:
        self._what = what
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise ConfigError(
                f"{self._what} raised {type(error).__name__}: {error}", where=self._where
            ) from error

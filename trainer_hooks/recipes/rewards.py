"""Verifiable rewards: the built-in ones, and how a user's own function is found and checked."""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

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
    try:
        value = function(prompt, answer, completion)
    except Exception as error:  # the function is the user's and may raise anything at all
        raise ConfigError(
            f"reward {name!r} raised {type(error).__name__}: {error}", where=where
        ) from error
    if not isinstance(value, numbers.Real):
        raise ConfigError(
            f"reward {name!r} returned {type(value).__name__}, not a number", where=where
        )
    number = float(value)
    if not math.isfinite(number) or not -_SLACK <= number <= 1 + _SLACK:
        raise ConfigError(f"reward {name!r} returned {number:g}, outside [0, 1]", where=where)
    return min(1.0, max(0.0, number))


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward {spec!r}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"_hotbunk_reward_{path.stem}", path)
    if found is None or found.loader is None:
        raise ConfigError(f"reward {spec!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:  # top-level code of the user's own file
        raise ConfigError(
            f"reward {spec!r}: importing {path} raised {type(error).__name__}: {error}"
        ) from error
    return module


def _from_name(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a missing module, or the user's own top-level code
        raise ConfigError(
            f"reward {spec!r}: importing {name} raised {type(error).__name__}: {error}"
        ) from error

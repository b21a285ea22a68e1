"""Plain mappings into frozen, typed options; unknown keys are refused with the closest match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from hotbunk.rollout.errors import ConfigError, closest

T = TypeVar("T", bound=msgspec.Struct)


def convert(values: Mapping[str, Any], into: type[T], where: str) -> T:
    """``values`` as an instance of the struct ``into``.

    :raises ConfigError: an unknown key, a missing one, or a value of the wrong type; the message
        names the key.
    """
    known = [field.name for field in msgspec.structs.fields(into)]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r}{closest(str(key), known)}",
                where=where,
                remedy=f"options are {', '.join(known)}",
            )
    return convert_nested(values, into, where)


def convert_nested(values: Mapping[str, Any], into: type[T], where: str) -> T:
    """As :func:`convert`, for structs within structs; unknown keys are msgspec's to name."""
    try:
        return msgspec.convert(dict(values), into)
    except msgspec.ValidationError as error:
        # __post_init__ errors arrive wrapped; ours already say all there is to say
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__.at(where) from None
        raise ConfigError(str(error), where=where) from error


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` into options; values are YAML, so numbers, booleans and lists mean themselves.

    :raises ConfigError: no ``=``, a key given twice, or a value that is not YAML.
    """
    options: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--set {text!r} is not key=value")
        if key in options:
            raise ConfigError(f"--set {key}= was given more than once")
        try:
            options[key] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--set {key}={value}: {error}") from error
    return options

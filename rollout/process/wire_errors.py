"""Errors between processes: the class by name, every field, and the traceback of an engine."""

from __future__ import annotations

import json
import traceback
from typing import Any

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.calls import engine_failed


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree as it travels. ``fields`` are its attributes, as plain data."""

    kind: str
    fields: dict[str, Any]


def _tree() -> dict[str, type[errors.HotbunkError]]:
    found: dict[str, type[errors.HotbunkError]] = {}
    left: list[type[errors.HotbunkError]] = [errors.HotbunkError]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__ == errors.__name__:
            found[kind.__name__] = kind
    return found


TREE = _tree()
MARK = "hotbunk-error:"


def to_wire(verb: str, error: BaseException) -> WireError:
    """An error as it travels; what is not of the tree becomes ``EngineFailed``."""
    if not isinstance(error, errors.HotbunkError):
        error = engine_failed(verb, error)
    fields = {key: value for key, value in vars(error).items() if not key.startswith("_")}
    if isinstance(error, errors.EngineFailed) and not error.remote_traceback:
        fields["remote_traceback"] = "".join(traceback.format_exception(error))
    kind = next(k for k in type(error).__mro__ if k.__module__ == errors.__name__)
    if kind is errors.HotbunkError and type(error) is not kind:
        fields["what"] = f"{verb} raised {type(error).__name__}: {error}"
        kind = errors.EngineFailed
    return WireError(kind.__name__, {key: _plain(value) for key, value in fields.items()})


def from_wire(wire: WireError) -> errors.HotbunkError:
    """The error again. An unknown class becomes ``EngineFailed``."""
    kind = TREE.get(wire.kind)
    said = {key: _tupled(value) for key, value in wire.fields.items()}
    for key in ("what", "where", "remedy"):
        said[key] = str(said.get(key, ""))
    if kind is None:
        said["what"] = f"{wire.kind}: {said['what']}"
        kind = errors.EngineFailed
    if issubclass(kind, errors.EngineFailed):
        said["remote_traceback"] = str(said.get("remote_traceback", ""))
    # Not by the constructor: classes build their text from arguments that are fields no more.
    error = kind.__new__(kind)
    errors.HotbunkError.__init__(error, said["what"])
    vars(error).update(said)
    return error


def as_text(verb: str, error: BaseException) -> str:
    """For a way on which nothing of an error travels but its words."""
    wire = to_wire(verb, error)
    return f"{error} {MARK}{json.dumps([wire.kind, wire.fields])}"


def from_text(text: str) -> errors.HotbunkError | None:
    """The error in somebody's words about it; None: there is none."""
    _, mark, said = text.partition(MARK)
    if not mark:
        return None
    try:
        (kind, fields), _ = json.JSONDecoder().raw_decode(said)
        return from_wire(WireError(str(kind), dict(fields)))
    except (TypeError, ValueError):
        return None


def _plain(value: object) -> Any:
    """What cannot travel as data stays behind (the report of a failed sync)."""
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return None


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

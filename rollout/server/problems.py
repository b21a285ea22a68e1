"""Errors as HTTP answers: the class by name, its fields, and a status.

:func:`problem` is what goes out, :func:`from_problem` makes the same error of it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.process.wire_errors import WireError, from_wire, to_wire

RETRY_SECONDS = 1  # for Retry-After

# The first class an error is of decides. What is not here is a fault of the engine: 500.
STATUS: tuple[tuple[type[errors.HotbunkError], int], ...] = (
    (errors.UnknownTag, 422),
    (errors.UsageError, 400),
    (errors.Unsupported, 400),
    (errors.WeightsNotResident, 409),  # an update too early; the others say: nothing to serve from
    (errors.WeightsNotLoaded, 503),
    (errors.WeightsPoisoned, 503),
    (errors.KVNotResident, 503),
    (errors.RequestsInFlight, 503),  # not in time; a pause that was not stays held
    (errors.ReplicaLost, 503),
    (errors.RequestRejected, 503),
    (errors.MemoryFault, 503),
    (errors.DeadlineExceeded, 503),
    (errors.ContractError, 409),
    (errors.UpdateRefused, 409),
    (errors.UpdateFailed, 503),
)


def status_of(error: errors.HotbunkError) -> int:
    """The HTTP status that tells of it."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def problem(error: BaseException, verb: str, *, traceback: bool) -> tuple[int, dict[str, Any]]:
    """Status and body. An error that is not of the tree becomes ``EngineFailed``.

    ``traceback``: whether the other side is trusted with one.
    """
    wire = to_wire(verb, error)
    known = from_wire(wire)
    fields = dict(wire.fields)
    if not traceback:
        fields.pop("remote_traceback", None)
    return status_of(known), {
        "error": {
            "message": str(known),
            "type": wire.kind,
            "code": status_of(known),
            "param": None,
            "retryable": known.retryable,
            "fields": fields,
        }
    }


def from_problem(status: int, body: bytes) -> errors.HotbunkError:
    """The error again, by name. Whatever else answered is told as it is."""
    try:
        said = msgspec.json.decode(body)
        about = said["error"]
        kind, fields = about["type"], about.get("fields")
        if isinstance(kind, str) and isinstance(fields, Mapping):
            return from_wire(WireError(kind, dict(fields)))
        what = str(about.get("message", about))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        what = body[:200].decode("utf-8", "replace") or "nothing"
    if status in (401, 403):
        return errors.ConfigError(f"the server refused the key ({status}): {what}")
    if status == 404:
        return errors.Unsupported(
            "this endpoint", "hotbunk_http", "start the server with --dev or --api-key-file"
        )
    if 400 <= status < 500:
        return errors.UsageError(f"the server answered {status}: {what}")
    return errors.EngineFailed(f"the server answered {status}: {what}")

"""The oracle: a rollout engine in plain Python whose tokens tell what made them.

Every token packs the digest of the weights in use, the stamp of the KV and of the encoder output
it was computed from, and the version label, so a test sees at once when stale or half-written
content was served. Memory is a device that counts bytes and can refuse, lie or be late; faults are
planned by point and count; time may be virtual. It needs no torch and no numpy.
"""

from __future__ import annotations

from typing import Any

from hotbunk.rollout.backends.oracle.device import Device
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.backends.oracle.faults import EngineDied, Fault, FaultPlan
from hotbunk.rollout.backends.oracle.options import Options, parse_options
from hotbunk.rollout.backends.oracle.tokens import TokenInfo, decode_token, encode_token
from hotbunk.rollout.backends.oracle.virtual_time import VirtualTimeLoop

__all__ = [
    "Device",
    "EngineDied",
    "Fault",
    "FaultPlan",
    "Options",
    "OracleEngine",
    "TokenInfo",
    "VirtualTimeLoop",
    "create",
    "decode_token",
    "encode_token",
]


def create(
    *, device: Device | None = None, faults: FaultPlan | None = None, **options: Any
) -> OracleEngine:
    """Build (not start) an oracle.

    :param device: the memory it lives in, shared with whoever else holds it; default: its own.
    :param faults: what shall go wrong; default: nothing.
    :param options: fields of :class:`~hotbunk.rollout.backends.oracle.options.Options`.
    :raises ConfigError: an option it does not know, or a value that cannot be meant.
    """
    return OracleEngine(parse_options(options), device or Device(), faults or FaultPlan())

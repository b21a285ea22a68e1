"""What a replica is told and what it tells: deadlines, health, status, timeline."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hotbunk.rollout.contract import BackendStatus, PauseMode, Version
from hotbunk.rollout.lifecycle import KV


class Health(StrEnum):
    """Whether anything can be asked of a replica."""

    OK = "ok"
    POISONED = "poisoned"  # a full update heals it
    LOST = "lost"  # only a restart heals it


class Deadlines(msgspec.Struct, frozen=True):
    """Seconds each kind of step may take. ``hold`` is how long a request waits at the gate."""

    hold: float = 600.0
    drain: float = 60.0
    memory: float = 120.0
    update: float = 600.0
    inspect: float = 2.0
    grace: float = 5.0  # for a cancelled engine call to come back before the engine is lost
    start: float = 600.0  # for an engine in a process of its own to be ready


class PauseInfo(msgspec.Struct, frozen=True):
    """A pause that is held, as status tells it."""

    owner: str
    mode: PauseMode
    seconds: float


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One coherent snapshot of what a replica knows, and what its engine answered.

    ``newest``: the newest version each group ever committed, also where its content is gone: a
    sender that comes back must not fall behind it.
    """

    name: str
    health: Health
    groups: Mapping[str, str]
    versions: Mapping[str, Version]
    kv: KV
    pauses: tuple[PauseInfo, ...]
    held: tuple[str, ...]
    running: tuple[str, ...]
    is_paused: bool
    is_sleeping: bool
    servable: bool
    backend: BackendStatus
    newest: Mapping[str, Version] = msgspec.field(default_factory=dict)


class TimelineEvent(msgspec.Struct, frozen=True):
    """One verb that ended: seconds on ``time.perf_counter``'s clock."""

    name: str
    start: float
    seconds: float
    error: str = ""

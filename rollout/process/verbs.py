"""The verbs that travel: their arguments as structs, and what comes back.

Fields are named as the parameters of the method they are for, and mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    BackendStatus,
    Cache,
    Digests,
    GenerateRequest,
    Manifest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Ticket,
    UpdateReport,
    Version,
)
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.status import ReplicaStatus

GENERATE = "generate"


class Nothing(msgspec.Struct, frozen=True):
    """No arguments."""


class Tags(msgspec.Struct, frozen=True):
    """Of resume and wake_up. A bare string is for the replica to refuse."""

    tags: list[str] | str | None = None


class Names(msgspec.Struct, frozen=True):
    """Of digest."""

    names: list[str] | None = None


class RequestIds(msgspec.Struct, frozen=True):
    """Of abort."""

    request_ids: list[str] | None = None


class Release(msgspec.Struct, frozen=True):
    """Of a replica's release."""

    tags: list[str] | str | None = None
    retention: Retention = Retention.DISCARD
    keep_kv: bool = False


class EngineRelease(msgspec.Struct, frozen=True):
    """Of an engine's release."""

    tags: list[str] | None = None
    retention: Retention = Retention.DISCARD
    overrides: Mapping[str, Retention] | None = None
    keep_kv: bool = False


class ReleaseKV(msgspec.Struct, frozen=True):
    """Of release_kv_cache."""

    keep_kv: bool = False


class Update(msgspec.Struct, frozen=True):
    """Of a replica's update_weights."""

    source: Ticket
    version: Version
    scope: Scope = FULL
    deadline: float | None = None


class Sleep(msgspec.Struct, frozen=True):
    """Of sleep."""

    level: int = 2
    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    keep_kv: bool = False


class Pause(msgspec.Struct, frozen=True):
    """Of a replica's pause_generation."""

    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    reject: bool = False
    owner: str = CALLER
    deadline: float | None = None
    min_start_version: Version | None = None


class EnginePause(msgspec.Struct, frozen=True):
    """Of an engine's pause_generation."""

    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True


class Owner(msgspec.Struct, frozen=True):
    """Of a replica's resume_generation."""

    owner: str = CALLER


class Caches(msgspec.Struct, frozen=True):
    """Of reset_caches."""

    which: list[Cache] | None = None


class OpenUpdate(msgspec.Struct, frozen=True):
    """Of a rank's open_update: its own ticket."""

    ticket: Ticket


class RankUpdate(msgspec.Struct, frozen=True):
    """Of a rank's update_weights. ``number`` tells its barriers from those of other updates."""

    number: int
    version: Version
    scope: Scope


class Reason(msgspec.Struct, frozen=True):
    """Of a rank's abort_update."""

    reason: str


class Generate(msgspec.Struct, frozen=True):
    """Of generate."""

    request: GenerateRequest


class Verb(NamedTuple):
    """Types of what goes and of what comes."""

    args: type[msgspec.Struct]
    result: Any


REPLICA_VERBS: Mapping[str, Verb] = {
    "resume": Verb(Tags, MemoryReport),
    "release": Verb(Release, MemoryReport),
    "release_kv_cache": Verb(ReleaseKV, MemoryReport),
    "resume_kv_cache": Verb(Nothing, MemoryReport),
    "update_weights": Verb(Update, UpdateReport),
    "sleep": Verb(Sleep, MemoryReport),
    "wake_up": Verb(Tags, MemoryReport),
    "pause_generation": Verb(Pause, PauseReport),
    "resume_generation": Verb(Owner, None),
    "abort": Verb(RequestIds, AbortReport),
    "reset_caches": Verb(Caches, None),
    "status": Verb(Nothing, ReplicaStatus),
    "digest": Verb(Names, Digests),
    "memory": Verb(Nothing, MemoryReport),
    GENERATE: Verb(Generate, None),
}

# Of one rank of an engine: the engine's verbs, and those of RankTarget.
RANK_VERBS: Mapping[str, Verb] = {
    "resume": Verb(Tags, MemoryReport),
    "release": Verb(EngineRelease, MemoryReport),
    "release_kv_cache": Verb(ReleaseKV, MemoryReport),
    "resume_kv_cache": Verb(Nothing, MemoryReport),
    "open_update": Verb(OpenUpdate, Manifest),
    "decline_update": Verb(Nothing, None),
    "abort_update": Verb(Reason, None),
    "update_weights": Verb(RankUpdate, UpdateReport),
    "pause_generation": Verb(EnginePause, PauseReport),
    "resume_generation": Verb(Nothing, None),
    "abort": Verb(RequestIds, AbortReport),
    "reset_caches": Verb(Caches, None),
    "status": Verb(Nothing, BackendStatus),
    "digest": Verb(Names, Digests),
    "memory": Verb(Nothing, MemoryReport),
    GENERATE: Verb(Generate, None),
}

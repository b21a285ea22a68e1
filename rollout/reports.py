"""What verbs did, and what an engine says of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from hotbunk.rollout.errors import ReleaseIncomplete
from hotbunk.rollout.vocabulary import PauseMode, Version


class ArenaReport(msgspec.Struct, frozen=True):
    """One arena's memory in bytes. ``resident`` is what the device or the OS says is in use."""

    tag: str
    group: str
    reserved: int
    resident: int
    backup: int = 0


class MemoryReport(msgspec.Struct, frozen=True):
    """What a memory verb did, and what is resident now (bytes, per arena).

    ``measured_by`` says who counted: ``process`` (this process's pages), ``device`` (device-wide,
    so other processes' changes are in it), or ``accounting`` (nobody asked the hardware).
    """

    arenas: tuple[ArenaReport, ...] = ()
    freed: int = 0
    mapped: int = 0
    emulated: str = ""
    recomputed_requests: int = 0  # frozen requests whose KV is lost and computed again
    kept_requests: int = 0  # frozen requests whose KV was saved
    measured_by: str = "process"
    seconds: float = 0.0
    outside: int = 0  # after a release: in use on the device, or by this process, by no arena

    def residual(self, tags: Collection[str] | None = None) -> dict[str, int]:
        """Who still holds memory after a release of ``tags`` (None: all), most first (bytes).

        Owners are ``tag/group``, and ``outside`` for what no arena holds: torch's cache, code,
        other processes where the device counts as a whole.
        """
        held = {
            f"{a.tag}/{a.group}".rstrip("/"): a.resident
            for a in self.arenas
            if a.resident and (tags is None or a.tag in tags)
        }
        if self.outside:
            held["outside"] = self.outside
        return dict(sorted(held.items(), key=lambda one: -one[1]))

    def require_residual(self, limit: int, tags: Collection[str] | None = None) -> None:
        """Be strict about what a release left.

        :raises ReleaseIncomplete: more than ``limit`` bytes are still held; it names the owners.
        """
        held = self.residual(tags)
        total = sum(held.values())
        if total > limit:
            owners = ", ".join(f"{name} {nbytes}" for name, nbytes in held.items())
            raise ReleaseIncomplete(
                self.freed + total - limit, self.freed, where=f"{total} bytes still held: {owners}"
            )

    def resident(self, tag: str | None = None) -> int:
        """Resident bytes of one tag, or of all."""
        return sum(a.resident for a in self.arenas if tag is None or a.tag == tag)

    def backup(self, tag: str | None = None) -> int:
        """Bytes kept in backups of one tag, or of all."""
        return sum(a.backup for a in self.arenas if tag is None or a.tag == tag)


class UpdateReport(msgspec.Struct, frozen=True):
    """What an update did. ``applied`` counts manifest entries; all of them is the only success.

    ``nbytes`` are the bytes that the receivers took: of every rank that the engine declares.
    """

    version: Version
    applied: int = 0
    nbytes: int = 0
    buckets: int = 0
    skipped: bool = False  # the same version was already there, and verified
    verified: str = "none"  # none, transfer, applied
    groups: tuple[str, ...] = ()
    seconds: float = 0.0
    fingerprint: int = 0  # of the whole payload: the sum of its tensors'; 0: none were sent


class PauseReport(msgspec.Struct, frozen=True):
    """What a pause found and did; ids of requests."""

    mode: PauseMode
    aborted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    cleared_cache: bool = False
    stale_tokens: int = 0  # tokens whose KV of older weights stays in use (clear_cache=False)
    seconds: float = 0.0


class AbortReport(msgspec.Struct, frozen=True):
    """Which requests an abort ended, and which ids it did not find in flight."""

    aborted: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class BackendStatus(msgspec.Struct, frozen=True):
    """What the engine itself says. ``busy`` means that it could not be asked in time."""

    paused: bool = False
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    versions: Mapping[str, Version] = msgspec.field(default_factory=dict)
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    tokens_generated: int = 0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found, over all requests
    busy: bool = False


class Digests(msgspec.Struct, frozen=True):
    """Fingerprints of tensors as they lie in the engine, and which ranks were read.

    ``slices``: of tensors of which a rank holds a part, ``(start, length)`` for every dimension; the
    value is then of that part at its place in the whole, so that parts add up.
    """

    values: Mapping[str, int]
    kind: str
    ranks: tuple[int, ...] = (0,)
    slices: Mapping[str, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)

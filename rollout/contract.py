"""What a rollout engine can be asked, and what the words mean.

Five verbs (:class:`RolloutBackend`) and three companions (:class:`GenerationControl`,
:class:`Generator`, :class:`Inspect`). An adapter implements these and nothing else; the rules that
hold for every engine (pauses, states, versions, deadlines) live in :mod:`hotbunk.rollout.replica`
and :mod:`hotbunk.rollout.lifecycle`. This file knows no engine and no tensor library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from hotbunk.rollout.capabilities import (
    NATIVE,
    NO_ADAPTER,
    NO_DELTA,
    NO_KEEP_KV,
    NO_LAYOUT,
    Ability,
    Capabilities,
    emulated,
    unsupported,
)
from hotbunk.rollout.generation import (
    Completion,
    GenerateRequest,
    Sampling,
    TokenChunk,
    VersionSpan,
    collect,
    collect_all,
)
from hotbunk.rollout.reports import (
    AbortReport,
    ArenaReport,
    BackendStatus,
    Digests,
    MemoryReport,
    PauseReport,
    UpdateReport,
)
from hotbunk.rollout.transfer import (
    ITEMSIZE,
    ArenaHandle,
    Bucket,
    BucketEntry,
    Manifest,
    Placement,
    ReceiverLayout,
    TensorSpec,
    Ticket,
    Transfer,
)
from hotbunk.rollout.vocabulary import (
    ADAPTER_PREFIX,
    ALL_TAGS,
    FULL,
    TARGET,
    Cache,
    Deployment,
    FinishReason,
    Gate,
    PauseMode,
    Retention,
    Scope,
    ScopeKind,
    Support,
    Tag,
    Version,
    digest_name,
    parse_tags,
)

__all__ = [
    "ADAPTER_PREFIX",
    "ALL_TAGS",
    "Ability",
    "AbortReport",
    "ArenaHandle",
    "ArenaReport",
    "BackendStatus",
    "Bucket",
    "BucketEntry",
    "Cache",
    "Capabilities",
    "Completion",
    "Deployment",
    "Digests",
    "Engine",
    "FULL",
    "FinishReason",
    "Gate",
    "GenerateRequest",
    "GenerationControl",
    "Generator",
    "ITEMSIZE",
    "Inspect",
    "Manifest",
    "MemoryReport",
    "NATIVE",
    "OpensTransfers",
    "NO_ADAPTER",
    "NO_DELTA",
    "NO_KEEP_KV",
    "NO_LAYOUT",
    "PauseMode",
    "PauseReport",
    "Placement",
    "ReceiverLayout",
    "Retention",
    "RolloutBackend",
    "Sampling",
    "Scope",
    "ScopeKind",
    "Support",
    "TARGET",
    "Tag",
    "TensorSpec",
    "Ticket",
    "TokenChunk",
    "Transfer",
    "UpdateReport",
    "Version",
    "VersionSpan",
    "collect",
    "collect_all",
    "digest_name",
    "emulated",
    "parse_tags",
    "unsupported",
]


class RolloutBackend(ABC):
    """The thin contract every engine adapter implements.

    A backend is driven by exactly one :class:`~hotbunk.rollout.replica.Replica`, which serialises
    the five verbs, quiesces generation before those that need it, and has checked the state table.
    """

    capabilities: Capabilities

    @abstractmethod
    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        """Map the tags' memory again, at the same addresses; restore what was backed up.

        :raises UnknownTag: a tag that does not exist.
        :raises ResumeOutOfMemory: nothing stays mapped that was not before.
        """

    @abstractmethod
    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        """Give the tags' memory back; returns when it is back, measured.

        ``overrides`` sets another retention for single weight groups (those that no sync feeds).
        ``keep_kv`` saves the KV of frozen requests to the host; they go on with it after a resume,
        unless the weights changed meanwhile.
        State that is not a parameter survives every retention. Called with generation quiesced.

        :raises UnknownTag: a tag that does not exist.
        :raises Unsupported: a retention the backend does not have.
        :raises HostOutOfMemory: no room for the backup; nothing was released.
        :raises ReleaseIncomplete: less came back than was promised.
        """

    @abstractmethod
    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        """Give back KV memory only; weights and their addresses stay. Quiesced, as release."""

    @abstractmethod
    async def resume_kv_cache(self) -> MemoryReport:
        """Map KV memory again, empty.

        :raises ResumeOutOfMemory: the KV cache stays released.
        """

    @abstractmethod
    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        """Check the offer, accept, apply every bucket, verify, drop older caches, vote, label.

        Post-load processing runs exactly once. The version label moves last, after the vote.

        :raises UpdateRefused: before the first byte; nothing changed.
        :raises UpdateFailed: after it; the weights are unusable until a full update.
        """


@runtime_checkable
class GenerationControl(Protocol):
    """Pausing what runs. An engine's own pause; owners, holding, and which requests a pause ends by
    the version they began with (``min_start_version``, by ``abort``) are the Replica's business."""

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        """Start no further step; returns when the last one has ended and ``mode`` is carried out.

        Calls may overlap and escalate: abort beats all, wait after keep lets the frozen finish,
        keep after wait freezes the rest.
        """
        ...

    async def resume_generation(self) -> None:
        """Open generation again: frozen requests go on."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        """End these requests (None: all) with their partial tokens; admission stays as it is."""
        ...

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        """Forget these caches (None: all the engine has)."""
        ...


@runtime_checkable
class Generator(Protocol):
    """Token ids in, token ids out."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream one request. Dropping the iterator ends the request in the engine."""
        ...


@runtime_checkable
class Inspect(Protocol):
    """Looking, never touching."""

    async def status(self) -> BackendStatus:
        """What the engine does now; must not wait for the work it does."""
        ...

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        """Fingerprints of all state (or of ``names``) as it lies on the device.

        Names are those of :func:`digest_name`.
        """
        ...

    async def memory(self) -> MemoryReport:
        """What is resident, as the device or the OS says."""
        ...


@runtime_checkable
class OpensTransfers(Protocol):
    """An engine of several receiver ranks, each of which opens its own end of an update."""

    async def open_transfer(self, ticket: Ticket) -> Transfer:
        """All ends together, as one transfer.

        :raises TransferFailed: the offer is gone, or is not the ticket's.
        """
        ...


class Engine(RolloutBackend, GenerationControl, Generator, Inspect):
    """Everything at once: what a Replica drives. Adapters derive from this.

    ``on_lost`` is set by who drives it; an engine that finds itself dead between two calls tells
    it why.
    """

    on_lost: Callable[[str], object] | None = None

    async def start(self) -> None:
        """Bring the engine up. Called once, before anything else."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""

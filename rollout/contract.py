"""What a rollout engine can be asked, and what the words mean.

Five verbs (:class:`RolloutBackend`) and three companions (:class:`GenerationControl`,
:class:`Generator`, :class:`Inspect`). An adapter implements these and nothing else; the rules that
hold for every engine (pauses, states, versions, deadlines) live in :mod:`hotbunk.rollout.replica`
and :mod:`hotbunk.rollout.lifecycle`. This file knows no engine and no tensor library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from hotbunk.rollout.errors import UnknownTag, closest

TARGET = "target"  # the weight group every engine has
ADAPTER_PREFIX = "adapter:"


class Tag(StrEnum):
    """Memory that can be given away and taken back on its own."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_TAGS: tuple[Tag, ...] = (Tag.WEIGHTS, Tag.KV_CACHE)


class Retention(StrEnum):
    """What a release does with the content."""

    RESIDENT = "resident"  # stays on the device
    BACKUP = "backup"  # a host copy is kept (sleep level 1)
    DISCARD = "discard"  # forgotten (sleep level 2)


class PauseMode(StrEnum):
    """What a pause does with requests that already run."""

    ABORT = "abort"  # end now, with their partial tokens
    WAIT = "wait"  # let them finish
    KEEP = "keep"  # freeze them


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Cache(StrEnum):
    """Things computed from weights that must not outlive them."""

    PREFIX = "prefix"
    MULTIMODAL = "multimodal"
    ENCODER = "encoder"
    CONNECTORS = "connectors"


class Support(StrEnum):
    """How a backend keeps a promise."""

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"


class Gate(StrEnum):
    """How far the ban on tokens from EMPTY or DIRTY weights reaches."""

    IN_ENGINE = "in_engine"  # whoever asks
    ENGINE_PAUSE = "engine_pause"  # the engine's own pause stands in front of everyone
    PROXY = "proxy"  # only requests that come through hotbunk


class Deployment(StrEnum):
    """With whom an engine shares its device, and so what sleep means."""

    HYBRID = "hybrid"  # with this policy's trainer: sleep discards, wake is staged
    COLOCATED = "colocated"  # with another model: sleep backs up, wake restores
    STANDALONE = "standalone"  # with nobody: sleep does nothing


def digest_name(group: str, name: str) -> str:
    """What :meth:`Inspect.digest` calls a tensor: an adapter's carries the adapter's name."""
    return f"{group}/{name}" if group.startswith(ADAPTER_PREFIX) else name


def parse_tags(tags: Collection[str] | None) -> tuple[Tag, ...]:
    """``None`` is every tag, ``[]`` is none; order and repetition do not matter.

    :raises UnknownTag: for anything else, a bare string included.
    """
    if tags is None:
        return ALL_TAGS
    if isinstance(tags, str):
        raise UnknownTag(f"tags must be a list, not the string {tags!r}", remedy=f"use [{tags!r}]")
    known = [t.value for t in Tag]
    for tag in tags:
        if tag not in known:
            raise UnknownTag(
                f"unknown tag {tag!r}{closest(str(tag), known)}", remedy=f"tags are {known}"
            )
    return tuple(t for t in ALL_TAGS if t.value in tags)


class Version(msgspec.Struct, frozen=True, order=True):
    """A point in a policy's history: ``step`` within ``incarnation``.

    Ordered; a trainer that goes back to a checkpoint starts a new, higher incarnation.
    """

    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class ScopeKind(StrEnum):
    """How much of a model an update carries."""

    FULL = "full"
    PARTIAL = "partial"
    ADAPTER = "adapter"
    DELTA = "delta"


class Scope(msgspec.Struct, frozen=True):
    """What an update covers, and over which resident version (``base``) it may be applied."""

    kind: ScopeKind = ScopeKind.FULL
    base: Version | None = None
    name: str = ""  # of the adapter

    @staticmethod
    def partial(base: Version) -> Scope:
        """Fewer names than the model has, over resident ``base``."""
        return Scope(ScopeKind.PARTIAL, base)

    @staticmethod
    def adapter(name: str, base: Version) -> Scope:
        """A named adapter over resident ``base`` weights."""
        return Scope(ScopeKind.ADAPTER, base, name)

    @staticmethod
    def delta(base: Version) -> Scope:
        """Differences against resident ``base``."""
        return Scope(ScopeKind.DELTA, base)


FULL = Scope()


# -- generation -------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn, and when to stop. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy; ``seed`` makes a draw repeatable. ``min_p``, ``top_k`` (0: off)
    and ``top_p`` narrow the distribution, in that order, after the temperature. A token of
    ``stop_token_ids`` ends the response and is part of it; so does the model's own end-of-sequence
    token, unless ``ignore_eos``; a string of ``stop`` ends it with the token that completes it.
    ``n`` responses share the prompt (chunks say their ``index``; the i-th draws with ``seed + i``).
    ``logprobs`` asks for that many most likely alternatives a token.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    logprobs: int = 0


class GenerateRequest(msgspec.Struct, frozen=True):
    """Token ids in. ``media`` holds image, video and audio payloads, passed through unread.

    The last ``continued`` tokens of the prompt are a response that was cut off: a stop string may
    begin in them.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    adapter: str | None = None
    version: Version | None = None  # pinned: refuse to start under any other
    media: Mapping[str, Any] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    continued: int = 0


class TokenChunk(msgspec.Struct, frozen=True):
    """Token ids out: a few tokens, all made by the weights of ``version``.

    ``logprobs`` has one entry a token: log-softmax at the request's temperature (1 when greedy),
    before any truncation of the distribution. ``finish_reason`` is set on the last chunk only; a
    chunk that ends a request which may be sent again says so in ``error`` and ``retryable``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: Version = Version()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was reused; on the first chunk
    routed_experts: Any = None
    error: str = ""
    retryable: bool = False
    index: int = 0  # which of a request's ``n`` responses
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # a token: (id, log-prob) pairs


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a response were made by ``version``."""

    version: Version
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """A finished request: all its chunks put together. Spans are contiguous and cover it."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    error: str = ""
    retryable: bool = False
    index: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class _Joined:
    """Chunks of one response, put together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.cached = 0
        self.last: TokenChunk | None = None

    def add(self, chunk: TokenChunk) -> None:
        if self.last is not None and self.last.finish_reason is not None:
            raise ValueError(f"request {chunk.request_id!r} went on after it finished")
        start = len(self.ids)
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top.extend(chunk.top_logprobs)
        self.cached = max(self.cached, chunk.cached_tokens)
        if chunk.token_ids:
            if self.spans and self.spans[-1].version == chunk.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(chunk.version, start, len(self.ids)))
        self.last = chunk

    def completion(self) -> Completion:
        if self.last is None or self.last.finish_reason is None:
            raise ValueError("the stream ended without a finish reason")
        return Completion(
            self.last.request_id,
            tuple(self.ids),
            tuple(self.logprobs),
            tuple(self.spans),
            self.last.finish_reason,
            self.cached,
            self.last.error,
            self.last.retryable,
            self.last.index,
            tuple(self.top),
        )


async def collect_all(chunks: AsyncIterator[TokenChunk]) -> list[Completion]:
    """Read a whole stream of one or more responses, by index.

    :raises ValueError: a response ends without a finish reason, or goes on after one.
    """
    joined: dict[int, _Joined] = {}
    async for chunk in chunks:
        joined.setdefault(chunk.index, _Joined()).add(chunk)
    return [joined[index].completion() for index in sorted(joined)]


async def collect(chunks: AsyncIterator[TokenChunk]) -> Completion:
    """Read a whole stream of one response.

    :raises ValueError: as :func:`collect_all`, or the stream holds another number of responses.
    """
    done = await collect_all(chunks)
    if len(done) != 1:
        raise ValueError(f"the stream held {len(done)} responses")
    return done[0]


# Bytes of one element, by the name that travels (torch's, without its prefix).
ITEMSIZE: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    "complex128": 16,
}

# -- weights on the move ----------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of an update. ``aliases`` are further names bound to the same content (ties).

    ``dtype`` is a name of :data:`ITEMSIZE`; ``nbytes`` is that size times the elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    group: str = TARGET
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name this content is bound to."""
        return (self.name, *self.aliases)


class Manifest(msgspec.Struct, frozen=True):
    """The offer: everything a receiver needs in order to say yes or no before a byte moves."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    scope: Scope = FULL
    bucket_bytes: int = 64 << 20
    fingerprint: str = "none"  # kind of the fingerprints sent after the last bucket, or none
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)  # ``lora_alpha``, say

    @property
    def total_bytes(self) -> int:
        """Payload bytes, padding not counted."""
        return sum(t.nbytes for t in self.tensors)


class Placement(msgspec.Struct, frozen=True):
    """Where a receiver keeps one tensor: element type there, and arena offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = -1  # in the receiver's arena; -1 is not published


class ReceiverLayout(msgspec.Struct, frozen=True):
    """Which names a receiver rank wants, and as what: casts happen at the source."""

    tensors: Mapping[str, Placement]


class BucketEntry(msgspec.Struct, frozen=True):
    """A piece of a tensor in a bucket: bytes ``[start, start + nbytes)`` of its contiguous form."""

    index: int  # into Manifest.tensors
    start: int
    nbytes: int
    offset: int  # in the bucket


class Bucket(msgspec.Struct, frozen=True):
    """One contiguous buffer and a table. Lent: valid until the next bucket is asked for."""

    data: Any  # anything with the buffer protocol, or a device tensor of bytes
    entries: tuple[BucketEntry, ...]


class Transfer(ABC):
    """One receiver rank's side of one sync: accept, take buckets, compare, vote.

    Runs in the process that owns the weights. The order is ``manifest`` -> :meth:`accept` ->
    :meth:`buckets` to its end -> :meth:`fingerprints` -> :meth:`commit`, with :meth:`abort` at any
    point instead. Accept and commit return once *all* ranks of the replica have decided so.
    """

    manifest: Manifest

    @abstractmethod
    async def accept(self, layout: ReceiverLayout | None) -> None:
        """Agree to receive. ``layout`` gives the element types wanted; None: as in the manifest.

        :raises UpdateRefused: another rank refused; nothing was written anywhere.
        """

    @abstractmethod
    def buckets(self) -> AsyncIterator[Bucket]:
        """The buckets, in order. Taking the next one acknowledges the last.

        :raises TransferFailed: the sender is gone or sent nonsense.
        """

    @abstractmethod
    async def fingerprints(self) -> Mapping[str, int]:
        """Per tensor name, the fingerprint of what was sent; empty if the manifest says none."""

    @abstractmethod
    async def commit(self) -> None:
        """Vote to commit; returns when every rank has.

        :raises UpdateFailed: another rank failed: this replica is poisoned.
        """

    @abstractmethod
    async def decline(self) -> None:
        """Need nothing: the offered version is already here. Instead of :meth:`accept`."""

    @abstractmethod
    async def abort(self, error: BaseException) -> None:
        """Tell the sender that this rank gave up, and why. Idempotent; never raises."""


class Ticket(msgspec.Struct, frozen=True):
    """What travels to a replica so that it can open a :class:`Transfer` where the weights live.

    ``transport`` is an entry-point name; ``address`` means something to that transport alone.
    """

    transport: str
    address: str
    rank: int = 0


# -- reports ----------------------------------------------------------------------------------


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

    def resident(self, tag: str | None = None) -> int:
        """Resident bytes of one tag, or of all."""
        return sum(a.resident for a in self.arenas if tag is None or a.tag == tag)

    def backup(self, tag: str | None = None) -> int:
        """Bytes kept in backups of one tag, or of all."""
        return sum(a.backup for a in self.arenas if tag is None or a.tag == tag)


class UpdateReport(msgspec.Struct, frozen=True):
    """What an update did. ``applied`` counts manifest entries; all of them is the only success."""

    version: Version
    applied: int = 0
    nbytes: int = 0
    buckets: int = 0
    skipped: bool = False  # the same version was already there, and verified
    verified: str = "none"  # none, transfer, applied
    groups: tuple[str, ...] = ()
    seconds: float = 0.0


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
    """Fingerprints of tensors as they lie in the engine, and which ranks were read."""

    values: Mapping[str, int]
    kind: str
    ranks: tuple[int, ...] = (0,)


# -- capabilities -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ability:
    """How one verb is kept. ``how`` explains an emulation and its cost, or why there is none."""

    support: Support
    how: str = ""

    def __bool__(self) -> bool:
        return self.support is not Support.UNSUPPORTED


NATIVE = Ability(Support.NATIVE)


def emulated(how: str) -> Ability:
    """Kept, but not by the engine's own means; ``how`` says by what and at what cost."""
    return Ability(Support.EMULATED, how)


def unsupported(why: str) -> Ability:
    """Not kept: the verb raises ``Unsupported`` and changes nothing."""
    return Ability(Support.UNSUPPORTED, why)


NO_ADAPTER = unsupported("no LoRA")
NO_DELTA = unsupported("no delta updates")
NO_LAYOUT = unsupported("no layout published")
NO_KEEP_KV = unsupported("KV is not saved; frozen requests are computed again")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend really does, so that nobody has to find out by trying.

    ``groups`` maps each weight group to whether a sync may feed it; the conformance suite checks
    every line both ways.
    """

    backend: str
    release: Ability = NATIVE
    release_kv_cache: Ability = NATIVE
    retentions: frozenset[Retention] = frozenset(Retention)
    pause: Mapping[PauseMode, Ability] = field(
        default_factory=lambda: dict.fromkeys(PauseMode, NATIVE)
    )
    keep_release: Ability = NATIVE  # releasing under frozen requests, which are recomputed
    keep_kv: Ability = NO_KEEP_KV  # saving frozen requests' KV over a release
    abort: Ability = NATIVE
    gate: Gate = Gate.IN_ENGINE
    digest: Ability = NATIVE
    request_versions: Ability = NATIVE
    partial: Ability = NATIVE
    adapter: Ability = NO_ADAPTER
    delta: Ability = NO_DELTA
    layout: Ability = NO_LAYOUT
    caches: frozenset[Cache] = frozenset({Cache.PREFIX})
    groups: Mapping[str, bool] = field(default_factory=lambda: {TARGET: True})
    memory_measured_by: str = "process"
    positional_draws: bool = False  # a draw depends on seed and position in the sequence alone


# -- the contract -----------------------------------------------------------------------------


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
    """Pausing what runs. An engine's own pause; owners and holding are the Replica's business."""

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


class Engine(RolloutBackend, GenerationControl, Generator, Inspect):
    """Everything at once: what a Replica drives. Adapters derive from this."""

    async def start(self) -> None:
        """Bring the engine up. Called once, before anything else."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""

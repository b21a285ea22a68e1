"""The field's words: tags, retentions, modes, versions, scopes.

What they mean for every engine; :mod:`hotbunk.rollout.contract` speaks in them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

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

"""What an oracle can be told when it is made, and the capabilities that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hotbunk.rollout.backends.oracle.model import GROUPS
from hotbunk.rollout.contract import (
    NATIVE,
    Ability,
    Cache,
    Capabilities,
    Gate,
    PauseMode,
    Retention,
    unsupported,
)
from hotbunk.rollout.errors import ConfigError, closest
from hotbunk.rollout.options import convert

# What ``unsupported`` may list: everything that the oracle can do and another engine may not.
ABILITIES = (
    "abort",
    "adapter",
    "digest",
    "keep_kv",
    "keep_release",
    "partial",
    "pause.abort",
    "pause.keep",
    "pause.wait",
    "release",
    "release_kv_cache",
    "retention.backup",
    "retention.discard",
    "retention.resident",
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the oracle backend; sizes in bytes, times in seconds of loop time.

    ``loaded``: start with content of version 0.0, else EMPTY. ``fed``: weight groups that an
    update may and a full one must carry. ``unsupported``: names from :data:`ABILITIES` that this
    engine shall lack. ``deltas``: it takes updates that say which bits of the base change. ``gate``: ``proxy`` makes tokens from whatever memory holds, so a broken
    rule shows; ``in_engine`` refuses by itself.
    """

    step_time: float = 0.01
    max_running: int = 8
    kv_blocks: int = 256
    block_tokens: int = 4
    kv_block_bytes: int = 64
    loaded: bool = True
    fed: tuple[str, ...] = GROUPS
    unsupported: tuple[str, ...] = ()
    gate: Gate = Gate.PROXY
    deltas: bool = False
    release_deadline: float = 5.0

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool."""
        return self.kv_blocks * self.kv_block_bytes


def parse_options(options: Mapping[str, Any]) -> Options:
    """Typed options.

    :raises ConfigError: an unknown name (with the closest known one), or a value that cannot be
        meant.
    """
    parsed = convert(options, Options, "backend oracle")
    for option, allowed in (("fed", GROUPS), ("unsupported", ABILITIES)):
        for word in getattr(parsed, option):
            if word not in allowed:
                raise ConfigError(
                    f"{option} holds {word!r}{closest(word, allowed)}",
                    remedy=f"known are {', '.join(allowed)}",
                )
    positive = ("max_running", "kv_blocks", "block_tokens", "kv_block_bytes")
    if parsed.step_time < 0 or any(getattr(parsed, name) < 1 for name in positive):
        raise ConfigError("step_time must not be negative, sizes and counts must be 1 or more")
    return parsed


def capabilities(options: Options) -> Capabilities:
    """What an engine with these options declares."""

    def ability(name: str) -> Ability:
        off = name in options.unsupported
        return unsupported("switched off by the option 'unsupported'") if off else NATIVE

    return Capabilities(
        backend="oracle",
        release=ability("release"),
        release_kv_cache=ability("release_kv_cache"),
        retentions=frozenset(r for r in Retention if ability(f"retention.{r.value}")),
        pause={mode: ability(f"pause.{mode.value}") for mode in PauseMode},
        keep_release=ability("keep_release"),
        keep_kv=ability("keep_kv"),
        abort=ability("abort"),
        gate=options.gate,
        digest=ability("digest"),
        partial=ability("partial"),
        adapter=ability("adapter"),
        delta=NATIVE if options.deltas else unsupported("the option 'deltas' is off"),
        caches=frozenset({Cache.PREFIX, Cache.ENCODER}),
        samples=unsupported("one response a request"),
        stop_strings=unsupported("its tokens are no text"),
        top_logprobs=unsupported("its tokens have no alternatives"),
        positional_draws=True,  # a token follows from the seed and everything before it
        groups={group: group in options.fed for group in GROUPS},
    )

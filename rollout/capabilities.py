"""What a backend really does, so that nobody has to find out by trying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotbunk.rollout.vocabulary import TARGET, Cache, Gate, PauseMode, Retention, Support


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
NO_SHARDS = unsupported("each rank holds the whole model")
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
    sharded: Ability = NO_SHARDS  # a rank may hold a part: tensor or pipeline parallel
    ranks: int = 1  # receiver ranks of one update
    samples: Ability = NATIVE  # several responses of one request (``Sampling.n``)
    stop_strings: Ability = NATIVE
    top_logprobs: Ability = NATIVE  # the most likely alternatives of each token
    positional_draws: bool = False  # a draw depends on seed and position in the sequence alone

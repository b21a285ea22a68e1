"""The rules, as data: one table for every engine.

:data:`WEIGHT_RULES` maps (state, event) of a weight group to the next state or to the error that
the event raises there; :data:`KV_RULES` does so for the KV cache. :class:`Residency` applies them
and is the only place that does. Nothing here knows an engine or a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    TARGET,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    Version,
)


class Weights(StrEnum):
    """States of a weight group."""

    RESIDENT = "RESIDENT"  # content of a known version on the device
    BACKED_UP = "BACKED_UP"  # off the device, a host copy kept
    DISCARDED = "DISCARDED"  # off the device, forgotten
    EMPTY = "EMPTY"  # mapped, without content
    DIRTY = "DIRTY"  # mapped, half-written


class KV(StrEnum):
    """States of the KV cache."""

    RESIDENT = "RESIDENT"
    RELEASED = "RELEASED"


class Event(StrEnum):
    """What can happen to a weight group or the KV cache."""

    RELEASE_RESIDENT = "release(RESIDENT)"
    RELEASE_BACKUP = "release(BACKUP)"
    RELEASE_DISCARD = "release(DISCARD)"
    RESUME = "resume"
    OFFER = "update: offered"
    FIRST_BYTE = "update: first byte written"
    COMMIT = "update: committed"
    FAIL = "update: failed after a byte"
    GENERATE = "generate"


RELEASE_EVENT: Mapping[Retention, Event] = {
    Retention.RESIDENT: Event.RELEASE_RESIDENT,
    Retention.BACKUP: Event.RELEASE_BACKUP,
    Retention.DISCARD: Event.RELEASE_DISCARD,
}

_W, _E = Weights, Event
_NotLoaded, _NotResident = errors.WeightsNotLoaded, errors.WeightsNotResident
_Refusal = (
    type[errors.WeightsNotLoaded]
    | type[errors.WeightsPoisoned]
    | type[errors.WeightsNotResident]
    | type[errors.SessionError]
)
_Rule = Weights | _Refusal

#            state           event               -> next state, or the error it raises
WEIGHT_RULES: Mapping[tuple[Weights, Event], _Rule] = {
    (_W.RESIDENT, _E.RELEASE_RESIDENT): _W.RESIDENT,
    (_W.RESIDENT, _E.RELEASE_BACKUP): _W.BACKED_UP,
    (_W.RESIDENT, _E.RELEASE_DISCARD): _W.DISCARDED,
    (_W.RESIDENT, _E.RESUME): _W.RESIDENT,
    (_W.RESIDENT, _E.OFFER): _W.RESIDENT,
    (_W.RESIDENT, _E.FIRST_BYTE): _W.DIRTY,
    (_W.RESIDENT, _E.COMMIT): errors.SessionError,
    (_W.RESIDENT, _E.FAIL): _W.RESIDENT,
    (_W.RESIDENT, _E.GENERATE): _W.RESIDENT,
    (_W.BACKED_UP, _E.RELEASE_RESIDENT): _W.BACKED_UP,
    (_W.BACKED_UP, _E.RELEASE_BACKUP): _W.BACKED_UP,
    (_W.BACKED_UP, _E.RELEASE_DISCARD): _W.DISCARDED,  # the backup is dropped
    (_W.BACKED_UP, _E.RESUME): _W.RESIDENT,
    (_W.BACKED_UP, _E.OFFER): _NotResident,
    (_W.BACKED_UP, _E.FIRST_BYTE): _NotResident,
    (_W.BACKED_UP, _E.COMMIT): errors.SessionError,
    (_W.BACKED_UP, _E.FAIL): _W.BACKED_UP,
    (_W.BACKED_UP, _E.GENERATE): _NotLoaded,
    (_W.DISCARDED, _E.RELEASE_RESIDENT): _W.DISCARDED,
    (_W.DISCARDED, _E.RELEASE_BACKUP): _W.DISCARDED,
    (_W.DISCARDED, _E.RELEASE_DISCARD): _W.DISCARDED,
    (_W.DISCARDED, _E.RESUME): _W.EMPTY,
    (_W.DISCARDED, _E.OFFER): _NotResident,
    (_W.DISCARDED, _E.FIRST_BYTE): _NotResident,
    (_W.DISCARDED, _E.COMMIT): errors.SessionError,
    (_W.DISCARDED, _E.FAIL): _W.DISCARDED,
    (_W.DISCARDED, _E.GENERATE): _NotLoaded,
    (_W.EMPTY, _E.RELEASE_RESIDENT): _W.EMPTY,
    (_W.EMPTY, _E.RELEASE_BACKUP): _W.DISCARDED,  # there is nothing to back up
    (_W.EMPTY, _E.RELEASE_DISCARD): _W.DISCARDED,
    (_W.EMPTY, _E.RESUME): _W.EMPTY,
    (_W.EMPTY, _E.OFFER): _W.EMPTY,
    (_W.EMPTY, _E.FIRST_BYTE): _W.DIRTY,
    (_W.EMPTY, _E.COMMIT): errors.SessionError,
    (_W.EMPTY, _E.FAIL): _W.EMPTY,
    (_W.EMPTY, _E.GENERATE): _NotLoaded,
    (_W.DIRTY, _E.RELEASE_RESIDENT): _W.DIRTY,
    (_W.DIRTY, _E.RELEASE_BACKUP): _W.DISCARDED,  # half-written content is not worth keeping
    (_W.DIRTY, _E.RELEASE_DISCARD): _W.DISCARDED,
    (_W.DIRTY, _E.RESUME): _W.DIRTY,
    (_W.DIRTY, _E.OFFER): _W.DIRTY,
    (_W.DIRTY, _E.FIRST_BYTE): _W.DIRTY,
    (_W.DIRTY, _E.COMMIT): _W.RESIDENT,
    (_W.DIRTY, _E.FAIL): _W.DIRTY,
    (_W.DIRTY, _E.GENERATE): errors.WeightsPoisoned,
}

KV_RULES: Mapping[tuple[KV, Event], KV | type[errors.ContractError]] = {
    (KV.RESIDENT, _E.RELEASE_RESIDENT): KV.RELEASED,  # KV content is never retained
    (KV.RESIDENT, _E.RELEASE_BACKUP): KV.RELEASED,
    (KV.RESIDENT, _E.RELEASE_DISCARD): KV.RELEASED,
    (KV.RESIDENT, _E.RESUME): KV.RESIDENT,
    (KV.RESIDENT, _E.GENERATE): KV.RESIDENT,
    (KV.RELEASED, _E.RELEASE_RESIDENT): KV.RELEASED,
    (KV.RELEASED, _E.RELEASE_BACKUP): KV.RELEASED,
    (KV.RELEASED, _E.RELEASE_DISCARD): KV.RELEASED,
    (KV.RELEASED, _E.RESUME): KV.RESIDENT,
    (KV.RELEASED, _E.GENERATE): errors.KVNotResident,
}

_VERSIONED = frozenset({Weights.RESIDENT, Weights.BACKED_UP})


@dataclass(frozen=True, slots=True)
class GroupState:
    """A weight group's state; ``version`` is set where content of a known version exists."""

    state: Weights
    version: Version | None = None

    def __str__(self) -> str:
        return f"{self.state.value}({self.version})" if self.version else self.state.value


def step(group: str, now: GroupState, event: Event, version: Version | None = None) -> GroupState:
    """The group's next state.

    :raises ContractError: whatever :data:`WEIGHT_RULES` names for it.
    """
    rule = WEIGHT_RULES[now.state, event]
    if isinstance(rule, Weights):
        kept = version if event is Event.COMMIT else now.version
        return GroupState(rule, kept if rule in _VERSIONED else None)
    if issubclass(rule, errors.SessionError):
        raise rule(f"{event.value} while weight group {group!r} is {now}")
    raise rule(group, str(now))


def groups_of(scope: Scope, manifest_groups: Iterable[str]) -> frozenset[str]:
    """The weight groups an update writes: the adapter's own, or those its tensors name."""
    if scope.kind is ScopeKind.ADAPTER:
        return frozenset({ADAPTER_PREFIX + scope.name})
    return frozenset(manifest_groups) or frozenset({TARGET})


class Residency:
    """The state of every group and of the KV cache of one engine.

    ``fed`` are the groups a sync feeds: the others are never discarded (they get a backup where
    the engine can make one, else they stay resident).
    """

    def __init__(
        self,
        versions: Mapping[str, Version | None],
        *,
        fed: Collection[str],
        retentions: Collection[Retention],
    ) -> None:
        self.groups: dict[str, GroupState] = {
            name: GroupState(Weights.RESIDENT, v) if v else GroupState(Weights.EMPTY)
            for name, v in versions.items()
        }
        self.kv = KV.RESIDENT
        self.fed = frozenset(fed)
        # Survives a discard: a stale sender must not get in through an empty engine.
        self._newest: dict[str, Version] = {n: v for n, v in versions.items() if v}
        self._unfed_retention = (
            Retention.BACKUP if Retention.BACKUP in retentions else Retention.RESIDENT
        )

    def is_fed(self, group: str) -> bool:
        """Whether some sync can bring this group's content back."""
        return group in self.fed

    def overrides(self, retention: Retention) -> dict[str, Retention]:
        """Groups that a release with ``retention`` must treat otherwise."""
        empty = (Weights.EMPTY, Weights.DIRTY)  # nothing to keep where there is no content
        if retention is Retention.BACKUP:
            return {g: Retention.DISCARD for g, s in self.groups.items() if s.state in empty}
        if retention is Retention.DISCARD:
            return {
                g: self._unfed_retention
                for g, s in self.groups.items()
                if not self.is_fed(g) and s.state not in empty
            }
        return {}

    def released(
        self,
        tags: Collection[Tag],
        retention: Retention,
        groups: Mapping[str, Retention] | None = None,
    ) -> None:
        """A release succeeded; ``groups`` says what was done to each (default: the overrides)."""
        if Tag.WEIGHTS in tags:
            others = self.overrides(retention) if groups is None else groups
            for name, now in self.groups.items():
                event = RELEASE_EVENT[others.get(name, retention)]
                self.groups[name] = step(name, now, event)
        if Tag.KV_CACHE in tags:
            self._kv(RELEASE_EVENT[retention])

    def resumed(self, tags: Collection[Tag]) -> None:
        """A resume succeeded."""
        if Tag.WEIGHTS in tags:
            for name, now in self.groups.items():
                self.groups[name] = step(name, now, Event.RESUME)
        if Tag.KV_CACHE in tags:
            self._kv(Event.RESUME)

    def check_offer(self, groups: Collection[str], scope: Scope, version: Version) -> None:
        """May an update of these groups begin?

        :raises WeightsNotResident: a group's memory is released.
        :raises VersionRegression: older than anything this engine ever held, or a patch that is
            not newer than it.
        :raises BaseMismatch: not a full update, and the base is not what is resident.
        """
        for name in sorted(groups):
            now = self.groups.get(name)
            if now is None:  # a new adapter: created by its first update
                continue
            step(name, now, Event.OFFER)
            newest = self._newest.get(name)
            patch = scope.kind in (ScopeKind.PARTIAL, ScopeKind.DELTA)
            if newest is not None and (version < newest or (patch and version == newest)):
                raise errors.VersionRegression(newest, version)
        if scope.kind is not ScopeKind.FULL:
            bases = [TARGET] if scope.kind is ScopeKind.ADAPTER else sorted(groups)
            for name in bases:
                held = self.groups.get(name)
                resident = held.version if held and held.state is Weights.RESIDENT else None
                if resident is None or scope.base != resident:
                    raise errors.BaseMismatch(scope.base, resident or "nothing")

    def written(self, groups: Collection[str]) -> None:
        """The first byte of an update reached these groups."""
        for name in groups:
            now = self.groups.get(name, GroupState(Weights.EMPTY))
            self.groups[name] = step(name, now, Event.FIRST_BYTE)

    def committed(self, groups: Collection[str], version: Version) -> None:
        """An update of these groups succeeded."""
        for name in groups:
            self.groups[name] = step(name, self.groups[name], Event.COMMIT, version)
            self._newest[name] = version

    def check_generate(self, adapter: str | None = None) -> None:
        """May a token be made now?

        :raises WeightsNotLoaded: a group in use has no content.
        :raises WeightsPoisoned: a group in use is half-written.
        :raises KVNotResident: the KV cache is released.
        """
        for name, now in self.groups.items():
            if name.startswith(ADAPTER_PREFIX) and name != f"{ADAPTER_PREFIX}{adapter}":
                continue
            step(name, now, Event.GENERATE)
        if adapter is not None and f"{ADAPTER_PREFIX}{adapter}" not in self.groups:
            raise errors.WeightsNotLoaded(f"{ADAPTER_PREFIX}{adapter}", "unknown")
        rule = KV_RULES[self.kv, Event.GENERATE]
        if not isinstance(rule, KV):
            raise errors.KVNotResident()

    def servable(self) -> bool:
        """Whether the base model could make a token now."""
        try:
            self.check_generate()
        except errors.ContractError:
            return False
        return True

    def poisoned(self) -> frozenset[str]:
        """Groups that an update left half-written."""
        return frozenset(n for n, s in self.groups.items() if s.state is Weights.DIRTY)

    def versions(self) -> dict[str, Version]:
        """The version vector of content that is resident or backed up."""
        # A copy: an engine's own record is read while its thread adds an adapter.
        return {n: s.version for n, s in self.groups.copy().items() if s.version is not None}

    def newest(self) -> dict[str, Version]:
        """The newest version each group ever committed, also where its content is gone."""
        return self._newest.copy()

    def mapped(self) -> frozenset[Tag]:
        """Tags whose memory is wholly on the device."""
        off = {Weights.BACKED_UP, Weights.DISCARDED}
        tags = set()
        if not any(s.state in off for s in self.groups.values()):
            tags.add(Tag.WEIGHTS)
        if self.kv is KV.RESIDENT:
            tags.add(Tag.KV_CACHE)
        return frozenset(tags)

    def _kv(self, event: Event) -> None:
        rule = KV_RULES[self.kv, event]
        assert isinstance(rule, KV)
        self.kv = rule

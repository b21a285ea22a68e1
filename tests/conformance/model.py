"""The contract once more, in the plainest way: what the machine compares a replica with.

Written from CONTRACT.md and nothing else, as ifs on strings; it shares no table with the code
under test.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hotbunk.rollout import errors


@dataclass
class Group:
    """A weight group: ``state`` as status spells it, ``version`` where it holds content."""

    state: str
    version: int | None
    fed: bool
    newest: int = -1

    def __str__(self) -> str:
        return self.state if self.version is None else f"{self.state}(0.{self.version})"

    @property
    def mapped(self) -> bool:
        return self.state in ("RESIDENT", "EMPTY", "DIRTY")

    def release(self, retention: str) -> None:
        """What a release with this retention makes of it."""
        if retention == "resident":
            return
        if self.state in ("EMPTY", "DIRTY") or retention == "discard":
            self.state, self.version = "DISCARDED", None
        elif self.state == "RESIDENT":
            self.state = "BACKED_UP"

    def resume(self) -> None:
        """What a resume makes of it."""
        if self.state == "BACKED_UP":
            self.state = "RESIDENT"
        elif self.state == "DISCARDED":
            self.state = "EMPTY"

    def write(self) -> None:
        """The first byte of an update."""
        self.state, self.version = "DIRTY", None

    def commit(self, version: int) -> None:
        """An update succeeded."""
        self.state, self.version, self.newest = "RESIDENT", version, version


@dataclass
class Model:
    """One replica. ``pauses`` maps owners to modes; ``clear`` is what pauses asked for so far."""

    groups: dict[str, Group]
    retentions: Collection[str]
    adapters: dict[str, Group] = field(default_factory=dict)
    kv: bool = True
    pauses: dict[str, str] = field(default_factory=dict)
    clear: bool = False

    def all_groups(self) -> dict[str, Group]:
        """Base groups, then adapters by their full names."""
        return {**self.groups, **{f"adapter:{n}": g for n, g in self.adapters.items()}}

    @property
    def paused(self) -> bool:
        return bool(self.pauses)

    @property
    def poisoned(self) -> bool:
        """Whether any group is half-written."""
        return any(g.state == "DIRTY" for g in self.all_groups().values())

    @property
    def version(self) -> int | None:
        """Of the weights a sync feeds."""
        return next(g.version for g in self.groups.values() if g.fed)

    def missing(self, adapter: str | None = None) -> type[errors.ContractError] | None:
        """The error a request gets when generation is open; None: it is served."""
        needed = list(self.groups.values())
        if adapter is not None and adapter in self.adapters:
            needed.append(self.adapters[adapter])
        for group in needed:
            if group.state == "DIRTY":
                return errors.WeightsPoisoned
            if group.state != "RESIDENT":
                return errors.WeightsNotLoaded
        if adapter is not None and adapter not in self.adapters:
            return errors.WeightsNotLoaded
        return None if self.kv else errors.KVNotResident

    def hopeless(self, adapter: str | None) -> bool:
        """Whether waiting makes no sense: what it needs is half-written."""
        if any(g.state == "DIRTY" for g in self.groups.values()):
            return True
        own = self.adapters.get(adapter) if adapter is not None else None
        return own is not None and own.state == "DIRTY"

    def release(self, tags: Collection[str], retention: str) -> None:
        """A release of these tags."""
        if "weights" in tags:
            for name, group in self.all_groups().items():
                how = retention
                fed = group.fed and name in self.groups
                if retention == "discard" and not fed and group.version is not None:
                    how = "backup" if "backup" in self.retentions else "resident"
                group.release(how)
        if "kv_cache" in tags:
            self.kv = False

    def resume(self, tags: Collection[str]) -> None:
        """A resume of these tags; sleep's pause ends when everything is back."""
        if "weights" in tags:
            for group in self.all_groups().values():
                group.resume()
        if "kv_cache" in tags:
            self.kv = True
        if self.kv and all(g.mapped for g in self.all_groups().values()):
            self.drop("sleep")

    def drop(self, owner: str) -> None:
        """An owner's pause ends."""
        self.pauses.pop(owner, None)
        if not self.pauses:
            self.clear = False

    def offered(
        self, version: int, base: int | None = None, *, patch: bool = False
    ) -> type[errors.HotbunkError] | str:
        """What becomes of a sound update of all fed groups: an error, ``skip`` or ``send``."""
        fed = [g for g in self.groups.values() if g.fed]
        for group in fed:
            if not group.mapped:
                return errors.WeightsNotResident
            if version < group.newest or (patch and version == group.newest):
                return errors.VersionRegression
        if patch and any(g.state != "RESIDENT" or g.version != base for g in fed):
            return errors.BaseMismatch
        whole = all(g.state == "RESIDENT" and g.version == version for g in fed)
        return "skip" if whole and not patch else "send"

    def offered_adapter(
        self, name: str, version: int, base: int | None
    ) -> type[errors.HotbunkError] | str:
        """The same for an adapter update over ``base``."""
        own = self.adapters.get(name)
        if own is not None:
            if not own.mapped:
                return errors.WeightsNotResident
            if version < own.newest:
                return errors.VersionRegression
        target = next(iter(self.groups.values()))
        if target.state != "RESIDENT" or target.version != base:
            return errors.BaseMismatch
        same = own is not None and own.state == "RESIDENT" and own.version == version
        return "skip" if same else "send"

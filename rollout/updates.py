"""One update as a transaction on the state table, and what was sent, to compare with later."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Engine,
    Manifest,
    Scope,
    ScopeKind,
    Transfer,
    UpdateReport,
    Version,
    digest_name,
)
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.lifecycle import Residency, Weights, groups_of
from hotbunk.rollout.quiesce import Call
from hotbunk.rollout.status import Deadlines
from hotbunk.rollout.watch import WatchedTransfer


class Updates:
    """Runs updates of one engine, one at a time.

    ``under_way`` are the groups being written now: DIRTY, and on their way to whole.
    """

    def __init__(
        self, backend: Engine, residency: Residency, deadlines: Deadlines, call: Call
    ) -> None:
        self.under_way: frozenset[str] = frozenset()
        self._backend = backend
        self._residency = residency
        self._deadlines = deadlines
        self._call = call
        self._sent: dict[str, dict[str, int]] = {}  # group -> name -> fingerprint of the commit

    def check(self, manifest: Manifest, version: Version, scope: Scope) -> frozenset[str]:
        """The groups the update writes, if it may begin.

        :raises SessionError: another update was asked for than is on offer.
        :raises Unsupported: a scope the backend does not have.
        :raises UpdateRefused, WeightsNotResident: see the state table.
        """
        if manifest.version != version or manifest.scope != scope:
            raise errors.SessionError(
                f"asked for version {version} ({scope.kind.value}) and offered "
                f"{manifest.version} ({manifest.scope.kind.value})"
            )
        if scope.kind is not ScopeKind.FULL:
            ability = getattr(self._backend.capabilities, scope.kind.value)
            if not ability:
                backend = self._backend.capabilities.backend
                raise errors.Unsupported(scope.kind.value, backend, ability.how)
        groups = groups_of(scope, (spec.group for spec in manifest.tensors))
        self._residency.check_offer(groups, scope, version)
        return groups

    async def run(
        self, transfer: Transfer, groups: frozenset[str], deadline: float | None
    ) -> UpdateReport:
        """Hand the transfer to the engine. The first byte sets the dirty mark, only this clears it.

        :raises UpdateFailed: also where the engine says less than that all was applied.
        """
        manifest = transfer.manifest
        watched = WatchedTransfer(transfer, lambda: self._residency.written(groups))
        limit = self._deadlines.update if deadline is None else deadline
        began = time.perf_counter()
        self.under_way = groups
        try:
            coro = self._backend.update_weights(
                watched, version=manifest.version, scope=manifest.scope
            )
            report = await self._call("update_weights", coro, limit)
            if report.applied != len(manifest.tensors) or not watched.committed:
                raise errors.UpdateFailed(
                    f"the engine applied {report.applied} of {len(manifest.tensors)} tensors"
                    + ("" if watched.committed else " and never voted to commit")
                )
            self._residency.committed(groups, manifest.version)
        finally:
            self.under_way = frozenset()
        held = watched.expected
        if held and report.verified != "applied" and self._backend.capabilities.digest:
            # It keeps the weights in another form: what they are now is what they must still be.
            names = {s.name: digest_name(s.group, s.name) for s in manifest.tensors}
            digesting = self._backend.digest(tuple(names.values()))
            found = await self._call("digest", digesting, self._deadlines.memory)
            held = {name: found.values[key] for name, key in names.items()}
        for spec in manifest.tensors:
            of_group = self._sent.setdefault(spec.group, {})
            for name in spec.names:
                of_group.pop(name, None)
            if spec.name in held:
                of_group[spec.name] = held[spec.name]
        seconds = time.perf_counter() - began
        return msgspec.structs.replace(
            report,
            groups=tuple(sorted(groups)),
            seconds=seconds,
            fingerprint=sum(watched.expected.values()) & MASK,
        )

    async def already_there(
        self, groups: Collection[str], scope: Scope, version: Version
    ) -> UpdateReport | None:
        """A report if this very version is resident and its bytes still are what was sent."""
        held = [self._residency.groups.get(name) for name in groups]
        if scope.kind not in (ScopeKind.FULL, ScopeKind.ADAPTER) or not all(
            s is not None and s.state is Weights.RESIDENT and s.version == version for s in held
        ):
            return None
        verified = "none"
        sent = {
            digest_name(group, name): value
            for group in groups
            for name, value in self._sent.get(group, {}).items()
        }
        if sent and self._backend.capabilities.digest:
            coro = self._backend.digest(tuple(sent))
            found = await self._call("digest", coro, self._deadlines.memory)
            if dict(found.values) != sent:
                return None  # content changed under its label: take the transfer
            verified = "applied"
        return UpdateReport(version, skipped=True, verified=verified, groups=tuple(sorted(groups)))

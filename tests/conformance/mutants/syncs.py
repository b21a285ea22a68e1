"""Updates, broken."""

from __future__ import annotations

from typing import Any

import msgspec

from hotbunk.conformance.mutants import Patches, mutant, nothing
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import engine
from hotbunk.rollout.backends.oracle.engine import OracleEngine
from hotbunk.rollout.backends.oracle.model import BUFFERS, WeightGroup
from hotbunk.rollout.backends.oracle.update import DeltaWriter, Writer, check_manifest
from hotbunk.rollout.contract import FULL, Digests, UpdateReport
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.updates import Updates


@mutant("an_update_equals_a_fresh_engine")
def an_update_leaves_a_trace(patch: Patches) -> None:
    """Every parameter is as sent, and a buffer is what the last update made of it (G3, G8)."""
    original = WeightGroup.post_load

    def trace(self: WeightGroup) -> None:
        original(self)
        for name in BUFFERS.get(self.name, {}):
            if self.version is None:  # an update, not the first load
                self.write(name, 0, bytes([self.read(name)[0] ^ self.derived[0]]))

    patch.setattr(WeightGroup, "post_load", trace)


@mutant("the_label_moves_last")
def the_engine_labels_first(patch: Patches) -> None:
    """The engine says the new version from the first byte on (V8)."""
    begin, update = OracleEngine._begin, OracleEngine.update_weights

    def label(self: OracleEngine, touched: Any) -> None:
        begin(self, touched)
        for group in touched:
            group.version = self.__dict__["announced"]

    async def announce(
        self: OracleEngine, transfer: Any, *, version: Any, scope: Any = FULL
    ) -> Any:
        self.__dict__["announced"] = version
        return await update(self, transfer, version=version, scope=scope)

    patch.setattr(OracleEngine, "_begin", label)
    patch.setattr(OracleEngine, "update_weights", announce)


@mutant("verification_reads_memory")
def verification_reads_what_came(patch: Patches) -> None:
    """Fingerprints are made of the buckets, and memory is never read (U1)."""
    write = Writer.write
    came: dict[int, bytearray] = {}

    def note(self: Writer, bucket: Any) -> None:
        write(self, bucket)
        for entry in bucket.entries:
            spec = self._manifest.tensors[entry.index]
            held = came.setdefault(entry.index, bytearray(spec.nbytes))
            piece = bucket.data[entry.offset : entry.offset + entry.nbytes]
            held[entry.start : entry.start + entry.nbytes] = piece

    def compare(self: Writer, sent: Any) -> None:
        wrong = [
            spec.name
            for n, spec in enumerate(self._manifest.tensors)
            if sent.get(spec.name) != fingerprint_bytes(bytes(came.pop(n, b"")))
        ]
        if wrong:
            raise errors.VerifyFailed(wrong)

    patch.setattr(Writer, "write", note)
    patch.setattr(Writer, "verify", compare)


@mutant("a_planted_corruption_is_found")
def digests_are_remembered(patch: Patches) -> None:
    """A digest is what it was at the last update, whatever lies there now (U1)."""
    digest, update = OracleEngine.digest, OracleEngine.update_weights

    async def remembered(self: OracleEngine, names: Any = None) -> Digests:
        key = None if names is None else tuple(names)
        known = self.__dict__.setdefault("digests", {})
        if key not in known:
            known[key] = await digest(self, names)
        found: Digests = known[key]
        return found

    async def renewed(self: OracleEngine, transfer: Any, **more: Any) -> Any:
        self.__dict__.pop("digests", None)
        return await update(self, transfer, **more)

    patch.setattr(OracleEngine, "digest", remembered)
    patch.setattr(OracleEngine, "update_weights", renewed)


@mutant("nothing_sent_is_no_success")
def silence_is_success(patch: Patches) -> None:
    """Bytes that never came are counted as applied (B16, B20)."""
    patch.setattr(Intake, "finish", lambda self: len(self._sizes))
    patch.setattr(Writer, "verify", nothing)


@mutant("one_tensor_at_a_time")
def a_partial_update_forgets_the_rest(patch: Patches) -> None:
    """The first parameter of a group is cleared when any other is updated (B17)."""
    original = OracleEngine._begin

    def clear(self: OracleEngine, touched: Any) -> None:
        original(self, touched)
        for group in touched:
            first = next(iter(group.parameters.values()))
            group.write(first.name, 0, bytes(first.nbytes))

    patch.setattr(OracleEngine, "_begin", clear)


@mutant("an_engine_fails_in_each_phase")
def a_receivers_error_is_swallowed(patch: Patches) -> None:
    """The engine's own code raised in the middle, and the update counts as done (B20, N2)."""
    original = OracleEngine.update_weights

    async def content(self: OracleEngine, transfer: Any, *, version: Any, scope: Any = FULL) -> Any:
        try:
            return await original(self, transfer, version=version, scope=scope)
        except RuntimeError:
            await transfer.commit()
            return UpdateReport(version, applied=len(transfer.manifest.tensors))

    patch.setattr(OracleEngine, "update_weights", content)


@mutant("a_sender_hangs_in_each_phase")
def an_update_that_never_ends_counts(patch: Patches) -> None:
    """One that started and was cut off at its deadline leaves weights that serve (N7)."""
    original = Updates.run

    async def run(self: Updates, transfer: Any, groups: Any, deadline: Any) -> Any:
        try:
            return await original(self, transfer, groups, deadline)
        except errors.DeadlineExceeded:
            self._residency.committed(groups, transfer.manifest.version)
            raise

    patch.setattr(Updates, "run", run)


@mutant("an_update_error_leaves_the_server_answering")
def an_update_error_ends_the_replica(patch: Patches) -> None:
    """A failed update takes the engine with it, though a resend would heal it (N7)."""
    original = Replica._update

    async def fragile(self: Replica, transfer: Any, groups: Any, deadline: Any) -> Any:
        try:
            return await original(self, transfer, groups, deadline)
        except errors.UpdateFailed as error:
            self._line.lose(str(error))
            raise

    patch.setattr(Replica, "_update", fragile)


@mutant("a_sender_fails_in_each_phase")
def an_offer_clears_the_weights(patch: Patches) -> None:
    """Old content is gone when an offer is accepted, before any byte came (B14, N7)."""
    original = Writer.__init__

    def clear(self: Writer, manifest: Any, groups: Any) -> None:
        original(self, manifest, groups)
        for name in {spec.group for spec in manifest.tensors}:
            arena = groups[name].arena
            arena[:] = bytes(len(arena))

    patch.setattr(Writer, "__init__", clear)


@mutant("requests_that_come_during_an_update")
def an_update_lets_go_who_waits(patch: Patches) -> None:
    """Requests that are held when an update commits are turned away (H4)."""
    original = Replica._update

    async def unkind(self: Replica, transfer: Any, groups: Any, deadline: Any) -> Any:
        report = await original(self, transfer, groups, deadline)
        self._gate.let_go("an update came")
        return report

    patch.setattr(Replica, "_update", unkind)


@mutant("bad_offers_are_refused")
def unknown_names_are_skipped(patch: Patches) -> None:
    """An offer names what the engine does not have, and the rest is applied (B16)."""
    check, make, verify = check_manifest, Writer.__init__, Writer.verify

    def known(manifest: Any, groups: Any) -> Any:
        theirs = {name for group in groups.values() for name in group.owner}
        tensors = tuple(spec for spec in manifest.tensors if theirs & set(spec.names))
        return msgspec.structs.replace(manifest, tensors=tensors)

    def lenient(manifest: Any, groups: Any, fed: Any) -> None:
        check(known(manifest, groups), groups, fed)

    def begin(self: Writer, manifest: Any, groups: Any) -> None:
        taken = known(manifest, groups)
        make(self, taken, groups)
        places = dict(zip(taken.tensors, self._first, strict=True))
        self._first = [places.get(spec, []) for spec in manifest.tensors]
        self.intake = Intake(manifest, [spec.nbytes for spec in manifest.tensors])
        self._manifest = manifest

    def compare(self: Writer, sent: Any) -> None:
        self._manifest = known(self._manifest, self._groups)
        verify(self, sent)

    patch.setattr(engine, "check_manifest", lenient)
    patch.setattr(Writer, "__init__", begin)
    patch.setattr(Writer, "verify", compare)


@mutant("refused_by_another_rank")
def one_rank_goes_ahead(patch: Patches) -> None:
    """Another rank refuses, and this one applies the update all the same (N6)."""
    original = OracleEngine.update_weights

    async def ahead(self: OracleEngine, transfer: Any, **more: Any) -> Any:
        accept, refused = transfer.accept, list[errors.UpdateRefused]()

        async def heedless(*args: Any) -> bool:
            try:
                return bool(await accept(*args))
            except errors.UpdateRefused as refusal:
                refused.append(refusal)
                transfer.accepted = True
                return False

        transfer.accept = heedless
        report = await original(self, transfer, **more)
        for refusal in refused:
            raise refusal
        return report

    patch.setattr(OracleEngine, "update_weights", ahead)


@mutant("deltas", deltas=True)
def a_delta_counts_as_the_whole(patch: Patches) -> None:
    """What a delta holds is written over the base, instead of what it makes of it (B17)."""
    patch.setattr(DeltaWriter, "_place", Writer._place)
    patch.setattr(DeltaWriter, "verify", nothing)

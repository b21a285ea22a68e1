"""Every error hotbunk raises on purpose, as one tree.

    HotbunkError
    ├── UsageError (ValueError)             what was asked for cannot be meant
    │   ├── UnknownTag                      a memory tag nobody knows
    │   ├── ConfigError                     a configuration key, value or file
    │   ├── MissingExtra (LookupError)      an optional package is not installed
    │   └── BackendNotFound (LookupError)   no backend or transport of that name
    ├── Unsupported                         the backend says it cannot do this
    ├── ContractError                       the verb is not legal in this state
    │   ├── WeightsNotLoaded                generation asked from weights without content
    │   ├── WeightsPoisoned                 generation asked from half-written weights
    │   ├── WeightsNotResident              an update before the weights were resumed
    │   ├── KVNotResident                   generation asked while the KV cache is released
    │   ├── RequestsInFlight                memory asked back while steps run
    │   ├── SessionError                    verbs in the wrong order
    │   └── ReplicaLost                     the engine hung or died; only a restart heals
    ├── MemoryFault                         the device and the promise disagree
    │   ├── ReleaseIncomplete               less came back than was promised
    │   ├── ReleaseUndone                   some ranks could not: all is mapped, some content gone
    │   ├── ResumeOutOfMemory               the device cannot hold what should return
    │   └── HostOutOfMemory                 no room for a backup
    ├── UpdateRefused                       an update stopped before its first byte
    │   ├── UnknownNames                    names the engine does not have
    │   ├── IncompleteUpdate                names the engine needs and nobody sends
    │   ├── DuplicateName                   one name, two different tensors
    │   ├── ShapeMismatch                   same name, other shape or type
    │   ├── BaseMismatch                    a partial update over another version
    │   ├── VersionRegression               a step lower than the resident one
    │   └── UnsupportedTarget               a weight group the engine cannot update
    ├── UpdateFailed                        an update broke after its first byte
    │   ├── TiedMismatch                    two contents for one tied tensor
    │   ├── TransferFailed                  the bytes did not arrive
    │   └── VerifyFailed                    the bytes arrived and are not the ones sent
    ├── DeadlineExceeded (TimeoutError)     a step did not end in time
    ├── RequestRejected                     a request that may be retried elsewhere
    │   └── ReplicaRejecting                this replica is leaving the pool
    ├── KernelFailed                        a kernel refused its arguments, or its device failed
    ├── LogprobMismatch                     trainer and engine disagree about the same tokens
    ├── ReplicaRetired                      a replica that died too often to be started again
    ├── TooFewReplicas                      what is left of a fleet is less than its minimum
    ├── SyncFailed                          a sync in which some replica did not commit
    ├── TrainerFailed                       the trainer itself raised; carries its traceback
    └── EngineFailed                        the engine itself raised; carries its traceback

``retryable`` says whether the same call may succeed later or on another replica without anything
being repaired first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


def closest(word: str, known: Iterable[str]) -> str:
    """A ``; did you mean 'x'?`` tail for an error about ``word``, or nothing."""
    found = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def shown(names: Collection[str], most: int = 5) -> str:
    """A readable, bounded list of names for an error message."""
    ordered = sorted(names)
    tail = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + tail


class HotbunkError(Exception):
    """Base of everything hotbunk raises on purpose.

    ``where`` names the replica, step, rank or tensor; ``remedy`` says what to do.
    ``remote_traceback`` is the traceback of what went wrong in another process, or nothing.
    """

    retryable: ClassVar[bool] = False
    remote_traceback: str = ""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        text = f"[{self.where}] {self.what}" if self.where else self.what
        return f"{text} ({self.remedy})" if self.remedy else text

    def at(self, where: str) -> HotbunkError:
        """The same error, located: outer places are put in front of inner ones."""
        self.where = f"{where}: {self.where}" if self.where else where
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy (Ray makes them) is not made by the constructor: subclasses build their text from
        # arguments that are fields no more.
        return _again, (type(self), self.what), vars(self)


def _again(kind: type[HotbunkError], what: str) -> HotbunkError:
    error = kind.__new__(kind)
    HotbunkError.__init__(error, what)
    return error


# -- usage ------------------------------------------------------------------------------------


class UsageError(HotbunkError, ValueError):
    """What was asked for cannot be meant; the command line exits with 2."""


class UnknownTag(UsageError):
    """A memory tag that is neither ``weights`` nor ``kv_cache``."""


class ConfigError(UsageError):
    """A configuration key, value or file that cannot be used."""


class MissingExtra(UsageError, LookupError):
    """An optional package is not installed; ``remedy`` names the pip extra that brings it."""


class BackendNotFound(UsageError, LookupError):
    """No backend or transport is registered under the name."""


class Unsupported(HotbunkError):
    """The backend declares that it cannot do this; nothing was changed."""

    def __init__(self, verb: str, backend: str, hint: str = "") -> None:
        self.verb = verb
        self.backend = backend
        self.hint = hint
        super().__init__(f"backend {backend!r} does not support {verb}", remedy=hint)


# -- state ------------------------------------------------------------------------------------


class ContractError(HotbunkError):
    """The verb is not legal in the replica's present state; nothing was changed."""


class WeightsNotLoaded(ContractError):
    """Generation was asked from a weight group that has no content on the device."""

    def __init__(self, group: str, state: str, **kw: Any) -> None:
        self.group = group
        super().__init__(
            f"weight group {group!r} has no content (it is {state})",
            remedy=kw.pop("remedy", "send a full update, or resume a backup, before generating"),
            **kw,
        )


class WeightsPoisoned(ContractError):
    """Generation was asked from weights that an update left half-written."""

    def __init__(self, group: str, state: str = "DIRTY", **kw: Any) -> None:
        self.group = group
        super().__init__(
            f"weight group {group!r} was left half-written by an update",
            remedy=kw.pop("remedy", "heal it with a full update"),
            **kw,
        )


class WeightsNotResident(ContractError):
    """An update was offered to weights that are released; no byte moved."""

    def __init__(self, group: str, state: str, **kw: Any) -> None:
        self.group = group
        super().__init__(
            f"weight group {group!r} is {state}, not on the device",
            remedy=kw.pop("remedy", "call resume(['weights']) before update_weights"),
            **kw,
        )


class KVNotResident(ContractError):
    """Generation was asked while the KV cache is released."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(
            "the KV cache is released",
            remedy=kw.pop("remedy", "call resume_kv_cache before generating"),
            **kw,
        )


class RequestsInFlight(ContractError):
    """Memory was asked back while these requests still run; nothing was released."""

    retryable = True

    def __init__(self, ids: Collection[str], verb: str, waited: float, **kw: Any) -> None:
        self.ids = tuple(sorted(ids))
        super().__init__(
            f"{verb} needs generation quiesced; {len(self.ids)} request(s) still run after "
            f"{waited:g} s: {shown(self.ids)}",
            remedy=kw.pop("remedy", "pause with mode 'abort' or 'keep', or allow a longer drain"),
            **kw,
        )


class SessionError(ContractError):
    """Verbs came in the wrong order (commit without a byte, nested sessions, resume mid-pause)."""


class ReplicaLost(ContractError):
    """The engine hung or died; only a restart heals it."""


# -- memory -----------------------------------------------------------------------------------


class MemoryFault(HotbunkError):
    """The device and the promise disagree."""


class ReleaseIncomplete(MemoryFault):
    """A release gave back less than it promised."""

    def __init__(self, expected: int, measured: int, **kw: Any) -> None:
        self.expected = expected
        self.measured = measured
        super().__init__(
            f"release promised {expected} bytes and {measured} came back",
            remedy=kw.pop("remedy", "something still holds the memory; see the residual report"),
            **kw,
        )


class ReleaseUndone(MemoryFault):
    """A rank could not release; the others had discarded, and have mapped their memory again.

    Nothing is released anywhere, and what was to be discarded has no content: a full update heals.
    """

    def __init__(self, why: object, **kw: Any) -> None:
        super().__init__(
            f"a release was undone: {why}; what other ranks had discarded is gone",
            remedy=kw.pop("remedy", "sync the weights in full"),
            **kw,
        )


class ResumeOutOfMemory(MemoryFault):
    """The device cannot hold what should return; what was mapped on the way is undone."""

    retryable = True

    def __init__(self, tag: str, needed: int, free: int, **kw: Any) -> None:
        self.tag = tag
        self.needed = needed
        self.free = free
        super().__init__(
            f"resume of {tag!r} needs {needed} bytes and {free} are free",
            remedy=kw.pop("remedy", "release the trainer's share first, then resume again"),
            **kw,
        )


class HostOutOfMemory(MemoryFault):
    """No room on the host for a backup; nothing was released."""

    def __init__(self, needed: int, free: int, **kw: Any) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"a backup needs {needed} bytes and {free} are free",
            remedy=kw.pop("remedy", "release with retention 'discard', or free space"),
            **kw,
        )


class KernelFailed(HotbunkError):
    """A kernel refused its arguments, with nothing written, or its device's driver failed.

    ``code`` is one of csrc/include/hotbunk_kernels.h.
    """

    def __init__(self, what: str, code: int, **kw: Any) -> None:
        self.code = code
        super().__init__(what, **kw)


# -- updates ----------------------------------------------------------------------------------


class UpdateRefused(HotbunkError):
    """An update was stopped before its first byte; weights and versions are unchanged."""


class _NamedRefusal(UpdateRefused):
    reason: ClassVar[str] = ""
    advice: ClassVar[str] = ""

    def __init__(self, names: Collection[str], **kw: Any) -> None:
        self.names = tuple(sorted(names))
        super().__init__(
            f"{len(self.names)} tensor(s) {self.reason}: {shown(self.names)}",
            remedy=kw.pop("remedy", self.advice),
            **kw,
        )


class UnknownNames(_NamedRefusal):
    """Names the engine does not have."""

    reason = "unknown to the engine"
    advice = "map the trainer's names to the engine's, or drop them in the source"


class IncompleteUpdate(_NamedRefusal):
    """Names a full update must cover and nobody sends."""

    reason = "missing from a full update"
    advice = "send every parameter, or use a partial scope over a resident base"


class DuplicateName(_NamedRefusal):
    """One name was offered with two different tensors."""

    reason = "offered more than once with different contents"
    advice = "let one rank own each tensor"


class ShapeMismatch(UpdateRefused):
    """Same name, another shape or an element type that cannot be converted."""

    def __init__(self, name: str, have: str, got: str, **kw: Any) -> None:
        self.name = name
        super().__init__(f"tensor {name!r} is {have} in the engine and {got} in the update", **kw)


class BaseMismatch(UpdateRefused):
    """A partial, adapter or delta update was made over another version than the resident one."""

    def __init__(self, wanted: object, resident: object, **kw: Any) -> None:
        super().__init__(
            f"the update was made over version {wanted} and {resident} is resident",
            remedy=kw.pop("remedy", "send a full update"),
            **kw,
        )


class VersionRegression(UpdateRefused):
    """The step is lower than the resident one and the incarnation is not newer."""

    def __init__(self, resident: object, got: object, **kw: Any) -> None:
        super().__init__(
            f"version {got} is older than the resident {resident}",
            remedy=kw.pop(
                "remedy", "a trainer that went back to a checkpoint needs a new incarnation"
            ),
            **kw,
        )


class UnsupportedTarget(UpdateRefused):
    """A weight group the engine cannot update (say, a draft model)."""


class UpdateFailed(HotbunkError):
    """An update broke after its first byte; the weight group is DIRTY until a full update."""


class TiedMismatch(UpdateFailed):
    """Two different contents were sent for tensors that the engine keeps as one."""

    def __init__(self, names: Collection[str], **kw: Any) -> None:
        self.names = tuple(names)
        super().__init__(
            f"tied tensors received different contents: {shown(self.names)}",
            remedy=kw.pop("remedy", "tie them in the trainer, or untie them in the engine"),
            **kw,
        )


class TransferFailed(UpdateFailed):
    """The bytes did not arrive (peer gone, short bucket, hostile table)."""


class VerifyFailed(UpdateFailed):
    """The bytes in the engine are not the bytes the trainer sent."""

    def __init__(self, names: Collection[str], **kw: Any) -> None:
        self.names = tuple(sorted(names))
        super().__init__(
            f"{len(self.names)} tensor(s) differ from what was sent: {shown(self.names)}",
            remedy=kw.pop("remedy", "heal with a full update; suspect the transport or the loader"),
            **kw,
        )


# -- time, requests, syncs, engines -----------------------------------------------------------


class DeadlineExceeded(HotbunkError, TimeoutError):
    """A step did not end in time."""

    def __init__(self, step: str, seconds: float, **kw: Any) -> None:
        self.step = step
        self.seconds = seconds
        super().__init__(f"{step} did not end within {seconds:g} s", **kw)


class RequestRejected(HotbunkError):
    """A generation request was turned away; it may be sent again."""

    retryable = True


class ReplicaRejecting(RequestRejected):
    """This replica is leaving the pool: send the request to another one."""


class LogprobMismatch(HotbunkError):
    """The trainer gives the tokens an engine drew other log-probs than the engine did."""

    def __init__(self, difference: float, tolerance: float, **kw: Any) -> None:
        self.difference = difference
        super().__init__(
            f"log-probs of the same tokens differ by {difference:.2e} (tolerance {tolerance:g})",
            remedy=kw.pop("remedy", "the weights or element types of the two sides differ"),
            **kw,
        )


class ReplicaRetired(HotbunkError):
    """It died so often that no successor is started; its cause is the last death."""

    def __init__(self, name: str, deaths: int) -> None:
        self.name, self.deaths = name, deaths
        super().__init__(
            f"replica {name} died {deaths} times and is retired",
            remedy="see what it died of, then start it by hand",
        )


class TooFewReplicas(HotbunkError):
    """So many replicas are retired that the fleet's minimum cannot be had."""

    def __init__(self, left: int, minimum: int) -> None:
        self.left, self.minimum = left, minimum
        super().__init__(f"{left} replica(s) are left, and {minimum} must be")


class SyncFailed(HotbunkError):
    """A sync in which at least one replica did not commit.

    ``report`` is the manager's SyncReport: one outcome per replica, with its error.
    """

    def __init__(self, what: str, report: object, **kw: Any) -> None:
        self.report = report
        super().__init__(what, **kw)


class EngineFailed(HotbunkError):
    """The engine raised something of its own; ``remote_traceback`` says where."""

    def __init__(self, what: str, *, remote_traceback: str = "", **kw: Any) -> None:
        self.remote_traceback = remote_traceback
        super().__init__(what, **kw)


class TrainerFailed(HotbunkError):
    """The trainer raised something of its own; ``remote_traceback`` says where."""

    def __init__(self, what: str, *, remote_traceback: str = "", **kw: Any) -> None:
        self.remote_traceback = remote_traceback
        super().__init__(what, **kw)

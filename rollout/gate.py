"""The gate in front of an engine: who holds it shut, who waits, and for how long.

Pauses have owners: a caller's, sleep's and a sync's are separate, and generation is open when none
is held. The gate knows requests and time; it does not know what an engine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

import msgspec

from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FinishReason,
    GenerateRequest,
    PauseMode,
    TokenChunk,
    Version,
)
from hotbunk.rollout.errors import ReplicaRejecting, UsageError

CALLER = "caller"
SLEEP = "sleep"
SYNC = "sync"


class Pause(msgspec.Struct):
    """One owner's pause. ``since`` is in the event loop's seconds."""

    owner: str
    mode: PauseMode
    clear_cache: bool
    reject: bool
    since: float


class Stage(StrEnum):
    """Where a request is, seen from the gate."""

    HELD = "held"
    RUNNING = "running"


class Entry:
    """One request at or behind the gate.

    ``until`` is when it stops waiting (event-loop seconds, None: no limit); moving it also moves a
    wait that is under way, so a request can be let go at once from outside.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.stage = Stage.HELD
        self.reason = ""  # why it was let go
        self.retryable = True
        self.aborted = False  # by somebody who wanted this very request to end
        self.admitted: Version | None = None  # what was resident when the engine took it
        self.begun = request.start_version  # what made its first token
        self.outdated = ""  # why its tokens are worth nothing, if they are not
        self.left = set(range(request.sampling.n))  # responses that have not ended
        self.until: float | None = None
        self.gone = False  # let go for good, though its reader may not have noticed yet
        self._scope: asyncio.Timeout | None = None

    def waiting(self) -> asyncio.Timeout:
        """The context in which this request waits; ends by ``TimeoutError`` at ``until``."""
        self._scope = asyncio.timeout_at(self.until)
        return self._scope

    def waited(self) -> None:
        """The wait is over: moving ``until`` must not cancel whatever runs now."""
        self._scope = None

    def move(self, until: float | None, reason: str, *, retryable: bool = True) -> None:
        """Let it wait until then, and say ``reason`` if that passes."""
        if self._scope is not None and self._scope.expired():
            return  # its wait is over already, for the reason it had
        self.until, self.reason, self.retryable = until, reason, retryable
        if self._scope is not None:
            self._scope.reschedule(until)

    def ended(self, version: Version) -> Iterator[TokenChunk]:
        """The last chunks of a request that was let go; the tokens it has had stand."""
        for index in sorted(self.left):
            yield TokenChunk(
                self.request.request_id,
                version=version,
                finish_reason=FinishReason.ABORT,
                error=self.reason,
                retryable=self.retryable,
                index=index,
            )

    def seen(self, chunk: TokenChunk) -> TokenChunk:
        """Account for a chunk. One that a pause ended may be sent again, and says so."""
        if chunk.token_ids and self.begun is None:
            self.begun = chunk.version
        if chunk.finish_reason is None:
            return chunk
        self.left.discard(chunk.index)
        if chunk.finish_reason is FinishReason.ABORT and self.outdated:
            # Without a token there is nothing old in it: it may be sent again as it is.
            again = self.begun is None
            return msgspec.structs.replace(chunk, error=self.outdated, retryable=again)
        if chunk.finish_reason is FinishReason.ABORT and not (chunk.error or self.aborted):
            return msgspec.structs.replace(chunk, error="cut off by a pause", retryable=True)
        return chunk


class Gate:
    """Owned pauses, and the requests that wait because of them.

    ``hold_deadline`` is how long a held or frozen request waits, in seconds.
    """

    def __init__(self, hold_deadline: float) -> None:
        self.hold_deadline = hold_deadline
        self.pauses: dict[str, Pause] = {}
        self.entries: dict[str, Entry] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._left = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether any pause is held."""
        return bool(self.pauses)

    def hold(self, owner: str, mode: PauseMode, clear_cache: bool, reject: bool = False) -> None:
        """Shut the gate for ``owner``. Again: the mode is the new one, the flags are or-ed."""
        old = self.pauses.get(owner)
        self.pauses[owner] = Pause(
            owner,
            mode,
            clear_cache or (old is not None and old.clear_cache),
            reject or (old is not None and old.reject),
            old.since if old else asyncio.get_running_loop().time(),
        )
        self._open.clear()
        if self.rejecting:
            self.let_go("the replica is leaving the pool", Stage.HELD)

    def drop(self, owner: str) -> None:
        """End the owner's pause. Owners that hold none are ignored."""
        self.pauses.pop(owner, None)
        if not self.pauses:
            self._open.set()

    @property
    def clear_cache(self) -> bool:
        """Whether any pause wants KV forgotten; it is or-ed until the gate opens."""
        return any(p.clear_cache for p in self.pauses.values())

    @property
    def rejecting(self) -> bool:
        """Whether some pause turns new requests away instead of holding them."""
        return any(p.reject for p in self.pauses.values())

    def ids(self, stage: Stage) -> tuple[str, ...]:
        """Requests in that stage, oldest first."""
        return tuple(i for i, e in self.entries.items() if e.stage is stage)

    def enter(self, request: GenerateRequest) -> Entry:
        """A request arrives.

        :raises ReplicaRejecting: a pause with ``reject`` is held.
        :raises UsageError: its id is in use, or it asks for nothing.
        """
        if request.request_id in self.entries:
            raise UsageError(f"request id {request.request_id!r} is already in flight")
        if not request.prompt or request.sampling.max_tokens < 1 or request.sampling.n < 1:
            raise UsageError(
                f"request {request.request_id!r} needs a prompt, and max_tokens and n of 1 or more"
            )
        if min(request.prompt) < 0:
            raise UsageError(f"request {request.request_id!r} has a negative token id")
        if self.rejecting:
            raise ReplicaRejecting(
                f"request {request.request_id!r} was turned away",
                remedy="send it to another replica",
            )
        entry = self.entries[request.request_id] = Entry(request)
        return entry

    def leave(self, entry: Entry) -> None:
        """A request is done, however it ended."""
        self.entries.pop(entry.request.request_id, None)
        self._left.set()

    async def drained(self) -> None:
        """Wait until no request runs behind the gate."""
        while self.ids(Stage.RUNNING):
            self._left.clear()
            await self._left.wait()

    async def passed(self, entry: Entry) -> bool:
        """Wait until the gate is open; False if the request was let go instead."""
        if not self.closed:
            return True
        if not entry.reason:
            now = asyncio.get_running_loop().time()
            entry.move(now + self.hold_deadline, self._overdue())
        try:
            async with entry.waiting():
                while self.closed:
                    await self._open.wait()
        except TimeoutError:
            return False
        finally:
            entry.waited()
        if entry.gone:  # it was let go in the moment the gate opened
            return False
        entry.move(None, "")
        return True

    def freeze(self) -> None:
        """Running requests stand still from now on: their hold deadline starts."""
        until = asyncio.get_running_loop().time() + self.hold_deadline
        for entry in self.entries.values():
            if entry.stage is Stage.RUNNING and entry.until is None:
                entry.move(until, self._overdue())

    def thaw(self) -> None:
        """Running requests go on."""
        for entry in self.entries.values():
            if entry.stage is Stage.RUNNING and not entry.gone:
                entry.move(None, "")

    def users_of(self, groups: Collection[str]) -> list[str] | None:
        """Ids of the requests that need one of these weight groups; None: all need them."""
        adapters = {g.removeprefix(ADAPTER_PREFIX) for g in groups if g.startswith(ADAPTER_PREFIX)}
        if len(adapters) < len(groups):
            return None
        return [key for key, entry in self.entries.items() if entry.request.adapter in adapters]

    def pinned_to_others(self, version: Version) -> list[str]:
        """Ids of the requests that only another version may serve."""
        pins = {key: entry.request.version for key, entry in self.entries.items()}
        return [key for key, pin in pins.items() if pin not in (None, version)]

    def begun_before(self, version: Version) -> dict[str, Stage]:
        """Requests whose first token is older, or may be: of those without one, admission counts."""
        found = {}
        for key, entry in self.entries.items():
            since = entry.begun or entry.admitted
            if since is not None and since < version:
                entry.outdated = f"begun by {since}, before {version}"
                found[key] = entry.stage
        return found

    def let_go(
        self,
        reason: str,
        *stages: Stage,
        ids: Iterable[str] | None = None,
        retryable: bool = True,
    ) -> None:
        """End waiting requests now, with an abort."""
        now = asyncio.get_running_loop().time()
        chosen = None if ids is None else set(ids)
        for key, entry in self.entries.items():
            if entry.stage in (stages or tuple(Stage)) and (chosen is None or key in chosen):
                entry.gone = True
                entry.move(now, reason, retryable=retryable)

    def _overdue(self) -> str:
        owners = ", ".join(sorted(self.pauses)) or "nobody"
        return f"held longer than {self.hold_deadline:g} s (paused by {owners})"

"""Requests through one replica: held at the gate, checked against the state table, streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from hotbunk.rollout import errors
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    TARGET,
    AbortReport,
    Engine,
    GenerateRequest,
    TokenChunk,
    Version,
)
from hotbunk.rollout.gate import Entry, Gate, Stage
from hotbunk.rollout.lifecycle import Residency
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.status import Deadlines


class Serving:
    """Generation and aborts of one engine.

    :param poisoned: the weight groups that only a resend heals.
    """

    def __init__(
        self,
        backend: Engine,
        line: EngineLine,
        gate: Gate,
        residency: Residency,
        deadlines: Deadlines,
        poisoned: Callable[[], frozenset[str]],
    ) -> None:
        self._backend = backend
        self._line = line
        self._gate = gate
        self._residency = residency
        self._deadlines = deadlines
        self._poisoned = poisoned

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """As :meth:`Replica.generate`."""
        entry = self._gate.enter(request)
        stream: AsyncIterator[TokenChunk] | None = None
        try:
            self._line.check_alive()
            if self._gate.closed and self._is_poisoned_for(request):
                # Nobody waits for a replica that only a resend can heal.
                entry.move(0.0, "the replica is poisoned by a failed update")
            if not await self._gate.passed(entry):
                for last in entry.ended(self._version()):
                    yield last
                return
            self._admit(request)
            entry.stage, entry.admitted = Stage.RUNNING, self._version()
            if not self._backend.capabilities.request_versions:  # nothing better will be known
                entry.begun = entry.begun or entry.admitted
            stream = self._backend.generate(request)
            while entry.left:
                chunk = await self._next(entry, stream)
                if chunk is None:
                    for last in entry.ended(self._version()):
                        yield last
                    return
                yield entry.seen(chunk)
        finally:
            self._gate.leave(entry)
            if stream is not None:
                await stream.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        """As :meth:`Replica.abort`."""
        held = set(self._gate.ids(Stage.HELD))
        running = set(self._gate.ids(Stage.RUNNING))
        wanted = held | running if request_ids is None else set(request_ids)
        self._gate.let_go("aborted", Stage.HELD, ids=wanted & held, retryable=False)
        ended = wanted & held
        if wanted & running:
            self._line.require("abort")
            ids = sorted(wanted & running)
            for key in ids:
                self._gate.entries[key].aborted = True
            said = await self._line.call("abort", self._backend.abort(ids), self._deadlines.drain)
            ended |= set(said.aborted)
        return AbortReport(tuple(sorted(ended)), tuple(sorted(wanted - ended)))

    async def end_older(self, version: Version) -> tuple[str, ...]:
        """End the requests that began before ``version``; their ids. New ones are held meanwhile."""
        older = self._gate.begun_before(version)
        ids = {stage: [key for key, its in older.items() if its is stage] for stage in Stage}
        self._gate.let_go(
            f"continues what began before {version}",
            Stage.HELD,
            ids=ids[Stage.HELD],
            retryable=False,
        )
        running = ids[Stage.RUNNING]
        ended: tuple[str, ...] = ()
        if running:
            call = self._backend.abort(running)
            ended = (await self._line.call("abort", call, self._deadlines.drain)).aborted
        return (*ids[Stage.HELD], *ended)

    def _version(self) -> Version:
        return self._residency.versions().get(TARGET, Version())

    def _is_poisoned_for(self, request: GenerateRequest) -> bool:
        own = f"{ADAPTER_PREFIX}{request.adapter}"
        return any(
            group == own or not group.startswith(ADAPTER_PREFIX) for group in self._poisoned()
        )

    def _admit(self, request: GenerateRequest) -> None:
        """Between this check and the engine's queue there is no suspension point."""
        self._line.check_alive()
        self._residency.check_generate(request.adapter)
        if request.version is not None and request.version != self._version():
            raise errors.RequestRejected(
                f"request {request.request_id!r} is pinned to version {request.version} and "
                f"{self._version()} is resident",
                where=self._line.name,
            )

    async def _next(self, entry: Entry, stream: AsyncIterator[TokenChunk]) -> TokenChunk | None:
        """The next chunk; None if the request was let go meanwhile."""
        scope = entry.waiting()
        try:
            async with scope:
                return await anext(stream)
        except errors.HotbunkError as error:
            if isinstance(error, errors.ReplicaLost):
                entry.waited()  # this wait has ended; letting everybody go must not move it
                self._line.lose(error.what)
            if entry.gone:  # who was slow to read is told what the others were told
                return None
            raise
        except StopAsyncIteration:
            raise errors.EngineFailed(
                f"the engine ended request {entry.request.request_id!r} without a finish reason",
                where=self._line.name,
            ) from None
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                return None
            raise engine_failed("generate", error).at(self._line.name) from error
        finally:
            entry.waited()

"""The reference engine in processes of its own, several data-parallel ranks behind one replica.

What a case sends is offered on by a transport between processes; what lies in a rank is read through its
peephole, and is the same in all of them or a failure.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.conformance.backends import peek
from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    BackendStatus,
    Cache,
    Capabilities,
    Digests,
    Engine,
    Gate,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Tag,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.http.relay import relay
from hotbunk.rollout.process import ProcessHandle, ReplicaSpec, start
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.status import Health

OWNER = "conformance"  # of the pauses that the suite's own replica asks for


class ReferenceProcessUnderTest(ReferenceUnderTest):
    """``ranks`` processes and the one in front of them; other options as for ``reference``."""

    name = "reference_process"
    case_deadline = 240.0

    def __init__(self, *, ranks: int = 2, transport: str = "shm", **options: Any) -> None:
        super().__init__(**options)
        self._ranks, self._transport = ranks, transport
        self._peeks = Path(tempfile.mkdtemp(prefix="peek-", dir=self._folder.path))
        self.expected_not_run["verification_reads_memory"] = (
            "the last tensor is still under way when it is asked for"
        )
        self.expected_not_run.pop("an_engine_hangs_in_each_phase")
        self.expected_not_run.pop("killed_and_started_anew")

    async def check_options(self) -> None:
        create_backend("reference", model=str(self._disk), **self._options)

    async def start(self) -> Engine:
        peek.setup()  # the fork server is asked for by the backend's name
        return _Driven(
            ReplicaSpec(
                peek.NAME,
                {"model": str(self._disk), **self._options},
                name=self.name,
                deadlines=self.deadlines,
                data_parallel=self._ranks,
                env={peek.FOLDER: str(self._peeks)},
                setup=f"{peek.__name__}:setup",
            ),
            self._transport,
        )

    def read_weight(self, name: str) -> bytes:
        found = {a.data for a in self._ask("read_weight", name)}
        assert len(found) == 1, f"the ranks hold different bytes of {name}"
        return found.pop()

    def corrupt_weight(self, name: str) -> bool:
        peek.ask(self._peeks, self._ranks - 1, peek.Question("corrupt_weight", name))
        return True

    def sabotage(self, point: str, how: str) -> bool:
        """In the last rank: the others know nothing of it."""
        question = peek.Question("sabotage", f"{point} {how}")
        return bool(peek.ask(self._peeks, self._ranks - 1, question).number)

    def starve(self, tag: Tag) -> bool:
        peek.ask(self._peeks, self._ranks - 1, peek.Question("starve", tag.value))
        return True

    async def kill(self) -> bool:
        os.kill(self._ask("pid")[-1].number, signal.SIGKILL)
        return True

    def resident(self, tag: Tag) -> int:
        return sum(a.number for a in self._ask("resident", tag.value))

    def host_backup(self) -> int:
        return sum(a.number for a in self._ask("host_backup"))

    def _ask(self, what: str, of: str = "") -> list[peek.Answer]:
        question = peek.Question(what, of)
        return [peek.ask(self._peeks, rank, question) for rank in range(self._ranks)]


class _Driven(Engine):
    """The contract over a handle. The replica over there keeps every rule by itself."""

    def __init__(self, spec: ReplicaSpec, transport: str) -> None:
        self._spec, self._transport = spec, transport
        self.capabilities = Capabilities(spec.name)
        self._handle: ProcessHandle

    async def start(self) -> None:
        self._handle = await start(self._spec)
        # What goes to its ranks is relayed as from one sender. A relay may break before their first
        # byte: they are whole then, and what keeps others out is a pause, as over HTTP.
        said = self._handle.capabilities
        gate = Gate.ENGINE_PAUSE if said.gate is Gate.IN_ENGINE else said.gate
        self.capabilities = dataclasses.replace(said, ranks=1, gate=gate)

    async def close(self) -> None:
        if hasattr(self, "_handle"):
            await self._handle.close()

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._handle.resume(tags)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        return await self._handle.release(tags, retention=retention, keep_kv=keep_kv)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self._handle.release_kv_cache(keep_kv=keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._handle.resume_kv_cache()

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        return await relay(self._handle, transfer, self._transport, self._spec.deadlines.update)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._handle.generate(request)

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self._handle.pause_generation(mode, clear_cache=clear_cache, owner=OWNER)

    async def resume_generation(self) -> None:
        await self._handle.resume_generation(owner=OWNER)

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self._handle.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self._handle.reset_caches(which)

    async def status(self) -> BackendStatus:
        said = await self._handle.status()
        if said.health is Health.LOST:
            raise ReplicaLost("its processes are gone", where=self._spec.name)
        resident = {
            name: version
            for name, version in said.versions.items()
            if said.groups.get(name, "").startswith("RESIDENT")
        }
        return msgspec.structs.replace(said.backend, paused=said.is_paused, versions=resident)

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return await self._handle.digest(names)

    async def memory(self) -> MemoryReport:
        return await self._handle.memory()

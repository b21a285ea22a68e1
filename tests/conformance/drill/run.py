"""A drill's rounds: arm, sync under traffic, look, heal, look again."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, ReleaseKV, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.conformance.drill import engine, promises
from hotbunk.conformance.drill.plan import SOURCE, Fault, How
from hotbunk.rollout import errors, native
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import (
    Completion,
    Deployment,
    GenerateRequest,
    PauseMode,
    Sampling,
    TensorSpec,
    Version,
    collect,
)
from hotbunk.rollout.process import ProcessHandle, start_replica
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.status import Deadlines

UPDATE, STALL = 4.0, 2.0  # seconds
ROUND = 60.0  # seconds; a round that takes longer waited for something without a bound
QUICK = Deadlines(
    hold=20.0, drain=2.0, memory=2.0, update=UPDATE, inspect=1.0, grace=1.0, start=60.0
)
# ``ipc`` shares memory of the fake device (simulated), which a pure install has not.
TRANSPORTS = ("shm", "disk", "collective", *(("ipc",) if native.available() else ()))
NEED_TORCH = ("collective",)
DOORS = "doors"  # the folder of the sockets, so that another job's are not taken for ours
SETUP = "hotbunk.conformance.drill.engine:setup"


class Round(msgspec.Struct):
    """One fault and what came of it. ``broken`` are promises that did not hold.

    ``report`` is of the sync that the fault hit.
    """

    fault: Fault
    outcomes: list[str]
    seconds: float
    broken: list[str]
    report: SyncReport | None = None


class _Weights:
    """An oracle's weights as tensors; may break, or hang for longer than a sync may take."""

    def __init__(self, step: int, fault: Fault | None) -> None:
        self._content = weights_at(step)
        self._fault = fault if fault is not None and fault.point == SOURCE else None

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, _ in self._content)

    def tensors(self) -> Iterator[torch.Tensor]:
        for n, (spec, content) in enumerate(self._content):
            if self._fault is not None and n == self._fault.nth:
                if self._fault.how is How.HANG:
                    time.sleep(UPDATE + 2 * STALL)
                raise RuntimeError(f"drill {self._fault.number}: the trainer's gather breaks")
            raw = torch.tensor(list(content), dtype=torch.uint8)
            yield raw.view(dtype_from(spec.dtype)).reshape(spec.shape)


class Drill:
    """Replicas in processes, synced again and again. One fault a round.

    :param ranks: data-parallel ranks of each replica.
    :param backend: one of those that ``engine.setup`` makes known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 2,
        ranks: int = 1,
        setup: str = SETUP,
        backend: str = engine.NAME,
    ) -> None:
        self.folder, self.setup, self.backend = folder, setup, backend
        self.replicas, self.ranks = replicas, ranks
        self.step = 0
        self.handles: list[ProcessHandle] = []
        self._transports: dict[str, Transport] = {}

    async def start(self) -> None:
        """Start every replica."""
        engine.setup()
        self.handles = [await self._one(n) for n in range(self.replicas)]

    async def close(self) -> None:
        """End every replica and transport."""
        await asyncio.gather(*(handle.close() for handle in self.handles), return_exceptions=True)
        for transport in self._transports.values():
            await transport.close()

    async def _one(self, number: int) -> ProcessHandle:
        return await start_replica(
            self.backend,
            {"step_time": 0.005},
            name=f"r{number}",
            deadlines=QUICK,
            data_parallel=self.ranks,
            env={engine.FOLDER: str(self.folder), engine.REPLICA: str(number)},
            setup=self.setup,
        )

    def _transport(self, name: str) -> Transport:
        if name not in self._transports:
            options: dict[str, Any] = {"stall": STALL}
            if name == "disk":
                options["root"] = self.folder / "published"
            if name == "ipc":
                options["device"] = "fake"
            if name in ("shm", "ipc"):
                options["directory"] = self.folder / DOORS
            self._transports[name] = load_transport(name)(**options)
        return self._transports[name]

    async def _sync(self, fault: Fault, *, faulty: bool) -> SyncReport:
        manager = CheckpointEngineManager(
            self.handles,
            self._transport(fault.transport),
            deployment=Deployment.STANDALONE,
            policy=SyncPolicy(
                pause=fault.pause,
                release_kv=ReleaseKV.NEVER if fault.number % 2 else ReleaseKV.ALWAYS,
                bucket_bytes=fault.bucket_bytes,
                deadline=UPDATE,
            ),
        )
        self.step += 1
        source = _Weights(self.step, fault if faulty else None)
        try:
            return await manager.update_weights(source, Version(0, self.step))
        except errors.SyncFailed as error:
            return cast(SyncReport, error.report)

    async def round(self, fault: Fault) -> Round:
        """One fault: a sync through it under traffic, then one that heals."""
        began = time.perf_counter()
        old, new = Version(0, self.step), Version(0, self.step + 1)
        result = Round(fault, [], 0.0, [])
        if fault.point != SOURCE:
            path = engine.armed(self.folder, fault.replica, fault.rank)
            path.with_suffix(".tmp").write_bytes(msgspec.json.encode(fault))
            path.with_suffix(".tmp").replace(path)
        try:
            async with asyncio.timeout(ROUND):
                # A drain ends when what runs has ended; other modes cut it off or freeze it.
                tokens = 60 if fault.pause is PauseMode.WAIT else 400
                async with self._traffic(tokens) as streams:
                    report = await self._sync(fault, faulty=True)
                unfired = fault.point != SOURCE and self._disarm(fault)
                result.report = report
                result.outcomes = [one.outcome.value for one in report.outcomes]
                for n, one in enumerate(report.outcomes):
                    found = list(promises.of_outcome(fault, n, one))
                    found += promises.of_stream(streams[n], (old, new))
                    found += await promises.of_replica(self.handles[n], one.outcome, old, new)
                    result.broken += [f"r{n} {text}" for text in found]
                await self._heal(fault, report, result)
                if unfired:
                    result.broken.append("the fault never happened: the drill itself is wrong")
        except TimeoutError:
            result.broken.append(f"the round did not end within {ROUND:g} s")
        self._disarm(fault)
        result.seconds = time.perf_counter() - began
        return result

    def _disarm(self, fault: Fault) -> bool:
        """Whether it still was armed."""
        path = engine.armed(self.folder, fault.replica, fault.rank)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there

    async def _heal(self, fault: Fault, report: SyncReport, result: Round) -> None:
        """What was lost is replaced; then a full sync must bring everybody back."""
        for n, one in enumerate(report.outcomes):
            if one.outcome in (Outcome.LOST, Outcome.IN_DOUBT):
                await self.handles[n].close()
                self.handles[n] = await self._one(n)
        report = await self._sync(fault, faulty=False)
        for n, one in enumerate(report.outcomes):
            now = Version(0, self.step)
            if one.outcome is not Outcome.COMMITTED:
                result.broken.append(f"r{n} was not healed: {one.outcome.value} {one.error}")
            else:
                found = await promises.of_replica(self.handles[n], one.outcome, now, now)
                result.broken += [f"r{n}, healed, {text}" for text in found]

    @asynccontextmanager
    async def _traffic(self, tokens: int) -> AsyncIterator[list[Any]]:
        """A request on every replica; what came of each is in the list afterwards."""
        results: list[Any] = [None] * len(self.handles)

        async def one(n: int) -> Completion | errors.HotbunkError:
            request = GenerateRequest("drill/during", promises.PROMPT, Sampling(0.0, tokens))
            try:
                return await collect(self.handles[n].generate(request))
            except errors.HotbunkError as error:
                return error

        tasks = [asyncio.create_task(one(n)) for n in range(len(self.handles))]
        await asyncio.sleep(0.05)
        yield results
        await asyncio.gather(*(handle.abort() for handle in self.handles), return_exceptions=True)
        results[:] = await asyncio.gather(*tasks)


async def drill(
    faults: list[Fault],
    *,
    replicas: int,
    ranks: int,
    tell: Callable[[Round], None],
    setup: str = SETUP,
) -> list[Round]:
    """Run the faults one after another; what is left behind at the end is the last round's fault."""
    rounds = []
    before = _leftovers()
    with tempfile.TemporaryDirectory(prefix="hotbunk-drill-") as folder:
        # Those that need no torch do without it, as engines that are not torch's may.
        needed = any(fault.transport in NEED_TORCH for fault in faults)
        backend = engine.WITH_TORCH if needed else engine.NAME
        doors = Path(folder) / DOORS
        doors.mkdir()
        it = Drill(Path(folder), replicas=replicas, ranks=ranks, setup=setup, backend=backend)
        try:
            await it.start()
            for fault in faults:
                rounds.append(await it.round(fault))
                tell(rounds[-1])
        finally:
            await it.close()
        left = _leftovers() - before | {f"{DOORS}/{one.name}" for one in doors.iterdir()}
    if left and rounds:
        rounds[-1].broken.append(f"left behind: {', '.join(sorted(left))}")
    return rounds


def _leftovers() -> set[str]:
    """Names in shared memory, and open files in memory."""
    there = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    names = {f"/dev/shm/{name}" for name in there if "hotbunk" in name}
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    return names | {fd for fd in fds if fd.startswith("/memfd:hotbunk")}


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")

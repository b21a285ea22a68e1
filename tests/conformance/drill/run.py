"""A drill's rounds: arm, sync under traffic, look, heal, look again."""

from __future__ import annotations

import asyncio
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
from hotbunk.conformance.drill import engine, leftovers, promises
from hotbunk.conformance.drill.plan import LET_GO, SOURCE, Fault, How, When
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

    async def warm_up(self) -> None:
        """What stays of the first replica (a fork server) and store (libuv's own pipe) is no leftover."""
        await (await self._one(0)).close()
        if self.backend == engine.WITH_TORCH:
            from hotbunk.checkpoint_engine.transports.collective.groups import open_store

            open_store("127.0.0.1", 1.0)

    async def start(self) -> None:
        """Start every replica."""
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

    def _manager(self, fault: Fault) -> CheckpointEngineManager:
        return CheckpointEngineManager(
            self.handles,
            self._transport(fault.transport),
            deployment=fault.deployment,
            policy=SyncPolicy(
                pause=fault.pause,
                release_kv=ReleaseKV.ALWAYS if fault.release_kv else ReleaseKV.NEVER,
                bucket_bytes=fault.bucket_bytes,
                deadline=UPDATE,
            ),
        )

    async def _sync(self, fault: Fault, *, faulty: bool) -> SyncReport:
        self.step += 1
        source = _Weights(self.step, fault if faulty else None)

        async def let_go() -> None:
            if faulty and fault.point == LET_GO:
                raise RuntimeError(f"drill {fault.number}: the trainer keeps its memory")
            if faulty:
                self._arm(fault, When.LET_GO)

        try:
            return await self._manager(fault).update_weights(
                source, Version(0, self.step), let_go=let_go
            )
        except errors.SyncFailed as error:
            return cast(SyncReport, error.report)

    def _arm(self, fault: Fault, when: When) -> None:
        """From now on the point is the drill's, if this is its moment."""
        if fault.at.reached and fault.at.when is when:
            path = engine.armed(self.folder, fault.replica, fault.rank)
            path.with_suffix(".tmp").write_bytes(msgspec.json.encode(fault))
            path.with_suffix(".tmp").replace(path)

    async def _sleep(self, fault: Fault, result: Round) -> list[bool]:
        """Put them to sleep, where the deployment does; who sleeps."""
        self._arm(fault, When.SLEEP)
        try:
            await self._manager(fault).sleep_replicas()
        except errors.HotbunkError as error:
            if fault.at.when is not When.SLEEP:
                result.broken.append(f"did not go to sleep: {error}")
        asleep = [(await handle.status()).is_sleeping for handle in self.handles]
        for n, sleeps in enumerate(asleep):
            hit = fault.at.when is When.SLEEP and n == fault.replica
            if sleeps != fault.sleeps and not hit:
                result.broken.append(f"r{n} is {'asleep' if sleeps else 'awake'}")
        return asleep

    async def round(self, fault: Fault) -> Round:
        """One fault: a sync through it under traffic, then one that heals."""
        began = time.perf_counter()
        old, new = Version(0, self.step), Version(0, self.step + 1)
        result = Round(fault, [], 0.0, [])
        try:
            async with asyncio.timeout(ROUND):
                # A drain ends when what runs has ended; other modes cut it off or freeze it.
                tokens = 60 if fault.pause is PauseMode.WAIT else 400
                async with self._traffic(tokens) as streams:
                    asleep = await self._sleep(fault, result)
                    self._arm(fault, When.SYNC)
                    report = await self._sync(fault, faulty=True)
                unfired = self._disarm(fault)
                result.report = report
                result.outcomes = [one.outcome.value for one in report.outcomes]
                for n, one in enumerate(report.outcomes):
                    found = list(promises.of_outcome(fault, n, one))
                    found += promises.of_stream(streams[n], (old, new))
                    gone = asleep[n] and fault.deployment is Deployment.HYBRID
                    found += await promises.of_replica(
                        self.handles[n], one.outcome, None if gone else old, new, asleep=asleep[n]
                    )
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
                found = await promises.of_replica(
                    self.handles[n], one.outcome, now, now, asleep=False
                )
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
    with tempfile.TemporaryDirectory(prefix="hotbunk-drill-") as folder:
        # Those that need no torch do without it, as engines that are not torch's may.
        needed = any(fault.transport in NEED_TORCH for fault in faults)
        backend = engine.WITH_TORCH if needed else engine.NAME
        doors = Path(folder) / DOORS
        doors.mkdir()
        engine.setup()
        it = Drill(Path(folder), replicas=replicas, ranks=ranks, setup=setup, backend=backend)
        await it.warm_up()
        before = leftovers.look()
        try:
            await it.start()
            for fault in faults:
                rounds.append(await it.round(fault))
                tell(rounds[-1])
        finally:
            await it.close()
        left = await leftovers.since(before) + [f"{DOORS}/{one.name}" for one in doors.iterdir()]
    if left and rounds:
        rounds[-1].broken.append(f"left behind: {', '.join(sorted(left))}")
    return rounds

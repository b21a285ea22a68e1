"""A manager over oracles in processes of their own: what only processes and real bytes can show."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy
from hotbunk.checkpoint_engine.supervisor import SlotState, Supervision, Supervisor
from hotbunk.checkpoint_engine.transports.disk import DiskTransport
from hotbunk.conformance.backends import holder
from hotbunk.conformance.backends.oracle_pool import TensorWeights
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import (
    Completion,
    Deployment,
    FinishReason,
    GenerateRequest,
    Sampling,
    Scope,
    TensorSpec,
    Version,
    collect,
    digest_name,
)
from hotbunk.rollout.errors import SyncFailed
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.process import ProcessHandle, shutdown, start_replica
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.status import Deadlines
from hotbunk.trainer_hooks.recipes.models import build_tiny

pytestmark = pytest.mark.anyio
# Nobody hangs here, so nobody is taken for hung where the machine is slow.
QUICK = Deadlines(hold=20.0, drain=10.0, memory=5.0, update=10.0)
V = [Version(0, n) for n in range(10)]
Begin = Callable[..., Awaitable[ProcessHandle]]
LIMIT = 0.025  # seconds that an event loop may be kept from a task


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    shutdown()
    assert not [p for p in psutil.Process().children() if _is_fork_server(p)]


def _is_fork_server(process: psutil.Process) -> bool:
    with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # it has ended
        return "forkserver" in str(process.cmdline())
    return False


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    made: list[ProcessHandle] = []

    async def started(name: str, ranks: int = 1, **options: Any) -> ProcessHandle:
        """An oracle in a process; with ``ranks`` more than one, in as many further ones."""
        handle = await start_replica(
            "oracle",
            {"step_time": 0.005, **options},
            name=name,
            deadlines=QUICK,
            data_parallel=ranks,
        )
        made.append(handle)
        return handle

    yield started
    await asyncio.gather(*(handle.close() for handle in made))


def read(handle: ReplicaHandle, name: str, tokens: int) -> asyncio.Task[Completion]:
    request = GenerateRequest(name, (1, 2, 3), Sampling(0.0, max_tokens=tokens))
    return asyncio.create_task(collect(handle.generate(request)))


def digests(step: int) -> dict[str, int]:
    return {
        digest_name(spec.group, name): fingerprint_bytes(content)
        for spec, content in weights_at(step)
        for name in spec.names
    }


async def has(handle: ReplicaHandle, step: int) -> bool:
    expected = digests(step)
    return dict((await handle.digest(list(expected))).values) == expected


async def settled(manager: CheckpointEngineManager, version: Version) -> None:
    for _ in range(1500):
        if set(manager.serves().values()) == {version}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not all came to {version}: {manager.serves()}")


async def test_lazy_replicas_read_what_is_published_when_they_stand_still(
    begin: Begin, tmp_path: Path
) -> None:
    """One of them has two ranks, each of which reads for itself."""
    handles = await asyncio.gather(begin("r0"), begin("r1", ranks=2))
    manager = CheckpointEngineManager(
        handles,
        DiskTransport(tmp_path / "sets"),
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(strategy="lazy", max_lag=5, bucket_bytes=64),
    )
    first = await manager.update_weights(TensorWeights(1), V[1])
    assert {one.outcome for one in first.outcomes} <= {Outcome.COMMITTED, Outcome.DEFERRED}
    await settled(manager, V[1])
    busy = [read(handle, "busy", 150) for handle in handles]
    await asyncio.sleep(0.1)
    report = await manager.update_weights(TensorWeights(2), V[2])
    report = await manager.update_weights(TensorWeights(3), V[3])
    assert report.deferred == ("r0", "r1")
    assert not any(one.done() for one in busy)
    late = await begin("late")
    await manager.add_replica(late)
    for one in busy:
        done = await one
        assert done.finish_reason is FinishReason.LENGTH
        assert [span.version for span in done.spans] == [V[1]]
    await settled(manager, V[3])
    for handle in (*handles, late):
        assert await has(handle, 3)
    assert V[2] not in {one.version for one in manager.taken}
    await manager.close()


async def test_killed_processes_are_replaced_until_one_is_retired_n3(
    begin: Begin, tmp_path: Path
) -> None:
    """kill -9 of one replica again and again, under requests; the other one never notices."""
    handles = await asyncio.gather(begin("r0"), begin("r1"))
    manager = CheckpointEngineManager(
        handles,
        DiskTransport(tmp_path / "sets"),
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(strategy="lazy"),
    )
    await manager.update_weights(TensorWeights(1), V[1])
    await settled(manager, V[1])
    rules = Supervision(backoff=0.05, every=0.02)
    supervisor = Supervisor(manager, begin, rules)
    supervising = asyncio.create_task(supervisor.run())
    steady = read(handles[1], "steady", 400)
    pids = set()
    for death in range(1, 5):
        victim = supervisor.slots["r0"]
        assert isinstance(victim, ProcessHandle)
        pids.add(victim.pid)
        cut = read(victim, "cut", 900)
        await asyncio.sleep(0.05)
        os.kill(victim.pid, signal.SIGKILL)
        done = await cut
        assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
        async with asyncio.timeout(20):
            while supervisor.slots["r0"] in (None, victim):
                await asyncio.sleep(0.02)
                if supervisor.state("r0") is SlotState.RETIRED:
                    break
        if death < 4:
            await settled(manager, V[1])
            assert len(manager.routable()) == 2
    assert len(pids) == 4
    assert supervisor.state("r0") is SlotState.RETIRED
    assert "SIGKILL" in str(supervisor.why("r0").__cause__)  # type: ignore[union-attr]
    assert manager.routable() == (handles[1],)
    done = await steady
    assert done.finish_reason is FinishReason.LENGTH
    assert not supervising.done()
    supervising.cancel()
    await asyncio.wait({supervising})
    await manager.close()


async def test_two_tensor_parallel_ranks_take_their_slices_from_one_sender(tmp_path: Path) -> None:
    """Beside a replica of one rank. Slices travel, and together they are the whole model."""
    cut = await start_replica(
        holder.NAME,
        name="cut",
        deadlines=Deadlines(),  # reading slices loads torch, which takes its time
        tensor_parallel=2,
        setup="hotbunk.conformance.backends.holder:register",
    )
    one = await start_replica(
        holder.NAME,
        name="one",
        deadlines=Deadlines(),
        setup="hotbunk.conformance.backends.holder:register",
    )
    transport = load_transport("shm")()
    manager = CheckpointEngineManager(
        [cut, one],
        transport,
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(bucket_bytes=128),
    )
    try:
        assert (cut.capabilities.ranks, bool(cut.capabilities.sharded)) == (2, True)
        for step in (1, 2):
            report = await manager.update_weights(holder.HeldWeights(step), V[step])
            parts, whole = (o.update for o in report.outcomes)
            assert parts is not None
            assert whole is not None
            assert parts.nbytes < 2 * whole.nbytes, "each rank was sent everything"
            for handle in (cut, one):
                assert dict((await handle.digest()).values) == holder.fingerprints(step)
        again = await manager.update_weights(holder.HeldWeights(2), V[2])
        assert [o.update.skipped for o in again.outcomes if o.update] == [True, True]
        await transport.close()
        # And from a published set, in their own time, each rank its slices.
        manager.transport = DiskTransport(tmp_path / "sets")
        await manager.update_weights(
            holder.HeldWeights(3), V[3], policy=SyncPolicy(strategy="lazy", bucket_bytes=128)
        )
        await settled(manager, V[3])
        for handle in (cut, one):
            assert dict((await handle.digest()).values) == holder.fingerprints(3)
    finally:
        await manager.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 32 MB: what blocks a loop for a moment with a tiny one is seen with this."""
    path = tmp_path_factory.mktemp("large") / "model"
    build_tiny(path, family="llama", seed=0, hidden=768, layers=1, context=64)
    return path


async def test_the_event_loop_is_never_starved_during_a_sync_h11(
    large: Path, tmp_path: Path, kit: Any
) -> None:
    """A task that wants to run every 5 ms waits less than 25 ms, over shm and disk.

    What blocks does so in each sync; what the machine does to us it does in some, so one of ten will do.
    """
    handle = await start_replica("reference", {"model": str(large)}, name="r0", deadlines=QUICK)
    source = kit.source(large)
    waits: list[float] = []

    async def watchdog() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            waits.append(time.perf_counter() - began)

    step, worst = 0, {}
    try:
        for kind in ("shm", "disk"):
            options = {"root": tmp_path / "sets"} if kind == "disk" else {}
            transport = load_transport(kind)(**options)
            manager = CheckpointEngineManager(
                [handle], transport, deployment=Deployment.STANDALONE, policy=SyncPolicy()
            )
            longest = []
            watching = asyncio.create_task(watchdog())
            while len(longest) < 10 and not any(one < LIMIT for one in longest):
                step += 1
                waits.clear()
                assert (await manager.update_weights(source, Version(0, step))).ok
                longest.append(max(waits))
            watching.cancel()
            await asyncio.wait({watching})
            await transport.close()
            worst[kind] = min(longest)
    finally:
        await handle.close()
    assert max(worst.values()) < LIMIT, worst


class Tensors:
    """Any specs with zeros for content."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def tensors(self) -> Iterator[Any]:
        for spec in self._specs:
            yield torch.zeros(spec.shape, dtype=dtype_from(spec.dtype))


async def test_what_an_offer_says_is_checked_over_every_transport_l8_v10(
    begin: Begin, tmp_path: Path
) -> None:
    """An adapter's manifest as well as a model's; the version told is the trainer's, and a Version."""
    handle = await begin("r0")
    adapter = [spec for spec, _ in weights_at(1, ["adapter:a"])]
    longer = msgspec.structs.replace(adapter[0], shape=(3,), nbytes=12)
    stray = msgspec.structs.replace(adapter[0], name="a.layers.9.lora_a")
    refused: dict[str, dict[str, tuple[str, str]]] = {}
    for n, kind in enumerate(("shm", "disk", "collective"), 1):
        options = {"root": tmp_path / "sets"} if kind == "disk" else {}
        transport = load_transport(kind)(**options)
        manager = CheckpointEngineManager(
            [handle], transport, deployment=Deployment.STANDALONE, policy=SyncPolicy()
        )
        base = V[2 * n]
        report = await manager.update_adapter(
            "a", Tensors(adapter), V[2 * n + 1], base=TensorWeights(n), base_version=base
        )
        assert report.outcomes[0].version == V[2 * n + 1]
        told = (await handle.status()).versions
        assert (told["target"], told["adapter:a"]) == (base, V[2 * n + 1])
        assert type(told["target"]) is Version
        before = dict((await handle.digest()).values)
        refused[kind] = {}
        for name, specs, over in (
            ("longer", [longer, *adapter[1:]], base),
            ("stray", [*adapter, stray], base),
            ("part", adapter[1:], base),
            ("base", adapter, V[1]),
        ):
            with pytest.raises(SyncFailed) as caught:
                await manager.update_weights(
                    Tensors(specs), Version(1, n), scope=Scope.adapter("a", over)
                )
            (one,) = caught.value.report.outcomes  # type: ignore[attr-defined]
            refused[kind][name] = (one.outcome.value, one.error_type)
        assert dict((await handle.digest()).values) == before
        assert (await handle.status()).versions == told
        await transport.close()
    assert refused["shm"] == {
        "longer": ("rolled back", "ShapeMismatch"),
        "stray": ("rolled back", "UnknownNames"),
        "part": ("rolled back", "IncompleteUpdate"),
        "base": ("rolled back", "BaseMismatch"),
    }
    assert refused["shm"] == refused["disk"] == refused["collective"]

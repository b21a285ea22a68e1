"""The reference engine in a process of its own: the same tokens, and a fork that costs little."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.ranks import StoreRanks
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.conformance.kit import greedy, make_adapter, merged
from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FinishReason,
    PauseMode,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.process import ProcessHandle, shutdown, start, start_replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
SETUP = "hotbunk.conformance.tickets:register"
Start = Callable[..., Awaitable[ProcessHandle]]


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture
async def process(tiny: Any) -> AsyncIterator[Start]:
    """``await process(model_dir, name=..., **options)``: a replica in a process, closed afterwards."""
    made: list[ProcessHandle] = []

    async def begin(
        model: Path | None = None, *, name: str = "r0", **options: Any
    ) -> ProcessHandle:
        options = {"model": str(model or tiny()), **options}
        handle = await start_replica("reference", options, name=name, setup=SETUP)
        made.append(handle)
        return handle

    yield begin
    for handle in made:
        await handle.close()


async def running_one(handle: ProcessHandle) -> None:
    for _ in range(1000):
        if (await handle.status()).running:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing runs")


async def test_tokens_are_those_of_transformers_through_sleep_and_update(
    process: Start, tiny: Any, kit: Any
) -> None:
    one, two = tiny(seed=0), tiny(seed=1)
    handle = await process(one)
    prompts = kit.prompts(12)
    done = await asyncio.gather(*(kit.complete(handle, p) for p in prompts))
    assert [list(c.token_ids) for c in done] == [kit.golden(one, p) for p in prompts]
    slept = await handle.sleep(2)
    assert slept.resident() == 0
    assert (await handle.status()).is_sleeping
    await handle.wake_up([Tag.WEIGHTS])
    told = ticket(1, weights=str(two / "model.safetensors"), bucket_bytes=70_001)
    report = await handle.update_weights(told, version=Version(0, 1))
    assert (report.verified, report.version) == ("applied", Version(0, 1))
    await handle.wake_up([Tag.KV_CACHE])
    done = await asyncio.gather(*(kit.complete(handle, p) for p in prompts))
    assert [list(c.token_ids) for c in done] == [kit.golden(two, p) for p in prompts]
    assert {s.version for c in done for s in c.spans} == {Version(0, 1)}


async def test_frozen_requests_go_on_and_aborted_ones_end(
    process: Start, tiny: Any, kit: Any
) -> None:
    handle = await process()
    prompt = kit.prompts(1)[0]
    stream = handle.generate(kit.request(prompt, 200, name="a"))
    begun = await kit.first_tokens(stream, 5)
    assert (await handle.pause_generation(PauseMode.KEEP)).frozen == ("a",)
    await handle.resume_generation()
    rest = await collect(stream)
    assert [*begun, *rest.token_ids] == kit.golden(tiny(), prompt, 200)
    running = asyncio.create_task(kit.complete(handle, prompt, 200, name="b"))
    await running_one(handle)
    assert (await handle.abort()).aborted == ("b",)
    assert (await running).finish_reason is FinishReason.ABORT


class Watched:
    """A source that says when it is walked, and goes on when it is told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.reached, self.go = threading.Event(), threading.Event()

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[Any]:
        self.reached.set()
        assert self.go.wait(30)
        yield from self.inner.tensors()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_quantised_engine_over_shm_behind_the_trainers_ranks_g7_g8(
    process: Start, tiny: Any, kit: Any, replica: Any, tmp_path: Path, shared: bool
) -> None:
    """int8 in another process, also where its arena could be shared: what arrives is quantised there,
    once, whether it slept or not, and nothing opens before every trainer rank has let go."""
    handle = await process(tiny(seed=0), quantization="int8", share_weights=shared)
    store, gone = torch.distributed.HashStore(), []
    transport = ShmTransport(directory=tmp_path)
    managers = [
        CheckpointEngineManager(
            [handle] if rank == 0 else [],
            transport,
            policy=SyncPolicy(bucket_bytes=50_000, deadline=30.0),
            ranks=StoreRanks(store, rank, 2, deadline=30.0),
        )
        for rank in range(2)
    ]

    async def sync(rank: int, seed: int) -> Any:
        async def let_go() -> None:
            await asyncio.sleep(0.1 * rank)
            gone.append(time.perf_counter())

        weights = kit.source(tiny(seed=seed))
        return await managers[rank].update_weights(weights, Version(0, seed), let_go=let_go)

    for seed in (1, 2):
        if seed == 2:
            await asyncio.gather(*(manager.sleep_replicas() for manager in managers))
        report, _ = await asyncio.gather(*(sync(rank, seed) for rank in range(2)))
        opened = [e.start for e in report.outcomes[0].timeline if e.name == "wake_kv"]
        assert len(gone) == 2 * seed
        assert max(gone) < opened[0]
        fresh = await replica(tiny(seed=seed), quantization="int8")
        assert dict((await handle.digest()).values) == dict((await fresh.digest()).values)
        prompt = [5, 6, 7, 8]
        assert (await kit.complete(handle, prompt)).token_ids == (
            await kit.complete(fresh, prompt)
        ).token_ids
    await transport.close()


async def test_an_adapter_over_shm_and_nobody_in_between_l2(
    process: Start, tiny: Any, kit: Any, tmp_path: Path
) -> None:
    """The base comes first, to an engine in a process; who asks before its adapter is there waits."""
    handle = await process(tiny(seed=0), load="empty")
    model, prompt, group = kit.loaded(tiny(seed=1)), [5, 6, 7, 8], f"{ADAPTER_PREFIX}a"
    transport = ShmTransport(directory=tmp_path)
    manager = CheckpointEngineManager(
        [handle], transport, policy=SyncPolicy(bucket_bytes=10_000, deadline=60.0)
    )
    for step in (1, 2):
        tensors = make_adapter(model, "a", step)
        watched = Watched(state_dict_source(tensors, group=group))
        syncing = asyncio.create_task(
            manager.update_adapter(
                "a",
                watched,
                Version(0, step),
                base=kit.source(tiny(seed=1)),
                base_version=Version(0, 1),
            )
        )
        await asyncio.to_thread(watched.reached.wait, 30)
        assert (await handle.status()).versions["target"] == Version(0, 1), "the base is there"
        asked = [replace(kit.request(prompt, 10), adapter=name) for name in ("a", None)]
        streams = [asyncio.create_task(collect(handle.generate(one))) for one in asked]
        done, _ = await asyncio.wait(streams, timeout=0.5)
        assert not done, "generation was open between the base and its adapter"
        watched.go.set()
        report = await syncing
        assert [u.skipped for u in report.outcomes[0].updates] == [step == 2, False]
        ends = [list((await one).token_ids) for one in streams]
        golden = [greedy(merged(model, tensors), prompt, 10), kit.golden(tiny(seed=1), prompt, 10)]
        assert ends == golden
    assert (await handle.status()).versions == {"target": Version(0, 1), group: Version(0, 2)}
    await transport.close()


async def test_killed_in_the_middle_it_is_replaced_in_less_than_a_start(
    process: Start, kit: Any
) -> None:
    """The server keeps what is heavy loaded: a successor need not load it again."""
    handle = await process()
    running = asyncio.create_task(kit.complete(handle, kit.prompts(1)[0], 200))
    await running_one(handle)
    os.kill(handle.pid, signal.SIGKILL)
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert (await handle.status()).health is Health.LOST
    began = time.monotonic()
    again = await start(handle.spec)
    try:
        assert time.monotonic() - began < 5.0
        assert len((await kit.complete(again, kit.prompts(1)[0], 5)).token_ids) == 5
    finally:
        await again.close()
    assert not psutil.pid_exists(handle.pid)
    assert not psutil.pid_exists(again.pid)


async def test_a_model_that_is_not_there_is_said_as_here(process: Start, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        await process(tmp_path)


async def test_the_server_forks_with_one_thread(process: Start) -> None:
    """A second thread would hold locks that nobody in the new process ever gives back."""
    handle = await process()
    server = psutil.Process(psutil.Process(handle.pid).ppid())
    assert server.num_threads() == 1

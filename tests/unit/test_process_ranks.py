"""data_parallel: a replica whose ranks are processes. Oracle engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.process import ProcessHandle, shutdown, start, start_replica
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio
SETUP = "hotbunk.conformance.tickets:register"
QUICK = Deadlines(hold=5.0, drain=5.0, memory=5.0, update=5.0, inspect=0.3, grace=1.0, start=30.0)
Start = Callable[..., Awaitable[ProcessHandle]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))  # other modules' servers
    yield
    shutdown()
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
async def begin() -> AsyncIterator[Start]:
    made: list[ProcessHandle] = []

    async def started(ranks: int = 3, **more: Any) -> ProcessHandle:
        more = {"deadlines": QUICK, "setup": SETUP, "name": "r0", **more}
        options = {"step_time": 0.002, **more.pop("options", {})}
        handle = await start_replica("oracle", options, data_parallel=ranks, **more)
        made.append(handle)
        return handle

    yield started
    for handle in made:
        await handle.close()


def read(handle: ProcessHandle, name: str, tokens: int = 20) -> asyncio.Task[Completion]:
    request = GenerateRequest(name, (1, 2, 3), Sampling(0.0, max_tokens=tokens))
    return asyncio.create_task(collect(handle.generate(request)))


def processes(handle: ProcessHandle) -> list[psutil.Process]:
    """The replica's own, then its ranks': all children of one fork server."""
    own = psutil.Process(handle.pid)
    server = psutil.Process(own.ppid())
    return [own, *(p for p in server.children() if p.pid > own.pid)]


async def update(handle: ProcessHandle, step: int, **more: Any) -> Any:
    ranks = handle.capabilities.ranks
    return await handle.update_weights(ticket(step, ranks=ranks, **more), version=Version(0, step))


async def until(handle: ProcessHandle, condition: Callable[[Any], bool]) -> None:
    for _ in range(500):
        if condition(await handle.status()):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")


async def test_one_replica_many_ranks(begin: Start) -> None:
    handle, single = await begin(3), await begin(1, name="single")
    assert (handle.capabilities.ranks, single.capabilities.ranks) == (3, 1)
    assert len(processes(handle)) >= 4
    for step in (1, 2):
        await update(handle, step)
        await update(single, step)
        many = await asyncio.gather(*(read(handle, f"{step}/{n}") for n in range(12)))
        one = await read(single, "x")
        assert {d.token_ids for d in many} == {one.token_ids}
    assert (await handle.memory()).resident() == 3 * (await single.memory()).resident()
    assert (await handle.digest()).values == (await single.digest()).values
    slept = await handle.sleep(2)
    assert slept.resident() == 0
    await handle.wake_up([Tag.WEIGHTS])
    await update(handle, 3)
    await handle.wake_up([Tag.KV_CACHE])
    assert (await read(handle, "y")).token_ids
    status = await handle.status()
    assert (status.health, status.versions["target"]) == (Health.OK, Version(0, 3))


async def test_a_rank_that_refuses_changes_nothing_and_one_that_fails_poisons(begin: Start) -> None:
    handle = await begin(3)
    await update(handle, 1)
    with pytest.raises(errors.UpdateRefused, match="r0: rank 1"):
        await update(handle, 2, sender="RefusedElsewhere", rank=1)
    assert (await handle.status()).health is Health.OK
    golden = (await read(handle, "a")).token_ids
    with pytest.raises(errors.TransferFailed, match="r0: rank 1"):
        await update(handle, 2, sender="Raising", at=1, rank=1, bucket_bytes=64)
    assert (await handle.status()).health is Health.POISONED
    with pytest.raises(errors.WeightsPoisoned):
        await read(handle, "b")
    with pytest.raises(errors.UpdateFailed):
        await update(handle, 2, sender="FailedElsewhere", rank=2)
    assert (await handle.status()).health is Health.POISONED
    await update(handle, 2)
    done = await asyncio.gather(*(read(handle, f"c{n}") for n in range(6)))
    assert len({d.token_ids for d in done}) == 1
    assert done[0].token_ids != golden


@pytest.mark.parametrize("phase", ["idle", "generating", "updating", "asleep", "waking"])
async def test_a_rank_that_dies_makes_the_replica_lost(begin: Start, phase: str) -> None:
    """Requests of the other ranks end as well, at once, and nobody of them stays."""
    handle = await begin(3)
    family = processes(handle)
    tasks: list[asyncio.Task[Any]] = []
    if phase == "generating":
        tasks = [read(handle, f"a{n}", 900) for n in range(3)]
        await until(handle, lambda s: s.backend.tokens_generated > 30)
    elif phase == "updating":
        tasks = [asyncio.create_task(update(handle, 1, sender="Hanging", at=0, rank=0))]
        await until(handle, lambda s: s.groups["target"] == "DIRTY")
    elif phase in ("asleep", "waking"):
        await handle.sleep(1)
    if phase == "waking":
        family[2].suspend()  # until then it does not answer, and the others wait for it
        tasks = [asyncio.create_task(handle.wake_up())]
        done, _ = await asyncio.wait(tasks, timeout=0.3)
        assert not done
    os.kill(family[2].pid, signal.SIGKILL)
    began = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Completion):
            assert (result.finish_reason, result.retryable) == (FinishReason.ABORT, True)
            assert "killed by SIGKILL" in result.error
            assert result.token_ids
        else:
            assert isinstance(result, errors.ReplicaLost)
            assert "killed by SIGKILL" in str(result)
    await until(handle, lambda s: s.health is Health.LOST)
    assert time.monotonic() - began < 2.0
    with pytest.raises(errors.ReplicaLost, match="rank 1"):
        await handle.wake_up()
    await handle.close()
    _, alive = psutil.wait_procs(family, timeout=3)
    assert not alive
    again = await start(handle.spec)
    assert (await read(again, "b")).token_ids
    await again.close()


async def test_a_rank_that_hangs_makes_it_lost_too(begin: Start) -> None:
    handle = await begin(2)
    running = [read(handle, f"a{n}", 900) for n in range(2)]
    await until(handle, lambda s: s.backend.tokens_generated > 10)
    processes(handle)[1].suspend()
    done = await asyncio.wait_for(asyncio.gather(*running), 6.0)
    assert all(d.retryable for d in done)
    assert (await handle.status()).health is Health.LOST


async def test_ranks_die_with_their_replicas_process(begin: Start) -> None:
    handle = await begin(3)
    family = processes(handle)
    for rank in family[1:]:
        rank.suspend()  # it cannot see for itself
    os.kill(handle.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=3)
    assert not alive


async def test_a_rank_that_does_not_start_is_named_h14(begin: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def second():\n"
        "    if os.environ.get('HOTBUNK_RANK') == '1': time.sleep(100)\n"
        "def killed():\n"
        "    if os.environ.get('HOTBUNK_RANK') == '1': os.kill(os.getpid(), 9)\n"
        "def dies():\n"
        "    if os.environ.get('HOTBUNK_RANK') == '1': os._exit(9)\n"
    )
    elsewhere: dict[str, Any] = {"python": sys.executable, "env": {"PYTHONPATH": str(tmp_path)}}
    hurried = Deadlines(start=6.0, grace=2.5)  # the others must be there by then
    with pytest.raises(errors.DeadlineExceeded, match="rank 1") as late:
        await begin(3, setup="slow:second", deadlines=hurried, **elsewhere)
    assert "ready were the ranks 0, 2, and not 1" in str(late.value)
    with pytest.raises(errors.EngineFailed, match=r"rank 1.*exit code 9"):
        await begin(3, setup="slow:dies", **elsewhere)
    with pytest.raises(errors.EngineFailed, match=r"rank 1.*SIGKILL"):
        await begin(3, setup="slow:killed", **elsewhere)


async def test_options_are_checked_once_for_all(begin: Start) -> None:
    with pytest.raises(errors.ConfigError, match="must be 1 or more"):
        await begin(0)
    with pytest.raises(errors.ConfigError, match="did you mean 'step_time'"):
        await begin(2, options={"step_tim": 1})

"""Processes that die, hang, and outlive nobody. Oracle engines; everything is bounded in time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.conformance.backends.oracle_pool import TensorWeights
from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Completion,
    Deployment,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.process import ProcessHandle, shutdown, start, start_replica
from hotbunk.rollout.process.launch import _servers
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio
SETUP = "hotbunk.conformance.tickets:register"
QUICK = Deadlines(hold=5.0, drain=5.0, memory=5.0, update=5.0, inspect=0.3, grace=0.7, start=30.0)
KILLS = int(os.environ.get("HOTBUNK_KILLS", "20"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this process, its fork servers and their engines would put temporary files."""
    path = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        yield path
        shutdown()


@pytest.fixture(autouse=True)
async def nothing_left(folder: Path) -> AsyncIterator[None]:
    """Descriptors, processes, temporary files: as many after a test as before."""

    def left() -> tuple[int, int, list[str]]:
        children = psutil.Process().children(recursive=True)
        return len(os.listdir("/proc/self/fd")), len(children), os.listdir(folder)

    await (await started()).close()  # the fork server stays, whoever comes first
    before = left()
    yield
    for _ in range(200):
        if left() == before:
            return
        await asyncio.sleep(0.01)
    assert left() == before


async def started(name: str = "r0", **more: Any) -> ProcessHandle:
    options = {"step_time": 0.002, **more.pop("options", {})}
    more.setdefault("deadlines", QUICK)
    more.setdefault("setup", SETUP)
    return await start_replica("oracle", options, name=name, **more)


def ask(name: str, tokens: int = 900) -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), Sampling(0.0, max_tokens=tokens))


def read(handle: ProcessHandle, name: str, tokens: int = 900) -> asyncio.Task[Completion]:
    return asyncio.create_task(collect(handle.generate(ask(name, tokens))))


async def until(handle: ProcessHandle, condition: Callable[[Any], bool]) -> None:
    for _ in range(500):
        if condition(await handle.status()):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")


async def test_killed_it_ends_everything_at_once_and_can_be_replaced() -> None:
    handle = await started()
    one, two = read(handle, "a", 400), read(handle, "b", 400)
    await until(handle, lambda s: s.backend.tokens_generated > 10)
    update = asyncio.create_task(
        handle.update_weights(ticket(1, sender="Hanging"), version=Version(0, 1))
    )
    await asyncio.sleep(0.02)
    os.kill(handle.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(errors.ReplicaLost, match="killed by SIGKILL") as lost:
        await update
    assert lost.value.where == "r0"
    for done in (await one, await two):
        assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
        assert "killed by SIGKILL" in done.error
        assert done.token_ids, "the tokens it has had stand"
        assert len(done.token_ids) == len(done.logprobs)
    status = await handle.status()
    assert (status.health, status.servable) == (Health.LOST, False)
    with pytest.raises(errors.ReplicaLost):
        await handle.wake_up()
    assert time.monotonic() - began < 1.0
    again = await start(handle.spec)
    assert again.pid != handle.pid
    assert (await again.status()).health is Health.OK
    assert len((await read(again, "a", 5)).token_ids) == 5
    await handle.close()
    await again.close()
    assert not psutil.pid_exists(handle.pid)


async def test_a_lost_handle_leaves_nothing_even_if_nobody_closes_it() -> None:
    handle = await started()
    os.kill(handle.pid, signal.SIGKILL)
    await until(handle, lambda s: s.health is Health.LOST)


async def test_stopped_it_is_found_out_and_killed() -> None:
    """SIGSTOP: the process is there and says nothing. Nobody waits longer than inspect + grace."""
    handle = await started()
    running = read(handle, "a")
    await until(handle, lambda s: bool(s.running))
    os.kill(handle.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(errors.ReplicaLost, match="hangs"):
        await handle.memory()
    assert time.monotonic() - began < 4.0
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert (await handle.status()).health is Health.LOST
    await handle.close()
    assert not psutil.pid_exists(handle.pid)


async def test_a_stream_alone_finds_out_as_well() -> None:
    handle = await started()
    running = read(handle, "a")
    await until(handle, lambda s: bool(s.running))
    os.kill(handle.pid, signal.SIGSTOP)
    done = await asyncio.wait_for(running, 4.0)
    assert done.retryable
    await handle.close()


async def test_status_of_a_stopped_process_says_lost() -> None:
    handle = await started()
    os.kill(handle.pid, signal.SIGSTOP)
    assert (await asyncio.wait_for(handle.status(), 4.0)).health is Health.LOST
    await handle.close()


async def test_a_trainer_that_stands_still_does_not_lose_its_engines() -> None:
    """Its own loop was blocked for longer than any deadline: that says nothing about the engine,
    not even if that stood as well, as when the whole machine was frozen."""
    handle = await started()
    running = read(handle, "a", 500)
    await asyncio.sleep(0.1)
    os.kill(handle.pid, signal.SIGSTOP)
    await asyncio.sleep(QUICK.inspect + 0.1)  # asked whether it is there
    time.sleep(1.5)  # noqa: ASYNC251
    os.kill(handle.pid, signal.SIGCONT)
    assert (await handle.status()).health is Health.OK
    assert len((await running).token_ids) == 500
    await handle.close()


async def test_one_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    handle = await started()
    os.kill(handle.pid, signal.SIGSTOP)  # it cannot even take the signal
    began = time.monotonic()
    await handle.close()
    assert QUICK.grace <= time.monotonic() - began < QUICK.grace + 2.0
    assert not psutil.pid_exists(handle.pid)


async def test_sigterm_from_elsewhere_closes_it_in_order() -> None:
    handle = await started()
    running = read(handle, "a")
    await until(handle, lambda s: bool(s.running))
    os.kill(handle.pid, signal.SIGTERM)
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    await until(handle, lambda s: s.health is Health.LOST)
    with pytest.raises(errors.ReplicaLost, match=r"exit code 0|closed"):
        await handle.memory()
    await handle.close()


async def test_a_start_that_hangs_ends_at_its_deadline_h14() -> None:
    """And says which replica, and what was last heard of it."""
    hurried = Deadlines(start=0.5, grace=0.5)
    with pytest.raises(errors.DeadlineExceeded, match=r"\[slow\] starting .* within 0.5 s") as late:
        await started("slow", setup="signal:pause", deadlines=hurried)
    assert "its stderr said nothing" in str(late.value)


async def test_a_start_that_dies_says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import os, sys\n"
        "def die():\n"
        "    for n in range(2000): print('a driver said', n, file=sys.stderr)\n"
        "    sys.stderr.flush()\n"
        "    os._exit(7)\n"
        "def crash():\n"
        "    raise ZeroDivisionError('in the hook')\n"
    )
    elsewhere: dict[str, Any] = {"python": sys.executable, "env": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(errors.EngineFailed, match="ended with exit code 7") as failed:
        await started("dead", setup="broken:die", **elsewhere)
    assert "a driver said 1999" in str(failed.value)
    assert "a driver said 2 " not in str(failed.value)
    with pytest.raises(errors.EngineFailed, match="ZeroDivisionError: in the hook") as raised:
        await started("raised", setup="broken:crash", **elsewhere)
    assert "broken.py" in raised.value.remote_traceback
    with pytest.raises(errors.EngineFailed, match="killed by SIGABRT"):
        await started("abort", setup="os:abort")
    with pytest.raises(errors.EngineFailed):
        await started("nowhere", python="/no/such/python")


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    starting = asyncio.create_task(started("slow", setup="signal:pause"))
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_grandchildren_do_not_outlive_it(tmp_path: Path) -> None:
    """An engine's own processes are in its group, which is killed with it."""
    (tmp_path / "family.py").write_text(
        "import subprocess\n"
        "def have():\n"
        "    subprocess.Popen(['sleep', '1000'])\n"
        "    subprocess.run(['sh', '-c', 'sleep 1001 &'])\n"
    )
    for how in ("kill", "close"):
        handle = await started(
            python=sys.executable, env={"PYTHONPATH": str(tmp_path)}, setup="family:have"
        )
        child = psutil.Process(handle.pid)
        server = psutil.Process(child.ppid())
        orphan = next(p for p in server.children() if p.pid != child.pid)
        family = [*child.children(), orphan]
        assert [p.cmdline()[1] for p in family] == ["1000", "1001"]
        if how == "kill":
            os.kill(handle.pid, signal.SIGKILL)
        await handle.close()
        _, left = psutil.wait_procs(family, timeout=3)
        assert not left, "they run on, or are zombies that nobody reaps"


async def test_a_killed_fork_server_takes_its_engines_and_is_replaced() -> None:
    handle = await started()
    [server] = _servers.values()
    server._process.kill()
    await until(handle, lambda s: s.health is Health.LOST)
    await handle.close()
    again = await started()
    assert (await again.status()).health is Health.OK
    await again.close()


PARENT = """
import asyncio, os, sys, time
from hotbunk.rollout.process import start_replica
async def main():
    options = {"step_time": 0.001}
    one = await start_replica("oracle", options, name="one")
    two = await start_replica("oracle", options, name="two", python=sys.executable)
    copy = os.fork() if sys.argv[1] == "forked" else 0  # a loader's worker, say
    if sys.argv[1] == "forked" and not copy:
        time.sleep(1000)
    print(one.pid, two.pid, copy, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["running", "stopped", "forked"])
async def test_engines_die_with_their_trainer(how: str) -> None:
    """Killed without a word; also while the engines cannot run, so cannot see that it is gone, or
    when a copy of the trainer still holds every descriptor it had."""
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        *pids, copy = map(int, trainer.stdout.readline().split())
        family = [psutil.Process(pid) for pid in pids]
        servers = [p for p in psutil.Process(trainer.pid).children() if p.pid != copy]
        assert [p.ppid() for p in family[:1]] == [p.pid for p in servers[:1]]
        if how == "stopped":
            for one in family:
                one.suspend()
        trainer.kill()
        _, alive = psutil.wait_procs([*family, *servers], timeout=5)
        for one in alive:
            one.kill()
        if copy:
            os.kill(copy, signal.SIGKILL)
        assert not alive, f"{alive} outlived their trainer"


async def test_two_jobs_beside_each_other_do_not_meet() -> None:
    """Two trainers with replicas of the same names: killing one leaves the other alone."""
    jobs = [
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", PARENT, "plain"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        lines = [job.stdout.readline() for job in jobs if job.stdout is not None]
        families = [[psutil.Process(int(pid)) for pid in line.split()[:2]] for line in lines]
        jobs[0].kill()
        psutil.wait_procs(families[0], timeout=5)
        assert not any(p.is_running() for p in families[0])
        await asyncio.sleep(0.2)
        assert all(p.status() != psutil.STATUS_ZOMBIE and p.is_running() for p in families[1])
    finally:
        for job in jobs:
            job.kill()
            with job:
                pass
    psutil.wait_procs(families[1], timeout=5)
    assert not any(p.is_running() for p in families[1])


async def test_a_broken_message_from_the_engine_ends_in_a_typed_error() -> None:
    """The child is not believed: nonsense ends it, like a death."""
    handle = await started()
    running = read(handle, "a")
    await until(handle, lambda s: bool(s.running))
    remote = handle._remote
    remote._connection.data_received((1 << 31).to_bytes(4, "little"))
    with pytest.raises(errors.ReplicaLost, match="broken message"):
        await handle.memory()
    assert "broken message" in (await running).error
    await handle.close()


@pytest.mark.parametrize("number", [0, 10_000])
async def test_an_answer_nobody_asked_for_ends_it_too(number: int) -> None:
    import msgspec

    from hotbunk.rollout.process.messages import Result, frame

    handle = await started()
    handle._remote._connection.data_received(frame(Result(number, msgspec.Raw(b"\xc0"))))
    with pytest.raises(errors.ReplicaLost, match="never made"):
        await handle.memory()
    await handle.close()


async def test_a_broken_message_to_the_engine_ends_the_engine() -> None:
    handle = await started()
    transport = handle._remote._connection._transport
    assert transport is not None
    transport.write((1 << 31).to_bytes(4, "little") + b"garbage")
    await until(handle, lambda s: s.health is Health.LOST)
    await handle.close()


async def test_killed_at_random_moments_it_leaves_nothing(tmp_path: Path) -> None:
    """kill -9, wherever it is: starting, generating, paused, asleep, updating from a ticket of its
    own, or in a manager's sync over shm or disk. Twenty times; the transports live through it."""
    transports: dict[str, Any] = {
        "shm": load_transport("shm")(directory=tmp_path, stall=2.0),
        "disk": load_transport("disk")(root=tmp_path / "published", stall=2.0),
    }
    seed = random.Random(2026).randrange(1 << 30)
    begun: Counter[str] = Counter()
    for round_ in range(KILLS):
        draw = random.Random(f"{seed}/{round_}")
        handle = await started(f"r{round_}", options={"step_time": 0.0005})
        streams = [read(handle, f"s{n}", 400) for n in range(draw.randint(0, 4))]
        way = (*transports, "")[round_ % 3]
        new = partial(sync, handle, transports[way]) if way else partial(update, handle)
        work = asyncio.create_task(restless(handle, draw, new, begun, way))
        await asyncio.sleep(draw.uniform(0.0, 0.2 if way else 0.08))
        os.kill(handle.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(errors.ReplicaLost):
            await work
        for done in await asyncio.gather(*streams):
            lost = (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
            assert lost or done.finish_reason is FinishReason.LENGTH
        assert (await handle.status()).health is Health.LOST
        assert time.monotonic() - began < 3.0, f"round {round_}"
        await handle.close()
        assert not psutil.pid_exists(handle.pid)
    assert all(begun[way] for way in ("shm", "disk", "")), begun
    for way, transport in transports.items():  # nobody of the dead is in the way of the next one
        handle = await started(way)
        await sync(handle, transport, 1)
        await handle.close()
        await transport.close()


async def update(handle: ProcessHandle, step: int) -> Any:
    version = Version(0, step)
    told = ticket(step, bucket_bytes=32, version=version)
    return await handle.update_weights(told, version=version)


async def sync(handle: ProcessHandle, transport: Any, step: int) -> Any:
    """As a trainer does it, weights of all groups in small buckets."""
    manager = CheckpointEngineManager(
        [handle],
        transport,
        deployment=Deployment.STANDALONE,
        policy=SyncPolicy(bucket_bytes=64, deadline=5.0),
    )
    return await manager.update_weights(TensorWeights(step), Version(0, step))


async def restless(
    handle: ProcessHandle,
    draw: random.Random,
    new: Callable[[int], Any],
    begun: Counter[str],
    way: str,
) -> None:
    """Verb after verb, until one says that the replica is lost. ``new`` brings weights of a step."""

    async def brought(step: int) -> Any:
        begun[way] += 1
        return await new(step)

    step = 0
    while True:
        step += 1
        verbs: list[Callable[[], Any]] = [
            *[partial(brought, step)] * (6 if way else 1),  # a sync may take the longest
            lambda: handle.sleep(draw.choice([1, 2])),
            handle.wake_up,
            lambda: handle.pause_generation(draw.choice(list(PauseMode)), deadline=0.05),
            handle.resume_generation,
            handle.status,
            handle.digest,
            lambda: handle.release([Tag.KV_CACHE]),
            handle.resume_kv_cache,
        ]
        try:
            done = await draw.choice(verbs)()
            if getattr(done, "health", None) is Health.LOST:
                await handle.memory()
        except errors.ReplicaLost:
            raise
        except errors.HotbunkError:
            pass  # the order is random: most of it is not allowed

"""vLLM in a process of its own, and vLLM that dies or hangs in the middle of something."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import save_file

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.conformance import tickets
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.transfers import Hooked
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm import pauses
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Version,
    collect,
)
from hotbunk.rollout.process.handle import start
from hotbunk.rollout.process.spec import ReplicaSpec
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
_ids = count()


def ask(prompt: tuple[int, ...], tokens: int = 8) -> GenerateRequest:
    sampling = Sampling(temperature=0.0, max_tokens=tokens)
    return GenerateRequest(f"l{next(_ids)}", tuple(prompt), sampling)


def folders_of(pid: int) -> list[Path]:
    """Where an adapter of that process keeps sockets."""
    return list(Path(tempfile.gettempdir()).glob(f"hotbunk-vllm-{pid}-*"))


async def until(done: Any, seconds: float = 20.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    for _ in iter(done, True):
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.005)


async def hanging_update(replica: Replica, it: VllmUnderTest, path: Path) -> Any:
    """One whose sender has sent a bucket and sends no more."""
    file = path / "weights.safetensors"
    save_file({n: p.contiguous() for n, p in it.model(1).named_parameters()}, file)
    ticket = tickets.ticket(1, weights=str(file), sender="Hanging", at=1, bucket_bytes=100_003)
    return await replica.update_weights(ticket, version=Version(0, 1))


async def asleep(replica: Replica, *_: Any) -> Any:
    await replica.sleep(2)
    await asyncio.Event().wait()


@pytest.mark.parametrize("phase", [hanging_update, pytest.param(asleep, marks=pytest.mark.slow)])
async def test_killed_in_the_middle_it_is_lost_and_another_takes_its_place(
    phase: Callable[..., Any], replica: Replica, untied: VllmUnderTest, tmp_path: Path
) -> None:
    doing = asyncio.create_task(phase(replica, untied, tmp_path))
    await until(lambda: bool(replica._updates.under_way) or replica._residency.mapped() == set())
    held = asyncio.create_task(collect(replica.generate(ask(untied.prompts[0], 200))))
    await until(lambda: bool(replica._gate.entries))
    os.kill(untied._where["pid"], signal.SIGKILL)
    if phase is hanging_update:
        with pytest.raises((errors.ReplicaLost, errors.UpdateFailed)):
            await asyncio.wait_for(doing, 20.0)
    else:
        doing.cancel()
    cut = await asyncio.wait_for(held, 20.0)
    assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, True)
    await replica.status()
    assert replica.health is Health.LOST
    with pytest.raises(errors.ReplicaLost):
        await replica.wake_up()
    with pytest.raises(errors.ReplicaLost):
        await collect(replica.generate(ask(untied.prompts[0])))
    again = await untied.engine()
    done = await collect(again.generate(ask(untied.prompts[0])))
    assert list(done.token_ids) == untied.golden(untied.prompts[0], 0, 8)


@pytest.mark.slow
async def test_one_that_hangs_in_a_release_is_lost_in_time(
    replica: Replica, untied: VllmUnderTest
) -> None:
    await replica.pause_generation()
    os.kill(untied._where["pid"], signal.SIGSTOP)
    try:
        with pytest.raises((errors.ReplicaLost, errors.DeadlineExceeded)):
            await asyncio.wait_for(replica.release_kv_cache(), 60.0)
    finally:
        os.kill(untied._where["pid"], signal.SIGKILL)
    await replica.status()
    assert replica.health is Health.LOST
    again = await untied.engine()
    done = await collect(again.generate(ask(untied.prompts[0])))
    assert list(done.token_ids) == untied.golden(untied.prompts[0], 0, 8)


@pytest.mark.parametrize(
    "verb, patience", [pytest.param("sleep", 60.0, marks=pytest.mark.slow), ("pause", 0.2)]
)
async def test_a_core_that_hangs_when_it_is_to_stand_still_is_lost(
    verb: str,
    patience: float,
    replica: Replica,
    untied: VllmUnderTest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it is asked but a pause, and that is all that could tell."""
    monkeypatch.setattr(pauses, "SILENCE", 1.5)
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(replica.generate(ask(prompt, 900))))
    streams = untied._engine._flight.streams  # type: ignore[union-attr]
    await until(lambda: any(s.tokens for s in streams.values()))
    os.kill(untied._where["pid"], signal.SIGSTOP)
    asked = (
        replica.pause_generation(PauseMode.KEEP, deadline=patience)
        if verb == "pause"
        else replica.sleep(1, mode=PauseMode.ABORT, deadline=patience)
    )
    why = errors.ReplicaLost if patience > 1.5 else errors.RequestsInFlight
    with pytest.raises(why):
        await asyncio.wait_for(asked, 20.0)
    cut = await asyncio.wait_for(running, 20.0)
    assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, True)
    await replica.status()
    assert replica.health is Health.LOST
    with pytest.raises(errors.ReplicaLost):
        await collect(replica.generate(ask(prompt)))
    again = await untied.engine()  # the one that stands still is ended, and another started
    done = await collect(again.generate(ask(prompt)))
    assert list(done.token_ids) == untied.golden(prompt, 0, 8)


async def test_nothing_is_written_any_more_once_an_update_was_given_up(
    replica: Replica, untied: VllmUnderTest
) -> None:
    """Its worker stands still when it is to load, and goes on after the deadline: that is waited for."""
    pid = untied._where["pid"]
    transfer = Hooked(untied.weights(1), version=Version(0, 1))

    async def hook(phase: str) -> None:
        if phase == "fingerprints":
            os.kill(pid, signal.SIGSTOP)

    transfer.hook = hook
    await replica.pause_generation(PauseMode.KEEP)
    doing = asyncio.create_task(
        replica.update_weights(transfer, version=Version(0, 1), deadline=0.5)
    )
    await until(lambda: "fingerprints" in transfer.events)
    asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGCONT)
    with pytest.raises(errors.DeadlineExceeded):
        await doing
    for spec, content in untied.weights(1):
        assert untied.read_weight(spec.name) == content, f"{spec.name} is still to come"


async def fails_in_both(it: VllmUnderTest) -> None:
    engine: Any = await it.engine()
    for _ in range(2):
        with pytest.raises(errors.EngineFailed, match=r"worker 0: .*nowhere.*worker 1: .*nowhere"):
            await engine.everywhere("hotbunk_load", "/nowhere", [])
    found = await engine.everywhere("hotbunk_addresses")
    assert [one["pid"] for one in found] == [place["pid"] for place in it._ranks]


@pytest.mark.slow
async def test_a_worker_that_fails_does_not_shift_what_others_answer(
    sharded: VllmUnderTest,
) -> None:
    """vLLM leaves what the others answered unread, and takes it for the answer to the next call."""
    await fails_in_both(sharded)


@pytest.mark.slow
async def test_every_core_is_heard_also_where_one_failed(copied: VllmUnderTest) -> None:
    await fails_in_both(copied)


async def test_in_a_process_of_its_own_it_sleeps_takes_syncs_and_goes_with_it(
    untied: VllmUnderTest,
) -> None:
    """As ``rollout.process=true`` starts it: nothing of vLLM is in the trainer's process."""
    options = {**untied._options, "model": str(untied._disk)}
    handle = await start(ReplicaSpec("vllm", options, deadlines=Deadlines()))
    shm = load_transport("shm")()
    [child] = [p for p in psutil.Process().children(recursive=True) if p.pid == handle.pid]
    try:
        manager = CheckpointEngineManager([handle], shm, policy=SyncPolicy(deadline=120.0))
        await manager.sleep_replicas()
        assert (await handle.memory()).resident() == 0
        await manager.update_weights(module_source(untied.model(1)), Version(0, 1))
        for prompt in untied.prompts:
            done = await collect(handle.generate(ask(prompt)))
            assert list(done.token_ids) == untied.golden(prompt, 1, 8)
        family = [child, *child.children(recursive=True)]
        [folder] = folders_of(child.pid)
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        await handle.close()
        await shm.close()
    assert not folders_of(child.pid)
    _, alive = psutil.wait_procs(family, timeout=20.0)
    assert not alive, alive

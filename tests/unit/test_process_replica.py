"""A replica in a process of its own does what one on this event loop does. Oracle engines."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotbunk.conformance.rig import check_spans
from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.model import DRAFT, PARAMETERS, TARGET, state_of, weights_at
from hotbunk.rollout.backends.oracle.tokens import continuation, digest_of, weights_bits
from hotbunk.rollout.contract import (
    Completion,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Tag,
    Ticket,
    Version,
    collect,
)
from hotbunk.rollout.lifecycle import KV
from hotbunk.rollout.process import ProcessHandle, start_replica
from hotbunk.rollout.process.messages import WINDOW
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio
SETUP = "hotbunk.conformance.tickets:register"
QUICK = Deadlines(hold=5.0, drain=5.0, memory=5.0, update=5.0, inspect=1.0, grace=2.0, start=30.0)
Start = Callable[..., Awaitable[ProcessHandle]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    made: list[ProcessHandle] = []

    async def started(name: str = "r0", *, step_time: float = 0.002, **more: Any) -> ProcessHandle:
        options = {"step_time": step_time, **more.pop("options", {})}
        more.setdefault("deadlines", QUICK)
        handle = await start_replica("oracle", options, name=name, setup=SETUP, **more)
        made.append(handle)
        return handle

    yield started
    for handle in made:
        await handle.close()


def ask(name: str, tokens: int = 20, *prompt: int) -> GenerateRequest:
    return GenerateRequest(name, prompt or (1, 2, 3), Sampling(0.0, max_tokens=tokens))


def golden(step: int, prompt: tuple[int, ...], n: int) -> list[int]:
    """Found without an engine."""
    contents = {spec.name: data for spec, data in weights_at(step)}
    digests = [
        digest_of(state_of(group, {p.name: contents[p.name] for p in PARAMETERS[group]}))
        for group in (TARGET, DRAFT)
    ]
    return continuation(prompt, weights_bits(digests), Version(0, step), n)


async def complete(handle: ProcessHandle, request: GenerateRequest) -> Completion:
    return await collect(handle.generate(request))


async def test_it_serves_updates_and_sleeps(start: Start) -> None:
    handle = await start()
    assert handle.name == "r0"
    assert handle.capabilities.backend == "oracle"
    assert handle.pid != os.getpid()
    for step in (1, 2):
        report = await handle.update_weights(ticket(step), version=Version(0, step))
        assert (report.version, report.verified) == (Version(0, step), "applied")
        done = await complete(handle, ask(f"a{step}"))
        check_spans(done)
        assert list(done.token_ids) == golden(step, (1, 2, 3), 20)
    slept = await handle.sleep(2)
    assert slept.resident() == 0
    status = await handle.status()
    assert (status.is_sleeping, status.kv, status.servable) == (True, KV.RELEASED, False)
    await handle.wake_up([Tag.WEIGHTS])
    await handle.update_weights(ticket(3), version=Version(0, 3))
    await handle.wake_up([Tag.KV_CACHE])
    assert list((await complete(handle, ask("b"))).token_ids) == golden(3, (1, 2, 3), 20)
    assert (await handle.memory()).resident() > 0
    assert (await handle.digest(["embed.weight"])).values.keys() == {"embed.weight"}
    assert (await handle.release_kv_cache()).freed > 0
    assert (await handle.resume_kv_cache()).mapped > 0
    await handle.reset_caches()


async def test_errors_arrive_as_they_were_raised(start: Start) -> None:
    handle = await start()
    with pytest.raises(errors.UnknownTag, match="did you mean 'weights'") as tag:
        await handle.release(["weight"])
    assert not tag.value.retryable
    with pytest.raises(errors.UnknownTag, match="must be a list"):
        await handle.resume("weights")
    with pytest.raises(ValueError, match="sleep level 3"):
        await handle.sleep(3)
    with pytest.raises(ValueError, match="drop"):
        await handle.pause_generation("drop")  # type: ignore[arg-type]
    told = ticket(1, sender="Raising", at=1, bucket_bytes=64)
    with pytest.raises(errors.TransferFailed, match="sender is gone"):
        await handle.update_weights(told, version=Version(0, 1))
    assert (await handle.status()).health is Health.POISONED
    with pytest.raises(errors.WeightsPoisoned) as poisoned:
        await complete(handle, ask("a"))
    assert poisoned.value.group == "target"
    await handle.update_weights(ticket(1), version=Version(0, 1))
    with pytest.raises(errors.VersionRegression, match="incarnation"):
        await handle.update_weights(ticket(0), version=Version(0, 0))
    with pytest.raises(errors.UsageError, match="needs a prompt"):
        await complete(handle, GenerateRequest("x", (), Sampling()))
    with pytest.raises(errors.UsageError, match="plain data"):
        await complete(handle, GenerateRequest("x", (1,), Sampling(), metadata={"o": object()}))
    bad = Ticket("tolt", ticket(2).address)
    with pytest.raises(errors.BackendNotFound, match="no transport named 'tolt'"):
        await handle.update_weights(bad, version=Version(0, 2))
    assert list((await complete(handle, ask("y"))).token_ids) == golden(1, (1, 2, 3), 20)


async def test_an_engines_own_error_brings_its_traceback(start: Start) -> None:
    handle = await start(options={"kv_blocks": 4})
    told = ticket(1, sender="NoSuchSender")
    with pytest.raises(errors.EngineFailed, match="AttributeError") as failed:
        await handle.update_weights(told, version=Version(0, 1))
    assert "tickets.py" in failed.value.remote_traceback


async def test_status_and_abort_are_answered_while_a_verb_runs(start: Start) -> None:
    """H11, N12: neither waits for the update, which hangs until it is cancelled."""
    handle = await start()
    held = ticket(1, sender="Hanging", at=1, bucket_bytes=64)
    update = asyncio.create_task(handle.update_weights(held, version=Version(0, 1)))
    await until(handle, lambda s: s.is_paused)  # its transport is loaded and its end opened first
    waiting = asyncio.create_task(complete(handle, ask("w")))
    loop = asyncio.get_running_loop()
    await until(handle, lambda s: "w" in s.held)
    began = loop.time()
    assert (await handle.abort(["w"])).aborted == ("w",)
    assert (await waiting).finish_reason is FinishReason.ABORT
    assert loop.time() - began < 1.0
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    # Cancelled here, it has ended there: the next one need not wait for its deadline.
    began = loop.time()
    assert (await handle.status()).health is Health.POISONED
    await handle.update_weights(ticket(2), version=Version(0, 2))
    assert loop.time() - began < 1.0


async def test_pauses_and_owners_cross(start: Start) -> None:
    handle = await start()
    running = asyncio.create_task(complete(handle, ask("a", 900)))
    await until(handle, lambda s: s.backend.tokens_generated > 3)
    report = await handle.pause_generation(PauseMode.KEEP, owner="me", clear_cache=False)
    assert report.frozen == ("a",)
    held = asyncio.create_task(complete(handle, ask("b", 3)))
    await until(handle, lambda s: s.held == ("b",))
    await handle.sleep(1, mode=PauseMode.KEEP)
    await handle.wake_up()
    status = await handle.status()
    assert [p.owner for p in status.pauses] == ["me"]
    assert not held.done()
    await handle.resume_generation(owner="me")
    assert len((await held).token_ids) == 3
    await handle.abort()
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, False)
    assert list(done.token_ids) == golden(0, (1, 2, 3), len(done.token_ids))


async def test_a_dropped_iterator_ends_the_request_in_the_engine(start: Start) -> None:
    handle = await start()
    stream = handle.generate(ask("a", 900))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    status = await handle.status()
    assert status.running == status.backend.running == ()
    assert (await complete(handle, ask("a", 3))).finish_reason is FinishReason.LENGTH


async def test_a_cancelled_reader_ends_the_request_too(start: Start) -> None:
    handle = await start()
    reading = asyncio.create_task(complete(handle, ask("a", 900)))
    await until(handle, lambda s: s.running == ("a",))
    reading.cancel()
    await asyncio.wait({reading})
    assert (await handle.status()).backend.running == ()


async def test_what_is_cancelled_as_it_is_sent_ends_at_once(start: Start) -> None:
    """Call and cancel arrive together: the answer is not waited for until a deadline."""
    handle = await start()
    began = asyncio.get_running_loop().time()
    for turns in range(4):
        work: list[Any] = [handle.memory(), handle.status(), complete(handle, ask(f"a{turns}"))]
        tasks = [asyncio.ensure_future(one) for one in work]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert asyncio.get_running_loop().time() - began < 0.5 * QUICK.inspect
    assert (await handle.status()).running == ()


async def test_a_slow_reader_holds_its_own_stream_back_and_nobody_elses(start: Start) -> None:
    """Chunks stay where they were made: on this side there is never more than a window of them."""
    handle = await start(step_time=0.0, options={"kv_blocks": 2048})
    stream = handle.generate(ask("slow", 4000))
    got = [await anext(stream)]
    fast = await complete(handle, ask("fast", 300))
    assert len(fast.token_ids) == 300
    await until(handle, lambda s: s.backend.tokens_generated > 1000)
    waiting = handle._remote._streams[1]._waiting
    assert 0 < len(waiting) <= WINDOW
    async for chunk in stream:
        assert len(waiting) <= WINDOW
        got.append(chunk)
    tokens = [t for chunk in got for t in chunk.token_ids]
    assert tokens == golden(0, (1, 2, 3), 4000)


async def test_many_streams_at_once_keep_their_tokens_apart(start: Start) -> None:
    handle = await start(step_time=0.0, options={"max_running": 64, "kv_blocks": 4096})
    prompts = [(n, n + 1, 7) for n in range(64)]
    done = await asyncio.gather(
        *(complete(handle, ask(f"r{n}", 150, *p)) for n, p in enumerate(prompts))
    )
    assert [list(d.token_ids) for d in done] == [golden(0, p, 150) for p in prompts]


async def test_closing_ends_requests_as_a_replica_does(start: Start) -> None:
    handle = await start()
    running = asyncio.create_task(complete(handle, ask("a", 900)))
    await until(handle, lambda s: s.backend.tokens_generated > 3)
    await asyncio.gather(handle.close(), handle.close())
    done = await running
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert "closed" in done.error
    assert done.token_ids
    assert not psutil.pid_exists(handle.pid)
    with pytest.raises(errors.ReplicaLost, match="closed"):
        await handle.memory()
    with pytest.raises(errors.ReplicaLost, match="closed"):
        await complete(handle, ask("b"))
    assert (await handle.status()).health is Health.LOST
    await handle.close()


async def test_options_that_cannot_be_are_refused_as_here(start: Start) -> None:
    with pytest.raises(errors.ConfigError, match="did you mean 'step_time'"):
        await start(options={"step_tim": 1})
    with pytest.raises(errors.BackendNotFound, match="did you mean 'oracle'"):
        await start_replica("orakle")
    with pytest.raises(errors.ConfigError, match="module:function"):
        await start_replica("oracle", setup="nonsense")
    with pytest.raises(errors.ConfigError, match="cannot be loaded"):
        await start_replica("oracle", setup="hotbunk.nowhere:x")


async def test_another_interpreter_can_run_it(start: Start, tmp_path: Path) -> None:
    """By ``python -m``, over an inherited socket, from any folder; and it brings no torch."""
    (tmp_path / "spy.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "def loaded():\n"
        "    heavy = {'torch', 'numpy', 'transformers', 'multiprocessing'} & sys.modules.keys()\n"
        f"    Path({str(tmp_path / 'loaded')!r}).write_text(' '.join(sorted(heavy)))\n"
    )
    handle = await start_replica(
        "oracle",
        {"step_time": 0.0},
        python=sys.executable,
        env={"PYTHONPATH": str(tmp_path)},
        setup="spy:loaded",
        deadlines=QUICK,
    )
    try:
        assert len((await complete(handle, ask("a"))).token_ids) == 20
        assert (tmp_path / "loaded").read_text() == ""
        assert "hotbunk.rollout.process.child" in psutil.Process(handle.pid).cmdline()
    finally:
        await handle.close()


async def test_a_forked_oracle_brings_no_torch_either(start: Start) -> None:
    handle = await start()
    maps = psutil.Process(handle.pid).memory_maps()
    assert not [m.path for m in maps if "libtorch" in m.path]


async def until(handle: ProcessHandle, condition: Callable[[Any], bool]) -> None:
    for _ in range(500):
        if condition(await handle.status()):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")

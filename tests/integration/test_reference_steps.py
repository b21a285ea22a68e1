"""Pauses and aborts counted in engine steps, each of which the test lets happen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hotbunk.rollout.contract import Completion, FinishReason, PauseMode, collect  # noqa: E402
from hotbunk.rollout.errors import RequestsInFlight  # noqa: E402

pytestmark = pytest.mark.anyio
SLOTS = 4


class Stepping:
    """Holds the engine in the middle of a step until the test lets it end."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.begun = 0
        self._step = target.backend._runner.step
        self._let = threading.Semaphore(0)
        self._free = False
        target.backend._runner.step = self.step

    def step(self, plan: Any) -> Any:
        self.begun += 1
        if not self._free:
            assert self._let.acquire(timeout=20), "the test forgot the engine in a step"
        return self._step(plan)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def gathering(self, count: int) -> AsyncIterator[None]:
        """Requests sent here come to the engine together: its first step has as many as it has slots."""
        thread = self.target.backend._thread
        idle, go = threading.Event(), threading.Event()

        def wait() -> None:
            idle.set()
            assert go.wait(20), "the requests did not come"

        waiting = thread.call(wait)
        await self.until(idle.is_set)
        yield
        await self.until(lambda: len(thread._commands) == count)
        go.set()
        await waiting
        await self.until(lambda: self.begun == 1)

    async def inside(self, number: int) -> None:
        """Let steps end until the engine is in the middle of that one."""
        while self.begun < number:
            before = self.begun
            self._let.release()
            await self.until(lambda: self.begun > before)  # noqa: B023 - it ends before the next

    def end(self) -> None:
        """Let the step in progress end."""
        self._let.release()

    def run(self) -> None:
        """Hold nothing any more."""
        self._free = True
        self._let.release()


Make = Callable[[], Awaitable[tuple[Any, Stepping]]]


@pytest.fixture
async def stepping(tiny: Any, replica: Any) -> AsyncIterator[Make]:
    made: list[Stepping] = []

    async def start() -> tuple[Any, Stepping]:
        target = await replica(tiny(), max_num_seqs=SLOTS, block_size=8)
        made.append(Stepping(target))
        return target, made[-1]

    yield start
    for one in made:
        one.run()


def ask(kit: Any, target: Any, count: int, tokens: int = 40) -> list[asyncio.Task[Completion]]:
    """Requests that keep every slot busy and a queue waiting."""
    prompts = kit.prompts(count, shortest=4, longest=12)
    return [
        asyncio.create_task(kit.complete(target, p, tokens, name=f"q{n}"))
        for n, p in enumerate(prompts)
    ]


def cut(kit: Any, model: Any, done: Completion, number: int, count: int) -> None:
    """It was aborted, and what it had are the first tokens of the uninterrupted response (V5)."""
    prompt = kit.prompts(count, shortest=4, longest=12)[number]
    assert done.finish_reason is FinishReason.ABORT
    got = list(done.token_ids)
    assert got == kit.golden(model, prompt, 40)[: len(got)]
    assert len(done.logprobs) == len(got)


async def busy(stepping: Make, kit: Any, count: int = 12) -> Any:
    """A replica in the middle of its sixth step, all slots taken."""
    target, steps = await stepping()
    async with steps.gathering(count):
        running = ask(kit, target, count)
    await steps.inside(6)
    status = await target.status()
    assert len(status.backend.running) == SLOTS
    assert len(status.backend.waiting) == count - SLOTS
    return target, steps, running


async def still(target: Any, steps: Stepping, begun: int) -> None:
    """No step was begun after that many, though one could have been."""
    await asyncio.sleep(0.05)
    assert steps.begun == begun, "the engine made another step"
    assert (await target.status()).backend.steps == begun


# -- one step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
async def test_a_pause_returns_with_the_step_in_progress_h7(
    tiny: Any, kit: Any, stepping: Make, mode: PauseMode
) -> None:
    """Not before it has ended, and without another one, also when every slot is busy (H10)."""
    target, steps, running = await busy(stepping, kit)
    pausing = asyncio.create_task(target.pause_generation(mode))
    await asyncio.sleep(0.05)
    assert not pausing.done(), "it returned while a step was running"
    steps.end()
    report = await asyncio.wait_for(pausing, 10)
    await still(target, steps, 6)
    frozen = {f"q{n}" for n in range(12)}
    assert set(report.frozen if mode is PauseMode.KEEP else report.aborted) == frozen
    steps.run()
    if mode is PauseMode.KEEP:
        await target.resume_generation()
        for n, task in enumerate(running):
            prompt = kit.prompts(12, shortest=4, longest=12)[n]
            assert list((await task).token_ids) == kit.golden(tiny(), prompt, 40)
        return
    done = await asyncio.wait_for(asyncio.gather(*running), 10)  # delivered while it is paused
    await still(target, steps, 6)
    for n, one in enumerate(done):
        cut(kit, tiny(), one, n, 12)
        assert len(one.token_ids) == (6 if n < SLOTS else 0)
        assert one.retryable
    await target.resume_generation()


async def test_an_abort_ends_its_requests_within_the_step_and_nobody_else_u5(
    tiny: Any, kit: Any, stepping: Make
) -> None:
    target, steps, running = await busy(stepping, kit)
    aborting = asyncio.create_task(target.abort(["q1", "q3", "q9"]))  # two running, one waiting
    await asyncio.sleep(0.02)
    assert not aborting.done()
    steps.end()
    report = await asyncio.wait_for(aborting, 10)
    assert report.aborted == ("q1", "q3", "q9")
    for n in (1, 3, 9):
        done = await asyncio.wait_for(running[n], 10)
        cut(kit, tiny(), done, n, 12)
        assert not done.retryable
        assert len(done.token_ids) == (0 if n == 9 else 6)
    await steps.until(lambda: steps.begun == 7)
    assert len((await target.status()).backend.running) == SLOTS, "free slots were not taken"
    steps.run()
    for n, task in enumerate(running):
        if n not in (1, 3, 9):
            assert len((await task).token_ids) == 40


async def test_two_pauses_at_once_both_return_h6(kit: Any, stepping: Make) -> None:
    target, steps, running = await busy(stepping, kit)
    pausing = [
        asyncio.create_task(target.pause_generation(mode, owner=owner))
        for mode, owner in (
            (PauseMode.KEEP, "one"),
            (PauseMode.KEEP, "one"),
            (PauseMode.ABORT, "two"),
            (PauseMode.WAIT, "three"),
        )
    ]
    await asyncio.sleep(0.02)
    steps.end()
    await asyncio.wait_for(asyncio.gather(*pausing), 10)
    await still(target, steps, 6)
    assert {(await t).finish_reason for t in running} == {FinishReason.ABORT}
    for owner in ("one", "two"):
        await target.resume_generation(owner=owner)
        assert (await target.status()).is_paused
    await target.resume_generation(owner="three")
    steps.run()
    assert len((await kit.complete(target, [1, 2, 3], 5)).token_ids) == 5


async def test_a_request_between_abort_and_drain_is_held_and_not_lost_h4_k5(
    tiny: Any, kit: Any, stepping: Make
) -> None:
    """It comes after the pause was asked for and before its last step has ended."""
    target, steps, running = await busy(stepping, kit)
    pausing = asyncio.create_task(target.pause_generation(PauseMode.ABORT))
    await asyncio.sleep(0.02)
    late = asyncio.create_task(kit.complete(target, [1, 2, 3], 8))
    past_the_gate = asyncio.create_task(kit.complete(target.backend, [1, 2, 3], 8))
    await asyncio.sleep(0.02)
    steps.end()
    report = await asyncio.wait_for(pausing, 10)
    assert len(report.held) == 1
    await asyncio.gather(*running)
    await still(target, steps, 6)
    assert not late.done()
    await target.release_kv_cache()
    await target.resume_kv_cache()
    await target.resume_generation()
    steps.run()
    for task in (late, past_the_gate):
        done = await asyncio.wait_for(task, 10)
        assert list(done.token_ids) == kit.golden(tiny(), [1, 2, 3], 8)


async def test_finish_and_abort_in_one_tick_h2(tiny: Any, kit: Any, stepping: Make) -> None:
    """The step in progress makes the last token while its request is aborted or paused away."""
    target, steps = await stepping()
    prompts = kit.prompts(3, shortest=4, longest=12)
    async with steps.gathering(3):
        tasks = [
            asyncio.create_task(kit.complete(target, p, 3, name=f"q{n}"))
            for n, p in enumerate(prompts)
        ]
    await steps.inside(3)  # at least one has its last token in this step
    aborting = asyncio.create_task(target.abort(["q0", "q1"]))
    pausing = asyncio.create_task(target.pause_generation(PauseMode.ABORT))
    await asyncio.sleep(0.02)
    steps.end()
    await asyncio.wait_for(asyncio.gather(aborting, pausing), 10)
    done = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    for prompt, one in zip(prompts, done, strict=True):
        got = list(one.token_ids)
        assert got == kit.golden(tiny(), prompt, 3)[: len(got)]
        whole = len(got) == 3
        assert (one.finish_reason is FinishReason.LENGTH) is whole
    assert done[0].finish_reason is FinishReason.LENGTH
    status = await target.status()
    assert status.running == ()
    assert target.backend._pending == [], "a pause's marker was left behind"
    steps.run()
    await target.resume_generation()
    target.backend.check_invariants()


async def test_requests_in_every_state_are_in_flight_k3(kit: Any, stepping: Make) -> None:
    """Queued, in the middle of a prompt, between two tokens: none may be overlooked."""
    target, steps, running = await busy(stepping, kit)
    releasing = asyncio.create_task(target.release_kv_cache(deadline=0.2))
    await asyncio.sleep(0.02)
    await steps.inside(8)
    await asyncio.sleep(0.3)  # past the deadline, in the middle of a step
    steps.run()
    with pytest.raises(RequestsInFlight) as caught:
        await asyncio.wait_for(releasing, 10)
    assert set(caught.value.ids) == {f"q{n}" for n in range(12)}
    assert (await target.status()).kv == "RESIDENT"
    assert {len((await task).token_ids) for task in running} == {40}


async def test_a_paused_or_idle_engine_makes_no_step_h7(kit: Any, stepping: Make) -> None:
    target, steps = await stepping()
    steps.run()
    await still(target, steps, 0)
    await kit.complete(target, [1, 2, 3], 5)
    await still(target, steps, 5)
    for _ in range(3):
        await target.pause_generation()
        await target.resume_generation()
    await still(target, steps, 5)
    stream = target.generate(kit.request([1, 2, 3], 100))
    await kit.first_tokens(stream, 3)
    await target.pause_generation(PauseMode.KEEP)
    stood = steps.begun
    held = asyncio.create_task(kit.complete(target, [4, 5], 3))
    await target.release_kv_cache()
    await still(target, steps, stood)
    await target.resume_kv_cache()
    await still(target, steps, stood)
    await target.resume_generation()
    assert len((await collect(stream)).token_ids) == 97
    await held


async def test_a_slow_reader_of_a_lost_replica_is_told_to_send_it_again(
    kit: Any, stepping: Make
) -> None:
    """Its engine was closed while nobody read: an abort with its tokens, not an engine's error."""
    target, steps = await stepping()
    steps.run()
    stream = target.generate(kit.request([1, 2, 3], 200))
    begun = await kit.first_tokens(stream, 2)
    await target.pause_generation(PauseMode.KEEP)
    await target.close()
    done = await collect(stream)
    assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)
    assert "closed" in done.error
    assert begun

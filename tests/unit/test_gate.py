"""The gate: owners, waiting, letting go."""

from __future__ import annotations

import asyncio

import pytest

from hotbunk.rollout.contract import FinishReason, GenerateRequest, PauseMode, Sampling, Version
from hotbunk.rollout.errors import ReplicaRejecting, UsageError
from hotbunk.rollout.gate import CALLER, SLEEP, Entry, Gate, Stage

pytestmark = pytest.mark.anyio


def request(name: str = "r", **more: object) -> GenerateRequest:
    return GenerateRequest(name, (1,), **more)  # type: ignore[arg-type]


def shut(gate: Gate, owner: str = CALLER, **flags: bool) -> None:
    gate.hold(owner, PauseMode.ABORT, flags.get("clear_cache", True), flags.get("reject", False))


def enter(gate: Gate, name: str = "r") -> tuple[Entry, asyncio.Task[bool]]:
    entry = gate.enter(request(name))
    return entry, asyncio.create_task(gate.passed(entry))


async def test_an_open_gate_lets_pass_without_a_suspension() -> None:
    gate = Gate(10)
    passing = gate.passed(gate.enter(request()))
    with pytest.raises(StopIteration) as end:
        passing.send(None)
    assert end.value.value is True


async def test_every_owner_must_drop() -> None:
    gate = Gate(10)
    shut(gate, CALLER)
    shut(gate, SLEEP)
    _, passing = enter(gate)
    gate.drop(CALLER)
    gate.drop("stranger")
    await asyncio.sleep(1)
    assert not passing.done()
    gate.drop(SLEEP)
    assert await passing is True
    assert not gate.closed


async def test_flags_are_or_ed_and_the_mode_is_the_new_one() -> None:
    gate = Gate(10)
    gate.hold(CALLER, PauseMode.WAIT, True)
    await asyncio.sleep(3)
    gate.hold(CALLER, PauseMode.KEEP, False)
    pause = gate.pauses[CALLER]
    assert (pause.mode, pause.clear_cache, pause.reject, pause.since) == (
        PauseMode.KEEP,
        True,
        False,
        0.0,
    )


async def test_waiting_ends_at_the_deadline_with_a_reason() -> None:
    gate = Gate(10)
    shut(gate)
    entry, passing = enter(gate)
    assert await passing is False
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    last = next(entry.ended(Version(0, 1)))
    assert last.finish_reason is FinishReason.ABORT
    assert last.retryable
    assert "10 s" in last.error
    assert CALLER in last.error


async def test_the_deadline_counts_from_the_first_wait() -> None:
    """Opening and shutting at once does not start it again for who could not get through."""
    gate = Gate(10)
    shut(gate)
    _, passing = enter(gate)
    await asyncio.sleep(6)
    gate.drop(CALLER)
    shut(gate)
    assert await passing is False
    assert asyncio.get_running_loop().time() == pytest.approx(10)


@pytest.mark.parametrize("opens_first", [False, True])
async def test_letting_go_is_at_once_and_final(opens_first: bool) -> None:
    """Also when the gate opens in the same tick, before or after."""
    gate = Gate(10)
    shut(gate)
    entry, passing = enter(gate)
    await asyncio.sleep(1)
    if opens_first:
        gate.drop(CALLER)
    gate.let_go("gone", Stage.HELD)
    gate.drop(CALLER)
    assert await passing is False
    assert next(entry.ended(Version())).error == "gone"
    assert asyncio.get_running_loop().time() == pytest.approx(1)


async def test_letting_go_chooses_by_stage_and_id() -> None:
    gate = Gate(10)
    shut(gate)
    entries = {name: enter(gate, name) for name in "abc"}
    entries["c"][0].stage = Stage.RUNNING
    await asyncio.sleep(1)
    gate.let_go("gone", Stage.HELD, ids=["a", "c"], retryable=False)
    await asyncio.sleep(1)
    assert {n: task.done() for n, (_, task) in entries.items()} == {
        "a": True,
        "b": False,
        "c": False,
    }
    assert not next(entries["a"][0].ended(Version())).retryable
    for _, task in entries.values():
        task.cancel()


async def test_reject() -> None:
    gate = Gate(10)
    shut(gate)
    _, held = enter(gate)
    await asyncio.sleep(1)
    shut(gate, SLEEP, reject=True)
    assert await held is False
    with pytest.raises(ReplicaRejecting):
        gate.enter(request("new"))
    gate.drop(SLEEP)
    gate.enter(request("new"))


async def test_freeze_and_thaw_move_running_requests_only() -> None:
    gate = Gate(10)
    entry = gate.enter(request())
    entry.stage = Stage.RUNNING
    gate.freeze()
    assert entry.until == 10
    await asyncio.sleep(5)
    gate.freeze()
    assert entry.until == 10, "freezing again prolonged the wait"
    gate.thaw()
    assert entry.until is None
    gate.let_go("gone")
    gate.thaw()
    assert entry.until == 5, "a thaw brought back who was let go"


async def test_a_wait_that_is_over_is_not_cancelled_by_a_late_move() -> None:
    gate = Gate(10)
    entry = gate.enter(request())
    with pytest.raises(asyncio.QueueEmpty):
        async with entry.waiting():
            asyncio.Queue[int]().get_nowait()
    entry.waited()
    gate.let_go("late")
    await asyncio.sleep(0)


async def test_drained() -> None:
    gate = Gate(10)
    entries = [gate.enter(request(name)) for name in "ab"]
    for entry in entries:
        entry.stage = Stage.RUNNING
    waiting = asyncio.create_task(gate.drained())
    await asyncio.sleep(1)
    gate.leave(entries[0])
    await asyncio.sleep(1)
    assert not waiting.done()
    gate.leave(entries[1])
    await waiting


async def test_who_uses_what() -> None:
    gate = Gate(10)
    gate.enter(request("base"))
    gate.enter(request("user", adapter="a"))
    assert gate.users_of({"target"}) is None
    assert gate.users_of({"target", "adapter:a"}) is None
    assert gate.users_of({"adapter:a"}) == ["user"]
    assert gate.users_of({"adapter:b"}) == []


@pytest.mark.parametrize(
    "bad",
    [
        GenerateRequest("x", ()),
        GenerateRequest("x", (1,), Sampling(max_tokens=0)),
        GenerateRequest("taken", (1,)),
    ],
)
async def test_senseless_requests(bad: GenerateRequest) -> None:
    gate = Gate(10)
    gate.enter(request("taken"))
    with pytest.raises(UsageError):
        gate.enter(bad)
    assert gate.ids(Stage.HELD) == ("taken",)

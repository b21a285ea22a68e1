"""The oracle itself: tokens, virtual time, the device, faults, options, stamps."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbunk.conformance.rig import expect
from hotbunk.rollout.backends.oracle import (
    Device,
    EngineDied,
    FaultPlan,
    TokenInfo,
    VirtualTimeLoop,
    create,
    decode_token,
    encode_token,
)
from hotbunk.rollout.backends.oracle.model import (
    GROUPS,
    PARAMETERS,
    WeightGroup,
    state_of,
    weights_at,
)
from hotbunk.rollout.backends.oracle.tokens import Stamp, continuation, weights_bits
from hotbunk.rollout.backends.oracle.virtual_time import Deadlock
from hotbunk.rollout.contract import (
    Version,
)
from hotbunk.rollout.errors import (
    ConfigError,
    HostOutOfMemory,
    ResumeOutOfMemory,
    UsageError,
)
from hotbunk.rollout.registry import create_backend

PROMPT = tuple(range(1, 10))
VERSIONS = st.builds(Version, st.integers(0, 7), st.integers(0, 1023))
INFOS = st.builds(
    TokenInfo,
    version=VERSIONS,
    weights=st.integers(0, 4095),
    kv=st.builds(Stamp, VERSIONS, st.integers(0, 4095)),
    encoder=st.integers(0, 127),
    context=st.integers(0, 63),
)


# -- tokens -----------------------------------------------------------------------------------


@given(INFOS)
def test_tokens_say_what_was_put_into_them(info: TokenInfo) -> None:
    token = encode_token(info)
    assert 0 <= token < 1 << 63
    assert decode_token(token) == info


def test_a_continuation_continues() -> None:
    whole = continuation(PROMPT, 5, Version(0, 1), 20)
    rest = continuation([*PROMPT, *whole[:7]], 5, Version(0, 1), 13)
    assert whole[7:] == rest
    assert len(set(whole)) > 1, "tokens do not depend on their context"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_in_memory_is_what_it_is_on_paper(group: str) -> None:
    on_paper = state_of(group, {spec.name: content for spec, content in weights_at(0, [group])})
    in_memory = WeightGroup(group, 0)
    assert {name: in_memory.read(name) for name in in_memory.names()} == on_paper
    assert sum(p.nbytes for p in PARAMETERS[group]) <= in_memory.nbytes


# -- virtual time -----------------------------------------------------------------------------


def on_virtual_time(work: Any, **options: Any) -> Any:
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(**options)) as runner:
        return runner.run(work)


def test_an_hour_passes_at_once() -> None:
    async def work() -> list[str]:
        loop = asyncio.get_running_loop()
        order: list[str] = []

        async def after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            assert loop.time() == pytest.approx(seconds)
            order.append(f"{seconds:g}")

        await asyncio.gather(*(after(s) for s in (3600, 0.5, 60, 59.999)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        assert loop.time() == pytest.approx(4200)
        return order

    began = time.monotonic()
    assert on_virtual_time(work()) == ["0.5", "59.999", "60", "3600"]
    assert time.monotonic() - began < 5


def test_sockets_come_before_timers() -> None:
    async def work() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            theirs.send(b"x")
            async with asyncio.timeout(0.001):
                return await loop.sock_recv(ours, 1)

    assert on_virtual_time(work()) == b"x"


def test_a_deadlock_is_an_error() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualTimeLoop(patience=0.01)
    task = loop.create_task(work())
    with pytest.raises(Deadlock):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


# -- the device -------------------------------------------------------------------------------


def test_the_device_counts_and_refuses() -> None:
    device = Device(capacity=100, host_capacity=10)
    device.map("weights", "target", 60)
    device.tenant("trainer", 30)
    assert (device.used, device.free, device.resident()) == (90, 10, 60)
    with pytest.raises(ResumeOutOfMemory) as error:
        device.map("kv_cache", "pool", 11)
    assert (error.value.needed, error.value.free) == (11, 10)
    with pytest.raises(ResumeOutOfMemory):
        device.tenant("trainer", 41)
    device.tenant("trainer", 0)
    device.refuse = {"kv_cache"}
    with pytest.raises(ResumeOutOfMemory):
        device.map("kv_cache", "pool", 1)
    device.map("kv_cache", "pool", 1)
    assert device.peak == 90
    device.keep_backup("weights", "target", 10)
    with pytest.raises(HostOutOfMemory):
        device.keep_backup("weights", "draft", 1)
    device.keep_backup("weights", "target", 0)
    assert device.host_used == 0


def test_the_device_lies_and_is_late() -> None:
    device = Device(capacity=100)
    device.map("weights", "target", 60)
    device.late, device.withhold = 2, 10
    assert device.unmap("weights", "target") == 60
    assert device.unmap("weights", "target") == 0
    assert [(device.tick(), device.resident())[1] for _ in range(3)] == [60, 10, 10]
    assert device.free == 90


# -- faults -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_faults_come_at_their_point_and_count() -> None:
    plan = FaultPlan().raises("step", OSError("x"), nth=2).delays("step", 5.0, nth=1)
    assert await plan.reach("step") is False
    await plan.reach("step")
    assert asyncio.get_running_loop().time() == pytest.approx(5)
    await expect(OSError, plan.reach("step"))
    await plan.reach("step")
    plan.corrupts("step")
    assert await plan.reach("step") is True
    assert await plan.reach("step") is False


@pytest.mark.anyio
async def test_the_dead_stay_dead() -> None:
    plan = FaultPlan().dies("update/bucket", nth=1)
    await plan.reach("update/bucket")
    for point in ("update/bucket", "status", "abort"):
        await expect(EngineDied, plan.reach(point))
    plan.clear()
    await expect(EngineDied, plan.reach("status"))
    silent = FaultPlan().dies("status", silently=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await silent.reach("status")


def test_unknown_fault_points_are_refused() -> None:
    with pytest.raises(UsageError, match="update/bucket"):
        FaultPlan().hangs("update/buckets")
    FaultPlan(points=("transport/send",)).hangs("transport/send")


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, hint",
    [
        ({"step_tim": 1}, "step_time"),
        ({"max_running": "many"}, "max_running"),
        ({"max_running": 0}, "1 or more"),
        ({"fed": ["targt"]}, "target"),
        ({"unsupported": ["pause.kep"]}, "pause.keep"),
        ({"gate": "nowhere"}, "gate"),
    ],
)
def test_bad_options_are_refused_with_a_hint(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        create(**options)


def test_the_registry_builds_it() -> None:
    engine = create_backend("oracle", step_time=0.5)
    assert engine.capabilities.backend == "oracle"


def test_it_needs_no_tensor_library() -> None:
    import subprocess

    code = (
        "import sys, hotbunk.rollout.backends.oracle, hotbunk.conformance.runner, "
        "hotbunk.conformance.cases; "
        "sys.exit(bool({'torch', 'numpy', 'hypothesis', 'pytest'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_golden_needs_every_group() -> None:
    """A digest that leaves a group out is another one."""
    assert weights_bits([1, 2]) != weights_bits([1])

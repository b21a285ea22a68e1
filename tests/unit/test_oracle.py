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

from hotbunk.conformance.rig import Running, expect
from hotbunk.conformance.transfers import MemoryTransfer
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
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.errors import (
    ConfigError,
    HostOutOfMemory,
    ResumeOutOfMemory,
    SessionError,
    UsageError,
)
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica

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


# -- generation -------------------------------------------------------------------------------


async def started(**options: Any) -> tuple[Replica, Any]:
    engine = create(**options)
    replica = Replica(engine)
    await replica.start()
    return replica, engine


async def load(replica: Replica, step: int) -> None:
    version = Version(0, step)
    await replica.update_weights(MemoryTransfer(weights_at(step), version=version), version=version)


def request(name: str, tokens: int = 8, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Any:
    return GenerateRequest(name, prompt, Sampling(0, tokens), **more)


@pytest.mark.anyio
async def test_stale_kv_shows_in_every_token() -> None:
    """clear_cache=False keeps the KV of a frozen request: its stamp says so."""
    replica, _ = await started()
    await load(replica, 1)
    running = await Running(replica.generate(request("x", 30))).started()
    report = await replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    assert report.stale_tokens >= len(PROMPT)
    kept = len(running.tokens)
    await load(replica, 2)
    await replica.resume_generation()
    done = await running.task
    infos = [decode_token(token) for token in done.token_ids]
    assert {i.version for i in infos[kept:]} == {Version(0, 2)}
    assert {i.kv.version for i in infos} == {Version(0, 1)}
    assert infos[0].weights == infos[0].kv.digest != infos[-1].weights
    await replica.close()


@pytest.mark.anyio
async def test_the_encoder_cache_dies_with_its_weights() -> None:
    """The same image before and after an update of the encoder (C6)."""
    replica, engine = await started()
    stamps = []
    for step in (1, 2):
        await load(replica, step)
        for name in ("a", "b"):
            done = await collect(replica.generate(request(f"{name}{step}", media={"image": name})))
            [encoder] = {decode_token(t).encoder for t in done.token_ids}
            stamps.append(encoder)
        assert len(engine.encoder_cache) == 2
    assert 0 not in stamps
    assert stamps[:2] != stamps[2:]
    plain = await collect(replica.generate(request("plain")))
    assert {decode_token(t).encoder for t in plain.token_ids} == {0}
    await replica.close()


@pytest.mark.anyio
async def test_prefixes_are_shared_by_prompt_adapter_and_media() -> None:
    replica, _ = await started()
    first = await collect(replica.generate(request("a")))
    again = await collect(replica.generate(request("b")))
    assert (first.cached_tokens, again.cached_tokens) == (0, 8)
    other = await collect(replica.generate(request("c", media={"image": 1})))
    assert other.cached_tokens == 0
    longer = await collect(replica.generate(request("d", prompt=(*PROMPT, *first.token_ids[:4]))))
    assert longer.cached_tokens == 12
    await replica.close()


@pytest.mark.anyio
async def test_batching_keeps_to_slots_and_blocks() -> None:
    replica, engine = await started(max_running=2, kv_blocks=10)
    running = [Running(replica.generate(request(str(n)))) for n in range(5)]
    most = 0
    while not all(r.done for r in running):
        await asyncio.sleep(0.01)
        most = max(most, len(engine.scheduler.running))
        assert engine.scheduler.blocks_used <= 10
    assert most == 2
    assert {len((await r.task).token_ids) for r in running} == {8}
    assert engine.scheduler.blocks_used == 0
    with pytest.raises(Exception, match="KV blocks"):
        await collect(replica.generate(request("huge", 1000)))
    await replica.close()


@pytest.mark.anyio
async def test_steps_take_time_and_idle_ones_none() -> None:
    replica, engine = await started(step_time=0.5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await collect(replica.generate(request("x", 10)))
    assert loop.time() - began == pytest.approx(5.0)
    steps = engine.scheduler.steps
    await asyncio.sleep(3600)
    assert engine.scheduler.steps == steps == 10
    await replica.close()


@pytest.mark.anyio
async def test_stop_tokens_and_seeds() -> None:
    replica, _ = await started()
    plain = await collect(replica.generate(request("a")))
    sampling = Sampling(0, 8, stop_token_ids=(plain.token_ids[3],))
    stopped = await collect(replica.generate(GenerateRequest("b", PROMPT, sampling)))
    assert stopped.token_ids == plain.token_ids[:4]
    assert stopped.finish_reason == "stop"
    drawn = [
        await collect(replica.generate(GenerateRequest(f"s{n}", PROMPT, Sampling(1.0, 8, seed))))
        for n, seed in enumerate((1, 1, 2))
    ]
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids
    await replica.close()


@pytest.mark.anyio
async def test_misuse_is_loud() -> None:
    """What a real engine answers with a crash: verbs without a pause, memory that is gone."""
    replica, engine = await started()
    for verb in (engine.release(), engine.release_kv_cache()):
        await expect(SessionError, verb)
    await engine.pause_generation()
    await engine.release([Tag.WEIGHTS], retention=Retention.DISCARD)
    await engine.resume_generation()
    await expect(EngineDied, collect(engine.generate(request("x"))))
    await expect(EngineDied, engine.status())
    await engine.close()
    await engine.close()
    assert engine.device.resident() == 0
    del replica


@pytest.mark.anyio
async def test_thousands_of_verbs_a_second() -> None:
    """Cheap enough to be driven by a state machine."""
    replica, _ = await started()
    began = time.perf_counter()
    for _ in range(500):
        await replica.sleep(1)
        await replica.wake_up()
    assert time.perf_counter() - began < 5
    await replica.close()


def test_golden_needs_every_group() -> None:
    """A digest that leaves a group out is another one."""
    assert weights_bits([1, 2]) != weights_bits([1])

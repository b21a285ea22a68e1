"""The whole sync over shm into reference engines: packed and in place, released and woken between."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import Retention, Tag, Version
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
POLICY = SyncPolicy(bucket_bytes=50_000, deadline=30.0)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """These tests tie knots through an engine, which holds its memory until they are collected."""
    yield
    gc.collect()


@pytest.fixture
def managed(transport: ShmTransport, replica: Any) -> Any:
    def make(*replicas: Any, **options: Any) -> CheckpointEngineManager:
        options.setdefault("policy", POLICY)
        return CheckpointEngineManager([LocalHandle(r) for r in replicas], transport, **options)

    return make


async def test_packed_and_in_place_side_by_side(
    tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    packed = await replica(tiny(seed=0))
    shared = await replica(tiny(seed=0), share_weights=True)
    half = await replica(tiny(seed=0), share_weights=True, dtype="bfloat16")
    manager = managed(packed, shared, half)
    for step, seed in enumerate((1, 2), 1):
        report = await manager.update_weights(kit.source(tiny(seed=seed)), Version(0, step))
        assert [o.update.verified for o in report.outcomes] == ["applied"] * 3
        golden = kit.golden(tiny(seed=seed), PROMPT)
        for target in (packed, shared):
            assert list((await kit.complete(target, PROMPT)).token_ids) == golden
    assert (await half.status()).versions == {"target": Version(0, 2)}


@pytest.mark.parametrize("tied", [False, True])
async def test_weights_written_in_place_survive_sleep_and_wake(
    tied: bool, tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    target = await replica(tiny(seed=0, tied=tied), share_weights=True)
    manager = managed(target)
    source = kit.source(tiny(seed=1, tied=tied))
    golden = kit.golden(tiny(seed=1, tied=tied), PROMPT)
    for step in range(1, 4):
        await manager.sleep_replicas()
        memory = await target.memory()
        assert memory.resident() == 0
        await manager.update_weights(source, Version(0, step))
        assert list((await kit.complete(target, PROMPT)).token_ids) == golden
    target.backend.check_invariants()
    await target.release(None, retention=Retention.BACKUP)
    await target.resume(None)
    assert list((await kit.complete(target, PROMPT)).token_ids) == golden
    assert Tag.WEIGHTS in {a.tag for a in (await target.memory()).arenas}


async def test_a_bit_that_flips_in_the_arena_is_caught_n7(
    tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    """The engine reads back what lies there, whoever wrote it; a full resend heals."""
    target = await replica(tiny(seed=0), share_weights=True)
    manager = managed(target)
    engine: Any = target.backend
    call = engine._thread.call

    async def flip(work: Any) -> Any:
        if getattr(getattr(work, "func", None), "__name__", "") == "differing":
            parameter = engine._runner.binding.tensor("model.norm.weight")
            parameter.view(torch.int32)[3] ^= 1
        return await call(work)

    engine._thread.call = flip
    source = kit.source(tiny(seed=1))
    with pytest.raises(errors.SyncFailed, match=r"model\.norm\.weight"):
        await manager.update_weights(source, Version(0, 1))
    assert (await target.status()).health is Health.POISONED
    engine._thread.call = call
    await manager.update_weights(source, Version(0, 2))
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_the_engine_refuses_to_compute_before_the_sender_writes_in_place(
    tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    """The mark is the engine's own, and stands before the first byte, not after the first bucket."""
    target = await replica(tiny(seed=0), share_weights=True)
    engine: Any = target.backend
    states: list[str] = []

    class Watching:
        inner = kit.source(tiny(seed=1))

        def specs(self) -> Any:
            return self.inner.specs()

        def tensors(self) -> Any:
            yield from self.inner.tensors()
            states.append(engine._residency.groups["target"].state.value)

    await managed(target).update_weights(Watching(), Version(0, 1))
    assert states == ["DIRTY"]


async def test_a_source_that_fails_half_way_poisons_and_is_healed_n2_n7(
    tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    targets = [await replica(tiny(seed=0), share_weights=in_place) for in_place in (False, True)]
    manager = managed(*targets)

    class Failing:
        inner = kit.source(tiny(seed=1))

        def specs(self) -> Any:
            return self.inner.specs()

        def tensors(self) -> Any:
            for number, tensor in enumerate(self.inner.tensors()):
                if number == 9:
                    raise RuntimeError("the gather failed")
                yield tensor

    with pytest.raises(errors.SyncFailed, match="the gather failed") as caught:
        await manager.update_weights(Failing(), Version(0, 1))
    report: Any = caught.value.report
    assert {o.outcome for o in report.outcomes} <= {Outcome.POISONED, Outcome.ROLLED_BACK}
    report = await manager.update_weights(Failing.inner, Version(0, 2))
    assert report.ok
    golden = kit.golden(tiny(seed=1), PROMPT)
    for target in targets:
        assert list((await kit.complete(target, PROMPT)).token_ids) == golden


async def test_what_the_engine_lacks_is_refused_before_a_byte(
    tiny: Any, kit: Any, replica: Any, managed: Any
) -> None:
    target = await replica(tiny(seed=0), share_weights=True)
    before = await target.digest()
    state = {**dict(kit.loaded(tiny(seed=1)).named_parameters()), "stranger": torch.zeros(3)}
    with pytest.raises(errors.SyncFailed, match="stranger"):
        await managed(target).update_weights(state_dict_source(state), Version(0, 1))
    assert await target.digest() == before
    await asyncio.sleep(0)


async def test_who_cannot_be_written_in_place_is_refused_where_one_copy_was_asked_for(
    tiny: Any, kit: Any, replica: Any, tmp_path: Path
) -> None:
    """Before a byte moves, and with the way out; who can has the weights all the same."""
    transport = ShmTransport(stall=1.5, directory=tmp_path, one_copy=True)
    packed = await replica(tiny(seed=0))
    shared = await replica(tiny(seed=0), share_weights=True)
    manager = CheckpointEngineManager(
        [LocalHandle(packed), LocalHandle(shared)], transport, policy=POLICY
    )
    with pytest.raises(errors.SyncFailed, match="one copy was asked for") as failed:
        await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert [o.outcome for o in failed.value.report.outcomes] == [
        Outcome.ROLLED_BACK,
        Outcome.COMMITTED,
    ]
    assert list((await kit.complete(shared, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)
    assert list((await kit.complete(packed, PROMPT)).token_ids) == kit.golden(tiny(seed=0), PROMPT)
    await transport.close()

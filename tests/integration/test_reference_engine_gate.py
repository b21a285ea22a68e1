"""The reference engine's own gate: never a token from weights without content, whoever asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Retention,
    Version,
    collect,
)
from hotbunk.rollout.replica import Health

pytestmark = pytest.mark.anyio


# -- never a token from weights without content, whoever asks ---------------------------------


async def test_level_2_then_resume_then_generate_is_refused_g1(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny())
    await target.sleep(2)
    await target.wake_up()
    with pytest.raises(errors.WeightsNotLoaded):
        await kit.complete(target, [1, 2, 3])
    assert not (await target.status()).servable


@pytest.mark.parametrize(
    "tags, retention, back, error",
    [
        (None, Retention.DISCARD, None, errors.WeightsNotLoaded),
        (["weights"], Retention.DISCARD, [], errors.WeightsNotLoaded),
        (["weights"], Retention.BACKUP, [], errors.WeightsNotLoaded),
        (["kv_cache"], Retention.DISCARD, [], errors.KVNotResident),
        (None, Retention.BACKUP, ["weights"], errors.KVNotResident),
    ],
)
async def test_the_engine_itself_refuses_whoever_asks(
    tiny: Any, kit: Any, engine: Any, tags: Any, retention: Any, back: Any, error: Any
) -> None:
    """``gate`` is declared in_engine: a client that bypasses the replica is refused as well."""
    backend = await engine(tiny())
    await backend.pause_generation()
    await backend.release(tags, retention=retention)
    await backend.resume(back)
    await backend.resume_generation()
    async with asyncio.timeout(10):
        with pytest.raises(error):
            await kit.complete(backend, [1, 2, 3])
    backend.check_invariants()


async def test_the_engine_refuses_when_started_without_weights(
    tiny: Any, kit: Any, engine: Any
) -> None:
    backend = await engine(tiny(), load="empty")
    assert (await backend.status()).versions == {}
    with pytest.raises(errors.WeightsNotLoaded):
        await kit.complete(backend, [1, 2, 3])


async def test_a_request_sent_to_a_paused_engine_is_told_what_is_missing_when_it_opens(
    tiny: Any, kit: Any, engine: Any
) -> None:
    backend = await engine(tiny())
    await backend.pause_generation()
    waiting = asyncio.ensure_future(kit.complete(backend, [1, 2, 3]))
    await kit.until(lambda: bool(backend._scheduler.arrived))
    await backend.release(retention=Retention.DISCARD)
    await backend.resume()
    await backend.resume_generation()
    async with asyncio.timeout(10):
        with pytest.raises(errors.WeightsNotLoaded):
            await waiting
    backend.check_invariants()


async def test_the_engine_refuses_half_written_weights(tiny: Any, kit: Any, engine: Any) -> None:
    model = tiny()
    backend = await engine(model)

    class Breaks:
        def specs(self) -> Any:
            return kit.source(model).specs()

        def tensors(self) -> Any:
            yield from list(kit.source(model).tensors())[:2]
            raise RuntimeError("the trainer's gather broke")

    await backend.pause_generation()
    transfer = await kit.offered(Breaks(), Version(0, 1))
    with pytest.raises(RuntimeError, match="gather broke"):
        await backend.update_weights(transfer, version=Version(0, 1))
    await backend.resume_generation()
    with pytest.raises(errors.WeightsPoisoned):
        await kit.complete(backend, [1, 2, 3])
    await backend.pause_generation()
    good = await kit.offered(kit.source(model), Version(0, 2))
    await backend.update_weights(good, version=Version(0, 2))
    await backend.resume_generation()
    assert list((await kit.complete(backend, [1, 2, 3])).token_ids) == kit.golden(model, [1, 2, 3])


async def test_a_transfer_that_breaks_before_its_first_byte_changes_nothing(
    tiny: Any, kit: Any, replica: Any
) -> None:
    model = tiny()
    target = await replica(model)

    class BreaksAtOnce:
        def specs(self) -> Any:
            return kit.source(model).specs()

        def tensors(self) -> Any:
            raise RuntimeError("the trainer's gather broke")
            yield

    transfer = await kit.offered(BreaksAtOnce(), Version(0, 1))
    with pytest.raises(errors.EngineFailed, match="gather broke"):
        await target.update_weights(transfer, version=Version(0, 1))
    assert target.health is Health.OK
    assert list((await kit.complete(target, [1, 2, 3])).token_ids) == kit.golden(model, [1, 2, 3])


async def test_memory_verbs_need_the_engine_to_stand_still_k1(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    backend = await engine(model)
    stream = backend.generate(kit.request([1, 2, 3], 100, name="busy"))
    begun = await kit.first_tokens(stream, 1)
    for verb in (backend.release, backend.release_kv_cache, backend.reset_caches):
        with pytest.raises(errors.RequestsInFlight) as caught:
            await verb()
        assert caught.value.ids == ("busy",)
    transfer = await kit.offered(kit.source(model), Version(0, 1))
    with pytest.raises(errors.RequestsInFlight):
        await backend.update_weights(transfer, version=Version(0, 1))
    done = await collect(stream)
    assert begun + list(done.token_ids) == kit.golden(model, [1, 2, 3], 100)
    # Idle is not enough: a step could start at any moment.
    with pytest.raises(errors.RequestsInFlight):
        await backend.release()

"""Memory that lies, is late, or is not there."""

from __future__ import annotations

import pytest

from hotbunk.conformance.backends.oracle_kit import ask, load, running
from hotbunk.conformance.rig import expect
from hotbunk.rollout.backends.oracle import Device
from hotbunk.rollout.contract import (
    Retention,
    Tag,
)
from hotbunk.rollout.errors import (
    HostOutOfMemory,
    ReleaseIncomplete,
    ResumeOutOfMemory,
    WeightsNotLoaded,
)

pytestmark = pytest.mark.anyio


async def test_memory_that_comes_late_is_waited_for() -> None:
    """release returns when the device has the memory, not before (M7)."""
    async with running() as (replica, engine):
        engine.device.late = 3
        report = await replica.release()
        assert engine.device.resident() == 0
        assert report.freed > 0


async def test_memory_that_never_comes() -> None:
    """ReleaseIncomplete with both numbers; the content is gone, and the state says so (M10)."""
    async with running() as (replica, engine):
        engine.device.withhold = 8
        error = await expect(ReleaseIncomplete, replica.sleep(2))
        assert error.measured < error.expected
        status = await replica.status()
        assert status.groups["target"] == "DISCARDED"
        assert not status.is_sleeping
        await expect(WeightsNotLoaded, ask(replica, "x").task)
        engine.device.withhold = 0
        await replica.resume()
        await load(replica, 1)
        assert (await ask(replica, "y").task).token_ids


async def test_no_room_for_a_backup() -> None:
    """HostOutOfMemory before anything is released, and sleep's pause is undone."""
    device = Device(host_capacity=100)
    async with running(device=device) as (replica, engine):
        before = engine.device.resident()
        error = await expect(HostOutOfMemory, replica.sleep(1))
        assert error.needed > error.free
        assert engine.device.resident() == before
        assert device.host_used == 0
        assert not (await replica.status()).is_paused
        assert (await ask(replica, "x").task).token_ids
        await replica.sleep(2)


async def test_waking_beside_a_trainer() -> None:
    """Room for the weights and not for KV: all or nothing, and staged it works (M1, M6)."""
    async with running() as (replica, engine):
        await replica.sleep(1)
        device = engine.device
        weights = sum(g.nbytes for g in engine.groups.values())
        device.tenant("trainer", device.free - weights)
        error = await expect(ResumeOutOfMemory, replica.wake_up())
        assert error.tag == Tag.KV_CACHE
        assert error.retryable
        assert device.resident() == 0, "what was mapped on the way was not undone"
        assert (await replica.status()).groups["target"] == "BACKED_UP(0.0)"
        assert device.host_used == weights
        await replica.wake_up([Tag.WEIGHTS])
        await load(replica, 1)
        await expect(ResumeOutOfMemory, replica.wake_up())
        assert (await replica.status()).is_sleeping
        device.tenant("trainer", 0)
        await replica.wake_up([Tag.KV_CACHE])
        assert (await ask(replica, "x").task).token_ids


async def test_peak_memory_is_the_sum_of_what_is_named() -> None:
    """Trainer share + weights, until KV comes back (M2)."""
    async with running() as (replica, engine):
        await replica.sleep(2)
        device = engine.device
        device.tenant("trainer", 1000)
        device.peak = 0
        await replica.wake_up([Tag.WEIGHTS])
        await load(replica, 1)
        assert device.peak == 1000 + sum(g.nbytes for g in engine.groups.values())


async def test_groups_that_no_sync_feeds_are_never_discarded() -> None:
    """They get a backup where there is one, else they stay (F: fed groups)."""
    for lacking, state in (((), "BACKED_UP(0.0)"), (("retention.backup",), "RESIDENT(0.0)")):
        async with running(fed=("target",), unsupported=lacking) as (replica, _):
            await replica.release(retention=Retention.DISCARD)
            groups = (await replica.status()).groups
            assert groups["target"] == "DISCARDED"
            assert groups["draft"] == groups["encoder"] == state
            await replica.resume()
            groups = (await replica.status()).groups
            assert groups["target"] == "EMPTY"
            assert groups["draft"] == "RESIDENT(0.0)"


async def test_fed_groups_can_be_fewer_than_feedable_ones() -> None:
    async with running(fed_groups=["target"]) as (replica, engine):
        await replica.release(retention=Retention.DISCARD)
        assert engine.groups["draft"].backup is not None
        assert engine.groups["target"].backup is None

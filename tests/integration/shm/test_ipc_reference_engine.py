"""One copy a byte into the reference engine's device arena, on the fake device: simulated memory.

The engine's arena, its handles, the protocol and both processes are what they are on a GPU; the memory
is the host's, and there is no device.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport
from hotbunk.rollout import errors, native
from hotbunk.rollout.contract import Tag, Version
from hotbunk.rollout.process import ProcessHandle, shutdown, start, start_replica

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not native.available(), reason="installed without the native library"),
]
POLICY = SyncPolicy(bucket_bytes=50_000, deadline=30.0)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def no_server() -> Iterator[None]:
    """The fork server is nobody's after these tests."""
    yield
    shutdown()


async def engine(model: Path, name: str, *, shares: bool) -> ProcessHandle:
    options = {"model": str(model), "device": "fake", "share_weights": shares}
    return await start_replica("reference", {**options, "kv_cache_tokens": 256}, name=name)


async def tokens(kit: Any, handle: ProcessHandle) -> list[int]:
    return list((await kit.complete(handle, PROMPT)).token_ids)


async def test_a_device_arena_is_written_in_place_and_one_that_is_not_shared_is_not(
    device: IpcTransport, tiny: Any, kit: Any
) -> None:
    """Mapped once for each sync, and given back with it: in between the engine sleeps."""
    handles = [await engine(tiny(seed=0), f"r{n}", shares=n == 0) for n in range(2)]
    manager = CheckpointEngineManager(handles, device, policy=POLICY)
    for step in (1, 2, 3):
        await manager.sleep_replicas()
        report = await manager.update_weights(kit.source(tiny(seed=step)), Version(0, step))
        ledger = (device.ledger.imports, device.ledger.closes, device.ledger.exports)
        assert ledger == (step, step, step), "one arena of theirs, one pair of halves of ours"
        assert [one.update.verified for one in report.outcomes if one.update] == ["applied"] * 2
        assert not any(one.memory for one in report.outcomes), "a simulated device measures nothing"
        for handle in handles:
            assert await tokens(kit, handle) == kit.golden(tiny(seed=step), PROMPT)
    assert device.pool.count("memory") == 0
    for handle in handles:
        await handle.close()


class Interrupted:
    """A source in whose middle something happens."""

    def __init__(self, inner: Any, pid: int) -> None:
        self._inner = inner
        self._pid = pid

    def specs(self) -> Any:
        return self._inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(self._inner.tensors()):
            if number == 9:
                os.kill(self._pid, signal.SIGKILL)
            yield tensor


async def test_an_engine_killed_while_its_arena_is_written_is_replaced_n3_b8(
    device: IpcTransport, tiny: Any, kit: Any
) -> None:
    handle = await engine(tiny(seed=0), "r0", shares=True)
    manager = CheckpointEngineManager([handle], device, policy=POLICY)
    with pytest.raises(errors.SyncFailed) as caught:
        await manager.update_weights(
            Interrupted(kit.source(tiny(seed=1)), handle.pid), Version(0, 1)
        )
    report: Any = caught.value.report
    assert [one.outcome for one in report.outcomes] == [Outcome.LOST]
    assert (device.ledger.live, device.pool.count("memory")) == (0, 0)
    manager.forget_replica("r0")
    await handle.close()
    successor = await start(handle.spec)
    await manager.add_replica(successor)
    assert (await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))).ok
    assert await tokens(kit, successor) == kit.golden(tiny(seed=1), PROMPT)
    assert device.ledger.live == 0
    await successor.close()


async def test_a_simulated_device_says_so(
    tiny: Any, replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    target = await replica(tiny(seed=0), device="fake")
    assert "device=fake is simulated" in caplog.text
    report = await target.memory()
    assert report.measured_by == target.backend.capabilities.memory_measured_by == "accounting"
    freed = (await target.sleep()).freed
    assert freed >= report.resident(Tag.WEIGHTS) > 0

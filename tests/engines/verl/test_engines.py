"""verl's six methods over our transports: what verl's own packing breaks, and what fails midway."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from hotbunk.checkpoint_engine.transports.shm.receiver import ShmTransfer
from hotbunk.rollout.contract import Bucket
from hotbunk.rollout.errors import EngineFailed, HotbunkError, TransferFailed

pytestmark = pytest.mark.anyio
Named = list[tuple[str, torch.Tensor]]
DEADLINE = 60.0

# verl's own packing fails on the first two, crashes on the third, and loses the last.
SHAPES = {
    "misaligned": lambda: [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.randn(4))],
    "misaligned bytes": lambda: [
        ("s", torch.ones(1, dtype=torch.uint8)),
        ("w", torch.ones(4, dtype=torch.bfloat16)),
    ],
    "not contiguous": lambda: [("t", torch.randn(4, 3).t()), ("e", torch.randn(1).expand(5))],
    "empty": lambda: [("a", torch.randn(2)), ("none", torch.empty(0)), ("b", torch.randn(2))],
    "scalar": lambda: [("s", torch.tensor(2.0))],
    "larger than a bucket": lambda: [("x", torch.ones(3)), ("big", torch.randn(5000))],
    "equal": lambda: [("x", torch.ones(3)), ("y", torch.ones(3))],
    "nothing": list,
}


class Party:
    """A trainer of ``actors`` ranks and some rollout ranks, as verl's manager drives them."""

    def __init__(
        self, backend: str, receivers: int = 1, actors: int = 1, bucket: int = 4096, **kw: Any
    ) -> None:
        kind = CheckpointEngineRegistry.get(backend)
        made = {"bucket_size": bucket, "deadline": DEADLINE, **kw}
        self.actors = [kind(is_master=n == 0, **made) for n in range(actors)]
        self.receivers = [kind(**made) for _ in range(receivers)]
        self.kind = kind

    async def connect(self) -> None:
        told = [one.prepare() for one in (*self.actors, *self.receivers)]
        ours, theirs = self.kind.build_topology(len(self.actors), len(self.receivers), told)
        for engines, kwargs in ((self.actors, ours), (self.receivers, theirs)):
            for n, one in enumerate(engines):
                await asyncio.to_thread(
                    one.init_process_group, **{key: values[n] for key, values in kwargs.items()}
                )

    async def sync(self, named: Named, step: int = 1) -> list[Any]:
        """Each receiver's tensors, or what it raised."""
        await self.connect()
        sending = [one.send_weights(iter(named), global_steps=step) for one in self.actors]
        results = await asyncio.gather(
            *sending, *(received(one, step) for one in self.receivers), return_exceptions=True
        )
        for one in (*self.actors, *self.receivers):
            one.finalize()
        self.sent = results[: len(self.actors)]
        return results[len(self.actors) :]


async def received(engine: Any, step: int) -> Named:
    return [named async for named in engine.receive_weights(global_steps=step)]


def check(got: Any, named: Named) -> None:
    assert not isinstance(got, BaseException), got
    assert sorted(name for name, _ in got) == sorted(name for name, _ in named)
    for name, tensor in got:
        assert torch.equal(tensor, dict(named)[name]), name
        assert tensor.dtype is dict(named)[name].dtype


@pytest.fixture(params=["hotbunk_shm", "hotbunk_disk", "hotbunk_collective"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    options = {"root": str(tmp_path / "weights")} if request.param == "hotbunk_disk" else {}
    return request.param, options


@pytest.mark.parametrize("shape", SHAPES)
async def test_whatever_a_model_holds_arrives(
    shape: str, backend: tuple[str, dict[str, Any]]
) -> None:
    named = SHAPES[shape]()
    (got,) = await Party(backend[0], **backend[1]).sync(named)
    check(got, named)


async def test_many_receivers_and_many_syncs(backend: tuple[str, dict[str, Any]]) -> None:
    party = Party(backend[0], receivers=2, actors=2, **backend[1])
    for step in range(3):
        named = [(f"w{n}", torch.randn(300, 7)) for n in range(4)]
        for got in await party.sync(named, step):
            check(got, named)
        assert party.sent[0]["checkpoint_engine/bytes"] == 4 * 300 * 7 * 4
        assert party.sent[1] is None


async def test_many_syncs_leave_nothing_open(backend: tuple[str, dict[str, Any]]) -> None:
    """verl's receivers open a socket a sync, and never close one."""
    party = Party(backend[0], receivers=2, **backend[1])
    named = [("w", torch.randn(300))]
    for step in range(3):
        await party.sync(named, step)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3, 9):
        await party.sync(named, step)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # less than one a sync


def failing(after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for n in range(after):
        yield f"w{n}", torch.ones(100)
    raise RuntimeError("a rank ran out of memory")


async def test_receivers_hear_that_the_trainer_failed(
    backend: tuple[str, dict[str, Any]],
) -> None:
    """verl leaves them waiting."""
    party = Party(backend[0], receivers=2, **backend[1])
    for got in await party.sync(failing(2)):  # type: ignore[arg-type]
        assert isinstance(got, EngineFailed)
        assert "out of memory" in str(got)
    assert isinstance(party.sent[0], RuntimeError)
    named = [("w", torch.ones(3))]
    for got in await party.sync(named):
        check(got, named)


async def test_a_changed_tensor_is_found_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ShmTransfer.buckets

    async def scaled(self: ShmTransfer) -> Any:
        async for bucket in whole(self):
            data = torch.frombuffer(bytearray(bucket.data), dtype=torch.uint8)
            data[: bucket.entries[0].nbytes].view(torch.float32).mul_(1.05)
            yield Bucket(memoryview(data.numpy()), bucket.entries)

    monkeypatch.setattr(ShmTransfer, "buckets", scaled)
    (got,) = await Party("hotbunk_shm").sync([("w", torch.ones(8)), ("v", torch.ones(8))])
    assert isinstance(got, TransferFailed)
    assert "'w'" in str(got)


async def test_one_receiver_that_leaves_is_no_others_matter() -> None:
    party = Party("hotbunk_shm", receivers=2)
    named = [(f"w{n}", torch.randn(2000)) for n in range(4)]
    await party.connect()

    async def leaves() -> None:
        async for _ in party.receivers[0].receive_weights(global_steps=1):
            raise KeyError("no such parameter")

    _, left, got = await asyncio.gather(
        party.actors[0].send_weights(iter(named), global_steps=1),
        leaves(),
        received(party.receivers[1], 1),
        return_exceptions=True,
    )
    assert isinstance(left, KeyError)
    check(got, named)


async def test_a_sender_that_never_comes_is_not_waited_for_for_ever() -> None:
    kind = CheckpointEngineRegistry.get("hotbunk_shm")
    master = kind(bucket_size=4096, is_master=True, deadline=1.0)
    receiver = kind(bucket_size=4096, deadline=1.0)
    where = master.prepare()
    await asyncio.to_thread(receiver.init_process_group, 1, 1, where)
    with pytest.raises(HotbunkError, match="ticket"):
        await received(receiver, 1)

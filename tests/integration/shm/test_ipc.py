"""Device memory between processes, on the fake device: simulated memory, and everything else is real."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport, devices
from hotbunk.checkpoint_engine.transports.ipc.devices import Ledger, driver_of
from hotbunk.checkpoint_engine.transports.ipc.receiver import IpcTransfer
from hotbunk.checkpoint_engine.transports.mapped import Way
from hotbunk.rollout import native
from hotbunk.rollout.contract import Placement, ReceiverLayout, Version
from hotbunk.rollout.errors import ConfigError, MemoryFault, TransferFailed, Unsupported
from hotbunk.rollout.registry import load_transport, open_transfer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not native.available(), reason="installed without the native library"),
]

KIB = 1024
F32 = torch.float32
NAMED = {str(n): torch.full((256,), float(n)) for n in range(20)}  # ten buckets of 2 KiB
PLACES = ReceiverLayout({n: Placement("float32", (256,), KIB * int(n)) for n in NAMED})
IN_PLACE = {"layout": PLACES, "arena": 20 * KIB, "device_arena": True}


def everything() -> dict[str, torch.Tensor]:
    """Every packing case of the contract, in one stream."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * 20).to(dtype)

    tied = random(9, 5)
    found = {
        "oversized": random(3000),
        "one row": random(1, 1500),
        "0-d": torch.tensor(1.5),
        "empty": torch.empty(3, 0, dtype=torch.bfloat16),
        "transposed": random(50, 30).T,
        "strided": random(400)[::2],
        "expanded": random(1, 40).expand(30, 40),
        "offset": random(500)[3:],
        "odd values": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]),
        "tied": tied,
        "tied again": tied,
    }
    for n, dtype in enumerate((torch.bool, torch.float64, torch.int8, torch.bfloat16, torch.int64)):
        found[f"mixed {n}"] = random(7 * n + 1, dtype=dtype)
    return found


def placed(named: dict[str, torch.Tensor]) -> tuple[ReceiverLayout, int]:
    places, at = {}, 0
    seen: dict[int, int] = {}
    for name, tensor in named.items():
        key = tensor.data_ptr() if tensor.numel() else -len(places) - 1
        if key not in seen:
            seen[key] = at
            at += -(-tensor.nbytes // 256) * 256
        kind = str(tensor.dtype).removeprefix("torch.")
        places[name] = Placement(kind, tuple(tensor.shape), seen[key])
    return ReceiverLayout(places), at


async def sync(
    device: IpcTransport,
    process: Any,
    shm: Any,
    step: int,
    named: dict[str, torch.Tensor] = NAMED,
    **told: Any,
) -> dict[str, Any]:
    """One sync to one process; how it ended."""
    offer, serving = await shm.offer(device, named, 2 * KIB, version=Version(0, step))
    said = await process.tell(offer.tickets[0], device=True, **told)
    await serving
    await offer.close()
    return dict(said)


async def test_every_packing_case_in_both_ways_and_a_ledger_that_balances_b4_b5_b8_b9_b10(
    device: IpcTransport, spawn: Any, shm: Any
) -> None:
    """Ten buckets and more are one export, one import, one close; nothing lives after a sync."""
    process, named = await spawn(), everything()
    expected = {n: shm.sha(t) for n, t in named.items()}
    layout, size = placed(named)
    ways: list[dict[str, Any]] = [
        {},
        {"layout": layout},
        {"layout": layout, "arena": size, "device_arena": True},
    ]
    for step, told in enumerate(ways * 2, 1):
        before = (device.ledger.exports, device.ledger.imports)
        said = await sync(device, process, shm, step, named, **told)
        assert device.pool.count("memory") == 0, "the trainer wakes next, and needs the device"
        assert said["outcome"] == "committed", said
        assert said["sha"] == expected
        assert said["in_place"] == ("arena" in told)
        assert said["verified"] == sorted({s.name for s in state_dict_source(named).specs()})
        assert (said["leaked"], said["torch"], said["live"]) == (0, False, [0, 0, 0])
        mapped = (device.ledger.exports - before[0], device.ledger.imports - before[1])
        assert mapped == ((0, 1) if said["in_place"] else (1, 0))
        assert said["buckets"] >= (1 if said["in_place"] else 10)
    assert said["ledger"] == [device.ledger.exports] * 2 == [4, 4]
    assert (device.ledger.imports, device.ledger.closes) == (2, 2)


async def test_casts_and_slices_happen_at_the_source(
    device: IpcTransport, spawn: Any, shm: Any
) -> None:
    named = {"w": torch.randn(40, 30)}
    part = Placement("bfloat16", (20, 5), 0, ((20, 20), (3, 5)))
    said = await sync(device, await spawn(), shm, 1, named, layout=ReceiverLayout({"w": part}))
    assert said["sha"] == {"w": shm.sha(named["w"][20:40, 3:8].bfloat16())}
    assert said["nbytes"] == 200


@pytest.mark.parametrize("way", [{}, IN_PLACE], ids=["buckets", "in place"])
@pytest.mark.parametrize("kind", ["raise", "die", "hang"])
async def test_one_of_two_fails_and_nothing_of_the_device_is_left_b8_b14(
    way: dict[str, Any], kind: str, device: IpcTransport, spawn: Any, shm: Any
) -> None:
    good, bad = await spawn(), await spawn()
    size = 256 if way else 2 * KIB
    offer, serving = await shm.offer(device, NAMED, size, ranks=[1, 1])
    fault = {"phase": "bucket", "bucket": 5, "kind": kind}
    first = good.tell(offer.tickets[0], device=True, **way)
    second = bad.tell(offer.tickets[1], device=True, fault=fault, **way)
    said = await first
    assert said["outcome"] == "committed", said
    assert said["sha"] == {n: shm.sha(t) for n, t in NAMED.items()}
    async with asyncio.timeout(shm.wait):
        await serving
    await offer.close()
    if kind == "hang":
        shm.resume(bad)
    said = await second
    assert said.get("error", "lost") in {"TiedMismatch", "TransferFailed", "lost"}, said
    if kind != "die":
        assert (said["leaked"], said["live"]) == (0, [0, 0, 0]), said
    assert (await sync(device, good, shm, 2, **way))["outcome"] == "committed"


@pytest.mark.parametrize("function", ["reserve", "create", "map", "zero", "sync", "export"])
async def test_a_device_that_fails_the_trainer_ends_the_sync_and_not_the_transport(
    function: str, device: IpcTransport, spawn: Any, shm: Any
) -> None:
    process = await spawn()
    device.pool.fail(function)
    offer, serving = await shm.offer(device, NAMED, 2 * KIB)
    said = await process.tell(offer.tickets[0], device=True)
    assert said["error"] in {"UpdateRefused", "TransferFailed"}, said
    assert function in said["text"]
    try:
        await serving
    except MemoryFault:
        assert function != "export", "a handle is for one replica, and it alone is out"
    await offer.close()
    assert (await sync(device, process, shm, 2))["outcome"] == "committed"


@pytest.mark.parametrize("function", ["import", "reserve", "map"])
async def test_a_device_that_fails_one_receiver_leaves_the_other_alone(
    function: str, device: IpcTransport, spawn: Any, shm: Any
) -> None:
    good, bad = await spawn(), await spawn()
    offer, serving = await shm.offer(device, NAMED, 2 * KIB, ranks=[1, 1])
    tasks = [
        good.tell(offer.tickets[0], device=True),
        bad.tell(offer.tickets[1], device=True, device_fails={function: 1}),
    ]
    assert (await tasks[0])["outcome"] == "committed"
    said = await tasks[1]
    assert said["error"] == "TransferFailed", said
    assert function in said["text"]
    assert (said["leaked"], said["live"]) == (0, [0, 0, 0])
    await serving
    await offer.close()
    said = await sync(device, bad, shm, 2)
    assert (said["outcome"], said["ledger"]) == ("committed", [1, 1])


async def test_what_is_exported_and_thrown_away_shows_in_the_ledger_b8(
    device: IpcTransport, spawn: Any, shm: Any
) -> None:
    process = await spawn()
    said = await sync(device, process, shm, 1, device_fails={"import": 1})
    assert said["error"] == "TransferFailed"
    assert device.ledger.exports == 1
    assert said["ledger"] == [0, 0], "one handle was made that nobody took"


async def test_who_still_reads_a_bucket_keeps_it_and_nothing_else_b9(
    device: IpcTransport, shm: Any
) -> None:
    """Receiver and trainer in one process. A view that outlives its sync must not become a fault."""
    before = devices.received.live
    offer, serving = await shm.offer(device, NAMED, 2 * KIB)
    transfer = await open_transfer(offer.tickets[0])
    await transfer.accept(None)
    kept = []
    async for bucket in transfer.buckets():
        kept.append(bucket.data[:8])
        with open("/dev/zero", "rb", buffering=0) as zeros, pytest.raises(OSError, match="address"):  # noqa: ASYNC230 - it is no disk
            zeros.readinto(bucket.data)  # other replicas read it, too
    await transfer.commit()
    await serving
    await offer.close()
    assert devices.received.live == before + 1
    assert [len(bytes(one)) for one in kept] == [8] * 10, "reading them is no fault"
    while kept:
        kept.pop().release()
    del bucket
    assert devices.received.live == before


async def test_memory_is_lent_by_a_device_that_the_receiver_must_see(
    device: IpcTransport, shm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices go by their UUIDs: numbers differ where processes see different ones."""
    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setattr(devices, "_cuda_uuids", lambda: uuids)
    assert devices.identity("cuda:1") == "GPU-b"
    assert devices._ordinal("cuda", "GPU-c") == 2
    with pytest.raises(TransferFailed, match="does not see"):
        devices.receiver_pool("cuda", "GPU-d")
    with pytest.raises(TransferFailed, match="kind"):
        devices.receiver_pool("file", "")
    monkeypatch.setattr(devices, "_cuda_uuids", list)
    monkeypatch.setattr(devices, "_pools", {})
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", "/no-such.so")
    with pytest.raises(TransferFailed, match="no-such"):
        devices.receiver_pool("cuda", "")


def test_devices_that_there_are_and_ledgers() -> None:
    named = {"cuda": "cuda:0", "npu:3": "acl:3", "acl:1": "acl:1", "fake:4096": "fake:4096"}
    assert {name: driver_of(name) for name in named} == named
    for wrong in ("cpu", "cuda:x", "tpu:0", ""):
        with pytest.raises(ConfigError):
            IpcTransport(wrong)
    with pytest.raises(ConfigError):
        IpcTransport("fake", stall=0)
    assert load_transport("ipc") is IpcTransport
    assert IpcTransport("fake").simulated
    with pytest.raises(Unsupported, match="no-such"):
        _ = IpcTransport("cuda:0", library="/no-such.so").pool
    ledger = Ledger()
    ledger.imported()
    assert ledger.live == 1


@pytest.mark.parametrize(
    "way, size",
    [
        (Way(False, 4096, "fake", "", 8192), None),
        (Way(False, 4096, "fake", "", 4096), 8192),
        (Way(False, 1 << 43, "fake", "", 1 << 44), 65536),
        (Way(False, 4096, "fake", "", 65536), 4096),
        (Way(False, 4096, "fake", "", 65537), 131072),
        (Way(False, 4096, "fake", "", (1 << 63) + 5), 65536),
        (Way(False, 4096, "file", "", 65536), 65536),
        (Way(False, 4096, "fake", "", 65536), -1),
    ],
    ids=["none", "short", "far", "cut", "half a page", "overflow", "kind", "pipe"],
)
def test_a_hostile_sender_has_nothing_mapped(way: Way, size: int | None) -> None:
    """Promises that the memory does not keep: refused, and the device holds nothing of it."""
    transfer = IpcTransfer.__new__(IpcTransfer)
    live, fds = devices.received.live, list(os.pipe())
    if size is not None and size >= 0:
        fds.append(os.memfd_create("hotbunk-test"))
        os.ftruncate(fds[-1], size)
    try:
        with pytest.raises(TransferFailed):
            transfer.map(way, None if size is None else fds[-1])
    finally:
        for fd in fds:
            os.close(fd)
    assert devices.received.live == live
    assert devices.receiver_pool("fake", "").count("imported") == 0

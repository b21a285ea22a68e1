"""Buckets taken in an engine's thread, one after the other, without the event loop between them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.transports import mapped
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.protocol import End, frame, from_sender
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout import kernels
from hotbunk.rollout.contract import Bucket, Manifest, Transfer
from hotbunk.rollout.errors import SessionError, TransferFailed
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.native_kernels import Run
from hotbunk.rollout.registry import open_transfer

pytestmark = pytest.mark.anyio

NAMED = {"a": torch.arange(3000.0), "b": torch.arange(1000.0)}
BUCKET = 1024
COUNT = 16  # buckets that make up NAMED


class Taken:
    """What an engine writes."""

    def __init__(self, manifest: Manifest) -> None:
        self.content = {s.name: bytearray(s.nbytes) for s in manifest.tensors}
        self.names = [s.name for s in manifest.tensors]
        self.threads: set[int] = set()
        self.buckets = 0

    def write(self, bucket: Bucket) -> None:
        self.threads.add(threading.get_ident())
        for e in bucket.entries:
            into = self.content[self.names[e.index]]
            into[e.start : e.start + e.nbytes] = bucket.data[e.offset : e.offset + e.nbytes]
        self.buckets += 1

    def check(self) -> None:
        for name, tensor in NAMED.items():
            assert bytes(self.content[name]) == tensor.numpy().tobytes()


async def opened(transport: ShmTransport, shm: Any) -> tuple[Any, Any, Transfer, Taken]:
    offer, serving = await shm.offer(transport, NAMED, BUCKET, ranks=[1])
    transfer = await open_transfer(offer.tickets[0])
    await transfer.accept(None)
    return offer, serving, transfer, Taken(transfer.manifest)


async def taking_two(
    transfer: Transfer, taken: Taken
) -> tuple[asyncio.Task[None], threading.Event]:
    """Taking, in the middle of writing its second bucket until the event is set."""
    inside, go_on = threading.Event(), threading.Event()

    def write(bucket: Bucket) -> None:
        taken.write(bucket)
        if taken.buckets == 2:
            inside.set()
            assert go_on.wait(10)

    taking = asyncio.create_task(transfer.take(write))
    await asyncio.to_thread(inside.wait, 10)
    return taking, go_on


async def test_every_bucket_is_written_in_one_thread_and_begun_once(
    transport: ShmTransport, shm: Any
) -> None:
    offer, serving, transfer, taken = await opened(transport, shm)
    begun: list[int] = []

    async def begin() -> None:
        begun.append(taken.buckets)

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        await transfer.take(
            taken.write, begin=begin, run=lambda work: loop.run_in_executor(pool, work)
        )
    assert (begun, taken.buckets, len(taken.threads)) == ([0], COUNT, 1)
    assert threading.get_ident() not in taken.threads
    assert set(await transfer.fingerprints()) == set(NAMED)
    with pytest.raises(SessionError, match="before"):
        await transfer.take(taken.write)
    await transfer.commit()
    await serving
    taken.check()
    await offer.close()


async def test_a_row_comes_back_for_others_and_for_a_sender_that_is_slow(
    transport: ShmTransport, shm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the thread gives up waiting, nothing is lost or taken twice."""
    for linger, row in ((0.0, 10.0), (0.005, 0.0)):
        monkeypatch.setattr(mapped, "_LINGER", linger)
        monkeypatch.setattr(mapped, "_ROW", row)
        offer, serving, transfer, taken = await opened(transport, shm)
        rows = 0

        async def run(work: Any) -> Any:
            nonlocal rows
            rows += 1
            return await asyncio.to_thread(work)

        await transfer.take(taken.write, run=run)
        assert taken.buckets == COUNT
        assert row or rows == COUNT
        await transfer.commit()
        await serving
        taken.check()
        await offer.close()


async def test_what_a_write_raises_ends_it(transport: ShmTransport, shm: Any) -> None:
    offer, serving, transfer, taken = await opened(transport, shm)

    def write(bucket: Bucket) -> None:
        if taken.buckets == 3:
            raise ZeroDivisionError("the engine's own")
        taken.write(bucket)

    with pytest.raises(ZeroDivisionError) as found:
        await transfer.take(write)
    await transfer.abort(found.value)
    await serving
    assert taken.buckets == 3
    assert "the engine's own" in offer.parties[0].failure.text
    await offer.close()


async def test_cancelled_it_ends_after_the_write_under_way(
    transport: ShmTransport, shm: Any
) -> None:
    offer, serving, transfer, taken = await opened(transport, shm)
    taking, go_on = await taking_two(transfer, taken)
    taking.cancel()
    await asyncio.sleep(0.05)
    assert not taking.done(), "the bucket is still lent"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert taken.buckets == 2, "no bucket was begun after it"
    await transfer.abort(ValueError("cancelled"))
    await serving
    await offer.close()


@pytest.mark.parametrize("how", ["left out", "closed", "gone"])
async def test_a_sender_that_ends_it_meanwhile_is_heard(
    how: str, transport: ShmTransport, shm: Any
) -> None:
    offer, serving, transfer, taken = await opened(transport, shm)
    taking, go_on = await taking_two(transfer, taken)
    if how == "left out":
        await offer.drop(0)
    elif how == "closed":
        await offer.close()
    else:
        for member in offer.parties[0].members.values():
            await member.cut()
    go_on.set()
    with pytest.raises(TransferFailed) as error:
        async with asyncio.timeout(10):
            await taking
    assert "rank 0" in str(error.value)
    assert taken.buckets < COUNT
    await transfer.abort(error.value)
    serving.cancel()
    await asyncio.wait({serving})
    await offer.close()


async def test_other_work_of_the_thread_has_its_turn(transport: ShmTransport, shm: Any) -> None:
    """A long sync does not keep an engine's thread to itself."""
    offer, serving, transfer, taken = await opened(transport, shm)
    loop = asyncio.get_running_loop()

    first = threading.Event()

    def write(bucket: Bucket) -> None:
        taken.write(bucket)
        first.set()
        time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        taking = asyncio.create_task(
            transfer.take(write, run=lambda work: loop.run_in_executor(pool, work))
        )
        await asyncio.to_thread(first.wait, 10)
        at = await loop.run_in_executor(pool, lambda: taken.buckets)
        await taking
    assert at < COUNT
    await transfer.commit()
    await serving
    await offer.close()


# -- the channel ------------------------------------------------------------------------------


async def test_a_channel_that_nobody_reads_lets_the_loop_sleep() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    calls, came = 0, channel._came

    def counted() -> None:
        nonlocal calls
        calls += 1
        came()

    channel._came = counted  # type: ignore[method-assign]
    waiting = asyncio.create_task(channel._readable(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    theirs.send(b"x")
    await waiting
    await asyncio.sleep(0.05)  # the byte is still there, and nobody waits
    assert 1 <= calls <= 2
    channel.close()
    theirs.close()


async def test_a_message_that_a_socket_cannot_take_whole_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = Channel(ours), Channel(theirs)
    said = End({f"tensor {n}": n for n in range(20_000)})
    data = frame(said)
    sent = sender.send_now(data)
    assert 0 < sent < len(data)
    rest = asyncio.create_task(sender.send(data[sent:]))
    assert await receiver.receive(from_sender) == said
    await rest
    assert receiver.receive_now(from_sender, 0.01) is None
    await sender.send(data[:100])
    assert receiver.receive_now(from_sender, 0.01) is None, "a part of a frame is none"
    sender.close()
    with pytest.raises(TransferFailed, match="gone"):
        receiver.receive_now(from_sender, 0.01)
    receiver.close()
    with pytest.raises(TransferFailed, match="this end"):  # a thread that was given up comes back
        receiver.receive_now(from_sender, 0.01)


# -- how it is packed -------------------------------------------------------------------------


@pytest.mark.skipif(kernels.native_kernels() is None, reason="installed without the native library")
@pytest.mark.parametrize(
    "cache, asked, packed, cached",
    [
        (32 << 20, 32 << 20, 12 << 20, True),
        (32 << 20, 1 << 20, 1 << 20, True),
        (16 << 20, 32 << 20, 32 << 20, False),
        (0, 32 << 20, 32 << 20, False),
    ],
)
async def test_buckets_are_as_large_as_the_cache_has_room_for_two(
    cache: int,
    asked: int,
    packed: int,
    cached: bool,
    transport: ShmTransport,
    shm: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed with half of the processors: the receiver copies at the same time."""
    native = kernels.native_kernels()
    assert native is not None
    monkeypatch.setattr(type(native), "cache", cache)
    runs: list[Run | None] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(native._lib, name)

        def hb_copy_many(self, address: int, count: int, run: Run | None) -> int:
            runs.append(run)
            return int(native._lib.hb_copy_many(address, count, run))

    named = {"a": torch.arange(10.0).repeat(asked >> 2)}
    spied = type(native)(Spy())  # type: ignore[arg-type]
    monkeypatch.setattr("hotbunk.checkpoint_engine.transports.walk.native_kernels", lambda: spied)
    monkeypatch.setattr(
        "hotbunk.checkpoint_engine.transports.shm.memory.native_kernels", lambda: spied
    )
    monkeypatch.setattr(kernels, "native_kernels", lambda: spied)
    offer, serving = await shm.offer(transport, named, asked, ranks=[1], fingerprint=KIND)
    transfer = await open_transfer(offer.tickets[0])
    await transfer.accept(None)
    sizes: list[int] = []
    await transfer.take(lambda bucket: sizes.append(len(bucket.data)))
    await transfer.commit()
    await serving
    await offer.close()
    assert max(sizes) == packed
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    assert runs
    assert None not in runs
    assert {(bool(run.flags), run.threads) for run in runs if run} == {
        (cached, min(half, native.threads))
    }

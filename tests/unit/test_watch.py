"""A watched transfer: the mark comes before the byte, and steps come in order."""

from __future__ import annotations

import pytest

from hotbunk.conformance.rig import expect
from hotbunk.conformance.transfers import MemoryTransfer, Raising
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import SessionError, TransferFailed
from hotbunk.rollout.watch import WatchedTransfer

pytestmark = pytest.mark.anyio

V1 = Version(0, 1)


def watched(inner: MemoryTransfer) -> tuple[WatchedTransfer, list[int]]:
    """The transfer, and the buckets its sender had handed out when the mark was set."""
    marks: list[int] = []

    def mark() -> None:
        marks.append(sum(event.startswith("bucket") for event in inner.events))

    return WatchedTransfer(inner, mark), marks


async def drain(transfer: WatchedTransfer) -> int:
    return len([bucket.entries async for bucket in transfer.buckets()])


async def test_the_mark_is_set_once_and_before_the_first_bucket_is_handed_out() -> None:
    inner = MemoryTransfer(weights_at(1), version=V1, bucket_bytes=16)
    transfer, marks = watched(inner)
    await transfer.accept(None)
    stream = transfer.buckets()
    await anext(stream)
    assert marks == [1]
    async for _ in stream:
        pass
    assert marks == [1]
    await transfer.fingerprints()
    await transfer.commit()
    assert transfer.committed
    assert set(transfer.expected) == {spec.name for spec, _ in weights_at(1)}


async def test_an_update_without_bytes_is_marked_too() -> None:
    transfer, marks = watched(MemoryTransfer([], version=V1))
    await transfer.accept(None)
    assert await drain(transfer) == 0
    assert marks == [0]


async def test_a_sender_that_fails_at_once_leaves_no_mark() -> None:
    transfer, marks = watched(Raising(weights_at(1), version=V1))
    await transfer.accept(None)
    await expect(TransferFailed, drain(transfer))
    assert marks == []
    assert not transfer.drained


async def test_taken_in_a_thread_it_is_marked_as_well() -> None:
    inner = MemoryTransfer(weights_at(1), version=V1, bucket_bytes=16)
    transfer, marks = watched(inner)
    await expect(SessionError, transfer.take(lambda bucket: None))
    await transfer.accept(None)
    seen: list[list[int]] = []

    async def begin() -> None:
        seen.append([*marks])

    await transfer.take(lambda bucket: seen.append([*marks]), begin=begin)
    assert len(seen) > 2
    assert seen == [[1]] * len(seen)
    assert transfer.drained

    empty, marks = watched(MemoryTransfer([], version=V1))
    await empty.accept(None)
    await empty.take(lambda bucket: None)
    assert (marks, empty.drained) == ([0], True)

    failing, marks = watched(Raising(weights_at(1), version=V1))
    await failing.accept(None)
    await expect(TransferFailed, failing.take(lambda bucket: None))
    assert (marks, failing.drained) == ([], False)


async def test_steps_come_in_order() -> None:
    transfer, _ = watched(MemoryTransfer(weights_at(1), version=V1))
    await expect(SessionError, drain(transfer))
    await expect(SessionError, transfer.fingerprints())
    await expect(SessionError, transfer.commit())
    await transfer.accept(None)
    await expect(SessionError, transfer.accept(None))
    await expect(SessionError, transfer.commit())
    await drain(transfer)
    await transfer.commit()


async def test_declining_and_giving_up_reach_the_sender() -> None:
    inner = MemoryTransfer(weights_at(1), version=V1)
    transfer, marks = watched(inner)
    await transfer.decline()
    error = RuntimeError("x")
    await transfer.abort(error)
    assert inner.events == ["decline", "abort"]
    assert inner.aborted_with == [error]
    assert marks == []

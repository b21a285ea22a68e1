"""(replica, phase, bucket) x (raise, hang, die): the others commit, and the next sync works."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout import native
from hotbunk.rollout.contract import Placement, ReceiverLayout, TensorSpec, Ticket, Version
from hotbunk.rollout.errors import DeadlineExceeded, HotbunkError, TrainerFailed, TransferFailed
from hotbunk.rollout.registry import open_transfer

pytestmark = pytest.mark.anyio

NAMED = {str(n): torch.full((256,), float(n)) for n in range(20)}
BUCKET = 2048  # bytes: ten buckets
SMALL = BUCKET // 8  # likewise, where they are in place
PLACES = ReceiverLayout({n: Placement("float32", (256,), 1024 * int(n)) for n in NAMED})
IN_PLACE = {"layout": PLACES, "arena": 1024 * 20}
NOTHING = ((0, []), (0, [0, 0, 0]))  # left of a receiver: descriptors, and of the device
POINTS = [
    ("open", 0),
    ("accept", 0),
    ("accepted", 0),
    *(("bucket", n) for n in (0, 1, 5, 9)),
    ("end", 0),
    ("fingerprints", 0),
    ("commit", 0),
]
EVERY = list(itertools.product(POINTS, ("raise", "hang", "die"), (False, True)))
SEED = int(os.environ.get("HOTBUNK_FAULT_SEED", "7"))
COUNT = int(os.environ.get("HOTBUNK_FAULTS", "8"))  # all of them: 60
# ``ipc`` on the fake device (simulated), which a pure install has not.
OVER = {"shm": {}, "ipc": {"device": True}} if native.available() else {"shm": {}}


def sample() -> list[tuple[str, tuple[str, int], str, bool]]:
    """By seed, another one for each transport; half as many over the second."""
    found = []
    for n, over in enumerate(OVER):
        count = len(EVERY) if len(EVERY) <= COUNT else max(COUNT // (1 + n), 1)
        found += [(over, *one) for one in random.Random(SEED + n).sample(EVERY, count)]
    return found


async def committed(shm: Any, transport: Transport, process: Any, step: int, **told: Any) -> None:
    """A sync that nothing is wrong with."""
    offer, serving = await shm.offer(transport, NAMED, BUCKET, version=Version(0, step))
    said = await process.tell(offer.tickets[0], **told)
    assert said["outcome"] == "committed", said
    assert said["sha"] == {n: shm.sha(t) for n, t in NAMED.items()}
    await serving
    await offer.close()


@pytest.fixture
def between(over: str, request: pytest.FixtureRequest) -> Transport:
    """The transport of the name ``over``, which must leave nothing behind."""
    found: Transport = request.getfixturevalue({"shm": "transport", "ipc": "device"}[over])
    return found


@pytest.mark.parametrize("over, point, kind, in_place", sample())
async def test_one_of_three_fails_and_the_others_commit_b14_n6(
    over: str,
    point: tuple[str, int],
    kind: str,
    in_place: bool,
    between: Transport,
    spawn: Any,
    shm: Any,
) -> None:
    transport = between
    told: dict[str, Any] = {**OVER[over], **(IN_PLACE if in_place else {})}
    if in_place and over == "ipc":
        told["device_arena"] = True
    processes = [await spawn() for _ in range(3)]
    size = SMALL if in_place else BUCKET
    offer, serving = await shm.offer(transport, NAMED, size, ranks=[1, 1, 1])
    fault = {"phase": point[0], "bucket": point[1], "kind": kind}
    good = [p.tell(t, **told) for p, t in zip(processes[:2], offer.tickets[:2], strict=True)]
    bad = processes[2].tell(offer.tickets[2], fault=fault, **told)
    for task in good:
        said = await task
        assert said["outcome"] == "committed", said
        assert said["sha"] == {n: shm.sha(t) for n, t in NAMED.items()}
    if kind == "raise":
        said = await bad
        assert said["error"] == "TiedMismatch", said
        assert (said["leaked"], said.get("live", [])) in NOTHING, said
    else:
        async with asyncio.timeout(shm.wait):
            await processes[2].reached.wait()
        await offer.drop(2)  # whoever watches the process tells
    async with asyncio.timeout(shm.wait):
        await serving
    await offer.close()
    if kind == "hang":
        shm.resume(processes[2])
        said = await bad
        assert said["error"] in ("TransferFailed", "UpdateRefused"), said
        assert (said["leaked"], said.get("live", [])) in NOTHING, said
    if kind == "die":
        assert (await bad)["outcome"] == "lost"
        await processes[2].kill()
        processes[2] = await spawn()
    for process in processes:
        await committed(shm, transport, process, 2, **told)


@pytest.mark.parametrize("kind", ["hang", "die"])
async def test_who_is_gone_in_a_bucket_is_left_out_without_being_told(
    kind: str, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    """Nobody calls drop: the sender's own deadline, or the closed socket, must do."""
    good, bad = await spawn(), await spawn()
    offer, serving = await shm.offer(transport, NAMED, BUCKET, ranks=[1, 1])
    first = good.tell(offer.tickets[0])
    second = bad.tell(offer.tickets[1], fault={"phase": "bucket", "bucket": 3, "kind": kind})
    assert (await first)["outcome"] == "committed"
    async with asyncio.timeout(shm.wait):
        await serving
    await offer.close()
    if kind == "hang":
        shm.resume(bad)
        assert (await second)["error"] == "TransferFailed"


async def test_who_hangs_before_it_accepts_gets_a_walk_of_its_own(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    good, late = await spawn(), await spawn()
    offer, serving = await shm.offer(transport, NAMED, BUCKET, ranks=[1, 1])
    second = late.tell(offer.tickets[1], fault={"phase": "accept", "kind": "hang"})
    await late.reached.wait()
    assert (await good.tell(offer.tickets[0]))["outcome"] == "committed"
    shm.resume(late)
    assert (await second)["outcome"] == "committed"
    await serving
    await offer.close()


async def test_one_rank_fails_and_its_replica_with_it(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    """Before a byte the other rank is refused, after it the other rank fails, and knows why."""
    a, b, other = await spawn(), await spawn(), await spawn()
    for phase, kinds in (
        ("accept", ("UpdateRefused",)),
        ("end", ("UpdateFailed", "TransferFailed")),  # it may not be through yet
        ("commit", ("UpdateFailed", "TransferFailed")),
    ):
        offer, serving = await shm.offer(transport, NAMED, BUCKET, ranks=[2, 1])
        first = a.tell(offer.tickets[0], 0)
        second = b.tell(offer.tickets[0], 1, fault={"phase": phase, "kind": "raise"})
        third = other.tell(offer.tickets[1])
        said = await first
        assert said["error"] in kinds, said
        assert "a planned failure" in said["text"]
        assert "rank 1" in said["text"]
        assert 'in at\n    raise TiedMismatch(("a planned failure",))' in said["traceback"]
        assert (await second)["error"] == "TiedMismatch"
        assert (await third)["outcome"] == "committed"
        await serving
        await offer.close()


async def test_a_rank_that_needs_nothing_does_not_hold_its_replica_up(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    a, b = await spawn(), await spawn()
    for decline in ([True, False], [True, True]):
        offer, serving = await shm.offer(transport, NAMED, BUCKET, ranks=[2])
        tasks = [
            p.tell(offer.tickets[0], rank, decline=no)
            for rank, (p, no) in enumerate(zip((a, b), decline, strict=True))
        ]
        wanted = ["declined" if no else "committed" for no in decline]
        assert [(await task)["outcome"] for task in tasks] == wanted
        await serving
        await offer.close()


@pytest.mark.parametrize("over", OVER)
async def test_what_is_not_whole_is_caught_before_the_commit_b17(
    over: str, between: Transport, spawn: Any, shm: Any
) -> None:
    """One bit that flips on the way; a receiver that takes every bucket and applies none."""
    process = await spawn()
    for step, (wrong, error, where) in enumerate(
        [
            ({"flip": 9}, "VerifyFailed", "19"),
            ({"applies": False}, "TransferFailed", "20 tensor(s)"),
        ],
        1,
    ):
        offer, serving = await shm.offer(between, NAMED, BUCKET, version=Version(0, step))
        said = await process.tell(offer.tickets[0], **OVER[over], **wrong)
        assert said["error"] == error, said
        assert where in said["text"]
        await serving
        await offer.close()
    await committed(shm, between, process, 3, **OVER[over])


# -- the sender -------------------------------------------------------------------------------


class Failing:
    """A source that raises in the middle, or never comes back."""

    def __init__(self, at: int, hang: Any = None) -> None:
        self._inner = state_dict_source(NAMED)
        self._at = at
        self._hang = hang

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(self._inner.tensors()):
            if number == self._at and self._hang is None:
                raise RuntimeError("the gather failed")
            if number == self._at:
                self._hang.wait(30)
            yield tensor


@pytest.mark.parametrize("at", [0, 1, 13])
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_source_that_raises_fails_every_peer_at_once_n2(
    at: int, in_place: bool, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    told: dict[str, Any] = IN_PLACE if in_place else {}
    processes = [await spawn(), await spawn()]
    size = SMALL if in_place else BUCKET
    offer, serving = await shm.offer(transport, Failing(at), size, ranks=[1, 1])
    tasks = [p.tell(t, **told) for p, t in zip(processes, offer.tickets, strict=True)]
    for task in tasks:
        said = await task
        assert said["error"] == "TransferFailed", said
        assert "the gather failed" in said["text"]
        assert "RuntimeError" in said["traceback"]
    with pytest.raises(TrainerFailed, match="the gather failed"):
        await serving
    await offer.close()
    await committed(shm, transport, processes[0], 2, **told)


async def test_a_source_that_hangs_ends_at_the_deadline(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    let_go = threading.Event()
    process = await spawn()
    offer, serving = await shm.offer(transport, Failing(5, let_go), BUCKET, deadline=3.0)
    said = await process.tell(offer.tickets[0])
    assert said["error"] == "TransferFailed"
    with pytest.raises(DeadlineExceeded):
        await serving
    let_go.set()
    await offer.close()
    await committed(shm, transport, process, 2)


async def test_nobody_comes(transport: ShmTransport, shm: Any) -> None:
    offer, serving = await shm.offer(transport, NAMED, BUCKET, deadline=0.3)
    await serving
    await offer.close()
    with pytest.raises(TransferFailed, match="gone"):
        await open_transfer(offer.tickets[0])


@pytest.mark.parametrize("kind", ["die", "hang"])
async def test_a_dead_or_hung_sender_fails_the_receivers_in_time_b12(
    kind: str, spawn: Any, shm: Any, tmp_path: Path
) -> None:
    sender, a, b = await spawn("sender_process.py"), await spawn(), await spawn()
    told = {
        "ranks": [1, 1],
        "stall": 1.0,
        "directory": str(tmp_path),
        "fault": {"tensor": 9, "kind": kind},
    }
    sender.process.stdin.write(json.dumps(told).encode() + b"\n")
    async with asyncio.timeout(shm.wait):
        tickets = msgspec.convert(
            json.loads(await sender.process.stdout.readline()), tuple[Ticket, ...]
        )
    tasks = [a.tell(tickets[0]), b.tell(tickets[1], **IN_PLACE)]
    for task in tasks:
        said = await task
        assert said["error"] == "TransferFailed", said
        assert said["leaked"] == 0
    await sender.kill()
    if kind == "hang":  # killed just now: whoever looks next cleans up
        with pytest.raises(TransferFailed):
            await open_transfer(tickets[0])
    assert os.listdir(tmp_path) == [], "who notices a dead sender removes its directory"


async def test_a_trainer_cleans_up_after_one_that_died_b12(
    spawn: Any, shm: Any, tmp_path: Path, transport: ShmTransport
) -> None:
    home = tmp_path / "sockets"  # the transport's
    sender = await spawn("sender_process.py")
    told = {"ranks": [1], "stall": 1.0, "directory": str(home)}
    sender.process.stdin.write(json.dumps(told).encode() + b"\n")
    async with asyncio.timeout(shm.wait):
        await sender.process.stdout.readline()
    await sender.kill()
    assert len(os.listdir(home)) == 1
    await committed(shm, transport, await spawn(), 1)


async def test_two_jobs_with_equal_ranks_never_meet_b12(
    transport: ShmTransport, spawn: Any, shm: Any, tmp_path: Path
) -> None:
    other = ShmTransport(stall=1.5, directory=tmp_path / "sockets")
    theirs = {n: t + 100 for n, t in NAMED.items()}
    processes = [await spawn(), await spawn()]
    for step in range(3):
        offer, serving = await shm.offer(transport, NAMED, BUCKET, version=Version(0, step))
        second, serving2 = await shm.offer(other, theirs, BUCKET, version=Version(0, step))
        tasks = [
            processes[0].tell(offer.tickets[0]),
            processes[1].tell(second.tickets[0]),
        ]
        for task, named in zip(tasks, (NAMED, theirs), strict=True):
            assert (await task)["sha"] == {n: shm.sha(t) for n, t in named.items()}
        await asyncio.gather(serving, serving2)
        await offer.close()
        await second.close()
    await other.close()


async def test_packing_has_a_thread_of_its_own_h11(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    threads = set()

    class Asked(Failing):
        def tensors(self) -> Iterator[torch.Tensor]:
            for tensor in super().tensors():
                threads.add(threading.get_ident())
                yield tensor

    offer, serving = await shm.offer(transport, Asked(-1), BUCKET)
    assert (await (await spawn()).tell(offer.tickets[0]))["outcome"] == "committed"
    await serving
    await offer.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_cancelled_in_the_middle_leaves_nothing(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    process = await spawn()
    offer, serving = await shm.offer(transport, NAMED, BUCKET)
    task = process.tell(offer.tickets[0], fault={"phase": "bucket", "bucket": 2, "kind": "hang"})
    await process.reached.wait()
    serving.cancel()
    await asyncio.wait({serving})
    await offer.close()
    shm.resume(process)
    assert (await task)["error"] == "TransferFailed"
    await committed(shm, transport, process, 2)


async def test_one_offer_at_a_time(transport: ShmTransport, shm: Any) -> None:
    offer, serving = await shm.offer(transport, NAMED, BUCKET, deadline=5.0)
    with pytest.raises(HotbunkError, match="still open"):
        await shm.offer(transport, NAMED, BUCKET)
    await offer.drop(0)
    await serving
    await offer.close()

"""Peers that lie, stumble or belong to somebody else are turned away; the sync goes on without."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.mapped import Way
from hotbunk.checkpoint_engine.transports.protocol import (
    HELLO_BYTES,
    Abort,
    Accept,
    Ack,
    End,
    Failure,
    Full,
    Go,
    Hello,
    Ready,
    Vote,
    Welcome,
    frame,
    from_sender,
    packed,
)
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.contract import (
    FULL,
    Manifest,
    Placement,
    ReceiverLayout,
    TensorSpec,
    Ticket,
    Version,
)
from hotbunk.rollout.errors import TransferFailed, UpdateRefused
from hotbunk.rollout.registry import open_transfer

pytestmark = pytest.mark.anyio

NAMED = {"a": torch.arange(300.0), "b": torch.arange(100.0)}


async def said_by(channel: Channel) -> Any:
    """What the sender answers; None if it closes."""
    async with asyncio.timeout(10):
        try:
            return await channel.receive(from_sender)
        except TransferFailed:
            return None


async def stranger(ticket: Ticket) -> Channel:
    home, _ = unix.parse(ticket.address)
    return Channel(await unix.connect(home))


@pytest.fixture
async def offered(transport: ShmTransport, spawn: Any, shm: Any) -> AsyncIterator[Any]:
    """An offer to two replicas; after the test the second commits all the same."""
    offer, serving = await shm.offer(transport, NAMED, 512, ranks=[1, 1])
    yield offer
    await offer.drop(0)
    assert (await (await spawn()).tell(offer.tickets[1]))["outcome"] == "committed"
    await serving
    await offer.close()


@pytest.mark.parametrize(
    "data",
    [
        frame(Hello("0" * 32, 0)),
        frame(Hello("", 0)),
        frame(Hello("\u00e9" * 16, 0)),
        frame(Vote()),
        frame(Hello("x", 0, protocol=99)),
    ],
    ids=["another token", "no token", "not ascii", "not a hello", "another protocol"],
)
async def test_a_stranger_is_told_to_go(data: bytes, offered: Any) -> None:
    channel = await stranger(offered.tickets[0])
    await channel.send(data)
    said = await said_by(channel)
    assert isinstance(said, Abort)
    assert said.failure.kind == "TransferFailed"
    assert await said_by(channel) is None
    channel.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        b"\x05\x00\x00\x00ab",
        (HELLO_BYTES + 1).to_bytes(4, "little") + b"x" * 100,
        frame(Hello("0" * HELLO_BYTES, 0)),
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\x00\x00\x00\x00",
        (2000).to_bytes(4, "little") + b"\x91" * 2000,
    ],
    ids=[
        "nothing",
        "half a length",
        "cut",
        "long",
        "long and whole",
        "4 GiB",
        "no msgpack",
        "empty",
        "deep",
    ],
)
async def test_broken_frames_of_strangers(data: bytes, offered: Any) -> None:
    channel = await stranger(offered.tickets[0])
    if data:
        await channel.send(data)
    channel._sock.shutdown(socket.SHUT_WR)
    assert await said_by(channel) is None
    channel.close()


async def test_tokens_of_an_older_sync_are_refused(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    """And so is every message that was said in it: a replay needs a hello first."""
    first, serving = await shm.offer(transport, NAMED, 512)
    old = first.tickets[0]
    assert (await (await spawn()).tell(old))["outcome"] == "committed"
    await serving
    await first.close()
    with pytest.raises(TransferFailed, match="gone"):
        await open_transfer(old)
    offer, serving = await shm.offer(transport, NAMED, 512, ranks=[1, 1], version=Version(0, 2))
    _, token = unix.parse(old.address)
    home, _ = unix.parse(offer.tickets[0].address)
    with pytest.raises(TransferFailed, match="not a ticket"):
        await open_transfer(Ticket("shm", unix.ticket_address(home, token)))
    for replay in (frame(Accept(None)), frame(Ack(0)), frame(Vote())):
        channel = await stranger(offer.tickets[0])
        await channel.send(replay)
        assert isinstance(await said_by(channel), Abort)
        channel.close()
    tasks = [(await spawn()).tell(t) for t in offer.tickets]
    assert [(await t)["outcome"] for t in tasks] == ["committed", "committed"]
    await serving
    await offer.close()


async def test_a_rank_comes_once_and_within_bounds(offered: Any) -> None:
    transfer = await open_transfer(offered.tickets[0])
    for rank, why in ((0, "here already"), (1, "no rank"), (-1, "no rank")):
        with pytest.raises(TransferFailed, match=why):
            await open_transfer(msgspec.structs.replace(offered.tickets[0], rank=rank))
    await transfer.abort(ValueError("enough"))


async def known(offered: Any) -> Channel:
    """A connection that has said hello."""
    home, token = unix.parse(offered.tickets[0].address)
    channel = Channel(await unix.connect(home))
    await channel.send(frame(Hello(token, 0)))
    assert isinstance(await said_by(channel), Welcome)
    return channel


@pytest.mark.parametrize(
    "message",
    [Ack(0), Ready(), Vote(), Hello("again", 0)],
    ids=lambda m: type(m).__name__,
)
async def test_out_of_turn(message: Any, offered: Any) -> None:
    channel = await known(offered)
    await channel.send(frame(message))
    said = await said_by(channel)
    assert isinstance(said, Abort)
    assert "out of turn" in said.failure.text
    channel.close()


async def test_more_descriptors_than_the_protocol_has(offered: Any) -> None:
    channel = await known(offered)
    fds = array.array("i", [0] * 20)
    channel._sock.sendmsg([frame(Accept(None))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    said = await said_by(channel)
    assert isinstance(said, Abort)
    assert "descriptors" in said.failure.text
    channel.close()


@pytest.mark.parametrize("ack", [1, 7, -1])
async def test_acks_of_buckets_that_were_not_sent(
    ack: int, transport: ShmTransport, shm: Any
) -> None:
    offer, serving = await shm.offer(transport, NAMED, 512)
    channel = await known(offer)
    await channel.send(frame(Accept(None)))
    assert isinstance(await said_by(channel), Go)
    await channel.send(frame(Ack(ack)))
    while isinstance(said := await said_by(channel), Full):
        pass
    assert isinstance(said, Abort)
    channel.close()
    await serving
    await offer.close()


@pytest.mark.parametrize(
    "place",
    [
        Placement("float32", (300,), 4096 - 1196),
        Placement("float32", (300,), 1 << 62),
        Placement("float32", (300,), 2),
        Placement("float32", (301,), 0),
        Placement("int32", (300,), 0),
        Placement("nonsense", (300,), 0),
        Placement("float32", (300,), 0, ((1, 300),)),
        Placement("float32", (300,), 0, ((-1, 300),)),
        Placement("float32", (300,), 0, ((0, 300), (0, 1))),
    ],
    ids=["past the end", "far", "crooked", "shape", "cast", "type", "slice", "before", "dims"],
)
async def test_hostile_layouts_are_refused_before_a_byte(
    place: Placement, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    bad, good = await spawn(), await spawn()
    offer, serving = await shm.offer(transport, NAMED, 512, ranks=[1, 1])
    layout = ReceiverLayout({"a": place, "b": Placement("float32", (100,), 2048)})
    task = bad.tell(offer.tickets[0], layout=layout, arena=4096)
    other = good.tell(offer.tickets[1])
    said = await task
    assert said["error"] == "UpdateRefused", said
    assert (await other)["outcome"] == "committed"
    await serving
    await offer.close()


async def test_an_arena_smaller_than_it_claims(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    places = {"a": Placement("float32", (300,), 8192), "b": Placement("float32", (100,), 0)}
    offer, serving = await shm.offer(transport, NAMED, 512)
    said = await (await spawn()).tell(
        offer.tickets[0], layout=ReceiverLayout(places), arena=4096, claims=1 << 20
    )
    assert said["error"] == "UpdateRefused"
    assert "4096" in said["text"]
    await serving
    await offer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_turned_away(offered: Any, tmp_path: Path) -> None:
    """The directory keeps it out; if somebody opens that, the kernel's word does."""
    home, token = unix.parse(offered.tickets[0].address)
    assert os.stat(home).st_mode & 0o777 == 0o700
    script = textwrap.dedent(
        """
        import os, socket, sys
        os.setgid(65534); os.setuid(65534)
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(10)
        try:
            os.chdir(sys.argv[1])  # an address is 107 bytes at most
            s.connect("s")
            s.sendall(bytes.fromhex(sys.argv[2]))
            print("answer", len(s.recv(10)))
        except PermissionError:
            print("denied")
        except ConnectionError:
            print("answer 0")
        """
    )

    def intrude() -> str:
        command = [sys.executable, "-c", script, str(home), frame(Hello(token, 0)).hex()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert await asyncio.to_thread(intrude) == "denied"
    for folder in (home, *home.parents[:-1]):
        os.chmod(folder, os.stat(folder).st_mode | 0o055)
    os.chmod(home / "s", 0o777)
    assert await asyncio.to_thread(intrude) == "answer 0"
    os.chmod(home, 0o700)


# -- hostile senders --------------------------------------------------------------------------

SPEC = TensorSpec("a", (16,), "float32", 64)
MANIFEST = Manifest(Version(0, 1), (SPEC,), FULL, 64)
WELCOME = frame(Welcome(MANIFEST, 60.0, 2.0))


def go(room: int) -> bytes:
    return frame(Go(packed(Way(False, room))))


class Impostor:
    """Listens like a sender and says what it is told to."""

    def __init__(self, tmp_path: Path, *frames: tuple[bytes, int | None]) -> None:
        self.listener, self.home = unix.listen(tmp_path)
        self.frames = frames
        self.ticket = Ticket("shm", unix.ticket_address(self.home, "t"))

    async def run(self) -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        channel = Channel(sock)
        try:
            for data, fd in self.frames:
                await channel.send(data, fd)
            await asyncio.sleep(10)
        except TransferFailed:
            pass
        finally:
            channel.close()
            self.listener.close()
            unix.remove(self.home)


async def received(ticket: Ticket) -> None:
    """Take what comes."""
    transfer = await open_transfer(ticket)
    try:
        await transfer.accept(None)
        async for bucket in transfer.buckets():
            assert len(bucket.data) <= 4096
    except BaseException as error:
        await transfer.abort(error)
        raise


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff\xff\xff"],
        [go(64)],
        [WELCOME, frame(Full(0, 0, ()))],
        [WELCOME, frame(Go(b"\xc1"))],
        [WELCOME, go(64)],
        [WELCOME, go(1 << 40), "fd"],
        [WELCOME, go(-64), "fd"],
        [WELCOME, go(4096), "fd", frame(Full(1, 64, ((0, 0, 64, 0),)))],
        [WELCOME, go(4096), "fd", frame(Full(0, 4097, ((0, 0, 64, 0),)))],
        [WELCOME, go(4096), "fd", frame(Full(0, -1, ()))],
        [WELCOME, go(4096), "fd", WELCOME],
        [WELCOME, go(4096), "fd", b"\x02\x00\x00\x00\xc1\xc1"],
        [WELCOME, go(4096), "fd"],
        [WELCOME, frame(Abort(Failure("RuntimeError", "no")))],
    ],
)
async def test_a_hostile_sender_raises_transfer_failed(frames: list[Any], tmp_path: Path) -> None:
    memory = os.memfd_create("hotbunk-test")
    os.ftruncate(memory, 8192)
    script: list[tuple[bytes, int | None]] = []
    for item in frames:
        if item == "fd":
            script[-1] = (script[-1][0], memory)
        else:
            script.append((item, None))
    impostor = Impostor(tmp_path, *script)
    running = asyncio.create_task(impostor.run())
    with pytest.raises(TransferFailed):
        await received(impostor.ticket)
    running.cancel()
    await asyncio.wait({running})
    os.close(memory)
    assert os.listdir(tmp_path) == []


async def test_refused_is_an_error_of_its_own(tmp_path: Path) -> None:
    refusal = frame(Abort(Failure("UnknownNames", "no"), refused=True))
    impostor = Impostor(tmp_path, (WELCOME, None), (refusal, None))
    running = asyncio.create_task(impostor.run())
    transfer = await open_transfer(impostor.ticket)
    with pytest.raises(UpdateRefused, match="UnknownNames"):
        await transfer.accept(None)
    await transfer.abort(ValueError())
    running.cancel()
    await asyncio.wait({running})


async def test_what_one_receiver_does_to_its_bucket_no_other_sees(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    offer, serving = await shm.offer(transport, NAMED, 1 << 20, ranks=[1, 1])
    process = await spawn()
    other = process.tell(offer.tickets[1], fault={"phase": "bucket", "kind": "hang"})
    transfer = await open_transfer(offer.tickets[0])
    await transfer.accept(None)
    async for bucket in transfer.buckets():
        await process.reached.wait()  # it has not read the bucket yet
        bucket.data[:] = bytes(len(bucket.data))
    shm.resume(process)
    await transfer.commit()
    assert (await other)["sha"] == {n: shm.sha(t) for n, t in NAMED.items()}
    await serving
    await offer.close()


async def test_a_frame_with_a_descriptor_is_sent_once() -> None:
    """A peer that reads it and leaves at once is no error."""
    ours, theirs = socket.socketpair()

    class Leaving(socket.socket):
        def sendmsg(self, *args: Any) -> int:
            sent = super().sendmsg(*args)
            theirs.close()
            return sent

    channel = Channel(Leaving(fileno=ours.detach()))
    with open(os.devnull, encoding="utf-8") as file:  # noqa: ASYNC230 - it is no disk
        await channel.send(go(64), file.fileno())
    channel.close()


async def test_end_without_buckets(tmp_path: Path) -> None:
    memory = os.memfd_create("hotbunk-test")
    os.ftruncate(memory, 8192)
    impostor = Impostor(tmp_path, (WELCOME, None), (go(4096), memory), (frame(End({})), None))
    running = asyncio.create_task(impostor.run())
    transfer = await open_transfer(impostor.ticket)
    await transfer.accept(None)
    assert [b async for b in transfer.buckets()] == []
    assert await transfer.fingerprints() == {}
    await transfer.abort(ValueError())
    running.cancel()
    await asyncio.wait({running})
    os.close(memory)

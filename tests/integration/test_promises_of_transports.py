"""What every transport between processes promises, shown for each of them in the same way.

Both ends are in this process here, on their own sockets, memory and groups; what is true of real
processes, killed and hung ones is in ``shm/``, test_syncs_between_processes.py and
test_sync_faults_between_processes.py. ``ipc`` runs on the fake device (simulated).
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports import tcp, unix
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.collective import receiver as collective_receiver
from hotbunk.checkpoint_engine.transports.protocol import (
    Abort,
    Accept,
    Ack,
    Hello,
    Vote,
    frame,
    from_sender,
)
from hotbunk.rollout import native
from hotbunk.rollout.contract import (
    ArenaHandle,
    Manifest,
    Placement,
    ReceiverLayout,
    Ticket,
    Transfer,
    Version,
)
from hotbunk.rollout.errors import TransferFailed, UpdateFailed, UpdateRefused, VerifyFailed
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import fingerprint
from hotbunk.rollout.registry import load_transport, open_transfer

pytestmark = pytest.mark.anyio
KINDS = ["shm", "onecopy", "disk", "collective", "ipc"]
SIZE = 256  # elements of a tensor
COUNT = 8
BUCKET = 2048  # bytes; two tensors
PHASES = ["open", "accept", "accepted", "bucket", "end", "fingerprints"]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((SIZE,), float(100 * seed + n)) for n in range(COUNT)}


class Planned(Exception):
    """A receiver's own failure."""


class Rank:
    """What an engine does in an update; ``onecopy`` publishes an arena."""

    def __init__(self, kind: str) -> None:
        self.layout: ReceiverLayout | None = None
        self.arena: mmap.mmap | None = None
        self.fd = -1
        if kind == "onecopy":
            nbytes = 4 * SIZE
            places = {f"w{n}": Placement("float32", (SIZE,), n * nbytes) for n in range(COUNT)}
            self.layout = ReceiverLayout(places)
            self.fd = os.memfd_create("hotbunk-test-arena")
            os.ftruncate(self.fd, COUNT * nbytes)
            self.arena = mmap.mmap(self.fd, COUNT * nbytes)

    async def take(
        self, ticket: Ticket, fails: str = "", flip: int | None = None
    ) -> dict[str, torch.Tensor]:
        """All of it, or an error; ``flip``: a bit of that bucket is turned on its way."""
        self.at("open", fails)
        transfer = await open_transfer(ticket)
        try:
            got = await self.update(transfer, fails, flip)
        except BaseException as error:
            await transfer.abort(error)
            raise
        return {name: data.view(torch.float32) for name, data in got.items()}

    async def update(
        self, transfer: Transfer, fails: str, flip: int | None
    ) -> dict[str, torch.Tensor]:
        self.at("accept", fails)
        handle = None
        if self.arena is not None:
            handle = ArenaHandle("file", len(self.arena), self.fd)
        in_place = await transfer.accept(self.layout, handle)
        assert in_place == (self.arena is not None)
        self.at("accepted", fails)
        specs = transfer.manifest.tensors
        got = {spec.name: torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in specs}
        intake = Intake(transfer.manifest, [spec.nbytes for spec in specs])
        number = 0
        async for bucket in transfer.buckets():
            data = bucket.data
            assert data is None or len(data) <= transfer.manifest.bucket_bytes, "B3"
            for e in intake.check(bucket, None if data is None else len(data)):
                flat, raw = data, None
                if not isinstance(data, torch.Tensor):
                    raw = self.arena if data is None else data
                    flat = torch.frombuffer(raw, dtype=torch.uint8)
                at = 4 * SIZE * e.index + e.start if data is None else e.offset
                piece = flat[at : at + e.nbytes].clone()  # what is left of it after its way
                if flip == number:
                    piece[0] ^= 16
                    flip = None
                got[specs[e.index].name][e.start : e.start + e.nbytes] = piece
                del flat, raw, piece
            del bucket, data
            if number == (0 if in_place else 1):
                self.at("bucket", fails)
            number += 1
        self.at("end", fails)
        intake.finish()
        expected = await transfer.fingerprints()
        assert set(expected) == set(got)
        self.at("fingerprints", fails)
        wrong = {name for name, value in expected.items() if fingerprint(got[name]) != value}
        if wrong:
            raise VerifyFailed(wrong)
        await transfer.commit()
        return got

    @staticmethod
    def at(phase: str, fails: str) -> None:
        if phase == fails:
            raise Planned(phase)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
            os.close(self.fd)


class Job:
    """A trainer with its transport, and ranks that receive from it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.ranks: list[Rank] = []
        options: dict[str, Any] = {"stall": 1.5}
        if kind == "disk":
            options["root"] = folder / "published"
        if kind == "ipc":
            options["device"] = "fake"
        name = "shm" if kind == "onecopy" else kind
        self.transport: Transport = load_transport(name)(**options)

    async def offer(
        self, named: dict[str, torch.Tensor], step: int = 1, ranks: tuple[int, ...] = (1,)
    ) -> tuple[Offer, asyncio.Task[None]]:
        source = state_dict_source(named)
        self.manifest = Manifest(
            Version(0, step), source.specs(), bucket_bytes=BUCKET, fingerprint=KIND
        )
        offer = await self.transport.offer(source, self.manifest, ranks=ranks, deadline=30.0)
        return offer, asyncio.create_task(offer.serve())

    def take(self, ticket: Ticket, **kw: Any) -> asyncio.Task[dict[str, torch.Tensor]]:
        self.ranks.append(Rank(self.kind))
        return asyncio.create_task(self.ranks[-1].take(ticket, **kw))

    async def close(self) -> None:
        await self.transport.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param in ("ipc",) and not native.available():
        pytest.skip("installed without the native library")
    return str(request.param)


@pytest.fixture
async def jobs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Job]]:
    """Two jobs. Nothing of them may be left: no file, socket, memory, mapping, group or name."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = [Job(kind, tmp_path / str(n)) for n in range(2)]
    for one in made:
        one.folder.mkdir(exist_ok=True)
    before = left()
    yield made
    for one in made:
        await one.close()
    collective_receiver._kept.close()  # of receivers; a process has it as long as it lives
    await asyncio.sleep(0.05)
    gc.collect()
    assert left() - before == set()
    assert os.listdir(folder) == []
    for one in made:
        names = [n for _, directories, _ in os.walk(one.folder) for n in directories]
        assert not any(n.startswith(".") for n in names), names


def left() -> set[str]:
    """Descriptors that are ours, mappings of nameless files, names in shared memory."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "hotbunk" in name}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "socket:" in name or "memfd:hotbunk" in name or "/published" in name:
            found.add(f"{fd} {name}")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:hotbunk" in line:
            found.add(line)
    return found


def same(got: dict[str, torch.Tensor], named: dict[str, torch.Tensor]) -> bool:
    return got.keys() == named.keys() and all(torch.equal(got[n], t) for n, t in named.items())


async def stranger(ticket: Ticket) -> Channel:
    """A connection to an offer's door."""
    if "@" in ticket.address:
        return Channel(await unix.connect(unix.parse(ticket.address)[0]))
    host, port, _ = tcp.parse(ticket.address)
    return Channel(await tcp.connect(host, port, 5.0))


def token_of(ticket: Ticket) -> str:
    if "@" in ticket.address:
        return ticket.address.partition("@")[0]
    return ticket.address.partition("/")[2]


async def test_two_jobs_with_equal_ranks_never_meet_b12(jobs: list[Job]) -> None:
    """Same replicas, ranks and versions at the same time; a token opens its own job's door only."""
    offers = [await job.offer(model(n)) for n, job in enumerate(jobs)]
    tickets = [offer.tickets[0] for offer, _ in offers]
    mixed = tickets[0].address.replace(token_of(tickets[0]), token_of(tickets[1]))
    with pytest.raises(TransferFailed):
        await open_transfer(msgspec.structs.replace(tickets[0], address=mixed))
    tasks = [job.take(ticket) for job, ticket in zip(jobs, tickets, strict=True)]
    for n, task in enumerate(tasks):
        assert same(await task, model(n))
    for offer, serving in offers:
        await serving
        await offer.close()


async def test_what_was_said_in_an_older_sync_is_refused_in_the_next(jobs: list[Job]) -> None:
    """Its ticket, its hello, and every message of it, replayed at the new door."""
    job = jobs[0]
    offer, serving = await job.offer(model(0))
    old = offer.tickets[0]
    assert same(await job.take(old), model(0))
    await serving
    await offer.close()
    offer, serving = await job.offer(model(1), 2)
    with pytest.raises(TransferFailed):
        await open_transfer(old)
    hello, *rest = Hello(token_of(old), 0), Accept(None), Ack(0), Vote()
    for messages in ([hello, *rest], *([one] for one in rest)):
        channel = await stranger(offer.tickets[0])
        await channel.send(b"".join(map(frame, messages)))
        async with asyncio.timeout(5):
            assert isinstance(await channel.receive(from_sender), Abort)
            with pytest.raises(TransferFailed):
                await channel.receive(from_sender)
        channel.close()
    assert same(await job.take(offer.tickets[0]), model(1))
    await serving
    await offer.close()


async def test_directories_are_private(jobs: list[Job]) -> None:
    job = jobs[0]
    offer, serving = await job.offer(model(0))
    assert same(await job.take(offer.tickets[0]), model(0))
    await serving
    made = [
        Path(top, name)
        for folder in (tempfile.gettempdir(), job.folder)
        for top, directories, _ in os.walk(folder)
        for name in directories
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} <= {0o700}
    assert bool(made) == (job.kind != "collective"), "a directory that is not looked at"
    await offer.close()


@pytest.mark.parametrize("bucket", [0, 3])
async def test_one_flipped_bit_is_caught_before_the_commit(jobs: list[Job], bucket: int) -> None:
    """On its way to one of two replicas: in the bucket, or in the arena that is written in place."""
    if jobs[0].kind == "onecopy":
        bucket = 0  # all of it is one bucket there
    job = jobs[0]
    offer, serving = await job.offer(model(0), ranks=(1, 1))
    hit = job.take(offer.tickets[0], flip=bucket)
    other = job.take(offer.tickets[1])
    with pytest.raises(VerifyFailed, match=rf"\bw{2 * bucket}\b"):
        await hit
    assert same(await other, model(0))
    await serving
    parties = offer.parties  # type: ignore[attr-defined]
    assert [party.committed for party in parties] == [False, True]
    assert "VerifyFailed" in parties[0].failure.text
    await offer.close()


async def test_who_applied_nothing_cannot_commit_b17(jobs: list[Job]) -> None:
    """Neither before the first bucket nor before the last; and the sender believes no vote."""
    job = jobs[0]
    for taken in (0, 1):
        offer, serving = await job.offer(model(0), 1 + taken)
        rank = Rank(job.kind)
        job.ranks.append(rank)
        transfer = await open_transfer(offer.tickets[0])
        handle = ArenaHandle("file", len(rank.arena), rank.fd) if rank.arena else None
        await transfer.accept(rank.layout, handle)
        buckets = transfer.buckets()
        for _ in range(taken):
            await anext(buckets)
        with pytest.raises(UpdateFailed, match="last bucket"):
            await transfer.commit()
        await buckets.aclose()  # type: ignore[attr-defined]
        await transfer.abort(ValueError("nothing was applied"))
        await serving
        assert not offer.parties[0].committed  # type: ignore[attr-defined]
        await offer.close()
    if job.kind == "disk":
        return  # what a rank reads there, the sender cannot see
    offer, serving = await job.offer(model(0), 3)
    channel = await stranger(offer.tickets[0])
    for message in (Hello(token_of(offer.tickets[0]), 0), Accept(None), Vote()):
        await channel.send(frame(message))
    async with asyncio.timeout(10):
        while not isinstance(said := await channel.receive(from_sender), Abort):
            pass
    if job.kind != "collective":  # there, nobody shared a group with it to begin with
        assert "Vote" in said.failure.text
    channel.close()
    await serving
    assert not offer.parties[0].committed  # type: ignore[attr-defined]
    await offer.close()


@pytest.mark.parametrize("phase", PHASES)
async def test_an_exception_at_any_step_leaves_nothing_b13_b14(jobs: list[Job], phase: str) -> None:
    """The other replica commits, the sender knows why, and the next sync works."""
    job = jobs[0]
    offer, serving = await job.offer(model(0), ranks=(1, 1))
    hit = job.take(offer.tickets[0], fails=phase)
    other = job.take(offer.tickets[1])
    with pytest.raises(Planned):
        await hit
    if phase == "open":
        await offer.drop(0)
    assert same(await other, model(0))
    await serving
    parties = offer.parties  # type: ignore[attr-defined]
    if phase != "open":
        assert f"Planned: {phase}" in parties[0].failure.text
        assert "raise Planned(phase)" in parties[0].failure.traceback
    await offer.close()
    offer, serving = await job.offer(model(1), 2)
    assert same(await job.take(offer.tickets[0]), model(1))
    await serving
    await offer.close()


async def test_every_transport_brings_the_manifest_and_holds_the_receiver_to_it_l8_b3(
    jobs: list[Job],
) -> None:
    """Version, names, shapes, bucket size: what was offered; who wants something else is refused."""
    job = jobs[0]
    offer, serving = await job.offer(model(0), ranks=(1, 1))
    transfer = await open_transfer(offer.tickets[0])
    assert transfer.manifest == job.manifest
    wrong = ReceiverLayout({"w0": Placement("float32", (SIZE + 1,))})
    with pytest.raises(UpdateRefused, match="w0"):
        await transfer.accept(wrong)
    await transfer.abort(ValueError())
    assert same(await job.take(offer.tickets[1]), model(0))
    await serving
    await offer.close()

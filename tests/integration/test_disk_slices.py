"""Ranks that want parts of a published set read those parts, check them, and together have it all."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.published import RECORD, OpenSet
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports import block_sums
from hotbunk.checkpoint_engine.transports.disk import DiskTransport, Published
from hotbunk.rollout.contract import Manifest, Placement, ReceiverLayout, Transfer, Version
from hotbunk.rollout.errors import ShapeMismatch, TransferFailed, VerifyFailed
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.kernels import as_bytes, fingerprint
from hotbunk.rollout.registry import open_transfer

pytestmark = pytest.mark.anyio
BLOCK = 1000  # bytes; not a multiple of anything
Named = dict[str, torch.Tensor]
Slices = tuple[tuple[int, int], ...]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sums, "BLOCK", BLOCK)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a file brought."""
    sizes: list[int] = []
    original = OpenSet.read

    def counted(self: OpenSet, index: int, start: int, into: memoryview) -> None:
        sizes.append(len(into))
        original(self, index, start, into)

    monkeypatch.setattr(OpenSet, "read", counted)
    return sizes


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def placed(tensor: torch.Tensor, slices: Slices, dtype: torch.dtype | None = None) -> Placement:
    shape = tuple(length for _, length in slices) if slices else tuple(tensor.shape)
    return Placement(name_of(dtype or tensor.dtype), shape, slices=slices)


def part_of(tensor: torch.Tensor, place: Placement) -> torch.Tensor:
    for dim, (start, length) in enumerate(place.slices):
        tensor = tensor.narrow(dim, start, length)
    return tensor.to(getattr(torch, place.dtype)).contiguous()


async def publish(
    root: Path, named: Named, *, bucket: int = 700, kind: str = KIND, step: int = 1
) -> Published:
    source = state_dict_source(named)
    manifest = Manifest(Version(0, step), source.specs(), bucket_bytes=bucket, fingerprint=kind)
    return await DiskTransport(root, shard_bytes=20_000).publish(source, manifest)


async def taken(transfer: Transfer, layout: ReceiverLayout) -> dict[str, torch.Tensor]:
    """What a rank gets, checked as an engine does it, and committed."""
    await transfer.accept(layout)
    places = {s.name: layout.tensors.get(s.name) for s in transfer.manifest.tensors}
    sizes = {
        n: math.prod(p.shape) * getattr(torch, p.dtype).itemsize for n, p in places.items() if p
    }
    got = {n: torch.zeros(size, dtype=torch.uint8) for n, size in sizes.items()}
    async for bucket in transfer.buckets():
        for e in bucket.entries:
            piece = bucket.data[e.offset : e.offset + e.nbytes]
            if e.nbytes:
                name = transfer.manifest.tensors[e.index].name
                data = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                got[name][e.start : e.start + e.nbytes] = data
    sums = await transfer.fingerprints()
    assert all(fingerprint(got[n]) == value for n, value in sums.items())
    assert set(sums) in (set(), set(got))
    await transfer.commit()
    return {
        n: data.view(getattr(torch, layout.tensors[n].dtype)).view(layout.tensors[n].shape)
        for n, data in got.items()
    }


def halves(named: Named, rank: int) -> ReceiverLayout:
    """Rank's half of every tensor: rows of some, columns of others; vectors are whole in both."""
    places = {}
    for n, (name, tensor) in enumerate(named.items()):
        whole = [(0, size) for size in tensor.shape]
        if tensor.dim() > 1:
            dim = n % 2
            size = tensor.shape[dim] // 2
            whole[dim] = (rank * size, size)
        places[name] = placed(tensor, tuple(whole) if tensor.dim() > 1 else ())
    return ReceiverLayout(places)


MODEL: Named = {
    "rows": torch.randn(64, 33),
    "columns": torch.randn(50, 40).bfloat16(),
    "norm": torch.randn(33),
    "more rows": torch.randn(128, 20).double(),
}


async def test_two_ranks_read_a_half_each_and_have_it_all_together(tmp_path: Path) -> None:
    """Through a real offer: rank 0 and 1 of a replica accept, read, verify and commit together."""
    transport = DiskTransport(tmp_path / "root")
    source = state_dict_source(MODEL)
    manifest = Manifest(Version(0, 1), source.specs(), bucket_bytes=900, fingerprint=KIND)
    offer = await transport.offer(source, manifest, ranks=[2], deadline=30.0)
    serving = asyncio.create_task(offer.serve())
    ticket = offer.tickets[0]
    ends = [await open_transfer(msgspec.structs.replace(ticket, rank=rank)) for rank in range(2)]
    layouts = [halves(MODEL, rank) for rank in range(2)]
    parts = await asyncio.gather(*(taken(e, la) for e, la in zip(ends, layouts, strict=True)))
    await serving
    await offer.close()
    await transport.close()
    for n, (name, tensor) in enumerate(MODEL.items()):
        if tensor.dim() == 1:
            assert all(torch.equal(part[name], tensor) for part in parts)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], dim=n % 2), tensor)


def random_case(seed: int) -> tuple[Named, ReceiverLayout]:
    """Tensors of up to four dimensions, and any part of each, cast or not."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    named: Named = {}
    places: dict[str, Placement] = {}
    for n in range(12):
        shape = [number(0 if number(0, 9) == 0 else 1, 13) for _ in range(number(1, 4))]
        dtype = (torch.float32, torch.bfloat16, torch.int8, torch.float64)[number(0, 3)]
        tensor = named[f"t{n}"] = (torch.randn(shape, generator=draw) * 20).to(dtype)
        slices = []
        for size in shape:
            start = number(0, size)
            slices.append((0, size) if number(0, 1) else (start, number(0, size - start)))
        cast = dtype in (torch.float32, torch.bfloat16) and number(0, 2) == 0
        places[f"t{n}"] = placed(tensor, tuple(slices), torch.float16 if cast else None)
    return named, ReceiverLayout(places)


@pytest.mark.parametrize("kind", [KIND, "none"])
@pytest.mark.parametrize("seed", range(6))
async def test_any_part_of_any_tensor_is_read_bit_for_bit(
    seed: int, kind: str, tmp_path: Path
) -> None:
    named, layout = random_case(seed)
    found = await publish(tmp_path / "root", named, bucket=64 + 97 * seed, kind=kind)
    got = await taken(await open_transfer(found.ticket), layout)
    for name, tensor in named.items():
        want = part_of(tensor, layout.tensors[name])
        assert torch.equal(as_bytes(got[name].contiguous()), as_bytes(want)), name


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
async def test_a_rank_reads_its_part_alone_where_nothing_is_verified(
    dim: int, tmp_path: Path, read: list[int]
) -> None:
    tensor = torch.randn(100, 60)
    found = await publish(tmp_path / "root", {"w": tensor}, bucket=1 << 20, kind="none")
    slices = ((20, 50), (0, 60)) if dim == 0 else ((0, 100), (15, 30))
    got = await taken(
        await open_transfer(found.ticket), ReceiverLayout({"w": placed(tensor, slices)})
    )
    assert torch.equal(got["w"], tensor.narrow(dim, *slices[dim]))
    assert sum(read) == tensor.nbytes // 2
    assert len(read) == (1 if dim == 0 else 100), "rows are one range, columns one for each row"


async def test_what_is_verified_is_read_in_whole_blocks_each_of_them_once(
    tmp_path: Path, read: list[int]
) -> None:
    tensor = torch.randn(100, 60)  # 24 blocks
    found = await publish(tmp_path / "root", {"w": tensor})
    layout = ReceiverLayout({"w": placed(tensor, ((20, 50), (0, 60)))})
    got = await taken(await open_transfer(found.ticket), layout)
    assert torch.equal(got["w"], tensor[20:70])
    assert sum(read) <= tensor.nbytes // 2 + 2 * BLOCK
    read.clear()
    layout = ReceiverLayout({"w": placed(tensor, ((0, 100), (15, 30)))})
    await taken(await open_transfer(found.ticket), layout)
    assert sum(read) <= tensor.nbytes


def flip(found: Published, at: int) -> None:
    """One bit, ``at`` bytes into the data of the only file."""
    (path,) = Path(found.ticket.address.removeprefix("set:")).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
async def test_one_flipped_bit_in_a_part_is_caught_before_the_commit(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    tensor = torch.randn(100, 60)
    layout = ReceiverLayout({"w": placed(tensor, ((20, 50), (0, 60)), dtype)})
    found = await publish(tmp_path / "root", {"w": tensor})
    flip(found, 22_000)  # nobody's: the part ends at 16 800, its last block at 17 000
    got = await taken(await open_transfer(found.ticket), layout)
    assert torch.equal(got["w"], tensor[20:70].to(got["w"].dtype))
    flip(found, 16_799)
    with pytest.raises(VerifyFailed, match="w"):
        await taken(await open_transfer(found.ticket), layout)


async def test_sets_without_blocks_are_read_and_records_that_lie_about_them_are_not(
    tmp_path: Path,
) -> None:
    tensor = torch.randn(100, 60)
    found = await publish(tmp_path / "root", {"w": tensor})
    layout = ReceiverLayout({"w": placed(tensor, ((20, 50), (0, 60)))})
    path = Path(found.ticket.address.removeprefix("set:")) / RECORD
    record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    for blocks, size in (([], 0), ([[1]], BLOCK), ([], 1), ([[1], [2]], 1 << 40), ([[]], 0)):
        path.write_bytes(msgspec.json.encode(record | {"blocks": blocks, "block_bytes": size}))
        if not blocks:
            got = await taken(await open_transfer(found.ticket), layout)
            assert torch.equal(got["w"], tensor[20:70])
            continue
        with pytest.raises(TransferFailed, match="blocks"):
            await open_transfer(found.ticket)


@pytest.mark.parametrize(
    "place",
    [
        Placement("float32", (50, 60), slices=((60, 50), (0, 60))),
        Placement("float32", (50, 60), slices=((-1, 50), (0, 60))),
        Placement("float32", (50,), slices=((0, 50),)),
        Placement("float32", (50, 61), slices=((0, 50), (0, 60))),
        Placement("int32", (50, 60), slices=((0, 50), (0, 60))),
    ],
    ids=["past the end", "before the start", "dims", "shape", "type"],
)
async def test_parts_that_are_none_are_refused_before_a_byte(
    place: Placement, tmp_path: Path
) -> None:
    found = await publish(tmp_path / "root", {"w": torch.randn(100, 60)})
    transfer = await open_transfer(found.ticket)
    with pytest.raises(ShapeMismatch):
        await transfer.accept(ReceiverLayout({"w": place}))
    await transfer.abort(ValueError())

"""Ranks that hold parts of a model: who gets what, what is complete, and how digests add up."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from hotbunk.conformance.backends import holder
from hotbunk.conformance.backends.holder import MODEL, Holder
from hotbunk.conformance.backends.ranks import MAKE, OPENED, LocalRank, offer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import FaultPlan, create
from hotbunk.rollout.contract import (
    FULL,
    Digests,
    GenerateRequest,
    Manifest,
    Placement,
    ReceiverLayout,
    Retention,
    Sampling,
    TensorSpec,
    Version,
    collect,
)
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.process import union
from hotbunk.rollout.process.grid import (
    DIFFERENT,
    Grid,
    Place,
    bytes_of,
    check_union,
    union_of,
)
from hotbunk.rollout.process.ranked import RankedEngine
from hotbunk.rollout.process.spec import ReplicaSpec, rank_specs
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
GRIDS = [Grid(1, 1, 3), Grid(2, 1, 2), Grid(1, 2, 2), Grid(2, 2, 3), Grid(1, 2, 1), Grid(1, 1, 4)]


@asynccontextmanager
async def sharded(
    grid: Grid, faults: dict[int, FaultPlan] | None = None
) -> AsyncIterator[tuple[Replica, list[Holder]]]:
    OPENED.clear()
    MAKE.clear()
    engines = [
        holder.create(faults=(faults or {}).get(n), rank=n, grid=grid) for n in range(grid.size)
    ]
    ranks = [
        LocalRank(n, engine, random.Random(n), sharded=True) for n, engine in enumerate(engines)
    ]
    replica = Replica(RankedEngine(ranks, grid), name="r0")
    await replica.start()
    try:
        yield replica, engines
    finally:
        await replica.close()


async def update(replica: Replica, step: int, tensors: Any = None) -> Any:
    ticket = offer(tensors or holder.whole(step), Version(0, step), replica.capabilities.ranks)
    return await replica.update_weights(ticket, version=Version(0, step))


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("sizes", [*itertools.product((1, 2, 3), repeat=3)])
def test_the_rank_map_of_a_grid_is_a_bijection_h22(engines: int, sizes: tuple[int, ...]) -> None:
    """Every receiver of (engines, dp, pp, tp) has a number of its own in 1..N; 0 is the trainer."""
    data, pipeline, tensor = sizes
    grid = Grid(data, pipeline, tensor)
    numbers = {}
    for engine in range(engines):
        spec = ReplicaSpec(
            name=f"e{engine}",
            data_parallel=data,
            pipeline_parallel=pipeline,
            tensor_parallel=tensor,
        )
        for its in rank_specs(spec):
            rank = int(its.env["HOTBUNK_RANK"])
            place = grid.place(rank)
            assert grid.rank(place) == rank
            assert its.env["HOTBUNK_GRID"] == f"{data},{pipeline},{tensor}"
            numbers[its.name, place] = 1 + engine * grid.size + rank
    assert sorted(numbers.values()) == list(range(1, engines * grid.size + 1))
    assert len({place for _, place in numbers}) == grid.size
    assert [rank for copy in grid.copies() for rank in copy] == list(range(grid.size))
    for copy in grid.copies():
        assert len({grid.place(rank).data for rank in copy}) == 1
    with pytest.raises(ValueError, match="rank"):
        grid.place(grid.size)
    with pytest.raises(ValueError, match="outside"):
        grid.rank(Place(0, 0, tensor))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
async def test_each_rank_gets_its_parts_exactly_once_and_digests_add_up_h20(grid: Grid) -> None:
    async with sharded(grid) as (replica, engines):
        assert replica.capabilities.ranks == grid.size
        for step in (1, 2):
            report = await update(replica, step)
            assert (report.applied, report.verified) == (len(MODEL), "applied")
            assert report.nbytes == sum(e.writes[-1] for e in engines)
            digest = await replica.digest()
            assert dict(digest.values) == holder.fingerprints(step)
            assert digest.ranks == tuple(range(grid.size))
        for ticket, transfer in OPENED:
            moved = [event for event in transfer.events if event.startswith("bucket")]
            assert transfer.events == ["accept", *moved, "fingerprints", "commit"]
            assert ticket.ranks == grid.size
        for engine in engines:
            assert engine.writes == [sum(map(len, engine.parts.values()))] * 2, "bytes too many"
        if grid.tensor > 1:
            whole = sum(len(data) for _, data in holder.whole(1))
            assert max(e.writes[0] for e in engines) < whole
        again = await update(replica, 2)
        assert (again.skipped, again.verified) == (True, "applied")
        victim = engines[-1]
        next(part for part in victim.parts.values() if part)[0] ^= 1
        resent = await update(replica, 2)
        assert not resent.skipped, "content that changed in one part was not noticed"
        assert dict((await replica.digest()).values) == holder.fingerprints(2)


@pytest.mark.parametrize("point, health", [("update/accept", "ok"), ("update/verify", "poisoned")])
async def test_one_rank_that_fails_poisons_all_of_the_replica(point: str, health: str) -> None:
    grid, plan = Grid(2, 1, 2), FaultPlan()
    async with sharded(grid, {3: plan}) as (replica, engines):
        await update(replica, 1)
        before = [dict(e.parts) for e in engines]
        plan.raises(point, RuntimeError("a kernel broke"))
        with pytest.raises(errors.EngineFailed, match="rank 3"):
            await update(replica, 2)
        assert replica.health is Health(health)
        if health == "ok":
            assert [dict(e.parts) for e in engines] == before
        assert {e.groups["target"].version for e in engines} <= {Version(0, 1), None}
        await update(replica, 3)
        assert replica.health is Health.OK
        assert dict((await replica.digest()).values) == holder.fingerprints(3)


async def test_what_no_rank_wants_is_unknown_and_what_some_rank_lacks_is_incomplete() -> None:
    extra = TensorSpec("layers.9.weight", (2,), "float32", 8), bytes(8)
    for grid in (Grid(1, 1, 2), Grid(1, 2, 1)):
        async with sharded(grid) as (replica, _):
            await update(replica, 1)
            with pytest.raises(errors.UnknownNames, match=r"layers\.9"):
                await update(replica, 2, [*holder.whole(2), extra])
            lacking = [it for it in holder.whole(2) if it[0].name != "layers.1.up.weight"]
            with pytest.raises(errors.IncompleteUpdate, match=r"layers\.1\.up"):
                await update(replica, 2, lacking)
            assert replica.health is Health.OK
            assert not any(t.bytes_moved for _, t in OPENED[grid.size :])
            assert dict((await replica.digest()).values) == holder.fingerprints(1)


async def test_a_hole_or_an_overlap_between_ranks_is_refused_before_a_byte() -> None:
    async with sharded(Grid(1, 1, 3)) as (replica, engines):
        await update(replica, 1)
        name = "layers.0.o.weight"
        right = engines[1].slices[name]
        for wrong, error in (
            (((0, 7), (4, 3)), errors.IncompleteUpdate),
            (((0, 7), (3, 5)), errors.UpdateRefused),
        ):
            engines[1].slices[name] = wrong
            engines[1].parts[name] = bytearray(2 * 7 * wrong[1][1])
            with pytest.raises(error, match=r"layers\.0\.o"):
                await update(replica, 2)
            assert replica.health is Health.OK
        engines[1].slices[name] = right
        engines[1].parts[name] = bytearray(2 * 7 * 4)
        await update(replica, 2)
        assert dict((await replica.digest()).values) == holder.fingerprints(2)


async def test_copies_that_are_sent_different_contents_do_not_commit() -> None:
    async with sharded(Grid(2, 1, 2)) as (replica, _):
        MAKE["3"] = lambda tensors, **more: holder_transfer(holder.whole(7), **more)
        with pytest.raises(errors.VerifyFailed, match="different contents"):
            await update(replica, 1)
        assert replica.health is Health.POISONED
        MAKE.clear()
        await update(replica, 1)
        assert replica.health is Health.OK


def holder_transfer(tensors: Any, **more: Any) -> Any:
    from hotbunk.conformance.transfers import MemoryTransfer

    return MemoryTransfer(tensors, **more)


async def test_parts_sleep_and_wake_as_one() -> None:
    for retention in (Retention.BACKUP, Retention.DISCARD):
        async with sharded(Grid(1, 1, 3)) as (replica, engines):
            await update(replica, 1)
            await replica.release(retention=retention)
            assert {e.device.resident() for e in engines} == {0}
            await replica.resume()
            if retention is Retention.DISCARD:
                assert (await replica.status()).versions == {}
                await update(replica, 1)
            assert dict((await replica.digest()).values) == holder.fingerprints(1)


async def test_parts_compute_nothing_and_a_whole_engine_is_not_cut() -> None:
    async with sharded(Grid(1, 1, 2)) as (replica, _):
        request = GenerateRequest("a", (1,), Sampling(0.0, max_tokens=1))
        with pytest.raises(errors.Unsupported, match="compute nothing"):
            await collect(replica.generate(request))
    ranks = [LocalRank(n, create(), random.Random(n)) for n in range(2)]
    with pytest.raises(errors.ConfigError, match="whole model"):
        await RankedEngine(ranks, Grid(1, 1, 2)).start()
    with pytest.raises(errors.ConfigError, match="2 ranks"):
        RankedEngine(ranks, Grid(1, 1, 3))
    for name in ("tensor_parallel", "pipeline_parallel"):
        with pytest.raises(errors.ConfigError, match=name):
            ReplicaSpec(**{name: 0})  # type: ignore[arg-type]


# -- the sums ---------------------------------------------------------------------------------


def test_rows_of_any_slice_are_what_it_holds() -> None:
    """Against numbers: each element is its own index, one byte wide."""
    draw = random.Random(1)
    for _ in range(300):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        slices = []
        for size in shape:
            start = draw.randint(0, size)
            slices.append((start, draw.randint(0, size - start)))
        data = list(itertools.product(*(range(size) for size in shape)))
        expected = [
            n
            for n, at in enumerate(data)
            if all(s <= i < s + length for i, (s, length) in zip(at, slices, strict=True))
        ]
        rows = bytes_of(shape, 1, tuple(slices))
        assert [n for at, nbytes in rows for n in range(at, at + nbytes)] == expected


@pytest.mark.parametrize("seed", range(8))
def test_fingerprints_of_any_cut_add_up(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
    itemsize = draw.choice([1, 2, 4])
    data = draw.randbytes(itemsize * _size(shape))
    dim = draw.randrange(len(shape))
    edges = sorted({0, shape[dim], *(draw.randint(0, shape[dim]) for _ in range(2))})
    parts, slices = [], []
    for low, high in itertools.pairwise(edges):
        cut = tuple((low, high - low) if d == dim else (0, n) for d, n in enumerate(shape))
        rows = bytes_of(shape, itemsize, cut)
        parts.append({"w": sum(fingerprint_bytes(data[a : a + n], a) for a, n in rows) % 2**64})
        slices.append({"w": cut})
    spec = TensorSpec("w", shape, {1: "int8", 2: "float16", 4: "float32"}[itemsize], len(data))
    manifest = Manifest(Version(), (spec,), FULL)
    layouts = [
        ReceiverLayout({"w": Placement(spec.dtype, tuple(n for _, n in s["w"]), slices=s["w"])})
        for s in slices
    ]
    check_union(manifest, [*layouts, layouts[0]])  # equal parts count once
    twice = union_of([*parts, parts[0]], [*slices, slices[0]])
    assert twice == {"w": fingerprint_bytes(data)}
    if len(layouts) > 1:
        with pytest.raises(errors.IncompleteUpdate):
            check_union(manifest, layouts[1:])
        with pytest.raises(errors.UpdateRefused, match="overlapping"):
            check_union(manifest, [*layouts, None])


def test_unions_that_do_not_fit_are_different() -> None:
    part: Any = {"w": ((0, 1),)}
    assert union_of([{"w": 1}, {"w": 2}], [part, part]) == {"w": DIFFERENT}
    assert union_of([{"w": 1}, {"w": 2}], [part, {}]) == {"w": DIFFERENT}
    whole = [Digests({"w": 1, "v": 2}, "k"), Digests({"w": 1}, "k")]
    assert union.digest(whole, Grid(2)).values == {"w": 1, "v": DIFFERENT}
    assert union.digest(whole, Grid(1, 2)).values == {"w": 1, "v": 2}


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def test_grids_travel() -> None:
    spec = ReplicaSpec(tensor_parallel=3, data_parallel=2)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ReplicaSpec)
    assert again.grid == Grid(2, 1, 3)

"""Every packing case of the contract arrives bit for bit in a second process, in each way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import Placement, ReceiverLayout, Version

pytestmark = pytest.mark.anyio

KIB = 1024
Named = dict[str, torch.Tensor]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 20).to(dtype)


def tied() -> Named:
    embed = random((9, 5))
    return {"embed": embed, "norm": random((5,)), "head": embed}


CASES: dict[str, Named] = {
    "around_a_bucket": {
        str(n): random((n,), torch.int8) for n in (KIB // 2, KIB, KIB + 1, 5 * KIB)
    },
    "one_row_larger_than_a_bucket": {"row": random((1, 3000)), "after": random((7,))},
    "scalars_and_empty": {
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0),
        "empty": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "last": torch.tensor(True),
    },
    "views": {
        "transposed": random((50, 30)).T,
        "strided": random((400,))[::2],
        "expanded": random((1, 40)).expand(30, 40),
        "offset": random((500,))[3:],
        "conjugate": torch.randn(60, dtype=torch.complex128).conj(),
    },
    "mixed_types": {
        f"{n}{i}": random((7 * i + 1,), dtype)
        for i in range(3)
        for n, dtype in (
            ("b", torch.bool),
            ("d", torch.float64),
            ("i", torch.int8),
            ("h", torch.bfloat16),
            ("q", torch.int64),
            ("e", torch.float8_e4m3fn),
            ("f", torch.float16),
        )
    },
    "nan_and_minus_zero": {"n": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42])},
    "tied": tied(),
    "nothing": {},
}


def layout_for(named: Named, dtype: torch.dtype | None = None) -> tuple[ReceiverLayout, int]:
    """A layout with a place for everything, ties together, as an engine has it; and its bytes."""
    places: dict[str, Placement] = {}
    seen: dict[int, int] = {}
    end = 0
    for name, tensor in named.items():
        kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        key = tensor.data_ptr() if nbytes else -len(seen) - 1
        if key not in seen:
            seen[key] = end
            end += -(-nbytes // 256) * 256
        places[name] = Placement(dtype_name(kind), tuple(tensor.shape), seen[key])
    return ReceiverLayout(places), max(end, 4096)


def expected(shm: Any, named: Named, layout: ReceiverLayout | None) -> dict[str, str]:
    found = {}
    for name, tensor in named.items():
        if layout is not None:
            tensor = tensor.to(getattr(torch, layout.tensors[name].dtype))
        found[name] = shm.sha(tensor.resolve_conj())
    return found


@pytest.mark.parametrize("way", ["packed", "layout", "in_place"])
async def test_each_case_arrives_bit_for_bit_b1_b2_b5(
    way: str, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    receiver = await spawn()
    for (name, named), bucket in itertools.product(CASES.items(), (64, 1000, 4096)):
        layout, size = layout_for(named)
        told: dict[str, Any] = {"arena": size} if way == "in_place" else {}
        if way != "packed":
            told["layout"] = layout
        offer, serving = await shm.offer(transport, named, bucket)
        said = await receiver.tell(offer.tickets[0], **told)
        await serving
        await offer.close()
        assert said["outcome"] == "committed", (name, bucket, said)
        assert said["sha"] == expected(shm, named, None), (name, bucket)
        assert said["in_place"] == (way == "in_place")
        assert said["untouched"], "the arena was written to before the first bucket was asked for"
        assert said["applied"] == len(state_dict_source(named).specs())
        assert said["leaked"] == 0
        assert not said["torch"], "a receiver needs no torch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("in_place", [False, True])
async def test_casts_happen_at_the_source(
    dtype: torch.dtype, in_place: bool, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    named = {"a": random((33, 65)), "n": torch.arange(5), "b": random((3,)), "v": random((40, 6)).T}
    layout, size = layout_for(named, dtype)
    receiver = await spawn()
    offer, serving = await shm.offer(transport, named, 1000)
    told = {"arena": size} if in_place else {}
    said = await receiver.tell(offer.tickets[0], layout=layout, **told)
    await serving
    await offer.close()
    assert said["sha"] == expected(shm, named, layout)
    assert said["verified"] == sorted(named)


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_rank_gets_only_the_slices_its_layout_names(
    in_place: bool, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    named = {
        "column": random((8, 6)),
        "row": random((6, 8)),
        "whole": random((5,)),
        "last": random((3,)),
    }
    shards: list[dict[str, Any]] = [
        {
            "column": (named["column"][4 * rank : 4 * rank + 4], ((4 * rank, 4), (0, 6))),
            "row": (named["row"][:, 4 * rank : 4 * rank + 4], ((0, 6), (4 * rank, 4))),
            "whole": (named["whole"], ()),
        }
        for rank in range(2)
    ]
    shards[1]["last"] = (named["last"], ())  # a pipeline's last rank
    offer, serving = await shm.offer(transport, named, 128, ranks=[2])
    processes = [await spawn(), await spawn()]
    tasks = []
    for rank, (shard, process) in enumerate(zip(shards, processes, strict=True)):
        places = {
            n: Placement("float32", tuple(t.shape), 1024 * i, slices)
            for i, (n, (t, slices)) in enumerate(shard.items())
        }
        told = {"arena": 8192} if in_place else {}
        tasks.append(process.tell(offer.tickets[0], rank, layout=ReceiverLayout(places), **told))
    for shard, task in zip(shards, tasks, strict=True):
        said = await task
        assert said["outcome"] == "committed", said
        assert said["in_place"] == in_place
        assert {n: said["sha"][n] for n in shard} == {n: shm.sha(t) for n, (t, _) in shard.items()}
        assert said["nbytes"] == sum(t.nbytes for t, _ in shard.values())
        assert said["verified"] == sorted(shard)
    await serving
    await offer.close()


async def test_a_tie_of_the_trainer_fills_both_places_of_an_engine_without_it(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    named = tied()
    places = {
        n: Placement("float32", tuple(t.shape), 4096 * i) for i, (n, t) in enumerate(named.items())
    }
    offer, serving = await shm.offer(transport, named)
    said = await (await spawn()).tell(
        offer.tickets[0], layout=ReceiverLayout(places), arena=4096 * 4
    )
    await serving
    await offer.close()
    assert said["in_place"]
    assert said["sha"] == expected(shm, named, None)


async def test_places_over_one_another_are_not_written_in_place(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    """An engine's own tie: whether both contents agree is for the receiver to see."""
    named = {"embed": random((9, 5)), "head": random((9, 5))}
    places = {n: Placement("float32", tuple(t.shape), 0) for n, t in named.items()}
    offer, serving = await shm.offer(transport, named)
    said = await (await spawn()).tell(offer.tickets[0], layout=ReceiverLayout(places), arena=4096)
    await serving
    await offer.close()
    assert said["outcome"] == "committed"
    assert not said["in_place"]
    assert said["sha"] == expected(shm, named, None)


@pytest.mark.parametrize("in_place", [False, True])
async def test_plans_are_reused_while_tensors_stay_and_made_anew_when_they_move(
    in_place: bool, transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    named = {str(n): random((50 + n,)) for n in range(30)}
    layout, size = layout_for(named)
    told: dict[str, Any] = {"layout": layout, "arena": size} if in_place else {}
    receiver = await spawn()

    async def sync(step: int) -> tuple[int, int]:
        offer, serving = await shm.offer(transport, named, 1000, version=Version(0, step))
        said = await receiver.tell(offer.tickets[0], **told)
        await serving
        await offer.close()
        assert said["sha"] == expected(shm, named, None)
        assert transport._sender is not None
        plans = transport._sender.plans[0]
        return plans.compiled, plans.reused

    first = (await sync(1))[0]
    for tensor in named.values():
        tensor.add_(1.0)
    compiled, reused = await sync(2)
    if not in_place:  # a receiver of these tests makes a new arena for each sync
        assert (compiled, reused) == (first, first)
    named["7"] = random((57,))
    assert (await sync(3))[0] > compiled
    named["8"] = named["8"].to(torch.float64)
    layout, size = layout_for(named)
    told = {"layout": layout, "arena": size} if in_place else {}
    await sync(4)


async def test_a_source_is_walked_once_for_all_replicas(
    transport: ShmTransport, spawn: Any, shm: Any
) -> None:
    named = {str(n): random((100,)) for n in range(20)}
    walks = 0

    class Counted:
        inner = state_dict_source(named)

        def specs(self) -> Any:
            return self.inner.specs()

        def tensors(self) -> Any:
            nonlocal walks
            walks += 1
            return self.inner.tensors()

    offer, serving = await shm.offer(transport, Counted(), 512, ranks=[1, 1, 1])
    layout, size = layout_for(named, torch.bfloat16)
    ways: list[dict[str, Any]] = [{}, {"layout": layout}, {"layout": layout, "arena": size}]
    tasks = [(await spawn()).tell(t, **told) for t, told in zip(offer.tickets, ways, strict=True)]
    for task, told in zip(tasks, ways, strict=True):
        said = await task
        assert said["outcome"] == "committed", said
        assert said["sha"] == expected(shm, named, told.get("layout"))
    await serving
    await offer.close()
    assert walks == 1

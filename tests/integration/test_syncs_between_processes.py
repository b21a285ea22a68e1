"""Disk and collective syncs between real processes: what arrives, for whom, and what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout.contract import Ticket
from hotbunk.rollout.errors import TransferFailed
from hotbunk.rollout.registry import load_transport, open_transfer

pytestmark = pytest.mark.anyio
TRANSPORTS = ["collective", "disk"]


@pytest.fixture(params=TRANSPORTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def transport(
    kind: str, tmp_path: Path, programs: Callable[[str], Any], zygotes: None
) -> AsyncIterator[Transport]:
    """One transport; nothing of it may be left."""
    before = programs("crew").open_files()
    options: dict[str, Any] = {"root": tmp_path / "root"} if kind == "disk" else {}
    made = load_transport(kind)(**options)
    yield made
    await made.close()
    await asyncio.sleep(0.05)
    left = programs("crew").open_files() - before
    assert not left, "descriptors stayed open"
    names = [name for _, directories, _ in os.walk(tmp_path) for name in directories]
    assert not any(name.startswith((".new", ".old")) for name in names)


@pytest.fixture
def weights(programs: Callable[[str], Any]) -> Any:
    return programs("weights")


@pytest.mark.parametrize("bucket_bytes", [64, 4097, 1 << 20])
async def test_every_packing_case_arrives_bit_for_bit(
    transport: Transport, crew: Any, weights: Any, programs: Any, bucket_bytes: int, kind: str
) -> None:
    named = weights.packing_cases()
    source = state_dict_source(named)
    manifest = weights.manifest_of(source, bucket_bytes=bucket_bytes)
    ends, failure = await crew.sync(transport, source, manifest, ranks=[1, 2])
    assert failure is None
    expected = programs("crew").digests(named)
    for end in [one for replica in ends for one in replica]:
        assert end.get("committed") == "0.1", end
        assert end["digests"] == expected
        assert end["nbytes"] == manifest.total_bytes
        assert end["torch"] == (kind == "collective")


async def test_an_empty_stream_commits(transport: Transport, crew: Any, weights: Any) -> None:
    source = state_dict_source({})
    ends, failure = await crew.sync(transport, source, weights.manifest_of(source))
    assert (ends[0][0].get("committed"), failure) == ("0.1", None), ends
    assert ends[0][0]["buckets"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
async def test_receivers_get_the_element_types_they_asked_for(
    transport: Transport, crew: Any, weights: Any, programs: Any, dtype: str
) -> None:
    """One replica wants a cast, one takes what there is: in one offer, each verified."""
    named = {
        **weights.simple(1),
        "ints": torch.arange(77),
        "e": torch.empty(0),
        "0-d": torch.ones(()),
    }
    source = state_dict_source(named)
    manifest = weights.manifest_of(source, bucket_bytes=1000)
    ends, failure = await crew.sync(
        transport, source, manifest, ranks=[1, 1], options={(0, 0): {"dtype": dtype}}
    )
    assert failure is None
    cast = programs("crew").digests(named, getattr(torch, dtype))
    assert ends[0][0]["digests"] == cast
    assert ends[1][0]["digests"] == programs("crew").digests(named)


async def test_a_flipped_bit_is_caught_before_the_commit(
    transport: Transport, crew: Any, weights: Any
) -> None:
    source = state_dict_source(weights.simple(1))
    ends, _ = await crew.sync(
        transport, source, weights.manifest_of(source), ranks=[1, 1], options={(0, 0): {"flip": 3}}
    )
    assert ends[0][0]["error"] == "VerifyFailed", ends
    assert ends[1][0]["committed"] == "0.1"


async def test_replicas_that_have_it_decline_and_the_others_go_on(
    transport: Transport, crew: Any, weights: Any
) -> None:
    source = state_dict_source(weights.simple(1))
    decline = {(0, 0): {"decline": True}, (0, 1): {"decline": True}}
    ends, failure = await crew.sync(
        transport, source, weights.manifest_of(source), ranks=[2, 1], options=decline
    )
    assert failure is None
    assert [one.get("declined") for one in ends[0]] == [True, True]
    assert ends[1][0]["committed"] == "0.1"


async def test_ranks_that_disagree_about_what_they_have_are_refused(
    transport: Transport, crew: Any, weights: Any
) -> None:
    source = state_dict_source(weights.simple(1))
    ends, _ = await crew.sync(
        transport,
        source,
        weights.manifest_of(source),
        ranks=[2],
        options={(0, 0): {"decline": True}},
    )
    assert ends[0][0].get("declined")
    assert ends[0][1]["error"] == "UpdateRefused", ends


async def test_syncs_follow_one_another_to_the_same_processes(
    transport: Transport, crew: Any, weights: Any, programs: Any
) -> None:
    living = [await crew.start("receive.py", {}, torch=True) for _ in range(2)]
    for step in (1, 2, 3):
        named = weights.simple(step)
        source = state_dict_source(named)
        offer = await transport.offer(
            source, weights.manifest_of(source, step=step), ranks=[2], deadline=120.0
        )
        serving = asyncio.create_task(offer.serve())
        ends = await asyncio.gather(
            *(one.take(offer.tickets[0], rank) for rank, one in enumerate(living))
        )
        await serving
        await offer.close()
        expected = programs("crew").digests(named)
        assert [one["digests"] == expected for one in ends] == [True, True]


# -- what is refused --------------------------------------------------------------------------


async def test_a_ticket_is_good_for_one_sync(transport: Transport, weights: Any) -> None:
    """H16: nothing is waited for when the offer is gone, or was another one."""
    source = state_dict_source(weights.simple(1))
    offer = await transport.offer(source, weights.manifest_of(source), deadline=120.0)
    (old,) = offer.tickets
    stranger = msgspec.structs.replace(old, address=old.address[:-3] + "AAA")
    beyond = msgspec.structs.replace(old, rank=5)
    for wrong in (stranger, beyond, msgspec.structs.replace(old, address="nonsense")):
        with pytest.raises(TransferFailed):
            await open_transfer(wrong)
    first = await open_transfer(old)
    with pytest.raises(TransferFailed, match="taken"):
        await open_transfer(old)
    await first.abort(RuntimeError("enough"))
    await offer.close()
    again = await transport.offer(source, weights.manifest_of(source), deadline=120.0)
    with pytest.raises(TransferFailed):
        await open_transfer(old)
    await again.close()


@pytest.mark.parametrize(
    "said", [b"", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", bytes(5000)]
)
async def test_strangers_get_nothing_and_disturb_nobody(
    transport: Transport, crew: Any, weights: Any, said: bytes
) -> None:
    source = state_dict_source(weights.simple(1))
    offer = await transport.offer(source, weights.manifest_of(source), deadline=120.0)
    host, _, port = offer.tickets[0].address.partition("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    serving = asyncio.create_task(offer.serve())
    ((one,),) = await crew.receivers(offer.tickets)
    assert (await one.end()).get("committed")
    await serving
    await offer.close()


async def test_offers_of_two_jobs_never_meet(
    kind: str, tmp_path: Path, crew: Any, weights: Any, programs: Any
) -> None:
    """B12: equal ranks, equal versions, equal replicas; and a token opens its own door only."""
    jobs = []
    for job in range(2):
        options: dict[str, Any] = {"root": tmp_path / str(job)} if kind == "disk" else {}
        transport = load_transport(kind)(**options)
        named = weights.simple(10 + job)
        source = state_dict_source(named)
        offer = await transport.offer(
            source, weights.manifest_of(source), ranks=[2], deadline=120.0
        )
        jobs.append((transport, named, offer))
    place, _, _ = jobs[0][2].tickets[0].address.partition("/")
    _, _, token = jobs[1][2].tickets[0].address.partition("/")
    with pytest.raises(TransferFailed):
        await open_transfer(Ticket(kind, f"{place}/{token}"))
    servings = [asyncio.create_task(offer.serve()) for _, _, offer in jobs]
    crews = [(await crew.receivers(offer.tickets))[0] for _, _, offer in jobs]
    for (_, named, _), members in zip(jobs, crews, strict=True):
        for one in members:
            assert (await one.end())["digests"] == programs("crew").digests(named)
    await asyncio.gather(*servings)
    for transport, _, offer in jobs:
        await offer.close()
        await transport.close()


async def test_a_rank_that_refuses_takes_its_replica_along_and_no_other(
    transport: Transport, crew: Any, weights: Any
) -> None:
    source = state_dict_source(weights.simple(1))
    ends, failure = await crew.sync(
        transport,
        source,
        weights.manifest_of(source),
        ranks=[2, 1],
        options={(0, 1): {"phase": "open", "how": "raise"}},
    )
    assert ends[0][0]["error"] in {"UpdateRefused", "TransferFailed"}, ends
    assert "Raised: at open" in ends[0][0]["text"]
    assert "Raised: at open" in ends[0][0]["traceback"]
    assert (ends[1][0]["committed"], failure) == ("0.1", None)


async def test_a_source_that_fails_tells_every_receiver_n2(
    transport: Transport, crew: Any, weights: Any
) -> None:
    class Broken:
        def specs(self) -> Any:
            return state_dict_source(weights.simple(1)).specs()

        def tensors(self) -> Any:
            raise RuntimeError("the checkpoint could not be read")

    source = Broken()
    ends, failure = await crew.sync(transport, source, weights.manifest_of(source), ranks=[2, 1])
    assert type(failure).__name__ == "TrainerFailed"
    for one in [*ends[0], *ends[1]]:
        assert "the checkpoint could not be read" in one["text"], ends
    for one in [*crew.last[0], *crew.last[1]]:
        assert {"reached": "bucket 0"} not in one.said

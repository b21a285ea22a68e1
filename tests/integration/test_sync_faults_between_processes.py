"""Ends that raise, hang or die in every phase of a sync: who is hit, who is not, what is left.

A seeded sample runs here; HOTBUNK_FAULTS=N runs N plans instead.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.rollout.contract import Ticket
from hotbunk.rollout.registry import load_transport

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]
TRANSPORTS = ["collective", "disk"]
SOAK = int(os.environ.get("HOTBUNK_FAULTS", "0"))  # all of them: 63
PHASES = ["open", "accepted", "bucket 0", "bucket 7", "end", "fingerprints", "commit"]
STALL = 2.0  # seconds; short, so that hung ends cost little
# What a rank that was not hit itself may say when another of its replica was.
FAILED = {"UpdateRefused", "TransferFailed", "UpdateFailed", "DeadlineExceeded"}


@pytest.fixture
def weights(programs: Callable[[str], Any]) -> Any:
    return programs("weights")


def options_of(kind: str, root: Path) -> dict[str, Any]:
    return {"root": str(root), "stall": STALL} if kind == "disk" else {"stall": STALL}


# It left connections in the sender, until they were collected.
ONCE_BROKE = [(0, 1, "accepted", "die")]


def plans(number: int, seed: int) -> list[Any]:
    """(replica, rank, phase, how) of a receiver. Every phase and fault, in an order by seed, but for
    those that once broke something."""
    every = [
        (replica, rank, phase, how)
        for how in ("die", "stop", "raise")
        for phase in PHASES
        for replica, rank in ((0, 0), (0, 1), (1, 0))
    ]
    draw = random.Random(seed)
    draw.shuffle(every)
    return sorted(every, key=lambda one: one not in ONCE_BROKE)[:number]


def names_left(root: Path) -> list[str]:
    return [n for n in os.listdir(root) if n.startswith((".new", ".old"))] if root.exists() else []


@pytest.mark.parametrize("kind", TRANSPORTS)
# By this seed the first ones wait for no deadline of a whole sync.
@pytest.mark.parametrize("replica, rank, phase, how", plans(SOAK or 7, 452))
async def test_a_receiver_hit_in_any_phase_takes_down_its_replica_alone(
    kind: str,
    replica: int,
    rank: int,
    phase: str,
    how: str,
    tmp_path: Path,
    crew: Any,
    weights: Any,
    programs: Any,
) -> None:
    before = programs("crew").open_files()
    transport = load_transport(kind)(**options_of(kind, tmp_path / "root"))
    ranks = [2, 1]
    # Who has not accepted, or has taken every bucket, has as long as the sync.
    waits = how == "stop" and phase in ("open", "end", "fingerprints", "commit")
    for step, fault in ((1, True), (2, False)):
        named = weights.simple(step)
        source = state_dict_source(named)
        offer = await transport.offer(
            source,
            weights.manifest_of(source, step=step),
            ranks=ranks,
            deadline=12.0 if kind == "disk" else (20.0 if fault and waits else 90.0),
        )
        serving = asyncio.create_task(offer.serve())
        chosen = {(replica, rank): {"phase": phase, "how": how}} if fault else {}
        crews = await crew.receivers(offer.tickets, chosen)
        for n, members in enumerate(crews):
            for m, one in enumerate(members):
                if fault and (n, m) == (replica, rank):
                    continue
                end = await one.end()
                if fault and n == replica:
                    assert end.get("error") in FAILED, (end, one.said)
                else:
                    assert end.get("digests") == programs("crew").digests(named), (end, one.said)
        async with asyncio.timeout(30):
            await serving
        await offer.close()
        if fault:
            hit = crews[replica][rank]
            if how == "stop":
                hit.signal(signal.SIGCONT)
                assert (await hit.end()).get("error") in FAILED
            elif how == "raise":
                assert (await hit.end()).get("error") == "Raised"
            else:
                assert await hit.gone()
    await transport.close()
    await asyncio.sleep(0.1)
    left = programs("crew").open_files() - before
    assert not left
    assert names_left(tmp_path / "root") == []


def sender_plans(number: int, seed: int) -> list[tuple[int, str]]:
    every = [(at, how) for at in (0, 4, 11) for how in ("die", "stop", "raise")]
    random.Random(seed).shuffle(every)
    return every[:number]


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("at, how", sender_plans(SOAK or 4, 11))
async def test_a_sender_hit_at_any_tensor_is_noticed_by_every_receiver(
    kind: str, at: int, how: str, tmp_path: Path, crew: Any, programs: Any
) -> None:
    options = options_of(kind, tmp_path / "root")
    sender = await crew.start(
        "send.py",
        {"transport": kind, "options": options, "ranks": [2, 1], "at": at, "how": how},
    )
    tickets = [
        Ticket(name, address, ranks=ranks)
        for name, address, ranks in (await sender.until("tickets"))["tickets"]
    ]
    crews = await crew.receivers(tickets)
    for members in crews:
        for one in members:
            end = await one.end()
            assert end.get("error") in FAILED, (end, one.said)
            if how == "raise" and "offer is gone" not in end["text"]:  # it came too late
                assert "the gather broke" in end["text"]
                assert "RuntimeError" in end["traceback"]
    if how == "stop":
        sender.signal(signal.SIGKILL)
        await sender.gone()
    # A new sender, the same receivers' place: nothing of the old one is in the way.
    again = await crew.start(
        "send.py", {"transport": kind, "options": options, "ranks": [1], "step": 2}
    )
    ((name, address, ranks),) = (await again.until("tickets"))["tickets"]
    ((one,),) = await crew.receivers([Ticket(name, address, ranks=ranks)])
    assert (await one.end()).get("committed") == "0.2"
    assert (await again.until("ended"))["ended"]
    await again.gone()
    assert names_left(tmp_path / "root") == []
    for process in (sender, again):
        assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_receiver_that_never_comes_costs_the_others_nothing_but_time(
    kind: str, tmp_path: Path, crew: Any, weights: Any, programs: Any
) -> None:
    transport = load_transport(kind)(**options_of(kind, tmp_path / "root"))
    named = weights.simple(1)
    source = state_dict_source(named)
    offer = await transport.offer(
        source, weights.manifest_of(source), ranks=[2, 1], deadline=8.0 if kind == "disk" else 40.0
    )
    serving = asyncio.create_task(offer.serve())
    alone, whole = await crew.receivers([Ticket(kind, offer.tickets[0].address), offer.tickets[1]])
    end = await alone[0].end()
    assert end["error"] == "UpdateRefused"
    assert "[1]" in end["text"], "the rank that did not come is named"
    assert (await whole[0].end())["digests"] == programs("crew").digests(named)
    await serving
    await offer.close()
    await transport.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_dropped_replica_is_not_waited_for(
    kind: str, tmp_path: Path, crew: Any, weights: Any
) -> None:
    transport = load_transport(kind)(**options_of(kind, tmp_path / "root"))
    source = state_dict_source(weights.simple(1))
    offer = await transport.offer(source, weights.manifest_of(source), ranks=[1, 1], deadline=600.0)
    serving = asyncio.create_task(offer.serve())
    ((one,),) = await crew.receivers(offer.tickets[1:])
    await offer.drop(0)
    await offer.drop(0)
    async with asyncio.timeout(60):  # and not half of the deadline
        assert (await one.end()).get("committed")
        await serving
    await offer.close()
    await transport.close()

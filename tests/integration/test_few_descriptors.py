"""A sync for which too few descriptors are left, at either end: a typed error, and nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.rollout import native
from hotbunk.rollout.contract import Manifest, Ticket, Version
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.registry import load_transport, open_transfer

pytestmark = pytest.mark.anyio
NAMED = {f"w{n}": torch.full((1000,), float(n)) for n in range(4)}
MOST = 20  # descriptors that a sync of one rank does with, both ends in one process


def open_files() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # of the listing itself
            continue
    return found


@contextmanager
def spare(number: int) -> Iterator[None]:
    """This process may open so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(open_files())
    holes = []
    while not holes or holes[-1] < top:
        holes.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1 + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)


@pytest.fixture(params=["shm", "ipc", "disk"])
async def transport(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Transport]:
    if request.param == "ipc" and not native.available():
        pytest.skip("installed without the native library")
    options: dict[str, Any] = {
        "shm": {"directory": tmp_path},
        "ipc": {"directory": tmp_path, "device": "fake"},
        "disk": {"root": tmp_path / "root"},
    }[request.param]
    made = load_transport(request.param)(stall=1.5, **options)
    yield made
    await made.close()


async def take(ticket: Ticket) -> None:
    """All of a sync."""
    transfer = await open_transfer(ticket)
    try:
        await transfer.accept(None)
        async for bucket in transfer.buckets():
            del bucket
        await transfer.fingerprints()
        await transfer.commit()
    except BaseException as error:
        await transfer.abort(error)
        raise


async def sync(transport: Transport, step: int) -> list[BaseException]:
    """One sync, both ends here; what went wrong at either."""
    source = state_dict_source(NAMED)
    manifest = Manifest(Version(0, step), source.specs(), bucket_bytes=4096, fingerprint=KIND)
    try:
        offer = await transport.offer(source, manifest, ranks=(1,), deadline=10.0)
    except HotbunkError as error:
        return [error]
    ends = await asyncio.gather(offer.serve(), _dropping(offer), return_exceptions=True)
    await offer.close()
    return [one for one in ends if one is not None]


async def _dropping(offer: Offer) -> None:
    try:
        await take(offer.tickets[0])
    except BaseException:
        await offer.drop(0)
        raise


async def test_too_few_descriptors_end_a_sync_with_a_typed_error_and_not_the_next(
    transport: Transport,
) -> None:
    assert await sync(transport, 0) == []
    await transport.close()
    gc.collect()
    before = open_files()
    ends = []
    for number in range(MOST):
        with spare(number):
            found = await sync(transport, 2 * number + 1)
        assert all(isinstance(one, HotbunkError) for one in found), (number, found)
        texts = [str(one) for one in found]
        assert not any("OSError" in text or "the offer is gone" in text for text in texts), texts
        ends.append(not found)
        del found
        assert await sync(transport, 2 * number + 2) == []
        await transport.close()
        gc.collect()
        assert open_files() == before
        if ends[-3:] == [True] * 3:
            break
    assert not ends[0]
    assert ends[-1], "it never was enough"

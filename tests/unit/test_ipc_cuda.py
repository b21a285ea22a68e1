"""The CUDA path of the ipc transport, over the tests' fake CUDA library: no GPU was used."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport, devices
from hotbunk.rollout import binding, native
from hotbunk.rollout.contract import Manifest, Version
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.registry import open_transfer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not native.available(), reason="installed without the native library"),
]
F32 = torch.float32


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so a real clock."""
    return "asyncio"


NAMED = {str(n): torch.full((256,), float(n)) for n in range(20)}


def test_the_gpu_check_of_shared_memory_holds_on_the_fake_driver(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    path = Path(__file__).parents[2] / "scripts/gpu_check_ipc.py"
    spec = importlib.util.spec_from_file_location("gpu_check_ipc", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.memory_of_another_process().startswith("16 MiB through descriptor")


async def test_the_cuda_path_with_a_library_in_the_drivers_place(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Handles of cuMemExportToShareableHandle, passed over the socket and imported: no GPU needed."""

    def over(pool: Any, arena: Any, region: Any, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        held = (ctypes.c_char * region.nbytes).from_address(arena.address + region.offset)
        held.arena = arena.lease()  # as a tensor of the device would
        return torch.frombuffer(held, dtype=dtype)

    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    monkeypatch.setattr(binding, "tensor_over", over)
    count = ctypes.CDLL(str(fake_cuda)).fake_cuda_count
    monkeypatch.setattr(devices, "_pools", {})
    calls = (b"cuMemExportToShareableHandle", b"cuMemImportFromShareableHandle")
    before = [count(what) for what in (b"memory", b"maps", b"imported", *calls)]
    transport = IpcTransport("cuda:0", directory=tmp_path, stall=2.0)
    live = devices.received.live
    for step in range(2):
        source = state_dict_source(NAMED)
        manifest = Manifest(Version(0, step), source.specs(), bucket_bytes=2048, fingerprint=KIND)
        offer = await transport.offer(source, manifest, deadline=30.0)
        serving = asyncio.create_task(offer.serve())
        transfer = await open_transfer(offer.tickets[0])
        await transfer.accept(None)
        got = {}
        async for bucket in transfer.buckets():
            assert isinstance(bucket.data, torch.Tensor)
            for e in bucket.entries:
                piece = bucket.data[e.offset : e.offset + e.nbytes].clone().view(F32)
                got[str(e.index), e.start] = piece
        assert set(await transfer.fingerprints()) == set(NAMED)
        await transfer.commit()
        del bucket
        await serving
        await offer.close()
        for name, tensor in NAMED.items():
            pieces = [p for (n, _), p in sorted(got.items(), key=lambda i: i[0][1]) if n == name]
            assert torch.equal(torch.cat(pieces), tensor)
        del got, transfer
    await transport.close()
    after = [count(what) for what in (b"memory", b"maps", b"imported", *calls)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [0, 0, 0, 2, 2]
    assert (transport.ledger.exports, devices.received.live) == (2, live)
    devices._pools["cuda:0"].close()

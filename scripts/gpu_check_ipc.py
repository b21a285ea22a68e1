"""The part of gpu_check.py about memory that two processes share: (title, call) pairs in CHECKS.

``memory_of_another_process`` runs on the tests' fake CUDA driver as well (tests/unit/test_ipc_cuda.py);
``a_sync_over_ipc`` needs tensors over the device's memory, and so a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import msgspec
import torch

from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.native_pool import Shared

MIB = 1 << 20
DRIVER = "cuda:0"
SYNCS = 3

IMPORTER = """
import sys
from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.native_pool import Shared
driver, fd, number, nbytes = sys.argv[1], *map(int, sys.argv[2:])
pool = NativePool(driver)
arena = pool.import_arena(Shared(fd=fd, number=number, nbytes=nbytes), "theirs")
print(arena.read(0, 4096).hex(), flush=True)
arena.write(nbytes - 4096, arena.read(0, 4096))
sys.stdin.readline()
print(arena.read(nbytes - 4096, 4096).hex(), flush=True)
"""

RECEIVER = """
import asyncio, json, sys
import torch
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport
from hotbunk.checkpoint_engine.transports.ipc.devices import received
from hotbunk.rollout.contract import Ticket
from hotbunk.rollout.kernels import copy_many, fingerprint

async def take(ticket):
    transfer = await IpcTransport.open(ticket)
    specs = transfer.manifest.tensors
    got = [torch.zeros(s.nbytes, dtype=torch.uint8, device="cuda") for s in specs]
    await transfer.accept(None)
    async for bucket in transfer.buckets():
        assert bucket.data.is_cuda
        copy_many([
            (got[e.index][e.start : e.start + e.nbytes], bucket.data[e.offset : e.offset + e.nbytes])
            for e in bucket.entries
        ])
        torch.cuda.synchronize()
    expected = await transfer.fingerprints()
    for spec, tensor in zip(specs, got):
        assert fingerprint(tensor, 0) == expected[spec.name], spec.name
    await transfer.commit()

for line in sys.stdin:
    asyncio.run(take(Ticket(*json.loads(line))))
    print(json.dumps([received.imports, received.closes]), flush=True)
"""


def memory_of_another_process() -> str:
    """Read and written by both; it outlives its owner's arena, and is back when the other ends."""
    pool = NativePool(DRIVER)
    free = int(pool.facts().free)
    arena = pool.arena("bucket", 16 * MIB)
    arena.add("content", 16 * MIB)
    content = os.urandom(4096)
    arena.write(0, content)
    shared: Shared = arena.export(os.getpid())
    command = [sys.executable, "-c", IMPORTER, DRIVER]
    child = subprocess.Popen(
        [*command, *map(str, (shared.fd, shared.number, shared.nbytes))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[shared.fd],
        text=True,
    )
    os.close(shared.fd)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == content.hex(), "the other reads something else"
        deadline = time.monotonic() + 30
        while arena.read(arena.size - 4096, 4096) != content and time.monotonic() < deadline:
            time.sleep(0.01)
        assert arena.read(arena.size - 4096, 4096) == content, "what the other wrote is not here"
        pool.drop(arena)
        rest, _ = child.communicate("\n", timeout=60)
        assert rest.strip() == content.hex(), "it went with its owner's arena"
    finally:
        child.kill()
        child.wait()
    lost = free - int(pool.facts().free)
    pool.close()
    assert lost < 16 * MIB, f"{lost} bytes did not come back"
    return f"{shared.nbytes / MIB:.0f} MiB through descriptor {shared.fd}"


def a_sync_over_ipc() -> str:
    """Tensors of the device, of the host and larger than a bucket, to a process of its own."""
    if not hasattr(msgspec, "msgpack"):  # gpu_check.sh's stand-in
        raise ModuleNotFoundError(name="msgspec")
    from hotbunk.checkpoint_engine.source import state_dict_source
    from hotbunk.checkpoint_engine.transports.ipc import IpcTransport
    from hotbunk.rollout.contract import Manifest, Version
    from hotbunk.rollout.fingerprint import KIND

    named = {
        f"device {n}": torch.randn(1000, 1000 + n, device="cuda").bfloat16() for n in range(60)
    }
    named["host"] = torch.randn(500, 500)
    named["large"] = torch.randn(40 * MIB // 4, device="cuda")
    source = state_dict_source(named)
    child = subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    async def run() -> float:
        transport = IpcTransport(DRIVER)
        best = float("inf")
        assert child.stdin is not None
        assert child.stdout is not None
        for step in range(SYNCS):
            manifest = Manifest(
                Version(0, step), source.specs(), bucket_bytes=8 * MIB, fingerprint=KIND
            )
            began = time.perf_counter()
            offer = await transport.offer(source, manifest, deadline=60.0)
            ticket = offer.tickets[0]
            child.stdin.write(json.dumps([ticket.transport, ticket.address]) + "\n")
            child.stdin.flush()
            await offer.serve()
            line = await asyncio.to_thread(child.stdout.readline)
            best = min(best, time.perf_counter() - began)
            await offer.close()
            assert json.loads(line) == [transport.ledger.exports] * 2, f"handles: {line}"
        await transport.close()
        return best

    try:
        seconds = asyncio.run(run())
    finally:
        child.kill()
        child.wait()
    nbytes = sum(t.nbytes for t in named.values())
    return f"{nbytes / MIB:.0f} MiB in {seconds * 1000:.0f} ms, one import a sync"


CHECKS = [
    ("memory of another process", memory_of_another_process),
    ("a sync over ipc", a_sync_over_ipc),
]

"""Receivers as processes, offers to them, and a look at what is left behind afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from hotbunk.checkpoint_engine.source import WeightSource, state_dict_source
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.checkpoint_engine.transports.ipc import IpcTransport
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.contract import FULL, Manifest, Scope, Ticket, Version
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.kernels import as_bytes

HERE = Path(__file__).parent
WAIT = 60.0  # seconds no test needs


class Process:
    """A receiver process; one line of JSON a sync."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.reached = asyncio.Event()  # its planned fault

    def tell(self, ticket: Ticket, rank: int = 0, **told: Any) -> asyncio.Task[dict[str, Any]]:
        """Take part in a sync; what came of it. A killed process says nothing but ``lost``."""
        mine = msgspec.structs.replace(ticket, rank=rank)
        told = msgspec.to_builtins({"ticket": mine, "rank": rank, **told})
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told).encode() + b"\n")
        return asyncio.create_task(self._answer())

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT):
            while line := await self.process.stdout.readline():
                if line.strip() == b"fault":
                    self.reached.set()
                    continue
                return dict(json.loads(line))
        return {"outcome": "lost"}

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        # The transport's pipes are closed when the loop has seen the end.
        await self._drain()

    async def _drain(self) -> None:
        if self.process.stdout is not None:
            async with asyncio.timeout(WAIT):
                await self.process.stdout.read()


Spawn = Callable[..., Any]


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """``await spawn()``: a receiver process; killed afterwards."""
    made: list[Process] = []

    async def start(script: str = "receiver_process.py", **env: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        made.append(Process(process))
        return made[-1]

    yield start
    for one in made:
        await one.kill()


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[ShmTransport]:
    """A transport with little patience; nothing of it may be left."""
    home = tmp_path / "sockets"
    home.mkdir()
    one = ShmTransport(stall=1.5, directory=home)
    yield one
    await one.close()
    assert list(home.iterdir()) == []


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[IpcTransport]:
    """A transport over the fake device (simulated); nothing of it may be left, there or here."""
    home = tmp_path / "device"
    home.mkdir()
    one = IpcTransport("fake", stall=1.5, directory=home)
    pool = one.pool
    yield one
    assert {what: pool.count(what) for what in DEVICE} == dict.fromkeys(DEVICE, 0)
    assert one.ledger.live == 0
    await one.close()
    assert list(home.iterdir()) == []


DEVICE = ("memory", "maps", "ranges", "imported", "bytes")  # what is alive of it


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor, no process, no name in /dev/shm."""
    here = psutil.Process()
    before = _left(here)
    yield
    after = _left(here)
    new = {key: value for key, value in after.items() if key not in before}
    assert not new, f"left behind: {new}"


def _left(here: psutil.Process) -> dict[str, str]:
    found: dict[str, str] = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if "hotbunk" in target or "socket:" in target or "deleted" in target:
            found[f"fd {fd.name} {target}"] = target
    found |= {f"/dev/shm/{n}": n for n in os.listdir("/dev/shm") if "hotbunk" in n}
    for child in here.children(recursive=True):
        try:
            if "receiver_process" in " ".join(child.cmdline()):
                found[f"process {child.pid}"] = str(child.pid)
        except psutil.Error:
            continue
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found |= {
        f"map {line}": line for line in maps if "memfd:hotbunk" in line or "memfd:arena" in line
    }
    return found


Named = Mapping[str, torch.Tensor]


class Shm:
    """Helpers of these tests."""

    wait = WAIT

    @staticmethod
    def manifest(
        source: WeightSource,
        bucket_bytes: int = 4096,
        *,
        version: Version | None = None,
        scope: Scope = FULL,
        fingerprint: str = KIND,
    ) -> Manifest:
        return Manifest(version or Version(0, 1), source.specs(), scope, bucket_bytes, fingerprint)

    @staticmethod
    async def offer(
        transport: Transport,
        named: Named | WeightSource,
        bucket_bytes: int = 4096,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = WAIT,
        **kw: Any,
    ) -> tuple[Offer, asyncio.Task[None]]:
        """An offer that is being served."""
        source = state_dict_source(named) if isinstance(named, Mapping) else named
        manifest = Shm.manifest(source, bucket_bytes, **kw)
        offer = await transport.offer(source, manifest, ranks=ranks, deadline=deadline)
        return offer, asyncio.create_task(offer.serve())

    @staticmethod
    def sha(tensor: torch.Tensor) -> str:
        """Of the tensor's elements in order."""
        data = bytes(as_bytes(tensor.detach().contiguous()).numpy())
        return hashlib.sha256(data).hexdigest()

    @staticmethod
    def resume(process: Process) -> None:
        """It has said that it stops, which comes a moment before it does."""
        until = time.monotonic() + WAIT
        while psutil.Process(process.process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.001)
        process.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def shm() -> type[Shm]:
    return Shm

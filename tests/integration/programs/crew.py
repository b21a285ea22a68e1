"""Second processes for tests: receivers and senders, started, watched, and never left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout.contract import Manifest, Ticket
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.kernels import as_bytes

HERE = Path(__file__).parent
LONG = 60.0  # seconds; no test waits as long unless something hangs
ENDS = ("committed", "declined", "error", "ended")


class Process:
    """One of the programs beside this file; what it says, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    @staticmethod
    async def start(program: str, options: dict[str, Any], prefix: Sequence[str] = ()) -> Process:
        """``prefix``: a command to run it under."""
        made = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            str(HERE / program),
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            limit=64 << 20,
        )
        return Process(made)

    async def until(self, *keys: str) -> dict[str, Any]:
        """What it says next that has one of these keys; empty: it ended without."""
        async with asyncio.timeout(LONG):
            while True:
                line = await self.process.stdout.readline()  # type: ignore[union-attr]
                if not line:
                    return {}
                self.said.append(json.loads(line))
                if self.said[-1].keys() & set(keys):
                    return self.said[-1]

    async def end(self) -> dict[str, Any]:
        """How its sync ended."""
        return await self.until(*ENDS)

    async def take(self, ticket: Ticket, rank: int = 0) -> dict[str, Any]:
        """Hand it one more ticket, and wait for the end of that sync."""
        self.process.stdin.write(  # type: ignore[union-attr]
            json.dumps(plain(ticket, rank)).encode() + b"\n"
        )
        return await self.end()

    def signal(self, number: int) -> None:
        """To the program itself, also under a prefix."""
        pid = next((one["pid"] for one in self.said if "pid" in one), self.process.pid)
        os.kill(pid, number)

    async def gone(self) -> int:
        """Its exit status, ended by its own or by force."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(10):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    def kill(self) -> None:
        """End it and what it runs."""
        if self.process.returncode is None:
            try:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    child.kill()
            except psutil.NoSuchProcess:  # ended, and not waited for yet
                return
            self.process.kill()


def plain(ticket: Ticket, rank: int = 0) -> dict[str, Any]:
    """A ticket as it travels to a process."""
    return msgspec.to_builtins(msgspec.structs.replace(ticket, rank=rank))  # type: ignore[no-any-return]


def digests(named: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, str]:
    """What a receiver must have, by name."""
    out = {}
    for name, tensor in named.items():
        tensor = tensor.contiguous()
        if dtype is not None and tensor.dtype.is_floating_point:
            tensor = tensor.to(dtype)
        raw = as_bytes(tensor)
        out[name] = hashlib.sha256(bytes(raw.tolist())).hexdigest()
    return out


class Crew:
    """Starts processes; ends every one of them."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.last: list[list[Process]] = []  # of the last sync

    async def start(
        self, program: str, options: dict[str, Any], prefix: Sequence[str] = ()
    ) -> Process:
        one = await Process.start(program, options, prefix)
        self.processes.append(one)
        return one

    async def receivers(
        self, tickets: Sequence[Ticket], options: Any = None
    ) -> list[list[Process]]:
        """A process a rank of every ticket; ``options[replica, rank]`` says what is special."""
        chosen = options or {}
        return [
            [
                await self.start(
                    "receive.py", {**chosen.get((n, rank), {}), "ticket": plain(ticket, rank)}
                )
                for rank in range(ticket.ranks)
            ]
            for n, ticket in enumerate(tickets)
        ]

    async def sync(
        self,
        transport: Transport,
        source: Any,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        options: Any = None,
        deadline: float = 30.0,
    ) -> tuple[list[list[dict[str, Any]]], HotbunkError | None]:
        """One sync to processes started for it; how it ended for every rank, and for the sender."""
        offer = await transport.offer(source, manifest, ranks=ranks, deadline=deadline)
        failure: HotbunkError | None = None
        serving = asyncio.create_task(offer.serve())
        try:
            crews = self.last = await self.receivers(offer.tickets, options)
            ends = [list(await asyncio.gather(*(one.end() for one in crew))) for crew in crews]
            async with asyncio.timeout(LONG):
                await serving
        except HotbunkError as error:
            failure = error
        finally:
            serving.cancel()
            await offer.close()
        return ends, failure

    async def close(self) -> None:
        for one in self.processes:
            try:
                one.signal(signal.SIGCONT)
            except OSError:
                pass
            one.kill()
            await one.process.wait()


def open_files() -> set[str]:
    """What this process has open, by name; connections, too."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return found

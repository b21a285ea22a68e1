"""Second processes for tests: receivers and senders, started, watched, and never left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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

    def __init__(self, pid: int, reader: asyncio.StreamReader, stdin: Any) -> None:
        self.pid = pid
        self.said: list[dict[str, Any]] = []
        self._pidfd = os.pidfd_open(pid)
        self._reader = reader
        self._stdin = stdin

    async def until(self, *keys: str) -> dict[str, Any]:
        """What it says next that has one of these keys; empty: it ended without."""
        async with asyncio.timeout(LONG):
            while True:
                line = await self._reader.readline()
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
        os.write(self._stdin, json.dumps(plain(ticket, rank)).encode() + b"\n")
        return await self.end()

    def signal(self, number: int) -> None:
        """:raises ProcessLookupError: it is gone."""
        # One that says that it stops does so a moment later; woken before, it would sleep for ever.
        until = time.monotonic() + LONG
        while number == signal.SIGCONT and not self._stands_still() and time.monotonic() < until:
            time.sleep(0.001)
        signal.pidfd_send_signal(self._pidfd, number)

    def _stands_still(self) -> bool:
        return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    async def gone(self) -> bool:
        """Whether it ended by its own, or by a signal sent before; else it is made to."""
        self._hang_up()
        by_itself = await self._ended(10.0)
        if not by_itself:
            self.kill()
            await self._ended(10.0)
        return by_itself

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    async def close(self) -> None:
        """End it, and let go of everything of it."""
        self._hang_up()
        self.kill()
        await self._ended(10.0)
        os.close(self._pidfd)
        self._reader._transport.close()  # type: ignore[attr-defined]

    def _hang_up(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def _ended(self, seconds: float) -> bool:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, over.set)
        try:
            async with asyncio.timeout(seconds):
                await over.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True


class Zygote:
    """See zygote.py. ``imports``: what its children find imported."""

    def __init__(self, imports: Sequence[str], prefix: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, HERE / "zygote.py", str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )
        self._control = ours

    async def start(self, program: str, options: dict[str, Any]) -> Process:
        """A process that runs the program."""
        request = json.dumps([program, options]).encode()
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._control, [request], [their_in, their_out])
        finally:
            os.close(their_in)
            os.close(their_out)
        pid = int(await asyncio.to_thread(self._control.recv, 64))
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=64 << 20)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_out, "rb")
        )
        return Process(pid, reader, our_in)

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=30)


LIGHT = ("msgspec", "asyncio", "hotbunk.rollout.registry", "hotbunk.rollout.intake")
HEAVY = (
    *LIGHT,
    "torch.distributed",
    "hotbunk.checkpoint_engine.transports.collective.sender",
    "hotbunk.checkpoint_engine.transports.disk",
)
_zygotes: dict[tuple[str, ...], Zygote] = {}


def zygote(imports: tuple[str, ...]) -> Zygote:
    """One a session."""
    if imports not in _zygotes:
        _zygotes[imports] = Zygote(imports)
    return _zygotes[imports]


def close_zygotes() -> None:
    while _zygotes:
        _zygotes.popitem()[1].close()


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
        self, program: str, options: dict[str, Any], *, torch: bool = True, under: Any = None
    ) -> Process:
        """``torch``: the process has it imported already; ``under``: another zygote."""
        parent = under or zygote(HEAVY if torch else LIGHT)
        one: Process = await parent.start(program, options)
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
                    "receive.py",
                    {**chosen.get((n, rank), {}), "ticket": plain(ticket, rank)},
                    torch=ticket.transport == "collective",
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
        deadline: float = 120.0,
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
            await one.close()


def open_files() -> set[str]:
    """What this process has open, by name, without what leads to processes of a crew."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "pipe" not in name and "pidfd" not in name:
            found.add(f"{fd} {name}")
    return found

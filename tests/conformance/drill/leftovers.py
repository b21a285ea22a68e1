"""What a drill may have left behind in this process and around it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE = 5.0  # seconds; a process that was ended is reaped by its fork server, a moment later
MOMENT = 0.05
_SERVER = "hotbunk.rollout.process.forkserver"


def look() -> Counter[str]:
    """Open files (sockets, pipes, memory, pidfds), processes, names in shared memory, gloo's threads."""
    there = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    found = Counter(f"/dev/shm/{name}" for name in there if "hotbunk" in name)
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            name = (task / "comm").read_text().strip()
            found[f"thread {name}"] += "gloo" in name
    for process in _processes():
        found[process] += 1
    return found


def _processes() -> list[str]:
    """Descendants, without fork servers: those stay for the next replica."""
    found = []
    me = psutil.Process()
    for process in me.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            server = process.ppid() == me.pid and _SERVER in process.cmdline()
            if not server:
                found.append(f"process {process.pid}")
    return found


async def since(before: Counter[str]) -> list[str]:
    """What is there now and was not, when it has had time to go."""
    for _ in range(int(PATIENCE / MOMENT)):
        if not look() - before:
            break
        await asyncio.sleep(MOMENT)
    return sorted(look() - before)

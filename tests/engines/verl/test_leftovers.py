"""What is cleared away after a job is its own, whoever else works on this machine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType

MADE_AND_KILLED = """
import multiprocessing, os, signal
from multiprocessing.shared_memory import SharedMemory
tracker = multiprocessing.resource_tracker._resource_tracker
lock, memory = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=64)
os.kill(tracker._pid, signal.SIGKILL)
print(lock._semlock.name.lstrip("/"), memory.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_what_nobody_has_mapped_is_unlinked(jobs: ModuleType) -> None:
    """A semaphore's maker has it mapped by the name it had before its own."""
    before = set(os.listdir("/dev/shm"))
    lock = multiprocessing.get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=64)
    try:
        killed = subprocess.run(
            [sys.executable, "-c", MADE_AND_KILLED], stdout=subprocess.PIPE, text=True, check=False
        )
        semaphore = f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
        mine = {semaphore, memory.name}
        name, other = killed.stdout.split()
        theirs = {f"sem.{name}", other}
        there = set(os.listdir("/dev/shm")) - before
        assert mine | theirs <= there
        jobs._unlink_orphans(mine | theirs)
        assert all(Path("/dev/shm", name).exists() for name in mine)
        assert not any(Path("/dev/shm", name).exists() for name in theirs)
    finally:
        memory.close()
        memory.unlink()

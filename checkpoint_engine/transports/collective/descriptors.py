"""Descriptors, counted before torch opens them: where gloo finds none left, it ends the process."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hotbunk.rollout.errors import TransferFailed

SPARE = 32  # descriptors that stay free for everybody else
STORE = 11  # that a store opens
_changed = threading.Condition()
_promised = 0


def of_group(size: int) -> int:
    """How many one rank of a group of ``size`` opens: its own, and a connection to each other."""
    return 5 + size


@contextmanager
def promised(number: int, what: str, seconds: float = 0.0) -> Iterator[None]:
    """As many descriptors can be opened in here. Waits for others who are promised some.

    :param seconds: how long it may wait.
    :raises TransferFailed: the process's limit leaves fewer.
    """
    global _promised  # noqa: PLW0603 - the limit is the process's, too
    until = time.monotonic() + seconds
    with _changed:
        while (free := _free()) - _promised < number + SPARE:
            if not _promised or not _changed.wait(max(until - time.monotonic(), 0)):
                raise TransferFailed(
                    f"{what} needs {number} descriptors and {SPARE} to spare, and {free} are free",
                    remedy="raise the limit of open files (ulimit -n)",
                )
        _promised += number
    try:
        yield
    finally:
        with _changed:
            _promised -= number
            _changed.notify_all()


def _free() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return limit - len(os.listdir("/proc/self/fd"))

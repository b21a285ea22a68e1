"""SIGTERM does what Ctrl-C does: what runs is ended in order, and nothing stays behind."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminable() -> Iterator[None]:
    """:raises SystemExit: with 143, once everything has ended after a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(TERMINATED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)

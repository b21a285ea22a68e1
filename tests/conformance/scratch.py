"""A folder for what a run writes, gone with it: also when it is ended by a signal, or killed.

A lock on a file inside tells that the owner lives; the kernel lets go of it however the owner ends, and
the next run removes what nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "hotbunk-conformance-"
OWNER = ".owner"
UNOWNED_SECONDS = 3600.0  # after which a folder without an owner's file is nobody's


class Scratch:
    """A new folder (0700) under the system's temporary one; dead ones are swept first."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(self.path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._gone = weakref.finalize(self, _remove, self.path, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its name only when it is held: whoever finds it free may take the owner for dead.
        (self.path / "new").rename(self.path / OWNER)

    def remove(self) -> None:
        """Idempotent; at the latest when the interpreter ends."""
        self._gone()


def sweep() -> None:
    """Remove folders of this user whose owners are dead."""
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another run is faster
            if _dead(home):
                shutil.rmtree(home, ignore_errors=True)


def _dead(home: Path) -> bool:
    about = home.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
        return False
    try:
        lock = os.open(home / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - about.st_mtime > UNOWNED_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)

"""The pool of an engine, by the device it runs on."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from hotbunk.rollout.allocator import empty_cache
from hotbunk.rollout.arena import MemoryPool
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.memory import NativePool, host_pool
from hotbunk.rollout.native import NativeUnavailable

log = logging.getLogger(__name__)


def device_pool(device: str, backup_dir: str | None = None, *, share: bool = False) -> MemoryPool:
    """A pool on ``cpu``, ``cuda`` or ``cuda:N``; with ``share`` in files that peers may map.

    ``fake`` is a simulated device: memory of the host behind the fake driver.

    Backups of a GPU lie in memory of the host, those of the host in files; ``backup_dir`` says
    where files go, for either.

    :raises NativeUnavailable: a GPU, and hotbunk was installed pure.
    :raises Unsupported: there is no such GPU, or its driver cannot be used; shared memory, and
        hotbunk was installed pure.
    """
    directory = None if backup_dir is None else Path(backup_dir)
    if device == "cpu" and share:
        try:
            return NativePool("shared", backup_dir=directory or Path(tempfile.gettempdir()))
        except NativeUnavailable as error:
            raise Unsupported("shared memory", "this install", str(error)) from error
    if device == "cpu":
        return host_pool(directory)
    if device.startswith("fake"):
        log.warning("device=%s is simulated: memory of the host stands for the device's", device)
        return NativePool(device, backup_dir=directory)
    kind, _, index = device.partition(":")
    return NativePool(
        f"{kind}:{index or 0}", backup_dir=directory, after_release=empty_cache(device)
    )

"""The pool of an engine, by the device it runs on."""

from __future__ import annotations

from pathlib import Path

from hotbunk.rollout.allocator import empty_cache
from hotbunk.rollout.arena import MemoryPool
from hotbunk.rollout.memory import NativePool, host_pool


def device_pool(device: str, backup_dir: str | None = None) -> MemoryPool:
    """A pool on ``cpu``, ``cuda`` or ``cuda:N``.

    Backups of a GPU lie in memory of the host, those of the host in files; ``backup_dir`` says
    where files go, for either.

    :raises NativeUnavailable: a GPU, and hotbunk was installed pure.
    :raises Unsupported: there is no such GPU, or its driver cannot be used.
    """
    directory = None if backup_dir is None else Path(backup_dir)
    if device == "cpu":
        return host_pool(directory)
    kind, _, index = device.partition(":")
    return NativePool(
        f"{kind}:{index or 0}", backup_dir=directory, after_release=empty_cache(device)
    )

"""Sets come and go: written under another name, synced, and renamed; pruned when nobody reads them.

What a killed writer left is removed by the next one. Needs no torch. See
:mod:`hotbunk.checkpoint_engine.published` for what a set is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from hotbunk.checkpoint_engine.published import (
    LOCK,
    RECORD,
    OpenSet,
    Record,
    SetName,
    scope_label,
    sets,
    stored_as,
)
from hotbunk.checkpoint_engine.safetensors_header import INDEX, header
from hotbunk.rollout.contract import Manifest, TensorSpec
from hotbunk.rollout.errors import TransferFailed

SHARD_BYTES = 4 << 30
_HALF_MADE = 60.0  # seconds that a writer may take from making its directory to locking it


class Writing:
    """A set being written: :meth:`write` pieces in any order, then :meth:`publish`.

    :raises TransferFailed: no room, or the disk failed.
    """

    def __init__(self, root: Path, manifest: Manifest, shard_bytes: int = SHARD_BYTES) -> None:
        self.root = root
        self.manifest = manifest
        self._home = root / f".new-{uuid.uuid4().hex}"
        self._fds: list[int] = []
        self._lock = -1
        self._shards = _shards(manifest.tensors, shard_bytes)
        total = len(self._shards)
        self._names = [f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)]
        self._places: dict[int, tuple[int, int]] = {}  # tensor -> file's number, byte
        try:
            self._home.mkdir(mode=0o700)
            self._lock = self._create(LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for number, (name, indices) in enumerate(zip(self._names, self._shards, strict=True)):
                self._begin(number, name, indices)
        except OSError as error:
            self.discard()
            raise _failed(self._home, error) from error

    def write(self, index: int, start: int, data: memoryview) -> None:
        """Bytes ``[start, ...)`` of a tensor."""
        number, at = self._places[index]
        at += start
        try:
            while data:
                written = os.pwrite(self._fds[number], data, at)
                data, at = data[written:], at + written
        except OSError as error:
            raise _failed(self._home, error) from error

    def publish(
        self, fingerprints: Mapping[str, int], blocks: Sequence[Sequence[int]] = (), block: int = 0
    ) -> OpenSet:
        """Everything is written: make it visible, at once and for good. It is the caller's to close."""
        files = [""] * len(self.manifest.tensors)
        for name, indices in zip(self._names, self._shards, strict=True):
            for index in indices:
                files[index] = name
        weight_map = {
            spec.name: file for spec, file in zip(self.manifest.tensors, files, strict=True)
        }
        index_file = {
            "metadata": {"total_size": self.manifest.total_bytes},
            "weight_map": weight_map,
        }
        record = Record(
            self.manifest,
            fingerprints,
            tuple(files),
            blocks=tuple(map(tuple, blocks)),
            block_bytes=block,
        )
        try:
            for fd in self._fds:
                os.fsync(fd)
            self._whole(INDEX, msgspec.json.encode(index_file))
            self._whole(RECORD, msgspec.json.encode(record))
            _sync(self._home)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            published = self._rename()
            _sync(self.root)
            return OpenSet(self.root, str(published))
        except OSError as error:
            raise _failed(self._home, error) from error
        finally:
            self._close()

    def discard(self) -> None:
        """Leave nothing. Idempotent; nothing is left to discard once it is published."""
        self._close()
        _delete(self.root, self._home.name)  # under a name that anybody cleans, if we die in it

    def _begin(self, number: int, name: str, indices: Sequence[int]) -> None:
        stored = [stored_as(self.manifest.tensors[i]) for i in indices]
        text = header(stored)
        fd = self._create(name)
        self._fds.append(fd)
        at = len(text)
        for index in indices:
            self._places[index] = (number, at)
            at += self.manifest.tensors[index].nbytes
        os.posix_fallocate(fd, 0, at)  # no room is found out now
        os.pwrite(fd, text, 0)

    def _rename(self) -> SetName:
        label, version = scope_label(self.manifest.scope), self.manifest.version
        known = [one.number for one in sets(self.root, label) if one.version == version]
        number = max(known, default=0) + 1
        while True:
            name = SetName(version, number, label)
            try:
                self._home.rename(self.root / str(name))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # somebody published the same version just now
            else:
                return name

    def _create(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._home / name, flags, 0o600)

    def _whole(self, name: str, content: bytes) -> None:
        fd = self._create(name)
        try:
            data = memoryview(content)
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _shards(specs: Sequence[TensorSpec], most: int) -> list[list[int]]:
    """Which tensors go into which file, in order. At least one file; a tensor is never cut."""
    shards: list[list[int]] = [[]]
    used = 0
    for index, spec in enumerate(specs):
        if shards[-1] and used + spec.nbytes > most:
            shards.append([])
            used = 0
        shards[-1].append(index)
        used += spec.nbytes
    return shards


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(where: Path, error: OSError) -> TransferFailed:
    return TransferFailed(f"cannot publish weights: {error.strerror or error}", where=str(where))


# -- pruning ----------------------------------------------------------------------------------


def prune(root: Path, keep: int, lease: float) -> list[SetName]:
    """Delete all but the newest ``keep`` sets of each scope, and what killed writers left.

    A set that is being read stays, until its last reader has had it for ``lease`` seconds.

    :returns: what was deleted.
    """
    deleted: list[SetName] = []
    by_scope: dict[str, list[SetName]] = {}
    for one in sets(root):
        by_scope.setdefault(one.scope, []).append(one)
    for found in by_scope.values():
        for one in found[: max(len(found) - keep, 0)]:
            with _alone(root / str(one), lease) as alone:
                if alone:
                    _delete(root, str(one))
                    deleted.append(one)
    for name in os.listdir(root):
        if name.startswith(".old-"):
            shutil.rmtree(root / name, ignore_errors=True)
        elif name.startswith(".new-"):
            _delete_left_over(root, name)
    return deleted


def _delete_left_over(root: Path, name: str) -> None:
    home = root / name
    try:
        age = time.time() - os.stat(home).st_mtime
    except OSError:  # published or removed meanwhile
        return
    if not (home / LOCK).exists():
        if age > _HALF_MADE:
            _delete(root, name)
        return
    with _alone(home, float("inf")) as alone:
        if alone:
            _delete(root, name)


def _delete(root: Path, name: str) -> None:
    gone = root / f".old-{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):  # it is published, or somebody else prunes, too
        (root / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _alone(home: Path, lease: float) -> Iterator[bool]:
    """Whether nobody reads or writes the set, or for longer than ``lease``."""
    try:
        fd = os.open(home / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield time.time() - os.fstat(fd).st_mtime > lease
        else:
            yield True
    finally:
        os.close(fd)

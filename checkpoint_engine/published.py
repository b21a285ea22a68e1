"""Versions of weights in a directory: published whole or not at all, read while others come and go.

    root/                               0700, of this user
      full-0.7-1/                       scope, version, how often it was published
        hotbunk.json                    the record: manifest, fingerprints, which file holds what
        model-00001-of-00002.safetensors ...
        model.safetensors.index.json    for everybody else's readers
        lock                            shared by readers; whoever prunes needs it alone
      .new-*, .old-*                    being written, being deleted

A set is written under another name, synced, and renamed; nothing in it changes afterwards. What a
killed writer left is removed by the next one. Needs no torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from hotbunk.checkpoint_engine.safetensors_header import (
    INDEX,
    NAMES,
    Stored,
    header,
    is_file_name,
    read_header,
)
from hotbunk.rollout.contract import ITEMSIZE, Manifest, Scope, ScopeKind, TensorSpec, Version
from hotbunk.rollout.errors import ConfigError, TransferFailed

FORMAT = 1
RECORD = "hotbunk.json"
LOCK = "lock"
SHARD_BYTES = 4 << 30
RECORD_BYTES = 256 << 20  # most of a record: a few million names
ROOTS_VARIABLE = "HOTBUNK_DISK_ROOTS"  # directories, separated as in PATH
_SET = re.compile(r"(full|partial|delta|adapter\.[0-9a-f]{16})-(\d+)\.(\d+)-(\d+)")
_HALF_MADE = 60.0  # seconds that a writer may take from making its directory to locking it


class Record(msgspec.Struct, frozen=True):
    """What a set says of itself. ``files[i]`` holds the i-th tensor of the manifest."""

    manifest: Manifest
    fingerprints: Mapping[str, int]
    files: tuple[str, ...]
    format: int = FORMAT


class SetName(msgspec.Struct, frozen=True, order=True):
    """A set's name, taken apart; ordered by version, and the last one published comes last."""

    version: Version
    number: int
    scope: str

    def __str__(self) -> str:
        return f"{self.scope}-{self.version}-{self.number}"

    @staticmethod
    def parse(name: str) -> SetName | None:
        """None: it is no set's name."""
        found = _SET.fullmatch(name)
        if found is None:
            return None
        scope, incarnation, step, number = found.groups()
        return SetName(Version(int(incarnation), int(step)), int(number), scope)


def scope_label(scope: Scope) -> str:
    """What sets of that scope are filed under. An adapter's name may be anything: its hash."""
    if scope.kind is not ScopeKind.ADAPTER:
        return scope.kind.value
    return f"adapter.{hashlib.sha256(scope.name.encode()).hexdigest()[:16]}"


def sets(root: Path, label: str | None = None) -> list[SetName]:
    """The sets in a root, oldest first. :raises ConfigError: the root cannot be read."""
    try:
        found = [SetName.parse(name) for name in os.listdir(root)]
    except OSError as error:
        raise ConfigError(f"{str(root)!r} cannot be read: {error.strerror}") from error
    return sorted(one for one in found if one is not None and label in (None, one.scope))


# -- roots ------------------------------------------------------------------------------------


def make_root(root: Path) -> Path:
    """Make the directory, or check the one that is there; its real path.

    :raises ConfigError: it is another user's, or others may read it.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = root.resolve(strict=True)
        os.close(_open_root(root))
    except OSError as error:
        raise ConfigError(f"{str(root)!r} cannot be used: {error.strerror}") from error
    return root


def _open_root(root: Path) -> int:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise ConfigError(
            f"{str(root)!r} belongs to user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}, and must be this user's alone",
            remedy=f"chmod 700 {root}",
        )
    return fd


def check_allowed(root: Path) -> None:
    """May sets be read from there? :raises ConfigError: the environment allows other roots only."""
    allowed = os.environ.get(ROOTS_VARIABLE)
    if allowed is not None and str(root) not in (
        os.path.realpath(one) for one in allowed.split(os.pathsep) if one
    ):
        raise ConfigError(f"{str(root)!r} is none of the roots in {ROOTS_VARIABLE}")


# -- writing ----------------------------------------------------------------------------------


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

    def publish(self, fingerprints: Mapping[str, int]) -> OpenSet:
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
        record = Record(self.manifest, fingerprints, tuple(files))
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
        stored = [_stored_as(self.manifest.tensors[i]) for i in indices]
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


def _stored_as(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    """What the file calls it: the format has no complex128, so pairs of float64 stand for it."""
    if spec.dtype in NAMES:
        return spec.name, spec.dtype, spec.shape
    if spec.dtype == "complex128":
        return spec.name, "float64", (*spec.shape, 2)
    raise ConfigError(f"{spec.name!r} has the element type {spec.dtype!r}, which no file holds")


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


# -- reading ----------------------------------------------------------------------------------


class OpenSet:
    """A set held open: no writer prunes it meanwhile, and everything in it was checked.

    :raises TransferFailed: it is gone, or is not what it should be. Nothing was read of it then
        but its record and headers.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self._fds: dict[str, int] = {}
        self._lock = -1
        home = -1
        try:
            check_allowed(root)
            if SetName.parse(name) is None:
                raise TransferFailed(f"{name!r} is no name of a set")
            top = _open_root(root)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                home = os.open(name, flags, dir_fd=top)
                self._hold(home, top)
            finally:
                os.close(top)
            self.record = self._read_record(home)
            self.stored = self._check(home)
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError):
                raise TransferFailed(error.what, where=name, remedy=error.remedy) from error
            if isinstance(error, OSError):
                raise TransferFailed(
                    f"set {name!r} in {str(root)!r} cannot be read: {error.strerror or error}"
                ) from error
            raise
        finally:
            if home >= 0:
                os.close(home)

    @property
    def manifest(self) -> Manifest:
        return self.record.manifest

    def read(self, index: int, start: int, into: memoryview) -> None:
        """Fill ``into`` with bytes ``[start, ...)`` of a tensor. :raises TransferFailed: too few."""
        stored, fd = self.stored[index], self._fds[self.record.files[index]]
        at = stored.start + start
        try:
            while into:
                got = os.preadv(fd, [into], at)
                if not got:
                    raise TransferFailed(f"{self.name!r} ends in the middle of {stored.name!r}")
                into, at = into[got:], at + got
        except OSError as error:
            raise TransferFailed(f"{self.name!r}: {error.strerror or error}") from error

    def close(self) -> None:
        """Let go of it. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _hold(self, home: int, top: int) -> None:
        self._lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=home)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransferFailed(f"set {self.name!r} is being deleted") from None
        os.utime(self._lock)  # the lease begins
        found, held = os.stat(self.name, dir_fd=top, follow_symlinks=False), os.fstat(home)
        if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise TransferFailed(f"set {self.name!r} was deleted")

    def _open(self, name: str, home: int) -> int:
        # Not blocking: what lies there may be a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=home)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise TransferFailed(f"{name!r} in set {self.name!r} is not a file")
        return fd

    def _read_record(self, home: int) -> Record:
        fd = self._open(RECORD, home)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size > RECORD_BYTES:
                raise TransferFailed(f"the record of set {self.name!r} has {size} bytes")
            try:
                record = msgspec.json.decode(file.read(RECORD_BYTES), type=Record)
            except (msgspec.DecodeError, RecursionError) as error:
                raise TransferFailed(f"the record of set {self.name!r}: {error}") from error
        if record.format != FORMAT or len(record.files) != len(record.manifest.tensors):
            raise TransferFailed(f"the record of set {self.name!r} is of another kind")
        if len({spec.name for spec in record.manifest.tensors}) != len(record.files):
            raise TransferFailed(f"the record of set {self.name!r} has a name twice")
        return record

    def _check(self, home: int) -> list[Stored]:
        """Every tensor of the manifest lies in its file, as what the manifest says."""
        headers: dict[str, dict[str, Stored]] = {}
        for file in dict.fromkeys(self.record.files):
            if not is_file_name(file):
                raise TransferFailed(f"set {self.name!r} names the file {file!r}")
            self._fds[file] = self._open(file, home)
            headers[file] = read_header(self._fds[file], f"{self.name}/{file}")
        stored = []
        for spec, file in zip(self.record.manifest.tensors, self.record.files, strict=True):
            if spec.dtype not in ITEMSIZE:
                raise TransferFailed(f"{spec.name!r} has the element type {spec.dtype!r}")
            _, dtype, shape = _stored_as(spec)
            one = headers[file].get(spec.name)
            if one is None or (one.dtype, one.shape, one.nbytes) != (dtype, shape, spec.nbytes):
                raise TransferFailed(
                    f"{file!r} of set {self.name!r} does not hold {spec.name!r} as "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            stored.append(one)
        return stored


def newest(root: Path, scope: Scope | None = None) -> OpenSet:
    """The newest set of a root (of that kind of scope; by default full ones), held open.

    :raises TransferFailed: there is none that can be read.
    """
    label = scope_label(scope or Scope())
    tried: SetName | None = None
    while True:
        found = sets(root, label)
        if not found:
            raise TransferFailed(f"no {label} weights are published in {str(root)!r}")
        try:
            return OpenSet(root, str(found[-1]))
        except TransferFailed:
            # Pruned this moment: there are newer ones by now. But an older one is never an answer.
            if found[-1] == tried:
                raise
            tried = found[-1]

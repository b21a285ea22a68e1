"""Versions of weights in a directory: published whole or not at all, read while others come and go.

    root/                               0700, of this user
      full-0.7-1/                       scope, version, how often it was published
        hotbunk.json                    the record: manifest, fingerprints, which file holds what
        model-00001-of-00002.safetensors ...
        model.safetensors.index.json    for everybody else's readers
        lock                            shared by readers; whoever prunes needs it alone
      .new-*, .old-*                    being written, being deleted

Nothing in a set changes once it is there (:mod:`hotbunk.checkpoint_engine.publishing`). Needs no
torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hotbunk.checkpoint_engine.safetensors_header import (
    NAMES,
    Stored,
    is_file_name,
    read_header,
)
from hotbunk.rollout.contract import ITEMSIZE, Manifest, Scope, ScopeKind, TensorSpec, Version
from hotbunk.rollout.errors import ConfigError, TransferFailed, VerifyFailed

FORMAT = 1
RECORD = "hotbunk.json"
LOCK = "lock"
RECORD_BYTES = 256 << 20  # most of a record: a few million names
ROOTS_VARIABLE = "HOTBUNK_DISK_ROOTS"  # directories, separated as in PATH
_SET = re.compile(r"(full|partial|delta|adapter\.[0-9a-f]{16})-(\d+)\.(\d+)-(\d+)")


class Record(msgspec.Struct, frozen=True):
    """What a set says of itself. ``files[i]`` holds the i-th tensor of the manifest.

    ``blocks[i]``: fingerprints of its blocks of ``block_bytes``, each at its place, for readers of
    parts; nothing where the set is not verified.
    """

    manifest: Manifest
    fingerprints: Mapping[str, int]
    files: tuple[str, ...]
    format: int = FORMAT
    blocks: tuple[tuple[int, ...], ...] = ()
    block_bytes: int = 0


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


# -- reading ----------------------------------------------------------------------------------


def stored_as(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    """What the file calls it: the format has no complex128, so pairs of float64 stand for it."""
    if spec.dtype in NAMES:
        return spec.name, spec.dtype, spec.shape
    if spec.dtype == "complex128":
        return spec.name, "float64", (*spec.shape, 2)
    raise ConfigError(f"{spec.name!r} has the element type {spec.dtype!r}, which no file holds")


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

    def blocks(self, index: int) -> tuple[tuple[int, ...], int]:
        """Fingerprints of a tensor's blocks, and bytes of one. A set without them is one block.

        :raises VerifyFailed: the set has no fingerprint of it.
        """
        spec, record = self.manifest.tensors[index], self.record
        if record.blocks:
            return record.blocks[index], record.block_bytes
        if spec.name not in record.fingerprints:
            raise VerifyFailed({spec.name}, where=f"set {self.name}")
        return (record.fingerprints[spec.name],), max(spec.nbytes, 1)

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
        if record.blocks and [len(sums) for sums in record.blocks] != [
            -(-spec.nbytes // max(record.block_bytes, 1)) for spec in record.manifest.tensors
        ]:
            raise TransferFailed(f"the record of set {self.name!r} has other blocks than tensors")
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
            _, dtype, shape = stored_as(spec)
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

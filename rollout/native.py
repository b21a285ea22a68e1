"""The Python face of csrc: finds the shared library and gives every function its signature.

The library has a C ABI and is bound with ctypes, so neither torch nor a compiler is needed to use
it. All ``argtypes`` and ``restype`` are set in :func:`_bind`, those of the pool in
:mod:`hotbunk.rollout.native_pool`, those of the kernels in :mod:`hotbunk.rollout.native_kernels`, and
nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import hotbunk
from hotbunk.rollout import native_kernels, native_pool
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.native_kernels import Kernels

__all__ = ["ABI_VERSION", "Native", "NativeUnavailable", "available", "load", "path"]

ABI_VERSION: Final = 4
"""``HB_ABI_VERSION`` of csrc/include/hotbunk.h that this file was written against."""

_FILE_NAME: Final = (
    "libhotbunk_native.dylib" if sys.platform == "darwin" else "libhotbunk_native.so"
)


class NativeUnavailable(HotbunkError, ImportError):
    """The native library is not part of this install, or cannot be used."""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library."""

    lib: ctypes.CDLL
    path: Path

    @property
    def abi_version(self) -> int:
        return int(self.lib.hb_abi_version())

    @property
    def version(self) -> str:
        """The package version the library was built as."""
        text: bytes = self.lib.hb_version()
        return text.decode("ascii")

    @property
    def page_size(self) -> int:
        """Bytes in a page of memory.

        :raises OSError: when the system will not say.
        """
        size = int(self.lib.hb_page_size())
        if size < 0:
            raise OSError("the system does not report its page size")
        return size

    @property
    def kernels(self) -> Kernels:
        """The kernels."""
        return Kernels(self.lib)


def path() -> Path:
    """Where the library lies when it is installed; nothing is loaded."""
    return Path(hotbunk.__file__).parent / "_native" / _FILE_NAME


def available() -> bool:
    """Whether :func:`load` would succeed."""
    try:
        load()
    except NativeUnavailable:
        return False
    return True


@functools.cache
def load() -> Native:
    """Load and bind the library, once a process.

    :raises NativeUnavailable: when hotbunk was installed pure, the file does not load here, or it
        speaks another ABI than this file.
    """
    file = path()
    if not file.is_file():
        raise NativeUnavailable(
            "hotbunk was installed without its native library",
            where=str(file),
            remedy="reinstall without HOTBUNK_PURE set: pip install --force-reinstall "
            "--no-deps --no-binary hotbunk hotbunk; it needs a C++17 compiler",
        )
    try:
        lib = ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeUnavailable(
            f"the native library does not load: {error}",
            where=str(file),
            remedy="reinstall hotbunk on this machine",
        ) from error
    _bind(lib, file)
    return Native(lib, file)


def _bind(lib: ctypes.CDLL, file: Path) -> None:
    """Set every signature of csrc/include, after asking which ABI the file speaks."""
    try:
        lib.hb_abi_version.argtypes = []
        lib.hb_abi_version.restype = ctypes.c_int32
        abi = int(lib.hb_abi_version())
        if abi != ABI_VERSION:
            raise NativeUnavailable(
                f"the native library has ABI {abi} and this hotbunk needs {ABI_VERSION}",
                where=str(file),
                remedy="rebuild it: reinstall hotbunk",
            )
        lib.hb_version.argtypes = []
        lib.hb_version.restype = ctypes.c_char_p
        lib.hb_page_size.argtypes = []
        lib.hb_page_size.restype = ctypes.c_int64
        native_pool.bind(lib)
        native_kernels.bind(lib)
    except AttributeError as error:
        raise NativeUnavailable(
            f"the native library lacks a function: {error}",
            where=str(file),
            remedy="rebuild it: reinstall hotbunk",
        ) from error

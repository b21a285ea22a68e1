"""The kernels of csrc/include/hotbunk_kernels.h: structs, signatures, and calls on addresses.

:mod:`hotbunk.rollout.kernels` is the face over tensors. Here memory is an address, and keeping it
alive is the caller's business.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from typing import Final

from hotbunk.rollout.errors import KernelFailed

__all__ = ["KV", "Code", "DType", "Kernels", "Run", "Variant", "beside", "bind", "copy_entry"]


class Code(IntEnum):
    """What a call comes back with."""

    OK = 0
    BAD_ARGUMENT = -1
    BAD_DTYPE = -2
    OVERLAP = -3
    OUT_OF_RANGE = -4
    UNAVAILABLE = -5
    NO_MEMORY = -6
    DRIVER = -7


class Variant(IntEnum):
    """Instruction sets of the host's kernels."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3


class DType(IntEnum):
    """Element types of a copy. BYTES on both sides, or two of the others."""

    BYTES = 0
    F32 = 1
    BF16 = 2
    F16 = 3


class Run(ctypes.Structure):
    """Where and how a call runs: on the host, or on a CUDA device and stream."""

    _fields_ = (
        ("device", c_int32),
        ("variant", c_int32),
        ("threads", c_int32),
        ("flags", c_int32),
        ("stream", c_void_p),
    )

    def __init__(
        self,
        device: int = -1,
        variant: Variant = Variant.AUTO,
        threads: int = 0,
        stream: int | None = None,
        cached: bool = False,
    ) -> None:
        """See ``hb_run``; ``cached``: writes stay in the cache, however large (host only)."""
        super().__init__(device, variant, threads, int(cached), stream)


class KV(ctypes.Structure):
    """A KV cache [layers, planes, slots, row]; row and strides in bytes."""

    _fields_ = (
        ("base", c_void_p),
        ("layers", c_int64),
        ("planes", c_int64),
        ("slots", c_int64),
        ("row", c_int64),
        ("layer_stride", c_int64),
        ("plane_stride", c_int64),
        ("slot_stride", c_int64),
    )


class _Blocks(ctypes.Structure):
    _fields_ = (("ids", c_void_p), ("n", c_int64), ("size", c_int64), ("tokens", c_int64))


def copy_entry(
    source: int, target: int, count: int, from_: DType, to: DType
) -> tuple[int, int, int, int]:
    """One ``hb_copy``, as the four 64-bit words it is made of."""
    return source, target, count, from_ | to << 32


_RUN: Final = POINTER(Run)


class _Shared(threading.local):
    threads = 0  # at most, for this thread's copies; 0: all there are


_shared = _Shared()


@contextmanager
def beside() -> Iterator[None]:
    """Copies on the host that this thread does meanwhile leave half of the processors free.

    For one of two processes that copy at the same time, one into a buffer and one out of it.
    """
    before = _shared.threads
    _shared.threads = max(1, len(os.sched_getaffinity(0)) // 2)
    try:
        yield
    finally:
        _shared.threads = before


def bind(lib: ctypes.CDLL) -> None:
    """Set the signatures. :raises AttributeError: the library lacks a function."""
    lib.hb_kernels_error.argtypes = [c_int32]
    lib.hb_kernels_error.restype = c_char_p
    lib.hb_kernels_detail.argtypes = []
    lib.hb_kernels_detail.restype = c_char_p
    lib.hb_kernels_variant.argtypes = []
    lib.hb_kernels_variant.restype = c_int32
    lib.hb_kernels_has.argtypes = [c_int32]
    lib.hb_kernels_has.restype = c_int32
    lib.hb_kernels_cache.argtypes = []
    lib.hb_kernels_cache.restype = c_int64
    lib.hb_kernels_threads.argtypes = []
    lib.hb_kernels_threads.restype = c_int32
    lib.hb_kernels_set_threads.argtypes = [c_int32]
    lib.hb_kernels_set_threads.restype = c_int32
    lib.hb_kernels_cuda.argtypes = [c_int32]
    lib.hb_kernels_cuda.restype = c_int32
    lib.hb_copy_many.argtypes = [c_void_p, c_int64, _RUN]
    lib.hb_copy_many.restype = c_int32
    lib.hb_fingerprint.argtypes = [c_void_p, c_int64, POINTER(c_uint64), _RUN]
    lib.hb_fingerprint.restype = c_int32
    lib.hb_kv_gather.argtypes = [POINTER(KV), POINTER(_Blocks), c_void_p, _RUN]
    lib.hb_kv_gather.restype = c_int32
    lib.hb_kv_scatter.argtypes = [POINTER(KV), POINTER(_Blocks), c_void_p, _RUN]
    lib.hb_kv_scatter.restype = c_int32
    lib.hb_kv_zero.argtypes = [POINTER(KV), POINTER(_Blocks), _RUN]
    lib.hb_kv_zero.restype = c_int32


class Kernels:
    """The loaded library's kernels. Calls give the interpreter lock away while they run."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib

    @property
    def variant(self) -> Variant:
        """What AUTO stands for here."""
        return Variant(self._lib.hb_kernels_variant())

    def has(self, variant: Variant) -> bool:
        """Whether this machine and build can run it."""
        return bool(self._lib.hb_kernels_has(variant))

    @property
    def threads(self) -> int:
        """Threads a call may use, the caller included."""
        return int(self._lib.hb_kernels_threads())

    @property
    def cache(self) -> int:
        """Bytes of this machine's largest cache; 0: not known."""
        return int(self._lib.hb_kernels_cache())

    def set_threads(self, count: int) -> None:
        """For all later calls of this process. :raises KernelFailed: not 1 to 64."""
        self._check(self._lib.hb_kernels_set_threads(count))

    def why_not_cuda(self, device: int = 0) -> str:
        """Why the CUDA kernels cannot run on that device; empty when they can."""
        if self._lib.hb_kernels_cuda(device) == Code.OK:
            return ""
        return self._detail()

    def copy_many(self, table: array[int], run: Run | None = None, *, cached: bool = False) -> None:
        """Do every copy of a table of :func:`copy_entry` words, in any order.

        On the host (no ``run``): ``cached`` writes stay in the cache; see also :func:`beside`.

        :raises KernelFailed: a malformed or overlapping entry; nothing was written.
        """
        threads = min(_shared.threads, self.threads) if _shared.threads else 0
        if run is None and (cached or threads):
            run = Run(threads=threads, cached=cached)
        address, words = table.buffer_info()
        self._check(self._lib.hb_copy_many(address, words // 4, run))

    def fingerprints(
        self, pieces: Sequence[tuple[int, int, int]], run: Run | None = None
    ) -> list[int]:
        """Of pieces ``(address, bytes, start)``, each at byte ``start`` of its tensor.

        :raises KernelFailed: a malformed piece.
        """
        table = array("q", [word for piece in pieces for word in piece])
        out = (c_uint64 * len(pieces))()
        self._check(self._lib.hb_fingerprint(table.buffer_info()[0], len(pieces), out, run))
        return list(out)

    def kv_gather(
        self,
        kv: KV,
        blocks: Sequence[int],
        size: int,
        tokens: int,
        packed: int,
        run: Run | None = None,
    ) -> None:
        """Rows of ``tokens`` slots to ``packed`` [layers, planes, tokens, row].

        :raises KernelFailed: a block outside the cache, or memory that overlaps.
        """
        held, table = _blocks(blocks, size, tokens)
        self._check(self._lib.hb_kv_gather(kv, table, packed, run))
        del held

    def kv_scatter(
        self,
        kv: KV,
        blocks: Sequence[int],
        size: int,
        tokens: int,
        packed: int,
        run: Run | None = None,
    ) -> None:
        """The way back. :raises KernelFailed: as above, or a block that comes twice."""
        held, table = _blocks(blocks, size, tokens)
        self._check(self._lib.hb_kv_scatter(kv, table, packed, run))
        del held

    def kv_zero(
        self, kv: KV, blocks: Sequence[int], size: int, tokens: int, run: Run | None = None
    ) -> None:
        """Zeros into the slots. :raises KernelFailed: a block outside the cache."""
        held, table = _blocks(blocks, size, tokens)
        self._check(self._lib.hb_kv_zero(kv, table, run))
        del held

    def _detail(self) -> str:
        text: bytes = self._lib.hb_kernels_detail()
        return text.decode("utf-8", "replace")

    def _check(self, code: int) -> None:
        if code != Code.OK:
            meaning: bytes = self._lib.hb_kernels_error(code)
            raise KernelFailed(f"{meaning.decode()}: {self._detail()}", code)


def _blocks(ids: Sequence[int], size: int, tokens: int) -> tuple[array[int], _Blocks]:
    held = array("q", ids)
    return held, _Blocks(held.buffer_info()[0], len(ids), size, tokens)

"""Every signature and struct of csrc/include/hotbunk_pool.h, and nothing else.

Loads nothing: :mod:`hotbunk.rollout.native` opens the library and calls :func:`bind`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Final

__all__ = ["ArenaInfo", "Choice", "Code", "Facts", "Options", "Outcome", "Shared", "bind"]


class Code(IntEnum):
    """``HB_E_*``."""

    OK = 0
    INVALID = -1
    HANDLE = -2
    EXISTS = -3
    FULL = -4
    NOMEM = -5
    HOST_NOMEM = -6
    UNAVAILABLE = -7
    DRIVER = -8
    BACKUP = -9
    INCOMPLETE = -10
    UNDO = -11
    STATE = -12


class Outcome(ctypes.Structure):
    """``hb_outcome``: what a call did, or why it failed."""

    code: int
    driver_code: int
    needed: int
    free: int
    expected: int
    freed: int
    mapped: int
    text: bytes

    _fields_ = (
        ("code", c_int32),
        ("driver_code", c_int32),
        ("needed", c_uint64),
        ("free", c_uint64),
        ("expected", c_uint64),
        ("freed", c_uint64),
        ("mapped", c_uint64),
        ("text", c_char * 512),
    )

    @property
    def message(self) -> str:
        return self.text.decode("utf-8", "replace")


class Options(ctypes.Structure):
    """``hb_pool_options``."""

    _fields_ = (
        ("driver", c_char_p),
        ("backup_dir", c_char_p),
        ("library", c_char_p),
        ("wait_ms", c_uint32),
    )


class Facts(ctypes.Structure):
    """``hb_pool_facts``."""

    granularity: int
    free: int
    total: int
    addressable: int
    per_process: int
    kind: bytes

    _fields_ = (
        ("granularity", c_uint64),
        ("free", c_uint64),
        ("total", c_uint64),
        ("addressable", c_int32),
        ("per_process", c_int32),
        ("kind", c_char * 64),
    )


class ArenaInfo(ctypes.Structure):
    """``hb_arena_info``."""

    arena: int
    address: int
    size: int
    persistent: int
    used: int
    resident: int
    backup: int
    released: int
    residue: int

    _fields_ = (
        ("arena", c_uint64),
        ("address", c_uint64),
        ("size", c_uint64),
        ("persistent", c_uint64),
        ("used", c_uint64),
        ("resident", c_uint64),
        ("backup", c_uint64),
        ("released", c_int32),
        ("residue", c_int32),
    )


class Choice(ctypes.Structure):
    """``hb_choice``."""

    _fields_ = (("tag", c_char_p), ("group", c_char_p), ("retention", c_int32))


class Shared(ctypes.Structure):
    """``hb_shared``: memory on its way to another process."""

    fd: int
    peer: int
    number: int
    nbytes: int
    read_only: int

    _fields_ = (
        ("fd", c_int32),
        ("peer", c_int32),
        ("number", c_uint64),
        ("nbytes", c_uint64),
        ("read_only", c_int32),
    )


_POOL: Final = c_uint64
_ARENA: Final = c_uint64
_OUT: Final = ctypes.POINTER(Outcome)

_SIGNATURES: Final[dict[str, tuple[type, tuple[type, ...]]]] = {
    "hb_strerror": (c_char_p, (c_int32,)),
    "hb_pool_open": (c_int32, (ctypes.POINTER(Options), ctypes.POINTER(_POOL), _OUT)),
    "hb_pool_close": (c_int32, (_POOL,)),
    "hb_pool_facts_of": (c_int32, (_POOL, ctypes.POINTER(Facts), _OUT)),
    "hb_pool_last_error": (c_int32, (_POOL, _OUT)),
    "hb_arena_open": (
        c_int32,
        (_POOL, c_char_p, c_char_p, c_uint64, c_uint64, ctypes.POINTER(_ARENA), _OUT),
    ),
    "hb_arena_add": (
        c_int32,
        (_POOL, _ARENA, c_char_p, c_uint64, c_int32, ctypes.POINTER(c_uint64), _OUT),
    ),
    "hb_arena_drop": (c_int32, (_POOL, _ARENA, _OUT)),
    "hb_arena_unreserve": (c_int32, (_POOL, _ARENA)),
    "hb_arena_read": (c_int32, (_POOL, _ARENA, c_uint64, c_void_p, c_uint64, _OUT)),
    "hb_arena_write": (c_int32, (_POOL, _ARENA, c_uint64, c_void_p, c_uint64, _OUT)),
    "hb_arena_fd": (c_int32, (_POOL, _ARENA)),
    "hb_arena_export": (c_int32, (_POOL, _ARENA, ctypes.POINTER(Shared), _OUT)),
    "hb_arena_import": (
        c_int32,
        (_POOL, c_char_p, c_char_p, ctypes.POINTER(Shared), ctypes.POINTER(_ARENA), _OUT),
    ),
    "hb_arena_look": (c_int32, (_POOL, _ARENA, ctypes.POINTER(ArenaInfo))),
    "hb_pool_look": (
        c_int32,
        (_POOL, ctypes.POINTER(ArenaInfo), c_uint64, ctypes.POINTER(c_uint64)),
    ),
    "hb_pool_release": (c_int32, (_POOL, ctypes.POINTER(Choice), c_uint64, _OUT)),
    "hb_pool_resume": (c_int32, (_POOL, ctypes.POINTER(c_char_p), c_uint64, _OUT)),
    "hb_pool_check": (c_int32, (_POOL, _OUT)),
    "hb_resident": (c_int64, (c_uint64, c_uint64)),
    "hb_fake_fail": (c_int32, (_POOL, c_char_p, c_uint64, c_int32)),
    "hb_fake_lie": (c_int32, (_POOL, c_uint64, c_uint64, c_uint64)),
    "hb_fake_count": (c_int64, (_POOL, c_char_p)),
}


def bind(lib: ctypes.CDLL) -> None:
    """Set the signature of every function. :raises AttributeError: the library lacks one."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments

"""What a safetensors file says of itself, checked before anything of it is used. Needs no torch.

A file is eight bytes (the header's length, little-endian), a JSON header of
``name -> {dtype, shape, data_offsets}``, and the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from hotbunk.rollout.contract import ITEMSIZE
from hotbunk.rollout.errors import ConfigError

# Element types by the names that the format has for them. It has none for complex128.
DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
NAMES: Mapping[str, str] = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100_000_000  # the format's own bound
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Stored(msgspec.Struct, frozen=True):
    """A tensor in a file: its bytes are ``[start, start + nbytes)`` of the file."""

    name: str
    dtype: str  # of ITEMSIZE
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(fd: int, where: str) -> dict[str, Stored]:
    """The tensors of an open file, by name.

    Every one lies inside the file, has as many bytes as its shape and type say, and none overlaps
    another.

    :raises ConfigError: the file is not a safetensors file, or lies about itself.
    """

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{where} is not a safetensors file: {what}")

    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or length > min(HEADER_BYTES, size - 8):
            raise wrong(f"a header of {length} bytes in a file of {size}")
        text = os.pread(fd, length, 8)
    except OSError as error:
        raise wrong(error.strerror or str(error)) from error
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(f"its header makes no sense ({error})") from error
    found: dict[str, Stored] = {}
    data = 8 + length
    for name, entry in entries.items():
        start, end = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise wrong(f"{name!r} has the element type {entry.dtype!r}, which nobody here knows")
        if any(dim < 0 for dim in entry.shape):
            raise wrong(f"{name!r} has the shape {list(entry.shape)}")
        nbytes = math.prod(entry.shape) * ITEMSIZE[dtype]
        if not 0 <= start <= end <= size - data or end - start != nbytes:
            raise wrong(
                f"{name!r} ({entry.dtype}{list(entry.shape)}) would lie at bytes {start}..{end} of "
                f"{size - data}"
            )
        found[name] = Stored(name, dtype, entry.shape, data + start, nbytes)
    spans = sorted((one.start, one.start + one.nbytes, one.name) for one in found.values())
    last, before = 0, ""
    for start, end, name in spans:
        if start < last and end > start:
            raise wrong(f"{name!r} lies over {before!r}")
        if end >= last:
            last, before = end, name
    return found


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], **metadata: str) -> bytes:
    """The beginning of a file of ``(name, dtype, shape)``, their bytes one behind another.

    ``dtype`` is one of :data:`NAMES`. Padded, so that the first tensor starts at a multiple of 8.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEMSIZE[dtype]
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_file_name(name: str) -> bool:
    """One plain component of a path: nothing that could lead elsewhere."""
    return _FILE_NAME.fullmatch(name) is not None


def files_of(directory: Path) -> dict[str, set[str] | None]:
    """The safetensors files of a model directory: name -> the tensors to take from it (None: all).

    Where there is an index, it alone counts: files that it does not name are left-overs.

    :raises ConfigError: no file, or an index that makes no sense.
    """
    index = directory / INDEX
    if not index.is_file():
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise ConfigError(f"no *.safetensors file in {str(directory)!r}")
        return dict.fromkeys(names)
    try:
        said = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{str(index)!r} is no index: {error}") from error
    files: dict[str, set[str] | None] = {}
    for name, file in said.weight_map.items():
        if not is_file_name(file):
            raise ConfigError(f"{str(index)!r} puts {name!r} into {file!r}, not a file beside it")
        wanted = files.setdefault(file, set())
        assert wanted is not None
        wanted.add(name)
    if not files:
        raise ConfigError(f"{str(index)!r} names no tensor")
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def stored_in(directory: Path) -> Iterator[tuple[Path, Stored]]:
    """Every tensor of a model directory, from the headers alone, file by file.

    :raises ConfigError: a file that is missing or broken, or lacks what the index says it has.
    """
    for file, wanted in files_of(directory).items():
        path = directory / file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        try:
            found = read_header(fd, repr(str(path)))
        finally:
            os.close(fd)
        absent = (wanted or set()) - found.keys()
        if absent:
            raise ConfigError(
                f"{str(path)!r} lacks {sorted(absent)[:5]}, which the index puts there"
            )
        for name, one in found.items():
            if wanted is None or name in wanted:
                yield path, one

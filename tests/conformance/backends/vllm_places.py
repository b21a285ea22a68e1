"""vLLM's memory, read past it: from ``/proc`` of the workers, where they say that everything lies.

A *place* is what one worker's ``hotbunk_addresses`` gives.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hotbunk.rollout.arena import PAGE
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import Tag
from hotbunk.rollout.kernels import as_bytes

Place = dict[str, Any]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read(places: Sequence[Place], name: str) -> bytes:
    """A tensor whole. What several workers hold of it must be the same in each."""
    dtype, shape, _ = places[0]["tensors"][name]
    bits = _BITS[dtype_from(dtype).itemsize]
    whole, seen = torch.zeros(shape, dtype=bits), torch.zeros(shape, dtype=torch.bool)
    for place in places:
        its, held = torch.zeros_like(whole), torch.zeros_like(seen)
        for address, into_stride, offset, size, stride in place["tensors"][name][2]:
            elements = 1 + sum((n - 1) * s for n, s in zip(size, into_stride, strict=True))
            raw = _peek(place["pid"], address, elements * bits.itemsize if whole.numel() else 0)
            lies = torch.frombuffer(raw, dtype=bits).as_strided(size, into_stride)
            its.as_strided(size, stride, offset).copy_(lies)
            held.as_strided(size, stride, offset).fill_(True)
        both = seen & held
        assert torch.equal(whole[both], its[both]), f"workers hold different bytes of {name}"
        whole, seen = torch.where(held, its, whole), seen | held
    assert seen.all(), f"no worker holds all of {name}"
    return as_bytes(whole).numpy().tobytes()


def corrupt(places: Sequence[Place], name: str) -> bool:
    """Flip a bit of it in the last worker that has a part: the others know nothing of it."""
    place = next(one for one in reversed(places) if one["tensors"][name][2])
    address = place["tensors"][name][2][0][0]
    memory = os.open(f"/proc/{place['pid']}/mem", os.O_RDWR)
    try:
        [byte] = os.pread(memory, 1, address)
        return os.pwrite(memory, bytes([byte ^ 1]), address) == 1
    finally:
        os.close(memory)


def resident(place: Place, tag: Tag) -> int:
    """Bytes that the operating system holds where the tag's memory lies.

    Of a file's memory, those of the file: the kernel may take pages from page tables and keep them.
    """
    pid, found = place["pid"], 0
    for address, nbytes in place["arenas"][tag.value]:
        first, last = address // PAGE * PAGE, -(-(address + nbytes) // PAGE) * PAGE
        device, inode, at = _mapping(pid, first)
        file = _open(pid, device, inode) if inode else None
        if file is None:
            found += _mapped(pid, first, last)
            continue
        try:
            found += _written(file, at, at + last - first)
        finally:
            os.close(file)
    return found


def backup(place: Place) -> int:
    """Bytes of nameless files that a worker holds and has not mapped: its backups."""
    process = Path(f"/proc/{place['pid']}")
    maps = (process / "maps").read_text(encoding="ascii", errors="replace")
    mapped = {int(line.split(None, 5)[4]) for line in maps.splitlines()}
    found = 0
    for entry in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(entry).endswith(" (deleted)"):
                status = entry.stat()
                found += 0 if status.st_ino in mapped else status.st_blocks * 512
    found -= int(place["state"])  # kept through every release
    edges = 2 * PAGE * len(place["tensors"])  # of holes, where a tensor was forgotten
    return found if found > edges else 0


def _peek(pid: int, address: int, nbytes: int) -> bytearray:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        return bytearray(os.pread(memory, nbytes, address))
    finally:
        os.close(memory)


def _mapping(pid: int, address: int) -> tuple[str, int, int]:
    """Device and inode (0: none) mapped at an address, and the offset there."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="ascii", errors="replace")
    for line in maps.splitlines():
        span, _, offset, device, inode = line.split(None, 5)[:5]
        start, end = (int(one, 16) for one in span.split("-"))
        if start <= address < end:
            return device, int(inode), int(offset, 16) + address - start
    return "", 0, 0


def _open(pid: int, device: str, inode: int) -> int | None:
    """A descriptor of a file that the process has open; None: it has no such file."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            about = entry.stat()
            its = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
            if (its, about.st_ino) == (device, inode) and stat.S_ISREG(about.st_mode):
                return os.open(entry, os.O_RDONLY)
    return None


def _written(file: int, start: int, end: int) -> int:
    found = 0
    while start < end:
        try:
            data = os.lseek(file, start, os.SEEK_DATA)
        except OSError:  # none from here on
            break
        hole = min(os.lseek(file, data, os.SEEK_HOLE), end)
        found += max(hole - data, 0)
        start = max(hole, data)
    return found


def _mapped(pid: int, start: int, end: int) -> int:
    with open(f"/proc/{pid}/pagemap", "rb") as pages:
        pages.seek(start // PAGE * 8)
        words = array("Q", pages.read((end - start) // PAGE * 8))
    return sum(word >> 63 for word in words) * PAGE

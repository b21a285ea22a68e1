"""A receiver rank in a process of its own, without torch. Told what to do by a line of JSON.

Prints ``ready`` lines as it goes (so that a test may kill it there) and a line of JSON at its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.transports.ipc.devices import received, receiver_pool
from hotbunk.rollout.contract import (
    ITEMSIZE,
    ArenaHandle,
    Bucket,
    Manifest,
    ReceiverLayout,
    Ticket,
    Transfer,
)
from hotbunk.rollout.errors import HotbunkError, TiedMismatch, VerifyFailed
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.registry import open_transfer


class Receiver:
    """What an engine does in an update, byte by byte."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.fault = told.get("fault") or {}
        self.layout = None
        if told.get("layout") is not None:
            self.layout = msgspec.convert(told["layout"], ReceiverLayout)
        self.fd = -1
        self.arena: mmap.mmap | None = None
        self.device: Any = None  # an arena in memory of the fake device
        if told.get("device_arena"):
            pool = receiver_pool("fake", "")
            self.device = pool.arena("weights", told["arena"])
            self.device.add("all", told["arena"])
            self.device.write(0, b"\xee" * told["arena"])
        elif told.get("arena"):
            self.fd = os.memfd_create("arena")
            os.ftruncate(self.fd, told["arena"])
            self.arena = mmap.mmap(self.fd, told["arena"])
            self.arena[:] = b"\xee" * told["arena"]

    def at(self, phase: str, bucket: int = 0) -> None:
        """A place where a fault may be planned."""
        fault = self.fault
        if fault.get("phase") != phase or fault.get("bucket", 0) != bucket:
            return
        if fault["kind"] == "raise":
            raise TiedMismatch(("a planned failure",))
        print("fault", flush=True)
        if fault["kind"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)

    async def run(self, ticket: Ticket) -> dict[str, Any]:
        self.at("open")
        transfer = await open_transfer(ticket)
        try:
            return await self.update(transfer)
        except BaseException as error:
            await transfer.abort(error)
            raise

    async def update(self, transfer: Transfer) -> dict[str, Any]:
        manifest = transfer.manifest
        self.at("accept")
        if self.told.get("decline"):
            await transfer.decline()
            return {"outcome": "declined"}
        handle = None
        if self.arena is not None:
            handle = ArenaHandle("file", self.told.get("claims", len(self.arena)), self.fd)
        shared = None
        if self.device is not None:
            shared = self.device.export()
            handle = ArenaHandle("fake", shared.nbytes, shared.fd)
        try:
            in_place = await transfer.accept(self.layout, handle)
        finally:
            if shared is not None:
                os.close(shared.fd)
        sizes = self.sizes(manifest)
        content = [bytearray(n) for n in sizes]
        intake = Intake(manifest, sizes)
        self.at("accepted")
        untouched = self.arena is None or self.arena[:] == b"\xee" * len(self.arena)
        number = 0

        def write(bucket: Bucket) -> None:
            nonlocal number
            self.at("bucket", number)
            if not self.told.get("applies", True):
                return
            size = None if bucket.data is None else len(bucket.data)
            for e in intake.check(bucket, size):
                if bucket.data is not None:
                    piece = bucket.data[e.offset : e.offset + e.nbytes]
                    content[e.index][e.start : e.start + e.nbytes] = piece
                    del piece
            if self.told.get("flip") == number and content:
                content[-1][0] ^= 1
            number += 1

        if self.fault.get("kind") == "hang":  # a thread that stops its process runs on for a moment
            async for bucket in transfer.buckets():
                write(bucket)
        else:
            await transfer.take(write)
        self.at("end")
        applied = intake.finish()
        sent = await transfer.fingerprints()
        self.at("fingerprints")
        got = self.collect(manifest, content, in_place)
        wrong = [n for n in sent if fingerprint_bytes(got[n]) != sent[n]]
        if wrong:
            raise VerifyFailed(wrong)
        self.at("commit")
        await transfer.commit()
        return {
            "outcome": "committed",
            "in_place": in_place,
            "untouched": untouched,
            "applied": applied,
            "buckets": number,
            "nbytes": intake.nbytes,
            "verified": sorted(sent),
            "sha": {n: hashlib.sha256(data).hexdigest() for n, data in got.items()},
        }

    def sizes(self, manifest: Manifest) -> list[int]:
        """Bytes of each tensor as this receiver asked for it."""
        found = []
        for spec in manifest.tensors:
            if self.layout is None:
                found.append(spec.nbytes)
                continue
            place = next(
                (self.layout.tensors[n] for n in spec.names if n in self.layout.tensors), None
            )
            count = ITEMSIZE[place.dtype] if place else 0
            for n in place.shape if place else ():
                count *= n
            found.append(count)
        return found

    def collect(
        self, manifest: Manifest, content: list[bytearray], in_place: bool
    ) -> dict[str, bytes]:
        """What arrived, by name."""
        got = {}
        for spec, data in zip(manifest.tensors, content, strict=True):
            for name in spec.names:
                got[name] = bytes(data)
                if in_place and self.layout is not None and name in self.layout.tensors:
                    at = self.layout.tensors[name].offset
                    if self.device is not None:
                        got[name] = self.device.read(at, len(data))
                    else:
                        assert self.arena is not None
                        got[name] = self.arena[at : at + len(data)]
        return got


def open_files() -> int:
    """Descriptors of this process, but for the arena's."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def main(told: dict[str, Any]) -> dict[str, Any]:
    receiver = Receiver(told)
    ticket = msgspec.convert(told["ticket"], Ticket)
    await asyncio.sleep(told.get("late", 0))
    for function, nth in told.get("device_fails", {}).items():
        receiver_pool("fake", "").fail(function, nth)
    before = open_files()
    began = time.monotonic()
    try:
        said = await receiver.run(ticket)
    except HotbunkError as error:
        said = {
            "outcome": "failed",
            "error": type(error).__name__,
            "text": str(error),
            "traceback": error.remote_traceback,
        }
    said["seconds"] = time.monotonic() - began
    said["leaked"] = open_files() - before
    if receiver.device is not None:
        receiver_pool("fake", "").drop(receiver.device)
        receiver.device = None
    said["ledger"] = [received.imports, received.closes]
    if told.get("device"):
        said["live"] = [receiver_pool("fake", "").count(n) for n in ("imported", "maps", "ranges")]
    said["torch"] = "torch" in sys.modules
    return said


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(main(json.loads(line)))), flush=True)

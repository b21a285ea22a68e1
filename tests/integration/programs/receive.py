"""One receiver rank as a process of its own: takes a sync and says what it got.

Reads one JSON object from its arguments, and writes one JSON object a line. ``phase`` and ``how``
make it raise, stop, die or sleep when it gets there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from hotbunk.rollout.contract import Placement, ReceiverLayout, Ticket
from hotbunk.rollout.errors import HotbunkError, VerifyFailed
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.registry import open_transfer

ITEM = {"float32": 4, "bfloat16": 2, "float64": 8}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Raised(Exception):
    pass


async def reach(options: dict[str, Any], phase: str) -> None:
    say(reached=phase)
    if options.get("phase") != phase:
        return
    how = options["how"]
    if how == "raise":
        raise Raised(f"at {phase}")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        await asyncio.sleep(options["seconds"])


async def sync(options: dict[str, Any], ticket: Ticket) -> None:
    transfer = await open_transfer(ticket)
    manifest = transfer.manifest
    try:
        await reach(options, "open")
        if options.get("decline"):
            await transfer.decline()
            say(declined=True)
            return
        layout = None
        dtype = options.get("dtype")
        sizes = [spec.nbytes for spec in manifest.tensors]
        if dtype:
            floats = set(ITEM)
            wanted = {
                spec.name: Placement(dtype if spec.dtype in floats else spec.dtype, spec.shape)
                for spec in manifest.tensors
            }
            layout = ReceiverLayout(wanted)
            sizes = [
                spec.nbytes // ITEM[spec.dtype] * ITEM[dtype]
                if spec.dtype in floats
                else spec.nbytes
                for spec in manifest.tensors
            ]
        await transfer.accept(layout)
        await reach(options, "accepted")
        contents = [bytearray(size) for size in sizes]
        intake = Intake(manifest, sizes)
        async for bucket in transfer.buckets():
            view = bucket.data
            if type(view).__name__ == "Tensor":
                view = view.numpy() if hasattr(view, "numpy") else view
            view = memoryview(view).cast("B")
            for entry in intake.check(bucket, view.nbytes):
                piece = view[entry.offset : entry.offset + entry.nbytes]
                contents[entry.index][entry.start : entry.start + entry.nbytes] = piece
            if options.get("flip") == intake.buckets - 1:
                contents[bucket.entries[0].index][bucket.entries[0].start] ^= 1
            await reach(options, f"bucket {intake.buckets - 1}")
        await reach(options, "end")
        intake.finish()
        expected = await transfer.fingerprints()
        await reach(options, "fingerprints")
        if manifest.fingerprint != "none":
            differing = [
                spec.name
                for spec, content in zip(manifest.tensors, contents, strict=True)
                if len(content) <= 1 << 20 and expected[spec.name] != fingerprint_bytes(content)
            ]
            if differing:
                raise VerifyFailed(differing)
        await reach(options, "commit")
        await transfer.commit()
    except BaseException as error:
        await transfer.abort(error)
        raise
    say(
        committed=str(manifest.version),
        buckets=intake.buckets,
        nbytes=intake.nbytes,
        torch="torch" in sys.modules,
        digests={
            name: hashlib.sha256(content).hexdigest()
            for spec, content in zip(manifest.tensors, contents, strict=True)
            for name in spec.names
        },
    )


async def main() -> None:
    options = json.loads(sys.argv[1])
    say(pid=os.getpid())
    tickets = [options.pop("ticket")] if "ticket" in options else None
    while True:
        if tickets is not None:
            if not tickets:
                return
            raw = tickets.pop()
        else:  # one ticket a line, for processes that live through several syncs
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line.strip():
                return
            raw = json.loads(line)
        began = time.monotonic()
        try:
            await sync(options, Ticket(**raw))
        except (HotbunkError, Raised) as error:
            say(
                error=type(error).__name__,
                text=str(error),
                traceback=getattr(error, "remote_traceback", ""),
                seconds=time.monotonic() - began,
            )


if __name__ == "__main__":
    asyncio.run(main())

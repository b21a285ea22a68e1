"""Builds a group of two again and again, with more and more descriptors; a line of JSON each time."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys

from hotbunk.checkpoint_engine.transports.collective.groups import Group, open_store
from hotbunk.rollout.errors import HotbunkError


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def build(number: int) -> str:
    try:
        _store, port = open_store("127.0.0.1", 1.0)
    except HotbunkError as error:
        return type(error).__name__
    groups = [Group(f"g/{number}", 1, r, 2, backend="gloo", address="127.0.0.1") for r in range(2)]
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.gather(
            *(loop.run_in_executor(g.executor, g.init, "127.0.0.1", port, 1.0) for g in groups),
            return_exceptions=True,
        )
    finally:
        for one in groups:
            one.close()
            one.executor.shutdown()
    wrong = [one for one in found if one is not None]
    assert all(isinstance(one, HotbunkError) for one in wrong), wrong
    return type(wrong[0]).__name__ if wrong else "built"


def main(most: int, step: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert asyncio.run(build(0)) == "built"
    gc.collect()
    before = open_files()
    for spare in range(8, most, step):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
        try:
            said = asyncio.run(build(spare + 1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        print(json.dumps({"spare": spare, "said": said, "left": open_files() - before}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

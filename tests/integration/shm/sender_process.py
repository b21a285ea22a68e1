"""A trainer in a process of its own: offers once to as many replicas as it is told, and serves.

Reads a line of JSON, prints the tickets, then what became of the serving.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.contract import FULL, Manifest, TensorSpec, Version
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.fingerprint import KIND


class Source:
    """Twenty tensors, of which one may be the last that this process gives."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self._fault = fault
        self._inner = state_dict_source({str(n): torch.full((256,), float(n)) for n in range(20)})

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(self._inner.tensors()):
            if number == self._fault.get("tensor"):
                print("fault", flush=True)
                os.kill(
                    os.getpid(),
                    signal.SIGKILL if self._fault["kind"] == "die" else signal.SIGSTOP,
                )
            yield tensor


async def main(told: dict[str, Any]) -> None:
    transport = ShmTransport(stall=told["stall"], directory=Path(told["directory"]))
    source = Source(told.get("fault") or {})
    manifest = Manifest(Version(0, 1), source.specs(), FULL, 2048, KIND)
    offer = await transport.offer(source, manifest, ranks=told["ranks"], deadline=60.0)
    print(json.dumps(msgspec.to_builtins(offer.tickets)), flush=True)
    said = "served"
    try:
        await offer.serve()
    except HotbunkError as error:
        said = f"{type(error).__name__}: {error}"
    await offer.close()
    await transport.close()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))

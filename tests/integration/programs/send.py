"""The sender as a process of its own. Reads one JSON object from its arguments: transport, options,
ranks, a phase at which it stops or dies. Says its tickets, and how it went.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from weights import manifest_of, simple  # type: ignore[import-not-found]

from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.registry import load_transport


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Failing:
    """A source that stops, dies or raises when tensor ``at`` is asked for."""

    def __init__(self, inner: Any, at: int, how: str) -> None:
        self.inner, self.at, self.how = inner, at, how

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        for n, tensor in enumerate(self.inner.tensors()):
            if n == self.at:
                say(reached=f"tensor {n}")
                if self.how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(1)  # another thread may have been the one to stop first
                raise RuntimeError("the gather broke")
            yield tensor


async def main() -> None:
    options = json.loads(sys.argv[1])
    transport = load_transport(options["transport"])(**options["options"])
    source: Any = state_dict_source(simple(options.get("seed", 1)))
    if "at" in options:
        source = Failing(source, options["at"], options["how"])
    manifest = manifest_of(source, step=options.get("step", 1), bucket_bytes=4096)
    offer = await transport.offer(
        source, manifest, ranks=options["ranks"], deadline=options.get("deadline", 120.0)
    )
    say(tickets=[[t.transport, t.address, t.ranks] for t in offer.tickets], pid=os.getpid())
    try:
        await offer.serve()
    except HotbunkError as error:
        say(error=type(error).__name__, text=str(error))
    finally:
        await offer.close()
        await transport.close()
    say(ended=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())

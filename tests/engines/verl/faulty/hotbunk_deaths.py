"""Deaths at any time but in a sync: ``hotbunk.setup=hotbunk_deaths:arm``, called in each engine's process.

``HOTBUNK_DEATHS`` is a folder, in which a file stands for each death that was died. The next of these is due:
the engine in the middle of an answer, its server's actor likewise, the engine asleep.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DEATHS = ("engine", "actor", "asleep")
ANSWERS = 20  # that an engine begins before it dies


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def arm() -> None:
    """Die the next death of the list, if one is left."""
    from hotbunk.rollout.replica import Replica

    folder = Path(os.environ["HOTBUNK_DEATHS"])
    due = next((death for death in DEATHS if not (folder / death).exists()), "")
    begun = 0
    generate, sleep = Replica.generate, Replica.sleep

    def die() -> None:
        (folder / due).touch()
        victim = os.getpid()
        if due == "actor":
            victim = _parent(_parent(victim))  # between them is the fork server
            while b"RolloutServer" not in Path(f"/proc/{victim}/cmdline").read_bytes():
                victim = _parent(victim)
        os.kill(victim, signal.SIGKILL)

    async def generated(self: Any, request: Any) -> AsyncIterator[Any]:
        nonlocal begun
        begun += 1
        async for chunk in generate(self, request):
            yield chunk
            if due in ("engine", "actor") and begun >= ANSWERS:
                die()

    async def slept(self: Any, *args: Any, **kw: Any) -> Any:
        report = await sleep(self, *args, **kw)
        if due == "asleep" and begun:
            die()
        return report

    Replica.generate, Replica.sleep = generated, slept  # type: ignore[method-assign, assignment]

"""Deaths at any time but in a sync: ``hotbunk.setup=hotbunk_deaths:arm``, called in each engine's process.

``HOTBUNK_DEATHS`` is a folder, in which a file stands for each death that was died; of several engines one dies
each. ``HOTBUNK_DEATHS_DUE`` names them, comma between them (engine,actor,asleep): the engine in the middle of an
answer, its server's actor likewise, the engine asleep; ``core``: vLLM's own process, in the middle of an answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DEATHS = tuple(os.environ.get("HOTBUNK_DEATHS_DUE", "engine,actor,asleep").split(","))
ANSWERS = 20  # that an engine begins before it dies


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _core() -> int:
    """vLLM's engine core, which this process started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()):
            return int(child.pid)
    raise RuntimeError("no engine core of vLLM's is running here")


def arm() -> None:
    """Die the next death of the list, if one is left."""
    from hotbunk.rollout.replica import Replica

    folder = Path(os.environ["HOTBUNK_DEATHS"])
    due = next((death for death in DEATHS if not (folder / death).exists()), "")
    begun = 0
    generate, sleep = Replica.generate, Replica.sleep

    def die() -> None:
        try:
            (folder / due).touch(exist_ok=False)
        except FileExistsError:
            return  # another's
        victim = _core() if due == "core" else os.getpid()
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
            if due in ("engine", "actor", "core") and begun >= ANSWERS:
                die()

    async def slept(self: Any, *args: Any, **kw: Any) -> Any:
        report = await sleep(self, *args, **kw)
        if due == "asleep" and begun:
            die()
        return report

    Replica.generate, Replica.sleep = generated, slept  # type: ignore[method-assign, assignment]

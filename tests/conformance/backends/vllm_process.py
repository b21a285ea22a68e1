"""vLLM in a process of its own, as ``rollout.process=true`` starts it, and as the suite sees it.

One process serves all cases: before each it is woken, opened, emptied and sent version 0, in an incarnation
of its own, since the replica over there lives on. Bytes are read past it, as in :mod:`.vllm`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from hotbunk.conformance.backends import vllm_inside
from hotbunk.conformance.backends.driven import Driven, Relabelling
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.rollout.contract import Engine
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.registry import create_backend


class VllmProcessUnderTest(VllmUnderTest):
    """Options as for ``vllm``; ``transport`` is the way of what a case sends.

    A worker that is written in place (``shm``) takes itself for dirty once it has said that it may be, so a
    sender that fails before its first byte poisons it; the default packs.
    """

    name = "vllm_process"
    long_tokens = 600  # what has been made over there may be far ahead of what has come here

    def __init__(self, *, transport: str = "collective", **options: Any) -> None:
        self._transport, self._incarnation = transport, 0
        super().__init__(**options)
        self._seen = Path(tempfile.mkdtemp(prefix="seen-", dir=self._folder.path))
        self.expected_not_run = {
            **self.expected_not_run,
            "the_engine_itself_refuses": "whoever asks meets the process's replica first",
        }

    @property
    def _told(self) -> Path:
        return self._seen

    def sabotage(self, point: str, how: str) -> bool:
        """By a word left in a file, in the adapter's process or the worker's."""
        vllm_inside.ask(self._seen, point, how)
        return True

    # -- inside -------------------------------------------------------------------------------

    def _create(self) -> Engine:
        options = {"model": str(self._disk), **self._options}
        made = _Living(
            ReplicaSpec(
                vllm_inside.NAME,
                options,
                name=self.name,
                deadlines=self.deadlines,
                env={vllm_inside.FOLDER: str(getattr(self, "_seen", ""))},
                setup=f"{vllm_inside.__name__}:setup",
            ),
            self._transport,
        )
        declared = create_backend("vllm", **options).capabilities
        made.capabilities = dataclasses.replace(declared, ranks=1)
        return made

    async def _places(self, engine: Engine) -> list[dict[str, Any]]:
        return vllm_inside.places(self._seen)

    async def _reset(self, engine: Engine) -> bool:
        assert isinstance(engine, _Living)
        vllm_inside.forget(self._seen)
        try:
            # A case uses two of its own: the second stands for a trainer that went back.
            self._incarnation += 2
            await engine.opened()
        except HotbunkError:
            return False
        engine.incarnation = self._incarnation
        return await super()._reset(engine)


class _Living(Relabelling, Driven):
    """It outlives a case."""

    async def opened(self) -> None:
        """Awake, with nothing in flight and nobody's pause. :raises ReplicaLost: it is not there."""
        await self.status()
        await self.handle.abort()
        await self.handle.wake_up()
        for pause in (await self.handle.status()).pauses:
            await self.handle.resume_generation(owner=pause.owner)

"""verl's client of rollout servers that continues what was cut off, and knows a response's versions.

verl's takes the version of a response's last token for that of every one. A request that lived
through a sync (``policy.pause=keep``) has tokens of several.

A request whose engine or whose server's actor died is one that was cut off: it goes on when the trainer
has replaced what died (``manager.heal``).
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from hotbunk.rollout.errors import ReplicaLost, WeightsNotLoaded

log = logging.getLogger(__name__)
PATIENCE = 600.0  # seconds in which a server that died must have been replaced

_seen: ContextVar[list[int] | None] = ContextVar("hotbunk_steps", default=None)
_lost: ContextVar[list[float] | None] = ContextVar("hotbunk_lost", default=None)


class _Noting(LLMServerClient):  # type: ignore[misc]
    """Each attempt's versions, noted for who puts them together; an attempt that met a death was cut off."""

    async def generate(self, *args: Any, **kw: Any) -> Any:
        lost = _lost.get()
        try:
            output = await super().generate(*args, **kw)
        # WeightsNotLoaded: it is there again, and its weights are on their way.
        except (ReplicaLost, WeightsNotLoaded, RayActorError) as error:
            if lost is None:
                raise
            now = asyncio.get_running_loop().time()
            if not lost:
                log.warning("a request waits until its engine has been replaced: %s", error)
                lost.append(now)
            if now - lost[0] > PATIENCE:
                raise
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted")
        if lost is not None and output.token_ids:
            lost.clear()
        seen = _seen.get()
        if seen is not None and output.token_ids:
            fields = output.extra_fields
            ends = (fields.get("min_global_steps"), fields.get("max_global_steps"))
            seen.extend(step for step in ends if step is not None)
        return output


class HotbunkClient(FullyAsyncLLMServerClient, _Noting):  # type: ignore[misc]
    """See the module."""

    async def generate(self, *args: Any, **kw: Any) -> Any:
        """verl's, with the versions of the first and the last token."""
        seen: list[int] = []
        tokens = _seen.set(seen), _lost.set([])
        try:
            output = await super().generate(*args, **kw)
        finally:
            _seen.reset(tokens[0])
            _lost.reset(tokens[1])
        if seen:
            output.extra_fields["min_global_steps"] = min(seen)
            output.extra_fields["max_global_steps"] = max(seen)
        return output

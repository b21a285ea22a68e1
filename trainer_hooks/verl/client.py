"""verl's client of rollout servers that continues what was cut off, and knows a response's versions.

verl's takes the version of a response's last token for that of every one. A request that lived
through a sync (``policy.pause=keep``) has tokens of several.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

_seen: ContextVar[list[int] | None] = ContextVar("hotbunk_steps", default=None)


class _Noting(LLMServerClient):  # type: ignore[misc]
    """Each attempt's versions, noted for who puts them together."""

    async def generate(self, *args: Any, **kw: Any) -> Any:
        output = await super().generate(*args, **kw)
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
        token = _seen.set(seen)
        try:
            output = await super().generate(*args, **kw)
        finally:
            _seen.reset(token)
        if seen:
            output.extra_fields["min_global_steps"] = min(seen)
            output.extra_fields["max_global_steps"] = max(seen)
        return output

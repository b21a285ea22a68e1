"""What is in flight at a server, and how it is brought to stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.pauses import Flight
from hotbunk.rollout.backends.vllm_http.streams import Stream

_SECONDS = 10.0
_AGAIN = 0.2  # seconds until one that has not ended is asked to again


class RemoteFlight(Flight[Stream]):
    """As in vLLM's own process, but a request and a call about it may overtake each other."""

    async def _until_ended(self, streams: Mapping[str, Stream], verb: str) -> None:
        """One that reached the server after the call is ended by its id, as soon as it is there.

        :raises EngineFailed: some did not end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _SECONDS
        while left := {key: it for key, it in streams.items() if not it.ended.is_set()}:
            waiting = [asyncio.ensure_future(it.ended.wait()) for it in left.values()]
            try:
                _, late = await asyncio.wait(waiting, timeout=_AGAIN)
            finally:
                for one in waiting:
                    one.cancel()
            if late and loop.time() >= until:
                raise errors.EngineFailed(
                    f"{verb} ended {len(streams) - len(left)} of {len(streams)} requests; still in "
                    f"flight: {errors.shown(left)}"
                )
            if late:
                ids = [it.internal_id for it in left.values() if not it.ended.is_set()]
                await self._llm().abort(ids, internal=True)

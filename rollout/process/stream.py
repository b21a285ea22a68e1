"""One stream of chunks from another process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from hotbunk.rollout.contract import GenerateRequest, TokenChunk, Version
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.gate import Entry
from hotbunk.rollout.process.messages import WINDOW, BrokenFrame


class Stream:
    """Chunks that came and were not read yet: at most a window of them.

    ``over``: nothing more will come.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.over = False
        self._entry = Entry(request)
        self._waiting: deque[TokenChunk] = deque()
        self._error: HotbunkError | None = None
        self._some = asyncio.Event()
        self._over = asyncio.Event()
        self._taken = 0

    async def next(self) -> TokenChunk | None:
        """The next chunk; None: that was all.

        :raises HotbunkError: what ended the stream, after the chunks before it.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self.over:
                return None
            self._some.clear()
            await self._some.wait()
        self._taken += 1
        return self._waiting.popleft()

    def taken(self) -> int:
        """How many chunks were read since this last said so; 0 while it is not worth telling."""
        if self._taken < WINDOW // 2 or self.over:
            return 0
        taken, self._taken = self._taken, 0
        return taken

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        """:raises BrokenFrame: more came than was allowed, or it is not of this request."""
        for chunk in chunks:
            if chunk.request_id != self._entry.request.request_id:
                raise BrokenFrame(f"a chunk of request {chunk.request_id!r} in another's stream")
            if chunk.finish_reason is not None:
                self._entry.left.discard(chunk.index)
        self._waiting.extend(chunks)
        if len(self._waiting) > WINDOW:
            raise BrokenFrame(f"{len(self._waiting)} chunks came and {WINDOW} were allowed")
        self._some.set()

    def end(self) -> None:
        """It came to its end there."""
        self.over = True
        self._some.set()
        self._over.set()

    def fail(self, error: HotbunkError) -> None:
        """It ended in an error there."""
        self._error = error
        self.end()

    def lose(self, reason: str, version: Version) -> None:
        """The process is gone: what has not finished ends here, and may be sent again."""
        self._entry.reason = reason
        self._waiting.extend(self._entry.ended(version))
        self._entry.left.clear()
        self.end()

    async def until_over(self, seconds: float) -> None:
        """Wait for the end, so long at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass

"""The contract over a server: what a Replica here drives, through the server's own Replica."""

from __future__ import annotations

import dataclasses

from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.errors import SessionError
from hotbunk.rollout.http.driven import DrivenEngine, relayed

OWNER = "hotbunk_http"  # of the pauses that the driver here asks for


class HttpEngine(DrivenEngine):
    """See the package. The server keeps every rule by itself, for whoever else asks it."""

    handle: HttpHandle

    def __init__(self, options: HttpOptions) -> None:
        super().__init__(
            "hotbunk_http",
            owner=OWNER,
            transport=options.relay,
            deadline=options.deadlines.update,
            where=options.url,
        )
        self.options = options

    async def start(self) -> None:
        """Connect.

        :raises SessionError: the server sleeps, which its driver here could not know.
        """
        self.handle = await HttpHandle.connect(self.options)
        status = await self.handle.status()
        if status.is_sleeping:
            await self.handle.close()
            raise SessionError(
                "the server sleeps", where=self.options.url, remedy="wake it up, then connect"
            )
        said = relayed(self.handle.capabilities)
        self.capabilities = dataclasses.replace(said, backend="hotbunk_http")

    async def close(self) -> None:
        if hasattr(self, "handle"):
            await self.handle.close()

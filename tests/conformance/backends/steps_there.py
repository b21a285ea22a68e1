"""An update in steps over HTTP: each is a call to the server's own route."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from hotbunk.conformance.steps import Steps
from hotbunk.rollout.backends.hotbunk_http.client import Client
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import (
    TARGET,
    Capabilities,
    Scope,
    Ticket,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.http.relay import relay


class StepsThere(Steps):
    """One client of ``hotbunk serve``, beside whoever else drives it. What it sends goes by tickets."""

    past_the_front = True

    def __init__(self, options: HttpOptions, client: Client, handle: HttpHandle) -> None:
        self._options, self._client, self._handle = options, client, handle
        self._generation = 0

    @classmethod
    async def begun(cls, options: HttpOptions) -> Self:
        """As another client than all before."""
        made = cls(options, Client(options), await HttpHandle.connect(options))
        try:
            body = await made._call("/init_weight_transfer_engine")
        except BaseException:
            await made.close()
            raise
        made._generation = int(msgspec.json.decode(body)["generation"])
        return made

    @property
    def capabilities(self) -> Capabilities:
        """The server's: how many ranks open a ticket."""
        return self._handle.capabilities

    async def start(self) -> None:
        await self._call("/start_weight_update")

    async def update(self, transfer: Transfer) -> UpdateReport:
        return await relay(self, transfer, self._options.relay, self._options.deadlines.update)

    async def update_weights(
        self, source: Ticket, *, version: Version, scope: Scope
    ) -> UpdateReport:
        """Of the relay: the ticket alone goes over the wire."""
        content = {"ticket": source, "version": version, "scope": scope}
        path = "/update_weights"
        body = await self._call(path, content, seconds=self._options.deadlines.update)
        return self._client.report(path, body, UpdateReport)

    async def finish(self, version: Version | None = None) -> Version:
        content = {} if version is None else {"weight_version": version}
        path = "/finish_weight_update"
        return self._client.report(path, await self._call(path, content), UpdateReport).version

    async def abort(self) -> None:
        await self._call("/abort_weight_update")

    async def label(self) -> Version | None:
        return (await self._handle.status()).versions.get(TARGET)

    async def close(self) -> None:
        await self._client.close()
        await self._handle.close()

    async def _call(self, path: str, content: Any = None, *, seconds: float = 0.0) -> bytes:
        waits = self._options.deadlines
        if path != "/init_weight_transfer_engine":
            content = {"generation": self._generation, **(content or {})}
        limit = (seconds or waits.inspect) + waits.grace
        return await self._client.call(path, limit, content=content, repeat=False)

"""What all routes of one server share, and who may use them."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

import msgspec
from fastapi import Depends, HTTPException, Request, Response

from hotbunk.rollout.contract import TARGET, UpdateReport, Version
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.server.metrics import Metrics
from hotbunk.rollout.server.settings import LOOPBACK, Settings, digest_key
from hotbunk.rollout.server.text import Texts

BOOT_HEADER = "x-hotbunk-boot"  # tells one run of a server from the next

Load = Callable[[ReplicaHandle, Path, Version], Awaitable[UpdateReport]]


class Plane:
    """One server's replica, tokenizer and settings.

    ``load`` updates the replica from a directory of safetensors files; without it that endpoint is
    not there.
    """

    def __init__(
        self, replica: ReplicaHandle, texts: Texts, settings: Settings, load: Load | None = None
    ) -> None:
        self.replica = replica
        self.texts = texts
        self.settings = settings
        self.load = load
        self.boot = uuid.uuid4().hex
        self.metrics = Metrics()
        self.leaving = False
        self._newest = Version()
        self.responses: dict[str, tuple[str, ...]] = {}  # a response's id -> those of its requests

    @property
    def ranks(self) -> int:
        """How many ranks a verb that succeeded has reached: all of them."""
        return self.replica.capabilities.ranks

    async def newest(self) -> Version:
        """The newest version this server has seen, also when it holds none now."""
        held = (await self.replica.status()).versions.get(TARGET)
        self._newest = max(self._newest, held or self._newest)
        return self._newest


def _plane(request: Request) -> Plane:
    return cast(Plane, request.app.state.plane)


Shared = Annotated[Plane, Depends(_plane)]


def require_key(request: Request, plane: Shared) -> None:
    """One of the keys, where there are any. Compared without telling how much of it was right."""
    keys = plane.settings.keys
    if not keys:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = digest_key(key.strip())
    fits = [hmac.compare_digest(given, known) for known in keys]
    if scheme.lower() != "bearer" or not any(fits):
        raise HTTPException(
            401, "a key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        )


def require_local(request: Request, plane: Shared) -> None:
    """Without a key nobody but this machine's own programs: no page in a browser, no other name."""
    if plane.settings.keys:
        return
    origin = request.headers.get("origin")
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname
    if host not in LOOPBACK or (origin is not None and urlsplit(origin).hostname not in LOOPBACK):
        raise HTTPException(403, "control without a key is for programs on this machine")


def answer(content: Any, status: int = 200) -> Response:
    """Structs, enums and sets as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")

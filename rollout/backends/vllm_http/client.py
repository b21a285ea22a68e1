"""Calls to a vLLM server: its errors as ours, and the face of ``AsyncLLM`` over its routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from hotbunk.rollout.errors import (
    ConfigError,
    EngineFailed,
    HotbunkError,
    ReplicaLost,
    Unsupported,
    UsageError,
)
from hotbunk.rollout.http.client import ServerClient
from hotbunk.rollout.process.wire_errors import from_text


class VllmClient(ServerClient):
    """One vLLM server. Bounds, retries and what counts as lost are those of any other server."""

    def refusal(self, status: int, body: bytes) -> HotbunkError:
        """vLLM's error as ours: one that the engine itself raised is ``EngineFailed``."""
        what = _message(body)
        if (ours := from_text(what)) is not None:  # of hotbunk's engine in a worker there
            return ours
        what = what[:600]
        if status == 401:
            return ConfigError(f"the server refused the key ({status}): {what}", where=self.url)
        if status == 403:
            return Unsupported("this route", "vllm_http", what)
        if status == 404:
            return Unsupported("this route", "vllm_http", "start it with VLLM_SERVER_DEV_MODE=1")
        if status == 503 or "EngineDead" in what:
            self.lose(f"{self.url} says that its engine is dead: {what}")
            return self.gone()
        if 400 <= status < 500:
            return UsageError(f"the server answered {status}: {what}", where=self.url)
        return EngineFailed(f"the server answered {status}: {what}", where=self.url)

    def check_answer(self, answer: httpx.Response) -> None:
        """Its word for a dead engine, whatever was asked."""
        if answer.url.path == "/health" and answer.status_code == 503:
            self.lose(f"{self.url} says that its engine is dead")
            raise self.gone()

    async def look(self, path: str) -> bytes | None:
        """The content at a path; None where there is none. :raises ReplicaLost: nobody is there."""
        try:
            return await self.text(path)
        except (Unsupported, UsageError):
            return None

    async def is_there(self, verb: str, path: str) -> bool:
        """Whether the route is: a GET, which at a path for POST is refused and changes nothing."""
        try:
            await self.text(path)
        except Unsupported:
            return False
        except (HotbunkError, UsageError) as error:
            if isinstance(error, ReplicaLost):
                raise
            return verb == "POST" or "answered 405" not in str(error)
        return verb == "GET"


class RemoteLLM:
    """What the adapter calls on vLLM's ``AsyncLLM``, as calls to its server.

    Names and arguments are those of ``AsyncLLM``. Each call has ``seconds``; updates and others
    that are not idempotent are never repeated.
    """

    def __init__(self, client: VllmClient, seconds: float, memory: float, update: float) -> None:
        self._client = client
        self._seconds, self._memory, self._update = seconds, memory, update

    # -- generation ---------------------------------------------------------------------------

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._post("/pause", query={"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._post("/resume")

    async def is_paused(self) -> bool:
        return bool((await self._client.get("/is_paused", dict[str, bool]))["is_paused"])

    async def abort(self, request_id: Sequence[str], internal: bool = False) -> None:
        """By the ids under which the server itself keeps requests, not those of its answers."""
        if request_id:  # none at all would mean: every one
            await self._post("/abort_requests", content={"request_ids": list(request_id)})

    # -- caches -------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        query = {
            "reset_running_requests": reset_running_requests,
            "reset_external": reset_connector,
        }
        body = await self._post("/reset_prefix_cache", query=query)
        return bool(self._client.decoded("/reset_prefix_cache", body, dict[str, bool])["success"])

    async def reset_mm_cache(self) -> None:
        await self._post("/reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._post("/reset_encoder_cache")

    # -- memory: always by query, vLLM reads no body ------------------------------------------

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._once("/sleep", self._memory, query={"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        query = {} if tags is None else {"tags": list(tags)}
        body = await self._once("/wake_up", self._memory, query=query)
        return bool(self._client.decoded("/wake_up", body, dict[str, Any])["status"] == "awake")

    async def release_kv_cache_memory(self) -> None:
        await self._once("/release_kv_cache_memory", self._memory)

    async def is_sleeping(self) -> bool:
        return bool((await self._client.get("/is_sleeping", dict[str, bool]))["is_sleeping"])

    # -- weights ------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        content = {"init_info": init_info}
        await self._once("/init_weight_transfer_engine", self._update, content=content)

    async def start_weight_update(self) -> None:
        await self._once("/start_weight_update", self._update)

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        content = {"update_info": update_info}
        await self._once("/update_weights", self._update, content=content)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        content = {"weight_version": weight_version}
        await self._once("/finish_weight_update", self._update, content=content)

    async def update_weight_version(self, new_version: str) -> None:
        await self._post("/update_weight_version", content={"new_version": new_version})

    async def get_weight_version(self) -> str:
        return (await self._client.get("/weight_info", dict[str, str]))["weight_version"]

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """On every rank of one engine; results as JSON has them."""
        content = {
            "method": method,
            "args": list(args),
            "kwargs": dict(kwargs or {}),
        }
        body = await self._once("/collective_rpc", self._update, content=content)
        return list(self._client.decoded("/collective_rpc", body, dict[str, list[Any]])["results"])

    # -- inside -------------------------------------------------------------------------------

    async def _post(self, path: str, *, query: Any = None, content: Any = None) -> bytes:
        return await self._client.call(path, self._seconds, query=query, content=content)

    async def _once(
        self, path: str, seconds: float, *, query: Any = None, content: Any = None
    ) -> bytes:
        return await self._client.call(path, seconds, query=query, content=content, repeat=False)


def _message(body: bytes) -> str:
    """The words of vLLM's error, in whichever of its forms."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:300].decode("utf-8", "replace") or "nothing"
    about = said.get("error", said) if isinstance(said, dict) else said
    what = about.get("message", about) if isinstance(about, dict) else about
    return str(what)

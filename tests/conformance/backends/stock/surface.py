"""What answers at a URL, and which routes it has."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from hotbunk.rollout.errors import ConfigError, ReplicaLost
from hotbunk.rollout.server.plane import BOOT_HEADER

SECONDS = 10.0
PAGES = ("/version", "/get_server_info", "/server_info", "/v1/models")


class Surface(msgspec.Struct, frozen=True):
    """``kind`` is hotbunk, vllm or sglang. ``info`` is what its pages say, by path."""

    kind: str
    routes: frozenset[str]
    info: dict[str, Any]

    @property
    def version(self) -> str:
        """As it says; empty where it does not."""
        for page in self.info.values():
            if isinstance(page, dict) and isinstance(page.get("version"), str):
                return str(page["version"])
        return ""

    @property
    def model(self) -> str:
        """The model directory, as far as it tells."""
        served = self.info.get("/v1/models") or {}
        data = served.get("data") or [{}]
        return str(data[0].get("root") or data[0].get("id") or "")

    @property
    def context(self) -> int:
        """Tokens that a prompt and its response may have together; 0: it does not tell."""
        data = (self.info.get("/v1/models") or {}).get("data") or [{}]
        return int(data[0].get("max_model_len") or 0)

    @property
    def model_name(self) -> str:
        """What a request calls the model."""
        data = (self.info.get("/v1/models") or {}).get("data") or [{}]
        return str(data[0].get("id") or "")


def surface_of(url: str, key: str | None = None) -> Surface:
    """Ask it. Blocks, a few seconds at most.

    :raises ReplicaLost: nobody answers there.
    :raises ConfigError: what answers is no server that the suite can speak to.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=SECONDS, trust_env=False) as client:
        try:
            alive = client.get("/health")
            routes = _routes(client)
            info = {page: _said(client, page) for page in PAGES}
        except httpx.HTTPError as error:
            raise ReplicaLost(
                f"nobody answers: {str(error) or type(error).__name__}", where=url
            ) from error
    info = {page: said for page, said in info.items() if said is not None}
    if BOOT_HEADER in alive.headers:
        return Surface("hotbunk", routes, info)
    if {"/pause", "/sleep"} & routes and "/version" in info:
        return Surface("vllm", routes, info)
    if "/release_memory_occupation" in routes or "/pause_generation" in routes:
        return Surface("sglang", routes, info)
    raise ConfigError(
        f"what answers at {url} has no control routes that the suite knows",
        remedy="vLLM has them with VLLM_SERVER_DEV_MODE=1, hotbunk serve with --dev",
    )


# Asked one by one where there is no OpenAPI page.
_KNOWN = (
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"),
    *("/release_kv_cache_memory", "/reset_prefix_cache", "/abort_requests", "/weight_info"),
    *("/update_weight_version", "/reset_mm_cache", "/reset_encoder_cache", "/v1/completions"),
    *("/pause_generation", "/continue_generation", "/release_memory_occupation", "/flush_cache"),
    *("/resume_memory_occupation", "/update_weights_from_disk", "/abort_request", "/generate"),
)


def _routes(client: httpx.Client) -> frozenset[str]:
    page = _said(client, "/openapi.json")
    if isinstance(page, dict) and page.get("paths"):
        return frozenset(page["paths"])
    # A path that exists answers another method with 405, one that does not with 404.
    return frozenset(p for p in _KNOWN if client.options(p).status_code != httpx.codes.NOT_FOUND)


def _said(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    if answer.status_code != httpx.codes.OK:
        return None
    try:
        return msgspec.json.decode(answer.content)
    except msgspec.MsgspecError:
        return None

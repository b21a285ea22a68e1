"""What a vLLM server can do, asked before anything is changed there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec

from hotbunk.rollout.backends.vllm_http.client import VllmClient
from hotbunk.rollout.errors import ConfigError, HotbunkError, shown

# Without these nothing works. A route that this list gets wrong is found by the tests' real server.
NEEDED = (
    "GET /health",
    "GET /version",
    "GET /v1/models",
    "GET /metrics",
    "GET /server_info",
    "GET /is_paused",
    "GET /weight_info",
    "POST /pause",
    "POST /resume",
    "POST /abort_requests",
    "POST /reset_prefix_cache",
    "POST /reset_mm_cache",
    "POST /reset_encoder_cache",
    "POST /update_weight_version",
)
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
SLEEP = ("POST /sleep", "POST /wake_up", "GET /is_sleeping")
KV_RELEASE = ("POST /release_kv_cache_memory",)
TRANSFER = (
    "POST /init_weight_transfer_engine",
    "POST /start_weight_update",
    "POST /update_weights",
    "POST /finish_weight_update",
)
RPC = ("POST /collective_rpc",)
_ASKED = (*NEEDED, f"POST {TOKENS}", f"POST {COMPLETIONS}", *SLEEP, *KV_RELEASE, *TRANSFER, *RPC)
_LOOKING = 60.0  # seconds
_DEV = "start it with VLLM_SERVER_DEV_MODE=1"


class Model(msgspec.Struct):
    """Of /server_info; names are vLLM's."""

    model: str
    max_model_len: int
    skip_tokenizer_init: bool = False
    enable_sleep_mode: bool = False
    logprobs_mode: str = "raw_logprobs"
    quantization: str | None = None


class Parallel(msgspec.Struct):
    """Of /server_info."""

    world_size: int = 1
    data_parallel_size: int = 1
    worker_cls: str = ""
    worker_extension_cls: str = ""


class CacheConfig(msgspec.Struct):
    """Of /server_info."""

    num_gpu_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True


class Device(msgspec.Struct):
    """Of /server_info."""

    device: str = ""


class TransferConfig(msgspec.Struct):
    """Of /server_info."""

    backend: str = ""


class Config(msgspec.Struct):
    """vLLM's own configuration, as far as it matters here."""

    model_config: Model
    parallel_config: Parallel = msgspec.field(default_factory=Parallel)
    cache_config: CacheConfig = msgspec.field(default_factory=CacheConfig)
    device_config: Device = msgspec.field(default_factory=Device)
    weight_transfer_config: TransferConfig | None = None
    speculative_config: Any = None


class _Info(msgspec.Struct):
    vllm_config: Config


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class _Paths(msgspec.Struct):
    paths: dict[str, dict[str, Any]]


class Surface(msgspec.Struct, frozen=True):
    """One server's routes and configuration."""

    version: str
    served: tuple[str, ...]
    routes: frozenset[str]
    config: Config

    def has(self, routes: Collection[str]) -> bool:
        """Whether all of them are there."""
        return self.routes.issuperset(routes)

    @property
    def generate(self) -> str:
        """The path that requests go to."""
        return TOKENS if f"POST {TOKENS}" in self.routes else COMPLETIONS

    @property
    def tells_versions(self) -> bool:
        """Whether a request's answer says which weights made which of its tokens."""
        return self.generate == TOKENS


async def probe(client: VllmClient) -> Surface:
    """Look at the server. Nothing there changes.

    :raises ConfigError: it is no vLLM, or lacks routes; the message names each.
    :raises ReplicaLost: nobody is there.
    """
    routes = await _routes(client)
    lacking = [route for route in NEEDED if route not in routes]
    if f"POST {TOKENS}" not in routes and f"POST {COMPLETIONS}" not in routes:
        lacking.append(f"POST {TOKENS}")
    if lacking:
        raise ConfigError(
            f"the server lacks {shown(lacking, most=len(lacking))}",
            where=client.url,
            remedy=_DEV,
        )
    try:
        version, models, info = await asyncio.gather(
            client.get("/version", _Version),
            client.get("/v1/models", _Models),
            # It looks at the machine first, which takes seconds.
            client.get("/server_info?config_format=json", _Info, _LOOKING),
        )
    except HotbunkError as error:
        raise error.at("is it a vLLM server?") from error
    served = tuple(card.id for card in models.data)
    return Surface(version.version, served, routes, info.vllm_config)


async def _routes(client: VllmClient) -> frozenset[str]:
    """By its own description; a server that hides it is asked for each path."""
    said = await client.look("/openapi.json")
    if said is not None:
        paths = client.decoded("/openapi.json", said, _Paths).paths
        found = {f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs}
        # Mounted beside the application, so not in its description.
        beside = {"GET /metrics"} if await client.look("/metrics") is not None else set()
        return frozenset(found | beside)
    there = await asyncio.gather(*(client.is_there(*route.split(" ")) for route in _ASKED))
    return frozenset(route for route, yes in zip(_ASKED, there, strict=True) if yes)

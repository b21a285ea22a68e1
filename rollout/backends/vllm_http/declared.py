"""What can be promised over a server's routes: its surface, device and options, as capabilities."""

from __future__ import annotations

from hotbunk.rollout.backends.vllm_http.options import AUTO, ENGINE, NEVER, RELOAD
from hotbunk.rollout.backends.vllm_http.probe import KV_RELEASE, RPC, SLEEP, TRANSFER, Surface
from hotbunk.rollout.contract import (
    NATIVE,
    Ability,
    Cache,
    Capabilities,
    Gate,
    PauseMode,
    Retention,
    Support,
    emulated,
    unsupported,
)

HOTBUNK = "hotbunk"  # the weight-transfer engine's name
EXTENSION = "hotbunk.rollout.backends.vllm.worker.WorkerExtension"
CACHES = frozenset({Cache.PREFIX, Cache.MULTIMODAL, Cache.ENCODER})
NO_TOKEN_VERSIONS = (
    "start the server with --enable-scale-out: only its route says which weights made a token"
)
_NO_DIGEST = "stock vLLM's checksums cannot be compared with what was sent"
_NO_ADAPTER = "vLLM's route takes an adapter as a directory, which no sync writes yet"


def declared(surface: Surface, way: str) -> Capabilities:
    """:param way: how weights get there, as :func:`way_of` found."""
    sleeps = surface.has(SLEEP) and surface.config.model_config.enable_sleep_mode
    parks = (
        NATIVE
        if sleeps
        else unsupported("the server was not started with sleep mode; it would free nothing")
    )
    kv = (
        NATIVE
        if sleeps and surface.has(KV_RELEASE)
        else unsupported(parks.how or "this vLLM has no /release_kv_cache_memory")
    )
    versions = surface.tells_versions
    return Capabilities(
        backend="vllm_http",
        release=parks,
        release_kv_cache=kv,
        retentions=frozenset(Retention) if sleeps else frozenset({Retention.RESIDENT}),
        pause={
            PauseMode.ABORT: NATIVE,
            # A resume that meets vLLM's own pending wait leaves it "paused" and open.
            PauseMode.WAIT: Ability(
                Support.NATIVE, "the adapter lets what is in flight end, then pauses the server"
            ),
            PauseMode.KEEP: NATIVE if versions else unsupported(NO_TOKEN_VERSIONS),
        },
        keep_release=unsupported("vLLM schedules by itself as soon as its last memory is awake"),
        gate=Gate.PROXY,
        digest=unsupported(_NO_DIGEST),
        request_versions=emulated(
            "vLLM tells with a response's last token; those after an update are held back until then"
            if versions
            else "requests never cross an update"
        ),
        partial=NATIVE
        if way == ENGINE
        else unsupported("vLLM's loader corrupts fused tensors of which a part is sent"),
        adapter=unsupported(_NO_ADAPTER),
        caches=CACHES,
        memory_measured_by="accounting",
        ranks=ranks_of(surface) if way == ENGINE else 1,
        stop_strings=unsupported("the server has no tokenizer")
        if surface.config.model_config.skip_tokenizer_init
        else NATIVE,
    )


def ranks_of(surface: Surface) -> int:
    """Worker ranks that hold weights."""
    parallel = surface.config.parallel_config
    return parallel.world_size * parallel.data_parallel_size


def tempers(surface: Surface) -> bool:
    """Whether the server's workers can be told to give log-probs at the request's temperature."""
    parallel = surface.config.parallel_config
    return surface.has(RPC) and parallel.worker_extension_cls == EXTENSION


def way_of(surface: Surface, wanted: str) -> tuple[str, str]:
    """How weights get to the server, and why they do not where it is ``never``."""
    config = surface.config
    engine = config.weight_transfer_config
    lacking: list[str] = []
    if wanted in (AUTO, ENGINE):
        if engine is not None and engine.backend == HOTBUNK and surface.has(TRANSFER):
            return ENGINE, ""
        lacking.append(
            "install hotbunk beside vLLM and start it with "
            """--weight-transfer-config '{"backend":"hotbunk"}'"""
        )
    if wanted in (AUTO, RELOAD):
        why = _no_reload(surface)
        if not why:
            return RELOAD, ""
        lacking.append(f"a reload is not possible: {why}")
    return NEVER, "; ".join(lacking) or "weights=never"


def _no_reload(surface: Surface) -> str:
    config = surface.config
    if not surface.has(RPC):
        return "there is no /collective_rpc"
    if config.parallel_config.data_parallel_size > 1:
        return "under data parallelism it answers for one engine only"
    if config.model_config.quantization:
        return "the model is quantised"
    if config.speculative_config is not None:
        return "the draft model would keep its old weights"
    return ""

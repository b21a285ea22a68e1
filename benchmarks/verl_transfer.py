"""verl's own bucketed transfer through shared memory, as a peer of `hotbunk bench sync`.

Its file is loaded by its path: the package around it imports vLLM. On a machine without an
accelerator verl asks CUDA to synchronise; here that is nothing, and nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_FILE = "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"


def installed() -> bool:
    """Whether there is a verl with that file."""
    spec = importlib.util.find_spec("verl")
    return (
        spec is not None and spec.origin is not None and (Path(spec.origin).parent / _FILE).exists()
    )


@cache
def module() -> ModuleType:
    """The file, loaded. :raises ImportError: there is none, or what it needs is missing."""
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise ImportError("verl is not installed")
    path = Path(verl.origin).parent / _FILE
    spec = importlib.util.spec_from_file_location("hotbunk_bench_verl_transfer", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    device = SimpleNamespace(synchronize=_nothing, empty_cache=_nothing)
    loaded.get_torch_device = lambda: device  # type: ignore[attr-defined]
    loaded.is_support_ipc = lambda: False  # type: ignore[attr-defined]
    return loaded


def _nothing() -> None:
    pass


def sender(address: str) -> Any:
    """With verl's default bucket of 512 MiB."""
    return module().BucketedWeightSender(address, use_shm=True)


def receiver(address: str) -> Any:
    """The other end."""
    import torch

    return module().BucketedWeightReceiver(address, torch.device("cpu"), use_shm=True)

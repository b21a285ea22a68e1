"""What a source yields is what the engine gets: a changed disk, and a base under an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.contract import Version
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.kernels import fingerprint
from hotbunk.trainer_hooks.recipes.models import load_model, load_state

pytestmark = pytest.mark.anyio
PROBE = "model.layers.0.mlp.down_proj.weight"


async def test_a_changed_disk_reaches_the_engine_g15(
    tiny: Any, replica: Any, tmp_path: Path
) -> None:
    """One source over one directory, whose file changes between two updates."""
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    directory = tmp_path / "published"
    shutil.copytree(tiny(seed=1), directory)
    source = SafetensorsSource(directory)
    digests = []
    for step, seed in ((1, 1), (2, 2)):
        shutil.copy(tiny(seed=seed) / "model.safetensors", directory / "model.safetensors")
        await manager.update_weights(source, Version(0, step))
        digests.append((await target.digest([PROBE])).values[PROBE])
    assert digests == [fingerprint(load_state(tiny(seed=seed))[PROBE]) for seed in (1, 2)]
    assert digests[0] != digests[1]


class WithAdapter(nn.Module):
    """A linear layer with a trainable addition, as trainers wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 4))


async def test_the_base_stream_is_the_frozen_base_while_an_adapter_is_on_g21(
    tiny: Any, replica: Any
) -> None:
    model = load_model(tiny(seed=1))
    frozen = {name: fingerprint(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for layer in model.model.layers:
        layer.mlp.down_proj = WithAdapter(layer.mlp.down_proj)

    def base_only(name: str) -> str | None:
        return None if ".lora_" in name else name.replace(".base_layer.", ".")

    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    await manager.update_weights(module_source(model, rename=base_only), Version(0, 1))
    assert dict((await target.digest(tuple(frozen))).values) == frozen

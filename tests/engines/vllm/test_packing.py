"""Which linear layers vLLM may pack on CPUs: all but those of engines that take our updates."""

from __future__ import annotations

import pytest
import torch
import vllm.model_executor.layers.utils as layers
from torch import nn
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config

from hotbunk.rollout.backends.vllm import packing
from hotbunk.rollout.backends.vllm.plugin import BACKEND, register


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Layers that vLLM itself was asked to pack."""
    register()
    got: list[nn.Module] = []

    def pack(layer: nn.Module, remove_weight: bool) -> None:
        got.append(layer)

    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", pack)
    packing.turn_off()
    return got


def load(layer: nn.Module) -> nn.Module:
    layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


def test_layers_of_others_are_packed_also_when_they_are_loaded_again(
    packed: list[nn.Module],
) -> None:
    """verl's own rollout loads weights again with no configuration at hand: it died here of ours."""
    layer = nn.Linear(2, 2)
    with set_current_vllm_config(VllmConfig()):
        load(layer)
    load(layer)
    assert packed == [layer, layer]


def test_layers_of_ours_stay_plain_also_when_they_are_loaded_again(
    packed: list[nn.Module],
) -> None:
    layer = nn.Linear(2, 2)
    with set_current_vllm_config(
        VllmConfig(weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    ):
        load(layer)
    load(layer)
    assert packed == []
    assert torch.equal(layer.cpu_linear(torch.ones(1, 2), layer.weight), layer.weight.sum(1)[None])

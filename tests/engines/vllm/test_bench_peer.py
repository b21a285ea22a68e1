"""vLLM's own way of taking weights, as `hotbunk bench sync` times it: what it loads is what was sent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotbunk.benchmarks.vllm_reload import Reload

pytestmark = pytest.mark.slow  # an engine of its own

WIDE, KEYS, INNER, ROWS = 128, 64, 256, 320
LAYER = [(WIDE, WIDE), (KEYS, WIDE), (KEYS, WIDE), (WIDE, WIDE)]
MLP = [(INNER, WIDE), (INNER, WIDE), (WIDE, INNER)]
SHAPES = [(ROWS, WIDE), *[*LAYER, *MLP, (WIDE,), (WIDE,)] * 2, (WIDE,)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name) / "vllm"


def test_a_reload_brings_what_the_trainer_has_now(folder: Path) -> None:
    torch.manual_seed(3)
    named = {f"t{n}": torch.randn(s, dtype=torch.bfloat16) for n, s in enumerate(SHAPES)}
    peer = Reload(named, folder, threads=1)
    try:
        assert peer.check(), "it began with them"
        for tensor in named.values():
            tensor.mul_(0.5)
        assert not peer.check(), "a step was taken, and nothing was sent"
        peer.sync()
        assert peer.check()
    finally:
        peer.close()

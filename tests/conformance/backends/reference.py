"""The reference engine, as the suite sees it: goldens come from transformers, memory from smaps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hotbunk.checkpoint_engine.source import specs_of
from hotbunk.conformance.kit import (
    greedy,
    make_adapter,
    make_model,
    merged,
    save_model,
    save_tokenizer,
    text_of,
)
from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.arena import Survival
from hotbunk.rollout.backends.reference.engine import ReferenceEngine
from hotbunk.rollout.contract import ADAPTER_PREFIX, TARGET, Engine, Tag
from hotbunk.rollout.kernels import as_bytes
from hotbunk.rollout.registry import create_backend


class ReferenceUnderTest(BackendUnderTest):
    """Options go to the backend. ``family`` and ``tied`` choose the model."""

    name = "reference"
    prompts = (
        (11, 12, 13, 14, 15, 16, 17, 18, 19),
        (21, 32, 43, 54, 65, 76, 87, 98, 109, 120, 131, 142),
        tuple(range(200, 240)),
    )
    bucket_sizes = (1 << 20, 10_007, 64)
    long_tokens = 300
    moment = 0.1

    def __init__(self, *, family: str = "llama", tied: bool = False, **options: Any) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="hotbunk-conformance-")
        self._disk = save_model(family, 0, Path(self._folder.name) / "model", tied=tied)
        save_tokenizer(self._disk)
        self.engine: ReferenceEngine
        # Goldens and weights are asked for again and again; they never change.
        self._model = cache(lambda version: make_model(family, version, tied=tied))
        self._adapter = cache(lambda name, v: make_adapter(self._model(0), name, v))
        self._merged = cache(lambda v, name, av: merged(self._model(v), self._adapter(name, av)))
        self._golden = cache(lambda prompt, version, n: greedy(self._model(version), prompt, n))

    async def start(self) -> Engine:
        engine = create_backend("reference", model=str(self._disk), **self._options)
        assert isinstance(engine, ReferenceEngine)
        self.engine = engine
        return engine

    def weights(self, version: int) -> Tensors:
        named = dict(self._model(version).named_parameters(remove_duplicate=False))
        return [
            (spec, bytes(as_bytes(named[spec.name]).tolist()))
            for spec in specs_of(named.items(), TARGET).values()
        ]

    def adapter(self, name: str, version: int) -> Tensors:
        tensors = self._adapter(name, version)
        group = ADAPTER_PREFIX + name
        return [
            (spec, bytes(as_bytes(tensors[spec.name]).tolist()))
            for spec in specs_of(tensors.items(), group).values()
        ]

    def adapter_golden(
        self, prompt: Sequence[int], version: int, name: str, adapter_version: int, n: int
    ) -> list[int]:
        model = self._merged(version, name, adapter_version)
        return greedy(model, prompt, n)

    def golden(self, prompt: Sequence[int], version: int, n: int) -> list[int]:
        return list(self._golden(tuple(prompt), version, n))

    def text(self, tokens: Sequence[int]) -> str:
        return text_of(tokens)

    def read_weight(self, name: str) -> bytes:
        runner = self.engine._runner
        adapters = {key.partition("/")[2]: t for key, t in runner.adapters.tensors().items()}
        tensor: torch.Tensor = adapters[name] if name in adapters else runner.binding.tensor(name)
        return bytes(as_bytes(tensor.contiguous()).tolist())

    def resident(self, tag: Tag) -> int:
        return self.engine._runner.pool.audit().resident(tag)

    def host_backup(self) -> int:
        arena = self.engine._runner.binding.arena
        state = sum(r.nbytes for r in arena.regions.values() if r.survival is Survival.STATE)
        return max(self.engine._runner.pool.memory().backup() - state, 0)

    def close(self) -> None:
        """Remove the model directory."""
        self._folder.cleanup()

"""The reference engine, as the suite sees it: goldens come from transformers, memory from smaps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar

from hotbunk.checkpoint_engine.source import specs_of
from hotbunk.conformance.backends import peek
from hotbunk.conformance.kit import (
    brought,
    check_told_apart,
    greedy,
    make_adapter,
    make_model,
    merged,
    save_model,
    save_tokenizer,
    text_of,
    version_of,
)
from hotbunk.conformance.scratch import Scratch
from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.backends.reference.engine import ReferenceEngine
from hotbunk.rollout.contract import ADAPTER_PREFIX, TARGET, Engine, Tag
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.kernels import as_bytes
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.status import Deadlines

ENDLESS = 4000  # tokens: seconds of work
ROOM = 64  # of a context, for a prompt


class ReferenceUnderTest(BackendUnderTest):
    """Options go to the backend. ``family`` and ``tied`` choose the model, or ``model`` brings one.

    The versions of a model that was brought are that model with noise: it is read, and not changed.
    """

    name = "reference"
    prompts: ClassVar[tuple[tuple[int, ...], ...]] = (
        (11, 12, 13, 14, 15, 16, 17, 18, 19),
        (21, 32, 43, 54, 65, 76, 87, 98, 109, 120, 131, 142),
        tuple(range(200, 240)),
    )
    bucket_sizes = (1 << 20, 10_007, 64)
    long_tokens = 300
    moment = 0.1
    # Who is held while long requests drain must not run out of time because the machine is busy; what
    # does not start says so before its case is over.
    deadlines = Deadlines(
        start=100.0, hold=10.0, drain=20.0, memory=20.0, update=20.0, inspect=2.0, grace=2.0
    )

    def __init__(
        self, *, family: str = "llama", tied: bool = False, model: str | None = None, **options: Any
    ) -> None:
        disk = None if model is None else brought(model)
        self._options = options
        self._folder = Scratch()
        self.engine: ReferenceEngine
        self.expected_not_run: dict[str, str] = {
            "groups_that_take_no_update": "its one group takes updates",
            "every_group_moves_with_an_update": "it has one group",
            "an_engine_hangs_in_each_phase": "it runs here: a thread that hangs cannot be ended",
            "killed_and_started_anew": "it runs in the suite's own process",
        }
        self._says = disk is None
        self.endless_tokens = ENDLESS
        make = partial(make_model, family, tied=tied)
        if disk is None:
            self._disk = save_model(family, 0, self._folder.path / "model", tied=tied)
            save_tokenizer(self._disk)
        else:
            self._disk = disk
            make = partial(version_of, self._disk)
            config = make(0).config
            tied = bool(config.tie_word_embeddings)
            self.endless_tokens = min(ENDLESS, config.max_position_embeddings - ROOM)
            self.expected_not_run["stop_strings_end_a_response"] = "its tokenizer is not ours"
        if not tied:
            self.expected_not_run["tied_tensors"] = "this model ties nothing; tied=true does"
        # Goldens and weights are asked for again and again; they never change.
        self._model = cache(make)
        self._adapter = cache(lambda name, v: make_adapter(self._model(0), name, v))
        self._merged = cache(lambda v, name, av: merged(self._model(v), self._adapter(name, av)))
        self._golden = cache(lambda prompt, version, n: greedy(self._model(version), prompt, n))
        if disk is not None:
            try:
                check_told_apart(
                    disk, self.prompts, lambda prompt, v: self.golden(prompt, v, self.tokens)
                )
            except ConfigError:
                self.close()
                raise

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

    def text(self, tokens: Sequence[int]) -> str | None:
        return text_of(tokens) if self._says else None

    def read_weight(self, name: str) -> bytes:
        return peek.read_weight(self.engine, name)

    def corrupt_weight(self, name: str) -> bool:
        peek.corrupt_weight(self.engine, name)
        return True

    def sabotage(self, point: str, how: str) -> bool:
        """A thread that hangs could not be ended here."""
        return how == "fail" and peek.sabotage(self.engine, point, how)

    def starve(self, tag: Tag) -> bool:
        peek.starve(self.engine, tag.value)
        return True

    def resident(self, tag: Tag) -> int:
        return peek.resident(self.engine, tag)

    def host_backup(self) -> int | None:
        return peek.host_backup(self.engine)

    def close(self) -> None:
        """Remove the model directory."""
        self._folder.remove()

"""The toy engine, as the conformance suite sees it."""

from __future__ import annotations

from collections.abc import Sequence

from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.backends.oracle import VirtualTimeLoop
from hotbunk.rollout.contract import Engine, Tag, TensorSpec
from toy_backend.engine import SHAPES, ToyEngine, content, nbytes_of, next_token


class ToyUnderTest(BackendUnderTest):
    name = "toy"
    prompts = (tuple(range(10)), tuple(range(20, 32)), tuple(range(40, 51)))
    bucket_sizes = (4096, 77, 16)
    loop_factory = VirtualTimeLoop  # it waits on the loop alone, so time may pass at once

    def __init__(self) -> None:
        self.expected_not_run = {
            "the_engine_itself_refuses": "hotbunk's replica is its gate",
            "tied_tensors": "nothing is tied",
            "ties_that_the_engine_does_not_have": "no two tensors have one shape",
            "groups_that_take_no_update": "its one group takes updates",
            "every_group_moves_with_an_update": "it has one group",
            "an_engine_fails_in_each_phase": "nothing breaks it from outside",
            "an_engine_hangs_in_each_phase": "nothing breaks it from outside",
            "killed_and_started_anew": "it lives in the suite's process",
        }

    async def start(self) -> Engine:  # a fresh engine for each case
        self.engine = ToyEngine()
        return self.engine

    def weights(self, version: int) -> Tensors:  # the trainer's, with their bytes
        return [
            (TensorSpec(name, shape, "float32", nbytes_of(shape)), content(name, version))
            for name, shape in SHAPES.items()
        ]

    def golden(self, prompt: Sequence[int], version: int, n: int) -> list[int]:
        weights, context = {name: content(name, version) for name in SHAPES}, list(prompt)
        for _ in range(n):  # found without the engine
            context.append(next_token(weights, context, 0))
        return context[len(prompt) :]

    # Out of band: past the engine's verbs, so that it is never believed about itself.

    def read_weight(self, name: str) -> bytes:
        return bytes(self.engine.weights[name])

    def corrupt_weight(self, name: str) -> bool:  # optional, as sabotage() and kill() are
        self.engine.weights[name][0] ^= 1
        return True

    def resident(self, tag: Tag) -> int:
        held = sum(map(len, self.engine.weights.values()))
        return held if tag is Tag.WEIGHTS else 1

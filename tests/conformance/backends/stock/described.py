"""A stock server that already runs, as the suite sees it: goldens from transformers, all else from outside."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.backends.stock.bare import Bare
from hotbunk.conformance.backends.stock.dialect import Dialect, not_part
from hotbunk.conformance.backends.stock.sglang import SglangDialect
from hotbunk.conformance.backends.stock.surface import Surface
from hotbunk.conformance.backends.stock.vllm import VllmDialect
from hotbunk.conformance.rig import Unseen
from hotbunk.conformance.steps import Steps
from hotbunk.conformance.under_test import Tensors
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import Engine, Tag, TensorSpec
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.replica import Replica

DIALECTS: dict[str, type[Dialect]] = {one.kind: one for one in (VllmDialect, SglangDialect)}
KEPT = 6  # published directories; the server has read older ones long ago
UNSEEN = "bytes of weights cannot be seen from outside"
HANDS = "nobody has a hand in the server"


class StockUnderTest(ReferenceUnderTest):
    """It must run on this host with the model directory ``model``, and serve nobody else meanwhile."""

    name = "stock"
    declares = False
    long_tokens = 600  # what the server still sends when it is asked twice how it is
    moment = 0.5
    # More than two blocks of most engines: its KV can be found again.
    prompts: ClassVar[tuple[tuple[int, ...], ...]] = (
        tuple(range(100, 170)),
        *ReferenceUnderTest.prompts[:2],
    )

    def __init__(self, *, url: str, surface: Surface, model: str | None, key: str | None) -> None:
        found = model or surface.model
        if not (Path(found) / "config.json").is_file():
            raise ConfigError(
                f"{url} says that it serves {found!r}, which is no directory here",
                remedy="--model DIR, the model directory that it was given",
            )
        super().__init__(model=found)
        if surface.context:  # a server may be started with less than its model could
            room = surface.context - max(map(len, self.prompts))
            self.endless_tokens = min(self.endless_tokens, room)
        self.url, self._key = url, key
        self.name = f"{surface.kind} {surface.version}".strip() + f" at {url}"  # type: ignore[misc]
        self.dialect = DIALECTS[surface.kind](surface)
        self.unseen = dict(self.dialect.unseen)
        self.expected_not_run.pop("an_engine_hangs_in_each_phase")
        self.expected_not_run.pop("killed_and_started_anew")
        self.expected_not_run["tied_tensors"] = UNSEEN
        self.expected_not_run["the_engine_itself_refuses"] = "it has no gate of its own to look at"
        self.expected_not_run["positional_draws_continue"] = "it declares nothing about its draws"
        self._published: dict[str, Path] = {}

    async def check_options(self) -> None:
        """Nothing to build: the server was looked at already."""

    async def start(self) -> Engine:
        fresh = self.weights(0)
        bare = Bare(self.url, self._key, self.dialect, self.deadlines, self.publish, fresh)
        return cast(Engine, bare)  # of which the suite asks capabilities alone

    def front(self, engine: Engine) -> Replica:
        """Nothing stands in front of it: the same verbs, and none of the rules."""
        return cast(Replica, engine)

    async def settle(self, replica: Replica) -> None:
        """Its routes leave caches to the caller."""
        await replica.reset_caches()

    async def steps(self, replica: Replica) -> Steps:
        raise Unseen("its steps, if any, are for senders of its own; a reload is one call")

    def publish(self, tensors: Tensors) -> Path:
        """A model directory with these tensors.

        :raises Unseen: no file can hold them.
        """
        from safetensors.torch import save_file

        names = [spec.name for spec, _ in tensors]
        short = [s.name for s, content in tensors if s.nbytes != len(content)]
        if len(set(names)) < len(names) or short or not names:
            raise not_part("an offer that no safetensors file can hold")
        digest = hashlib.sha256()
        for spec, content in tensors:
            digest.update(f"{spec.name} {spec.shape} {spec.dtype} ".encode() + content)
        key = digest.hexdigest()[:16]
        if key not in self._published:
            target = self._folder.path / "published" / key
            target.mkdir(parents=True)
            for beside in self._disk.iterdir():
                if beside.is_file() and ".safetensors" not in beside.name:
                    shutil.copy(beside, target)
            held = {spec.name: _tensor(spec, content) for spec, content in tensors}
            save_file(held, target / "model.safetensors", {"format": "pt"})
            self._published[key] = target
            for old in list(self._published)[:-KEPT]:
                shutil.rmtree(self._published.pop(old))
        return self._published[key]

    def read_weight(self, name: str) -> bytes:
        raise Unseen(UNSEEN)

    def corrupt_weight(self, name: str) -> bool:
        raise Unseen(HANDS)

    def sabotage(self, point: str, how: str) -> bool:
        raise Unseen(HANDS)

    def starve(self, tag: Tag) -> bool:
        raise Unseen(HANDS)

    async def kill(self) -> bool:
        raise Unseen(HANDS)

    def resident(self, tag: Tag) -> int:
        raise Unseen(self.dialect.unseen["memory"])

    def host_backup(self) -> None:
        raise Unseen(self.dialect.unseen["memory"])


def _tensor(spec: TensorSpec, content: bytes) -> Any:
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
    return raw.view(dtype_from(spec.dtype)).reshape(spec.shape)

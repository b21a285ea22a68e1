"""A stock vLLM server, as the suite sees it: goldens from transformers, its bytes unseen.

The server is a real one, in a process of its own, with hotbunk's weight-transfer engine in its
workers; it is started with the first case and serves all of them. ``engine=false`` leaves that out,
as in a server that knows nothing of hotbunk: weights come by reload.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hotbunk.conformance.backends.stock_vllm import StockServer
from hotbunk.conformance.backends.vllm import Reused, VllmUnderTest
from hotbunk.conformance.rig import NotApplicable
from hotbunk.rollout.contract import Engine, Tag
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.registry import create_backend

UNSEEN = "bytes of weights cannot be seen from outside"
NEEDS_BYTES = (
    "any_bucket_size",
    "bytes_are_the_ones_sent",
    "golden_after_a_kv_only_release",
    "one_tensor_at_a_time",
    "partial_updates",
    "ties_that_the_engine_does_not_have",
    "verification_reads_memory",
    "versions_only_rise",
)
NEEDS_HANDS = (
    "a_planted_corruption_is_found",
    "an_engine_fails_in_a_memory_verb",
    "an_engine_fails_in_each_phase",
    "an_engine_hangs_in_each_phase",
    "discard_takes_no_host_memory",
    "killed_and_started_anew",
)
EXTENSION = "hotbunk.rollout.backends.vllm.worker.WorkerExtension"


class VllmHttpUnderTest(VllmUnderTest):
    """Options go to the connection (``weights``, ``attempts``)."""

    name = "vllm_http"
    long_tokens = 600  # what the server has made may be far ahead of what has come here

    def __init__(self, *, engine: bool = True, tokenizer: bool = True, **options: Any) -> None:
        if "url" in options:
            raise ConfigError("the suite brings its own server: its weights have known goldens")
        self._server: StockServer | None = None
        self._connection = {"deadlines": self.deadlines, **options}
        self._with_engine = engine
        super().__init__(tokenizer=tokenizer)
        self.expected_not_run = {
            **self.expected_not_run,
            **dict.fromkeys(NEEDS_BYTES, UNSEEN),
            **dict.fromkeys(NEEDS_HANDS, "nobody has a hand in the server"),
            "the_engine_itself_refuses": "its gate is a proxy: the server has other clients",
        }

    async def start(self) -> Engine:
        return Reused(self)

    async def engine(self) -> Engine:
        if self._engine is not None and not await self._reset(self._engine):
            await self._drop()
        if self._engine is None:
            if self._server is None:
                self._server = await asyncio.to_thread(self._served)
            engine = self._create()
            await engine.start()
            self._engine = engine
            if not await self._reset(engine):
                raise AssertionError("a server that was just started does not take version 0")
        return self._engine

    def read_weight(self, name: str) -> bytes:
        raise NotApplicable(UNSEEN)

    def corrupt_weight(self, name: str) -> bool:
        return False

    def sabotage(self, point: str, how: str) -> bool:
        return False

    async def kill(self) -> bool:
        return False

    def resident(self, tag: Tag) -> int:
        """Nothing: it is not told, and not seen."""
        return 0

    def host_backup(self) -> None:
        return None

    def _create(self) -> Engine:
        url = "http://127.0.0.1:1" if self._server is None else self._server.url
        return create_backend("vllm_http", url=url, **self._connection)

    def _served(self) -> StockServer:
        arguments = ["--enable-scale-out"]
        if self._with_engine:
            arguments += ["--worker-extension-cls", EXTENSION]
            arguments += ["--weight-transfer-config", json.dumps({"backend": "hotbunk"})]
        return StockServer(self._disk, *arguments).ready()

    async def _drop(self) -> None:
        await super()._drop()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

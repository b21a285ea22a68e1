"""Several servers: each gets each verb once, from node 0 alone, whatever balancer stands before them (N14).

Two real server processes, one of them of two data-parallel ranks; a relay in front of each counts what comes.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import Deployment, PauseMode, collect

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
HOST = "127.0.0.1"
CALL = re.compile(rb"(?:GET|POST) (/[^ ?]*)\S* HTTP/1\.1\r\n")
LOOKS = {"/status", "/health", "/server_info", "/memory", "/weight_checker"}


class Relay:
    """Passes connections on to one of ``urls``, in turn, and counts the calls in them."""

    def __init__(self, *urls: str) -> None:
        self.calls: Counter[str] = Counter()
        self._ports = [int(url.rsplit(":", 1)[1]) for url in urls]
        self._turn = 0
        self._server: asyncio.Server
        self.url = ""

    async def start(self) -> Relay:
        self._server = await asyncio.start_server(self._pass_on, HOST, 0)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def close(self) -> None:
        self._server.close()

    def verbs(self) -> dict[str, int]:
        """What changes something, since it was last asked; looks are free."""
        made, self.calls = self.calls, Counter()
        return {path: n for path, n in made.items() if path not in LOOKS}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        port = self._ports[self._turn % len(self._ports)]
        up, down = await asyncio.open_connection(HOST, port)
        ways = [
            asyncio.create_task(self._copy(reader, down, True)),
            asyncio.create_task(self._copy(up, writer, False)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, down):
            end.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: bool
    ) -> None:
        while data := await source.read(1 << 20):
            if count:
                self.calls.update(path.decode() for path in CALL.findall(data))
            sink.write(data)
            await sink.drain()


@pytest.fixture
async def relays(server: Any, ranked: Any) -> AsyncIterator[list[Relay]]:
    """Of the plain server, of the one of two ranks, and of both: a balancer."""
    made = [
        await Relay(*urls).start()
        for urls in ([server.url], [ranked.url], [server.url, ranked.url])
    ]
    yield made
    ranked.ok("/resume")  # also after a failure: others share it
    for one in made:
        one.close()


async def test_each_server_gets_each_verb_once_and_says_for_how_many_ranks(
    relays: list[Relay], kit: Any, model: Path, other: Path, key_file: Path
) -> None:
    *fronts, balancer = relays
    managers = []
    for node in (0, 1):
        handles = [
            await HttpHandle.connect(
                HttpOptions(
                    front.url,
                    api_key_file=str(key_file),
                    generate_url=balancer.url,
                    node_rank=node,
                ),
                f"r{number}",
            )
            for number, front in enumerate(fronts)
        ]
        managers.append(
            CheckpointEngineManager(
                handles,
                ShmTransport(),
                deployment=Deployment.STANDALONE,
                policy=SyncPolicy(pause=PauseMode.KEEP),
            )
        )
    leader, follower = managers
    try:
        assert [h.capabilities.ranks for h in leader.replicas] == [1, 2]
        held = await leader.adopt()
        assert held is not None
        for front in fronts:
            front.verbs()
        for step, path in enumerate((other, model), held.step + 1):
            version = leader.next_version(step)
            report = await leader.update_weights(kit.source(path), version)
            assert report.ok
            for front in fronts:
                sent = front.verbs()
                assert set(sent.values()) == {1}, sent
                assert {"/update_weights", "/pause", "/resume"} <= set(sent)
        await leader.pause_replicas(PauseMode.KEEP)
        assert [front.verbs() for front in fronts] == [{"/pause": 1}] * 2
        await leader.resume_generation_replicas()
        assert [front.verbs() for front in fronts] == [{"/resume": 1}] * 2
        # What is generated goes through the balancer, to either.
        first = leader.replicas[0]
        for n in range(4):
            done = await collect(first.generate(kit.request([5, 6, n + 1], 3)))
            assert len(done.token_ids) == 3
        assert balancer.verbs() == {"/v1/generate": 4}
        # The other nodes of an engine do all of it, too, and nobody hears of it.
        for handle in follower.replicas:
            await handle.pause_generation(PauseMode.KEEP)
            await handle.sleep(1)
            await handle.wake_up()
            await handle.release_kv_cache()
            await handle.resume_kv_cache()
            await handle.resume_generation()
            await handle.abort()
            await handle.reset_caches()
        assert [front.calls for front in fronts] == [Counter()] * 2
    finally:
        for manager in managers:
            await manager.close()


async def test_a_verb_says_how_many_ranks_answered(server: Any, ranked: Any) -> None:
    for one, ranks in ((server, 1), (ranked, 2)):
        for path in ("/pause?mode=keep", "/release_kv_cache_memory", "/resume_kv_cache_memory"):
            assert one.ok(path)["ranks"] == ranks
        assert one.ok("/resume")["ranks"] == ranks
        assert one.get("/get_world_size") == {"world_size": ranks}
        assert one.ok("/abort_requests")["ranks"] == ranks
        digests = one.ok("/weight_checker")
        assert digests["ranks"] == list(range(ranks))

"""Stock servers: which is which, and that calls and answers are those of the documented surfaces.

vLLM's own server is tried in tests/engines/vllm. SGLang's cannot run here: what answers below is simulated,
with the routes and fields of its guide for RL systems, so this shows what is sent and how answers are read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.stock.bare import Bare
from hotbunk.conformance.backends.stock.dialect import Dialect
from hotbunk.conformance.backends.stock.sglang import SglangDialect
from hotbunk.conformance.backends.stock.surface import Surface, surface_of
from hotbunk.conformance.backends.stock.vllm import VllmDialect
from hotbunk.conformance.kit import save_model
from hotbunk.conformance.rig import Unseen
from hotbunk.conformance.transfers import FailedElsewhere, MemoryTransfer
from hotbunk.rollout.contract import (
    Cache,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Tag,
    TensorSpec,
    Version,
    collect,
)
from hotbunk.rollout.errors import ConfigError, EngineFailed, ReplicaLost, UnknownTag, UsageError
from hotbunk.rollout.status import Deadlines

SGLANG_ROUTES = (
    *("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"),
)
VLLM_ROUTES = (
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"),
    *("/release_kv_cache_memory", "/reset_prefix_cache", "/abort_requests", "/v1/completions"),
)
SPEC = TensorSpec("w", (1,), "float32", 4)


class Simulated:
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self, routes: tuple[str, ...], pages: dict[str, Any]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.events: list[Any] = []
        self.answers: dict[str, int] = {}
        self.headers: dict[str, str] = {}
        self.pages = {"/openapi.json": {"paths": dict.fromkeys(routes, 0)}, "/health": {}, **pages}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                page = outer.pages.get(self.path)
                self._answer(404 if page is None else 200, json.dumps(page))

            def do_OPTIONS(self) -> None:
                self._answer(405 if self.path in routes else 404, "{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.path, json.loads(body) if body else None))
                if self.path == "/generate":
                    said = "".join(f"data: {json.dumps(e)}\n\n" for e in outer.events)
                    self._answer(200, said + "data: [DONE]\n\n")
                else:
                    self._answer(outer.answers.get(self.path.partition("?")[0], 200), "{}")

            def _answer(self, status: int, body: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **outer.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def sglang() -> Iterator[Simulated]:
    info = {"version": "0.5.23", "enable_memory_saver": True, "enable_weights_cpu_backup": False}
    it = Simulated(
        SGLANG_ROUTES, {"/get_server_info": info, "/get_model_info": {"weight_version": "0.7"}}
    )
    yield it
    it.close()


@pytest.fixture
def vllm() -> Iterator[Simulated]:
    it = Simulated(VLLM_ROUTES, {"/version": {"version": "0.32.0"}})
    yield it
    it.close()


def bare(url: str, dialect: Dialect) -> Bare:
    waits = Deadlines(hold=1, drain=5, memory=5, update=5, inspect=2, grace=0.2)
    return Bare(url, None, dialect, waits, lambda tensors: Path("/models/m"), [(SPEC, bytes(4))])


def test_what_answers_is_found_out(sglang: Simulated, vllm: Simulated) -> None:
    found = surface_of(sglang.url)
    assert (found.kind, found.version) == ("sglang", "0.5.23")
    found = surface_of(vllm.url)
    assert (found.kind, found.version) == ("vllm", "0.32.0")
    del vllm.pages["/openapi.json"]  # its pages can be turned off
    assert surface_of(vllm.url).routes == set(VLLM_ROUTES)
    vllm.headers["x-hotbunk-boot"] = "1"
    assert surface_of(vllm.url).kind == "hotbunk"


def test_no_more_is_asked_for_than_it_takes(vllm: Simulated, tmp_path: Path) -> None:
    """A server may be started with a shorter context than its model's."""
    model = str(save_model("llama", 0, tmp_path / "model"))
    served = {"id": model, "root": model}
    asked = []
    for told in ({}, {"max_model_len": 1024}):
        vllm.pages["/v1/models"] = {"data": [served | told]}
        it = under_test("url", url=vllm.url)
        asked.append(it.endless_tokens + max(map(len, it.prompts)))
        it.close()
    assert asked[0] > asked[1] == 1024


def test_what_cannot_be_tried_is_said() -> None:
    plain = Simulated(("/v1/completions",), {"/version": {"version": "0.32.0"}})
    with pytest.raises(ConfigError, match="control routes"):
        surface_of(plain.url)
    plain.close()
    with pytest.raises(ReplicaLost):
        surface_of(plain.url)


@pytest.mark.anyio
async def test_sglang_is_asked_in_its_words(sglang: Simulated) -> None:
    it = bare(sglang.url, SglangDialect(surface_of(sglang.url)))
    assert it.capabilities.retentions == {Retention.DISCARD}
    assert not it.capabilities.pause[PauseMode.WAIT]
    await it.start()
    await it.pause_generation(PauseMode.KEEP, clear_cache=True)
    await it.pause_generation(PauseMode.KEEP, clear_cache=False)
    await it.resume_generation()
    await it.release([Tag.KV_CACHE])
    await it.wake_up([Tag.KV_CACHE])
    await it.sleep(2)
    await it.reset_caches([Cache.PREFIX])
    with pytest.raises(Unseen):
        await it.sleep(1)  # what it keeps is fixed at launch
    assert (await it.status()).versions == {"target": Version(0, 7)}
    await it.close()
    both = {"tags": ["weights", "kv_cache"]}
    disk = {"model_path": "/models/m", "flush_cache": True, "weight_version": "0.0"}
    assert sglang.asked == [
        ("/abort_request", {"rid": "", "abort_all": True}),
        ("/resume_memory_occupation", {"tags": None}),
        ("/continue_generation", {}),
        ("/update_weights_from_disk", disk),
        ("/flush_cache?timeout=5", None),
        ("/pause_generation", {"mode": "retract"}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("/pause_generation", {"mode": "abort"}),
        ("/release_memory_occupation", both),
        ("/flush_cache?timeout=5", None),
    ]


def _event(pairs: list[tuple[float, int]], count: int, reason: str | None = None) -> Any:
    said = [[value, token, None] for value, token in pairs]
    ended = None if reason is None else {"type": reason}
    meta = {"output_token_logprobs": said, "completion_tokens": count, "finish_reason": ended}
    return {"text": "", "meta_info": {**meta, "cached_tokens": 3}}


@pytest.mark.anyio
@pytest.mark.parametrize("increments", [False, True], ids=["whole", "increments"])
async def test_sglang_streams_are_read_either_way(sglang: Simulated, increments: bool) -> None:
    one, two = (-0.5, 11), (-0.25, 12)
    rest = [two] if increments else [one, two]
    sglang.events = [_event([one], 1), _event(rest, 2, "length")]
    it = bare(sglang.url, SglangDialect(surface_of(sglang.url)))
    asked = GenerateRequest("r1", (1, 2, 3), Sampling(0.0, max_tokens=2, ignore_eos=True, seed=4))
    done = await collect(it.generate(asked))
    await it.close()
    assert (done.token_ids, done.logprobs) == ((11, 12), (-0.5, -0.25))
    assert (done.finish_reason, done.cached_tokens) == (FinishReason.LENGTH, 3)
    [(path, body)] = sglang.asked
    assert path == "/generate"
    assert body["input_ids"] == [1, 2, 3]
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["sampling_seed"]) == (2, 4)
    assert (body["stream"], body["return_logprob"]) == (True, True)


@pytest.mark.anyio
async def test_vllm_is_asked_in_its_words(vllm: Simulated) -> None:
    it = bare(vllm.url, VllmDialect(surface_of(vllm.url)))
    await it.pause_generation(PauseMode.WAIT, clear_cache=False)
    await it.sleep(1, mode=PauseMode.KEEP)
    await it.wake_up([Tag.WEIGHTS, Tag.KV_CACHE])
    await it.release(retention=Retention.BACKUP)
    await it.release_kv_cache()
    await it.abort(["r1"])
    await it.close()
    assert vllm.asked == [
        ("/pause?mode=wait&clear_cache=false", None),
        ("/sleep?level=1&mode=keep", None),
        ("/wake_up?tags=weights&tags=kv_cache", None),
        ("/sleep?level=1&mode=wait", None),
        ("/release_kv_cache_memory", None),
        ("/abort_requests", {"request_ids": ["r1", "cmpl-r1"]}),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("status", [200, 400, 422, 500])
async def test_only_422_refuses_what_means_nothing(status: int, vllm: Simulated) -> None:
    it = bare(vllm.url, VllmDialect(surface_of(vllm.url)))
    vllm.answers = dict.fromkeys(("/pause", "/sleep", "/wake_up"), status)
    bad: Any = "doze"
    for wanted, doing in (
        (UsageError, it.pause_generation(bad)),
        (UsageError, it.sleep(1, mode=bad)),
        (UsageError, it.sleep(3)),
        (UnknownTag, it.wake_up(["weight"])),
    ):
        with pytest.raises(wanted if status == 422 else EngineFailed, match=str(status)):
            await doing
    await it.close()


@pytest.mark.anyio
async def test_what_no_route_can_try_is_unseen(vllm: Simulated) -> None:
    it = bare(vllm.url, VllmDialect(surface_of(vllm.url)))
    offer = MemoryTransfer([(SPEC, bytes(4))], version=Version(0, 1), fingerprint="none")
    dying = FailedElsewhere([(SPEC, bytes(4))], version=Version(0, 1))
    for doing in (
        it.release([Tag.WEIGHTS]),
        it.pause_generation(reject=True),
        it.update_weights(offer, version=Version(0, 1)),
        it.update_weights(dying, version=Version(0, 1)),
        it.memory(),
    ):
        with pytest.raises(Unseen):
            await doing
    await it.close()
    assert vllm.asked == []


def test_routes_that_are_not_there_are_no_abilities() -> None:
    caps = VllmDialect(Surface("vllm", frozenset({"/pause", "/resume"}), {})).capabilities
    assert caps.pause[PauseMode.KEEP]
    for lacking in (caps.release, caps.release_kv_cache, caps.abort):
        assert not lacking
        assert "no route" in lacking.how
    assert not caps.caches

"""The contract over a stock vLLM server: what its routes can do, and where they cannot be trusted."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.stock_vllm import StockServer
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.kit import greedy
from hotbunk.conformance.transfers import Corrupted, MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm_http import probe as probing
from hotbunk.rollout.backends.vllm_http.engine import VllmHttpEngine
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Scope,
    Version,
    collect,
    collect_all,
)
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio
_ids = count()
LONG = 400
QUICK = Deadlines(hold=5.0, drain=10.0, memory=10.0, update=20.0, inspect=3.0, grace=2.0)


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling})
    return GenerateRequest(f"h{next(_ids)}", tuple(prompt), chosen)


@pytest.fixture(scope="module")
def known() -> Iterator[VllmUnderTest]:
    """The model that is served, and what it says under which weights."""
    it = under_test("vllm")
    assert isinstance(it, VllmUnderTest)
    yield it
    it.close()


@pytest.fixture(scope="module")
def server(known: VllmUnderTest) -> Iterator[StockServer]:
    it = StockServer(known._disk, "--enable-scale-out").ready()
    yield it
    it.close()


def connect(server: StockServer, **options: Any) -> VllmHttpEngine:
    engine = create_backend("vllm_http", url=server.url, deadlines=QUICK, **options)
    assert isinstance(engine, VllmHttpEngine)
    return engine


_incarnations = count(1)


@pytest.fixture
async def replica(server: StockServer, known: VllmUnderTest) -> AsyncIterator[Replica]:
    """A replica over the server; its weights are version 0 of ``known``."""
    it = Replica(connect(server), name="http", deadlines=QUICK)
    await it.start()
    it.incarnation = next(_incarnations)  # type: ignore[attr-defined]
    await update(it, known, 0)
    yield it
    for pause in (await it.status()).pauses:
        await it.resume_generation(owner=pause.owner)
    await it.close()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        (await client.post("/resume")).raise_for_status()


def version(replica: Replica, step: int) -> Version:
    return Version(replica.incarnation, step)  # type: ignore[attr-defined]


async def update(replica: Replica, known: VllmUnderTest, step: int, kind: Any = None) -> Any:
    label = version(replica, step)
    transfer = (kind or MemoryTransfer)(known.weights(step), version=label)
    return await replica.update_weights(transfer, version=label)


async def begun(replica: Replica, tokens: int) -> None:
    """Until so many have come since the engine was connected to."""
    end = asyncio.get_running_loop().time() + 20
    while (await replica.backend.status()).tokens_generated < tokens:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


async def test_tokens_log_probs_and_cached_tokens(replica: Replica, known: VllmUnderTest) -> None:
    for prompt in known.prompts:
        first = await collect(replica.generate(ask(prompt, logprobs=3)))
        assert list(first.token_ids) == known.golden(prompt, 0, 8)
        assert all(len(top) == 3 for top in first.top_logprobs)
        assert [top[0][0] for top in first.top_logprobs] == list(first.token_ids)
        assert [top[0][1] for top in first.top_logprobs] == list(first.logprobs)
        again = await collect(replica.generate(ask(prompt)))
        assert again.token_ids == first.token_ids
        assert again.cached_tokens == len(prompt) // 32 * 32
    many = await collect_all(replica.generate(ask(known.prompts[0], n=3)))
    assert [list(one.token_ids) for one in many] == [known.golden(known.prompts[0], 0, 8)] * 3


async def test_frozen_over_an_update_tokens_say_which_weights_made_them(
    replica: Replica, known: VllmUnderTest
) -> None:
    prompt = known.prompts[0]
    running = asyncio.create_task(collect(replica.generate(ask(prompt, LONG))))
    await begun(replica, 20)
    report = await replica.pause_generation(PauseMode.KEEP)
    assert len(report.frozen) == 1
    assert (await update(replica, known, 1)).verified == "transfer"
    await replica.resume_generation()
    done = await running
    [before, after] = done.spans
    assert (before.version, after.version) == (version(replica, 0), version(replica, 1))
    assert (before.start, after.end) == (0, LONG)
    cut = after.start
    assert list(done.token_ids[:cut]) == known.golden(prompt, 0, cut)
    told = [*prompt, *done.token_ids[:cut]]
    assert list(done.token_ids[cut:]) == greedy(known.model(1), told, LONG - cut)


async def test_what_kv_of_older_weights_said_is_not_found_again(
    replica: Replica, known: VllmUnderTest
) -> None:
    prompt = known.prompts[0]
    await collect(replica.generate(ask(prompt)))
    await update(replica, known, 2)
    done = await collect(replica.generate(ask(prompt)))
    assert (done.cached_tokens, list(done.token_ids)) == (0, known.golden(prompt, 2, 8))
    await collect(replica.generate(ask(prompt)))


async def test_aborts_go_by_the_ids_that_the_server_itself_has(
    server: StockServer, replica: Replica, known: VllmUnderTest
) -> None:
    """By the id of the answer its own route aborts nothing, and says that it aborted one."""
    requests = [ask(known.prompts[0], 900, n=n) for n in (1, 2)]
    running = [asyncio.create_task(collect_all(replica.generate(it))) for it in requests]
    await begun(replica, 10)
    await replica.pause_generation(PauseMode.KEEP)  # so that none ends by itself meanwhile
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        said = await client.post("/abort_requests", json={"request_ids": [requests[0].request_id]})
    assert said.json() == {"status": "aborted", "aborted": 1}
    assert not running[0].done()
    report = await replica.abort([requests[0].request_id, "nobody"])
    assert (report.aborted, report.unknown) == ((requests[0].request_id,), ("nobody",))
    [cut] = await running[0]
    assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, False)
    assert 0 < len(cut.token_ids) < 900
    assert list(cut.token_ids) == known.golden(known.prompts[0], 0, len(cut.token_ids))
    await replica.abort()
    assert {one.finish_reason for one in await running[1]} == {FinishReason.ABORT}


async def test_a_pause_meets_requests_wherever_they_are(
    replica: Replica, known: VllmUnderTest
) -> None:
    """A request and a pause over two connections may overtake each other."""
    for late in (0.0, 0.005, 0.02, 0.05):
        running = [
            asyncio.create_task(collect(replica.generate(ask(known.prompts[n % 3], LONG))))
            for n in range(4)
        ]
        await asyncio.sleep(late)
        await replica.pause_generation(PauseMode.ABORT)
        await replica.resume_generation()
        for done in await asyncio.gather(*running):
            assert done.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert list(done.token_ids) == known.golden(
                next(p for p in known.prompts if _starts(known, p, done.token_ids)),
                0,
                len(done.token_ids),
            )


def _starts(known: VllmUnderTest, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return list(tokens) == known.golden(prompt, 0, len(tokens))


async def test_a_resume_during_a_wait_says_so(replica: Replica, known: VllmUnderTest) -> None:
    """vLLM's own wait answers that it paused, though it was resumed meanwhile and is open."""
    running = asyncio.create_task(collect(replica.generate(ask(known.prompts[0], LONG))))
    await begun(replica, 5)
    pausing = asyncio.create_task(replica.pause_generation(PauseMode.WAIT))
    await asyncio.sleep(0.1)
    await replica.resume_generation()
    with pytest.raises(errors.SessionError):
        await pausing
    assert (await running).finish_reason is FinishReason.LENGTH
    assert not (await replica.backend.status()).paused


async def test_paused_is_not_asleep_and_tags_are_ours_to_check(replica: Replica) -> None:
    """vLLM says that it sleeps when it is merely paused, and takes any tag."""
    await replica.pause_generation()
    status = await replica.status()
    assert (status.is_paused, status.is_sleeping) == (True, False)
    with pytest.raises(errors.UnknownTag):
        await replica.wake_up(["bogus"])
    await replica.resume_generation()


async def test_a_sleep_that_frees_nothing_is_refused(replica: Replica) -> None:
    """Stock vLLM on CPUs answers 200."""
    with pytest.raises(errors.Unsupported, match="has resident"):
        await replica.sleep(2)
    status = await replica.status()
    assert (status.servable, status.is_sleeping) == (True, False)
    for verb in (
        replica.release_kv_cache,
        replica.backend.release,
        replica.backend.release_kv_cache,
    ):
        with pytest.raises(errors.Unsupported, match="free nothing"):
            await verb()


async def test_a_broken_update_poisons_and_the_next_heals(
    server: StockServer, replica: Replica, known: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.VerifyFailed):
        await update(replica, known, 1, Corrupted)
    assert replica.health is Health.POISONED
    with pytest.raises(errors.WeightsPoisoned):
        await collect(replica.generate(ask(known.prompts[0])))
    await update(replica, known, 2)
    engine: Any = replica.backend
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "collective_rpc", lambda method, **_: engine.llm.nope(method))
        with pytest.raises(errors.EngineFailed):
            await update(replica, known, 3)
    assert replica.health is Health.POISONED
    await update(replica, known, 4)
    done = await collect(replica.generate(ask(known.prompts[1])))
    assert list(done.token_ids) == known.golden(known.prompts[1], 4, 8)
    assert not [name for name in os.listdir("/tmp") if name.startswith("hotbunk-reload-")]


async def test_what_a_reload_would_corrupt_is_refused(
    replica: Replica, known: VllmUnderTest
) -> None:
    here = version(replica, 0)
    some, scope = known.weights(1)[:3], Scope.partial(here)
    transfer = MemoryTransfer(some, version=version(replica, 1), scope=scope)
    with pytest.raises(errors.Unsupported, match="fused"):
        await replica.update_weights(transfer, version=version(replica, 1), scope=scope)
    tied = under_test("vllm", tied=True, tokenizer=False)
    assert isinstance(tied, VllmUnderTest)
    transfer = MemoryTransfer(tied.weights(1), version=version(replica, 1))
    with pytest.raises(errors.Unsupported, match="stale head"):
        await replica.update_weights(transfer, version=version(replica, 1))
    transfer = MemoryTransfer(known.weights(1)[1:], version=version(replica, 1))
    with pytest.raises(errors.IncompleteUpdate):
        await replica.update_weights(transfer, version=version(replica, 1))
    assert transfer.events == ["abort"]
    assert replica.health is Health.OK
    tied.close()


async def test_another_client_of_the_server_is_noticed(
    server: StockServer, replica: Replica, known: VllmUnderTest
) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        await replica.pause_generation(PauseMode.KEEP)
        await client.post("/resume")
        with pytest.raises(errors.SessionError, match="somebody else"):
            await update(replica, known, 1)
        await replica.resume_generation()
        await client.post("/update_weight_version", json={"new_version": "theirs"})
        with pytest.raises(errors.EngineFailed, match="theirs"):
            await collect(replica.generate(ask(known.prompts[0])))


async def test_log_probs_that_would_mean_something_else_are_refused(
    replica: Replica, known: VllmUnderTest
) -> None:
    with pytest.raises(errors.Unsupported, match="--logprobs-mode"):
        await collect(replica.generate(ask(known.prompts[0], temperature=0.7)))
    drawn = await collect(replica.generate(ask(known.prompts[0], temperature=1.0, seed=3)))
    assert len(drawn.logprobs) == 8


async def test_a_server_without_the_route_of_tokens(
    server: StockServer, known: VllmUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock vLLM without --enable-scale-out: nothing says which weights made a token."""
    routes = probing._routes

    async def fewer(client: Any) -> frozenset[str]:
        return await routes(client) - {f"POST {probing.TOKENS}"}

    monkeypatch.setattr(probing, "_routes", fewer)
    replica = Replica(connect(server), name="plain", deadlines=QUICK)
    await replica.start()
    replica.incarnation = next(_incarnations)  # type: ignore[attr-defined]
    await update(replica, known, 1)
    request = ask(known.prompts[0], logprobs=2)
    done = await collect(replica.generate(request))
    assert list(done.token_ids) == known.golden(known.prompts[0], 1, 8)
    assert all(len(top) == 2 for top in done.top_logprobs)
    assert done.spans[0].version == version(replica, 1)
    again = await collect(replica.generate(ask(known.prompts[0])))
    assert again.cached_tokens == 64
    with pytest.raises(errors.Unsupported, match="--enable-scale-out"):
        await replica.pause_generation(PauseMode.KEEP)
    running = asyncio.create_task(collect_all(replica.generate(ask(known.prompts[0], 900, n=2))))
    await asyncio.sleep(0.1)
    report = await replica.abort()
    assert len(report.aborted) == 1
    assert {one.finish_reason for one in await running} == {FinishReason.ABORT}
    await replica.close()


async def test_a_server_that_hides_its_routes_is_asked_for_each(
    server: StockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = probing.VllmClient(connect(server).options)
    said = await probing._routes(client)
    look = client.look
    monkeypatch.setattr(client, "look", lambda p: _nothing() if "openapi" in p else look(p))
    asked = await probing._routes(client)
    assert asked == said & set(probing._ASKED)
    assert set(probing.NEEDED) <= asked
    await client.close()


async def _nothing() -> None:
    return None


async def test_a_server_that_lacks_routes_is_told_each(known: VllmUnderTest) -> None:
    """hotbunk's own plane has many of vLLM's routes, but is no vLLM."""
    from hotbunk.conformance.backends.hotbunk_http import Served
    from hotbunk.rollout.backends.oracle import create

    served = Served(create(), QUICK)
    await asyncio.to_thread(served.start)
    try:
        engine = create_backend("vllm_http", url=served.url)
        with pytest.raises(errors.ConfigError, match="VLLM_SERVER_DEV_MODE") as caught:
            await engine.start()
        assert "POST /update_weight_version" in str(caught.value)
        assert "GET /version" in str(caught.value)
    finally:
        await asyncio.to_thread(served.stop)
    with pytest.raises(errors.ReplicaLost):
        await create_backend("vllm_http", url=served.url, attempts=1).start()


async def test_one_that_hangs_or_dies_is_lost_in_time(known: VllmUnderTest) -> None:
    """Last: its server is gone after it."""
    server = StockServer(known._disk, "--enable-scale-out").ready()
    try:
        prompt = known.prompts[0]
        for number, error in ((signal.SIGSTOP, errors.ReplicaLost), (signal.SIGKILL, None)):
            replica = Replica(connect(server, attempts=2), name="http", deadlines=QUICK)
            await replica.start()
            running = asyncio.create_task(collect(replica.generate(ask(prompt, LONG))))
            await begun(replica, 10)
            server.signal(number)
            began = time.monotonic()
            cut = await asyncio.wait_for(running, 30)
            assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, True)
            assert cut.token_ids
            await replica.status()
            assert replica.health is Health.LOST
            with pytest.raises(errors.ReplicaLost):
                await replica.pause_generation()
            with pytest.raises(errors.ReplicaLost):
                await collect(replica.generate(ask(prompt)))
            assert time.monotonic() - began < 30
            await replica.close()
            if error is not None:
                server.signal(signal.SIGCONT)
    finally:
        server.close()


def test_options_are_checked() -> None:
    with pytest.raises(errors.ConfigError, match="http://host:port"):
        create_backend("vllm_http", url="here")
    with pytest.raises(errors.ConfigError, match="weights='shm'"):
        create_backend("vllm_http", url="http://h:1", weights="shm")
    with pytest.raises(errors.ConfigError, match="served_name"):
        create_backend("vllm_http", url="http://h:1", servedname="x")

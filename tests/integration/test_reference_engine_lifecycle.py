"""The reference engine under pauses, releases and failures: it refuses, frees and ends cleanly."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from typing import Any

import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FinishReason,
    PauseMode,
    Tag,
    collect,
)
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Health

pytestmark = pytest.mark.anyio


# -- requests ---------------------------------------------------------------------------------


async def test_abort_keeps_partial_tokens_v5(tiny: Any, kit: Any, replica: Any) -> None:
    model, prompt = tiny(), kit.prompts(1)[0]
    target = await replica(model)
    stream = target.generate(kit.request(prompt, 200, name="long"))
    begun = await kit.first_tokens(stream, 5)
    assert (await target.abort(["long", "nobody"])).unknown == ("nobody",)
    rest = await collect(stream)
    tokens = begun + list(rest.token_ids)
    assert rest.finish_reason is FinishReason.ABORT
    assert tokens == kit.golden(model, prompt, 200)[: len(tokens)]
    assert len(rest.logprobs) == len(rest.token_ids)
    assert (await target.status()).backend.kv_blocks_used == 0
    target.backend.check_invariants()


async def test_dropping_the_iterator_frees_its_blocks(tiny: Any, kit: Any, engine: Any) -> None:
    backend = await engine(tiny())
    stream = backend.generate(kit.request([1, 2, 3], 200))
    await kit.first_tokens(stream, 1)
    assert (await backend.status()).kv_blocks_used > 0
    await stream.aclose()
    for _ in range(1000):
        if not (await backend.status()).kv_blocks_used:
            break
        await asyncio.sleep(0.005)
    assert (await backend.status()).kv_blocks_used == 0
    assert (await backend.status()).running == ()
    backend.check_invariants()


async def test_an_id_may_be_used_again_at_once_and_gets_only_its_own_tokens(
    tiny: Any, kit: Any, engine: Any
) -> None:
    """A retry under the same id must not see what was still under way for the dropped one."""
    model = tiny()
    backend = await engine(model)
    first, second = kit.prompts(2, shortest=10)
    expected = kit.golden(model, second, 8)
    for _ in range(30):
        stream = backend.generate(kit.request(first, 200, name="same"))
        await kit.first_tokens(stream, 1)
        await stream.aclose()
        assert list((await kit.complete(backend, second, 8, name="same")).token_ids) == expected


async def test_a_request_larger_than_the_whole_kv_cache_is_refused(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    backend = await engine(model, kv_cache_tokens=32, block_size=8)
    with pytest.raises(errors.UsageError, match="KV"):
        await kit.complete(backend, [1] * 20, 13)
    assert list((await kit.complete(backend, [1] * 20, 12)).token_ids) == kit.golden(
        model, [1] * 20, 12
    )


async def test_more_requests_than_kv_all_finish_first_come_first_served(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    backend = await engine(model, kv_cache_tokens=64, block_size=8, max_num_batched_tokens=16)
    prompts = kit.prompts(20, shortest=12, longest=20)
    order: list[int] = []

    async def run(index: int) -> list[int]:
        done = await kit.complete(backend, prompts[index], 8)
        order.append(index)
        return list(done.token_ids)

    results = await asyncio.gather(*(run(i) for i in range(len(prompts))))
    assert results == [kit.golden(model, p, 8) for p in prompts]
    # Two or three run at once, so neighbours may swap; nobody is overtaken by a latecomer.
    assert all(abs(place - index) <= 2 for place, index in enumerate(order)), order
    backend.check_invariants()


async def test_kv_that_holds_nan_does_not_reach_other_requests(
    tiny: Any, kit: Any, engine: Any
) -> None:
    """KV pages are never read undefined: neither after a wake nor where another request wrote."""
    model = tiny()
    backend = await engine(model, kv_cache_tokens=256, block_size=8)
    for keys, values in backend._runner._kv:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    prompts = kit.prompts(3, shortest=2, longest=40)
    done = await asyncio.gather(*(kit.complete(backend, p, 10) for p in prompts))
    assert [list(c.token_ids) for c in done] == [kit.golden(model, p, 10) for p in prompts]
    assert all(p == p for c in done for p in c.logprobs)


# -- pauses -----------------------------------------------------------------------------------


async def test_a_waiting_pause_that_is_overtaken_by_keep_freezes_the_rest(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    backend = await engine(model)
    stream = backend.generate(kit.request([1, 2, 3], 150, name="long"))
    begun = await kit.first_tokens(stream, 1)
    waiting = asyncio.ensure_future(backend.pause_generation(PauseMode.WAIT))
    await kit.until(lambda: bool(backend._pending))
    report = await backend.pause_generation(PauseMode.KEEP)
    assert report.frozen == ("long",)
    assert (await waiting).frozen == ("long",)
    assert (await backend.status()).frozen == ("long",)
    finishing = asyncio.ensure_future(backend.pause_generation(PauseMode.WAIT))
    rest = await collect(stream)
    assert (await finishing).finished == ("long",)
    assert begun + list(rest.token_ids) == kit.golden(model, [1, 2, 3], 150)


def engine_seconds(backend: Any) -> float:
    """CPU seconds of the engine's own thread."""
    clock = time.pthread_getcpuclockid(backend._thread._thread.ident)
    return time.clock_gettime(clock)


async def test_an_idle_and_a_paused_engine_burn_no_cpu(tiny: Any, kit: Any, replica: Any) -> None:
    target = await replica(tiny())
    stream = target.generate(kit.request([1, 2, 3], 200))
    await kit.first_tokens(stream, 1)
    await target.pause_generation(PauseMode.KEEP)  # frozen work is no work
    for prepare in (None, target.sleep, target.wake_up):
        if prepare is not None:
            await prepare()
        steps = (await target.status()).backend.steps
        thread, process = engine_seconds(target.backend), time.process_time()
        await asyncio.sleep(0.5)
        assert engine_seconds(target.backend) - thread < 0.05
        assert time.process_time() - process < 0.25
        assert (await target.status()).backend.steps == steps
    await stream.aclose()


# -- the end ----------------------------------------------------------------------------------


async def test_a_step_that_raises_ends_every_stream_with_a_typed_error(
    tiny: Any, kit: Any, replica: Any, caplog: Any
) -> None:
    target = await replica(tiny())
    streams = [target.generate(kit.request([n, 1, 2], 200)) for n in range(4)]
    for stream in streams:
        await kit.first_tokens(stream, 1)
    pausing = None

    def broken(plan: Any) -> Any:
        raise RuntimeError("a kernel broke")

    target.backend._runner.step = broken
    pausing = asyncio.ensure_future(target.pause_generation(PauseMode.WAIT))
    results = await asyncio.gather(*(collect(s) for s in streams), return_exceptions=True)
    assert [type(r) for r in results] == [errors.EngineFailed] * 4
    assert all("a kernel broke" in str(r) for r in results)
    with pytest.raises((errors.EngineFailed, errors.ReplicaLost)):
        await pausing
    with pytest.raises(errors.ReplicaLost):
        await target.sleep(1)
    status = await target.status()
    assert (status.health, status.servable) == (Health.LOST, False)
    await target.close()
    await target.close()
    assert "a kernel broke" in caplog.text


async def test_status_tells_that_the_engine_died_although_no_verb_was_called(
    tiny: Any, kit: Any, replica: Any, caplog: Any
) -> None:
    target = await replica(tiny())

    def broken(plan: Any) -> Any:
        raise RuntimeError("a kernel broke")

    target.backend._runner.step = broken
    with pytest.raises(errors.EngineFailed):
        await kit.complete(target, [1, 2, 3])
    status = await target.status()
    assert (status.health, status.servable) == (Health.LOST, False)
    with pytest.raises(errors.ReplicaLost):
        await kit.complete(target, [1, 2, 3])
    assert caplog.records


async def test_close_is_idempotent_and_ends_everything(tiny: Any, kit: Any) -> None:
    threads = set(threading.enumerate())
    backend = create_backend("reference", model=str(tiny()))
    await backend.close()  # not even started
    backend = create_backend("reference", model=str(tiny()))
    await backend.start()
    stream = backend.generate(kit.request([1, 2, 3], 250))
    await kit.first_tokens(stream, 1)
    held = asyncio.ensure_future(backend.pause_generation(PauseMode.WAIT))
    await kit.until(lambda: bool(backend._pending))
    await asyncio.gather(backend.close(), backend.close())
    await backend.close()
    with pytest.raises(errors.ReplicaLost):
        await collect(stream)
    async with asyncio.timeout(10):
        with pytest.raises(errors.ReplicaLost):
            await held
    with pytest.raises(errors.ReplicaLost):
        await kit.complete(backend, [1, 2, 3])
    for verb in (backend.resume, backend.release, backend.digest, backend.resume_generation):
        with pytest.raises(errors.ReplicaLost):
            await verb()
    engines = {t for t in threading.enumerate() if t.name == "hotbunk-engine"}
    assert engines <= threads


async def test_engines_come_and_go_without_growth(tiny: Any) -> None:
    """Addresses, pages and threads of closed engines are given back."""
    for _ in range(3):
        backend = create_backend("reference", model=str(tiny()), kv_cache_tokens=65536)
        await backend.start()
        await backend.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        backend = create_backend("reference", model=str(tiny()), kv_cache_tokens=65536)
        await backend.start()
        for keys, values in backend._runner._kv:
            keys.fill_(1.0)
            values.fill_(1.0)
        assert (await backend.memory()).resident(Tag.KV_CACHE) > 30 << 20
        await backend.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 120 << 10  # KiB: ten leaked engines would be above 300 MiB

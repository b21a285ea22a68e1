"""The reference engine's tokens are transformers' own, however its batches, blocks and cache fall."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hotbunk.conformance.kit import greedy, make_adapter, make_model, merged, save_model  # noqa: E402
from hotbunk.conformance.transfers import MemoryTransfer, RefusedElsewhere  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.contract import (  # noqa: E402
    ADAPTER_PREFIX,
    TARGET,
    Completion,
    PauseMode,
    Scope,
    TensorSpec,
    Version,
    collect,
    collect_all,
)
from hotbunk.rollout.kernels import as_bytes  # noqa: E402

pytestmark = pytest.mark.anyio
ONE = Version(0, 1)


def tokens(done: list[Completion]) -> list[list[int]]:
    return [list(c.token_ids) for c in done]


def sent(tensors: dict[str, Any], version: Version, scope: Scope | None = None, **kw: Any) -> Any:
    """A transfer of tensors, to the base or (``scope``) to an adapter."""
    group = TARGET if scope is None else ADAPTER_PREFIX + scope.name
    content = [
        (
            TensorSpec(name, tuple(t.shape), "float32", t.numel() * 4, group),
            bytes(as_bytes(t.detach().contiguous()).tolist()),
        )
        for name, t in tensors.items()
    ]
    kind = kw.pop("kind", MemoryTransfer)
    options = {} if scope is None else {"scope": scope}
    return kind(content, version=version, **options, **kw)


# -- prefixes ---------------------------------------------------------------------------------


async def test_a_prefix_hit_changes_no_token(tiny: Any, kit: Any, engine: Any) -> None:
    """Whole blocks of a prompt are found again, also its own response as a next turn's prompt."""
    model = tiny()
    backend = await engine(model, block_size=4)
    [system] = kit.prompts(1, shortest=40)
    first = await kit.complete(backend, system, 16)
    assert first.cached_tokens == 0
    again = await kit.complete(backend, system, 16)
    assert again.cached_tokens == (len(system) - 1) // 4 * 4
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)
    for tail in kit.prompts(6, longest=12, seed=3):
        done = await kit.complete(backend, [*system, *tail], 12)
        assert done.cached_tokens == len(system)
        assert list(done.token_ids) == kit.golden(model, [*system, *tail], 12)
    turn = [*system, *first.token_ids, 7]
    done = await kit.complete(backend, turn, 12)
    assert done.cached_tokens == 52, "the response's own blocks were not found"
    assert list(done.token_ids) == kit.golden(model, turn, 12)
    status = await backend.status()
    assert status.cached_tokens == 36 + 6 * 40 + 52
    backend.check_invariants()


async def test_without_prefix_caching_nothing_is_cached(tiny: Any, kit: Any, engine: Any) -> None:
    backend = await engine(tiny(), block_size=4, enable_prefix_caching=False)
    [prompt] = kit.prompts(1, shortest=30)
    done = [await kit.complete(backend, prompt) for _ in range(2)]
    assert [c.cached_tokens for c in done] == [0, 0]
    assert tokens(done) == [kit.golden(tiny(), prompt)] * 2


# -- preemption and chunks --------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
async def test_a_preemption_storm_changes_no_token(
    tiny: Any, kit: Any, engine: Any, caching: bool
) -> None:
    """Half of them twins, so preempted requests come back onto the KV of others."""
    model = tiny()
    backend = await engine(
        model,
        kv_cache_tokens=96,
        block_size=4,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
    )
    prompts = kit.prompts(12, shortest=4, longest=24) * 2
    done = await asyncio.gather(*(kit.complete(backend, p, 24) for p in prompts))
    assert tokens(done) == [kit.golden(model, p, 24) for p in prompts[:12]] * 2
    status = await backend.status()
    assert status.preemptions > 5
    assert status.kv_blocks_used == 0
    assert caching or status.cached_tokens == 0
    backend.check_invariants()


@pytest.mark.parametrize("budget", [1, 7, 16, 17])
@pytest.mark.parametrize("block", [1, 5, 16])
async def test_chunk_and_block_edges_change_no_token(
    tiny: Any, kit: Any, engine: Any, budget: int, block: int
) -> None:
    model = tiny()
    lengths = sorted({1, 2, budget, budget + 1, block, block + 1, 2 * block, 2 * block + 1, 33})
    prompts = [p[:n] for p, n in zip(kit.prompts(len(lengths), shortest=40), lengths, strict=True)]
    backend = await engine(
        model, max_num_batched_tokens=budget, block_size=block, kv_cache_tokens=240
    )
    done = await asyncio.gather(*(kit.complete(backend, p, 6) for p in prompts))
    assert tokens(done) == [kit.golden(model, p, 6) for p in prompts]
    backend.check_invariants()


async def test_one_request_may_fill_the_whole_pool(tiny: Any, kit: Any, engine: Any) -> None:
    model = tiny()
    backend = await engine(model, kv_cache_tokens=40, block_size=8, max_num_batched_tokens=7)
    prompts = kit.prompts(5, shortest=20, longest=20)
    done = await asyncio.gather(*(kit.complete(backend, p, 20) for p in prompts))
    assert tokens(done) == [kit.golden(model, p, 20) for p in prompts]


# -- several responses ------------------------------------------------------------------------


async def test_n_greedy_samples_are_equal_and_n_sampled_ones_are_those_of_their_seeds(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    backend = await engine(model, block_size=4, max_num_seqs=3)
    [prompt] = kit.prompts(1, shortest=20)
    done = await collect_all(backend.generate(kit.request(prompt, 8, n=4)))
    assert [c.index for c in done] == [0, 1, 2, 3]
    assert tokens(done) == [kit.golden(model, prompt, 8)] * 4
    hot = {"temperature": 1.5, "seed": 11}
    sampled = await collect_all(backend.generate(kit.request(prompt, 8, n=4, **hot)))
    alone = [await kit.complete(backend, prompt, 8, temperature=1.5, seed=11 + i) for i in range(4)]
    assert tokens(sampled) == tokens(alone)
    assert len({c.token_ids for c in sampled}) == 4
    backend.check_invariants()


async def test_dropping_a_stream_of_several_frees_them_all(
    tiny: Any, kit: Any, engine: Any
) -> None:
    backend = await engine(tiny(), block_size=4, enable_prefix_caching=False)
    stream = backend.generate(kit.request([1, 2, 3], 200, n=5))
    await kit.first_tokens(stream, 7)
    assert (await backend.status()).kv_blocks_used > 0
    await stream.aclose()
    await backend.resume_generation()  # a command after it: the removal has been done
    status = await backend.status()
    assert (status.kv_blocks_used, status.running, status.waiting) == (0, (), ())
    backend.check_invariants()


async def test_cancelled_tasks_free_their_blocks_wherever_they_are(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """Running, preempted, waiting and held requests, all dropped at once."""
    target = await replica(tiny(), kv_cache_tokens=96, block_size=4, max_num_seqs=6)
    tasks = [asyncio.create_task(kit.complete(target, p, 60)) for p in kit.prompts(12, longest=30)]
    async with asyncio.timeout(20):
        while (await target.status()).backend.tokens_generated < 60:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await target.pause_generation(PauseMode.KEEP)
    tasks += [asyncio.create_task(kit.complete(target, [1, 2], 4)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await target.resume_generation()
    status = await target.status()
    assert (status.running, status.held) == ((), ())
    assert status.backend.kv_blocks_used == 0
    target.backend.check_invariants()


# -- adapters ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make_model("llama", 0)
    return save_model("llama", 0, tmp_path_factory.mktemp("models") / "base"), model


async def test_adapters_mixed_in_one_batch_equal_merged_weights(
    base: Any, kit: Any, replica: Any
) -> None:
    """Three adapters and none, in chunks of one batch, under preemption, with prefix hits."""
    path, model = base
    target = await replica(
        path, kv_cache_tokens=160, block_size=4, max_num_batched_tokens=24, max_num_seqs=12
    )
    goldens: dict[str | None, Any] = {None: model}
    for name in "abc":
        tensors = make_adapter(model, name, 1, rank=2 if name == "b" else 4)
        scope = Scope.adapter(name, Version(0, 0))
        await target.update_weights(sent(tensors, ONE, scope), version=ONE, scope=scope)
        goldens[name] = merged(model, tensors)
    prompts = kit.prompts(6, shortest=8, longest=30)
    asked = [(p, name) for p in prompts for name in goldens] * 2

    async def run(prompt: list[int], name: str | None) -> Completion:
        from msgspec.structs import replace

        return await collect(target.generate(replace(kit.request(prompt, 10), adapter=name)))

    done = await asyncio.gather(*(run(*each) for each in asked))
    want = {(tuple(p), n): greedy(goldens[n], p, 10) for p in prompts for n in goldens}
    assert tokens(done) == [want[tuple(p), n] for p, n in asked]
    for prompt in prompts:
        assert len({tuple(want[tuple(prompt), n]) for n in goldens}) == 4, "goldens must differ"
    status = (await target.status()).backend
    assert status.preemptions > 0
    again = await run(*asked[-1])
    assert again.cached_tokens > 0
    assert again.token_ids == done[-1].token_ids
    target.backend.check_invariants()


async def test_a_refused_adapter_update_leaves_the_old_one_as_it_was_l3(
    base: Any, kit: Any, replica: Any
) -> None:
    """Another rank says no: neither rank nor scale nor content of the resident adapter changes."""
    path, model = base
    target = await replica(path)
    scope, zero = Scope.adapter("a", Version(0, 0)), Version(0, 0)
    old = make_adapter(model, "a", 1)
    await target.update_weights(sent(old, ONE, scope), version=ONE, scope=scope)
    memory = (await target.memory()).resident()
    [prompt] = kit.prompts(1, shortest=12)
    from msgspec.structs import replace

    async def ask() -> list[int]:
        asked = replace(kit.request(prompt, 10), adapter="a")
        return list((await collect(target.generate(asked))).token_ids)

    golden = greedy(merged(model, old), prompt, 10)
    assert await ask() == golden
    for name, rank in (("a", 8), ("a", 4), ("new", 4)):
        other = Scope.adapter(name, zero)
        refused = sent(
            make_adapter(model, name, 2, rank=rank), Version(0, 2), other, kind=RefusedElsewhere
        )
        refused.manifest = replace(refused.manifest, metadata={"lora_alpha": 64})
        with pytest.raises(errors.UpdateRefused, match="rank 1"):
            await target.update_weights(refused, version=Version(0, 2), scope=other)
        assert await ask() == golden, f"a refused update of {name} (rank {rank}) changed it"
        assert (await target.memory()).resident() == memory
    assert (await target.status()).versions[f"{ADAPTER_PREFIX}a"] == ONE


async def test_frozen_requests_of_a_poisoned_adapter_are_never_computed_again(
    base: Any, kit: Any, engine: Any
) -> None:
    """The engine's own gate: past the replica, too, no token comes from a half-written adapter."""
    from msgspec.structs import replace

    from hotbunk.conformance.transfers import FailedElsewhere

    path, model = base
    backend = await engine(path)
    scope = Scope.adapter("a", Version(0, 0))
    await backend.pause_generation()
    good = sent(make_adapter(model, "a", 1), ONE, scope)
    await backend.update_weights(good, version=ONE, scope=scope)
    await backend.resume_generation()
    with_it = backend.generate(replace(kit.request([1, 2, 3], 60), adapter="a"))
    without = backend.generate(kit.request([1, 2, 3], 60))
    await kit.first_tokens(with_it, 2)
    begun = await kit.first_tokens(without, 2)
    await backend.pause_generation(PauseMode.KEEP)
    bad = sent(make_adapter(model, "a", 2), Version(0, 2), scope, kind=FailedElsewhere)
    with pytest.raises(errors.UpdateFailed):
        await backend.update_weights(bad, version=Version(0, 2), scope=scope)
    made = (await backend.status()).tokens_generated
    await backend.resume_generation()
    rest = await collect(with_it)
    assert (rest.finish_reason, rest.retryable) == ("abort", True)
    assert "adapter:a" in rest.error
    other = await collect(without)
    assert begun + list(other.token_ids) == greedy(model, [1, 2, 3], 60)
    after = (await backend.status()).tokens_generated
    in_flight = 60 - len(begun)
    assert after - made <= in_flight, "the poisoned adapter made tokens"
    backend.check_invariants()


# -- mixture of experts -----------------------------------------------------------------------


async def test_qwen3_moe_equals_generate_before_and_after_an_update(
    tmp_path: Path, kit: Any, replica: Any
) -> None:
    one, two = make_model("qwen3_moe", 0), make_model("qwen3_moe", 1)
    path = save_model("qwen3_moe", 0, tmp_path / "moe")
    target = await replica(path, block_size=8, max_num_batched_tokens=32, kv_cache_tokens=256)
    prompts = kit.prompts(10, longest=40)
    for version, model in ((0, one), (1, two)):
        if version:
            await target.sleep(2)
            await target.wake_up(["weights"])
            tensors = dict(two.named_parameters())
            assert any("experts" in name for name in tensors)
            await target.update_weights(sent(tensors, ONE), version=ONE)
            await target.wake_up()
        done = await asyncio.gather(*(kit.complete(target, p, 10) for p in prompts))
        assert tokens(done) == [greedy(model, p, 10) for p in prompts]
        assert {s.version.step for c in done for s in c.spans} == {version}
    assert all(greedy(one, p, 10) != greedy(two, p, 10) for p in prompts)
    target.backend.check_invariants()

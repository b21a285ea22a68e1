"""Adapters (LoRA) in a real vLLM. One hazard a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy
from hotbunk.checkpoint_engine.source import module_source, state_dict_source
from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.case import Case, Status, all_cases
from hotbunk.conformance.kit import greedy, make_adapter, merged
from hotbunk.conformance.runner import run_case
from hotbunk.conformance.transfers import Corrupted, MemoryTransfer
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.declared import declared
from hotbunk.rollout.backends.vllm.options import VllmOptions
from hotbunk.rollout.backends.vllm.update import Receiver
from hotbunk.rollout.contract import (
    GenerateRequest,
    PauseMode,
    Sampling,
    Scope,
    Tag,
    TensorSpec,
    Version,
    collect,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.replica import Replica

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
_ids = count()
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
CASES = [pytest.param(one, id=one.name) for one in all_cases() if "adapter" in one.capabilities]


def ask(prompt: tuple[int, ...], adapter: str | None = None, tokens: int = 8) -> GenerateRequest:
    sampling = Sampling(temperature=0.0, max_tokens=tokens)
    return GenerateRequest(f"l{next(_ids)}", tuple(prompt), sampling, adapter=adapter)


@pytest.fixture(scope="module")
async def adapted(anyio_backend: str) -> AsyncIterator[VllmUnderTest]:
    it = under_test("vllm", engine_args=LORA)
    assert isinstance(it, VllmUnderTest)
    yield it
    await it.finish()


@pytest.fixture
async def replica(adapted: VllmUnderTest) -> AsyncIterator[Replica]:
    it = Replica(await adapted.start(), name="vllm", deadlines=adapted.deadlines)
    await it.start()
    yield it
    await it.close()


async def send(
    replica: Replica, it: VllmUnderTest, name: str, version: int, kind: Any = MemoryTransfer
) -> None:
    """Over the base of version 0."""
    await offered(replica, it.adapter(name, version), name, version, kind)


async def offered(
    replica: Replica, tensors: Any, name: str, version: int, kind: Any = MemoryTransfer, **meta: Any
) -> None:
    scope = Scope.adapter(name, Version(0, 0))
    transfer = kind(tensors, version=Version(0, version), scope=scope)
    transfer.manifest = msgspec.structs.replace(transfer.manifest, metadata=meta)
    await replica.pause_generation(PauseMode.KEEP)
    try:
        await replica.update_weights(transfer, version=Version(0, version), scope=scope)
    finally:
        await replica.resume_generation()


@contextmanager
def one_hop() -> Iterator[None]:
    async def receive(*_: Any) -> None:
        raise AssertionError("the adapter's own process received it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "receive", receive)
        yield


@pytest.mark.parametrize("one", CASES)
async def test_suite(one: Case, adapted: VllmUnderTest) -> None:
    result = await run_case(one, adapted)
    assert result.status is Status.PASS, result.detail


async def test_over_a_transport_the_base_comes_first_and_stays_as_it_is(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    """One hop into the worker; asleep at level 2 the base is not resident, so it is sent, too."""
    shm = load_transport("shm")()
    manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=SyncPolicy(deadline=60.0))
    base = module_source(adapted.model(1))
    tensors = make_adapter(adapted.model(1), "a", 1)
    source = state_dict_source(tensors, group="adapter:a")
    try:
        await manager.sleep_replicas()
        with one_hop():
            report = await manager.update_adapter(
                "a", source, Version(0, 1), base=base, base_version=Version(0, 1)
            )
            assert [one.outcome for one in report.outcomes] == [Outcome.COMMITTED], report
            before = await replica.digest()
            again = state_dict_source(make_adapter(adapted.model(1), "a", 2), group="adapter:a")
            report = await manager.update_adapter(
                "a", again, Version(0, 2), base=base, base_version=Version(0, 1)
            )
    finally:
        await shm.close()
    after = await replica.digest()
    changed = {name for name in before.values if before.values[name] != after.values.get(name)}
    assert changed == {f"adapter:a/{name}" for name in tensors}
    assert [u.skipped for u in report.outcomes[0].updates] == [True, False], "the base was sent"
    for prompt in adapted.prompts:
        done = await collect(replica.generate(ask(prompt, "a")))
        assert list(done.token_ids) == adapted.adapter_golden(prompt, 1, "a", 2, 8)
        done = await collect(replica.generate(ask(prompt)))
        assert list(done.token_ids) == adapted.golden(prompt, 1, 8)


async def test_as_merged_weights_in_a_fresh_engine_would(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    """The same tokens, and their log-probs: the scale is the adapter's, and no other row has it."""
    tensors = make_adapter(adapted.model(0), "a", 1, rank=8)
    await offered(replica, _described(tensors, "adapter:a"), "a", 1, lora_alpha=4)
    scaled = {n: t * 0.5 if ".lora_B." in n else t for n, t in tensors.items()}
    model = merged(adapted.model(0), scaled)
    for prompt in adapted.prompts:
        adapter, base = await asyncio.gather(
            collect(replica.generate(ask(prompt, "a"))), collect(replica.generate(ask(prompt)))
        )
        assert list(adapter.token_ids) == greedy(model, prompt, 8)
        assert list(base.token_ids) == adapted.golden(prompt, 0, 8)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *adapter.token_ids]])).logits[0]
        at = logits[len(prompt) - 1 : -1].log_softmax(-1)
        want = [float(row[token]) for row, token in zip(at, adapter.token_ids, strict=True)]
        assert adapter.logprobs == pytest.approx(want, abs=1e-3)


async def test_a_new_version_under_the_same_name_is_used_also_by_who_is_frozen(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    """vLLM knows adapters by number, and never reads one again that it has."""
    prompt = adapted.prompts[0]
    await send(replica, adapted, "a", 1)
    for version in (1, 2, 3):
        if version > 1:
            await send(replica, adapted, "a", version)
        done = await collect(replica.generate(ask(prompt, "a")))
        assert list(done.token_ids) == adapted.adapter_golden(prompt, 0, "a", version, 8)
    stream = replica.generate(ask(prompt, "a", tokens=300))
    had = list((await anext(stream)).token_ids)
    await send(replica, adapted, "a", 4)
    tokens = had + [token async for chunk in stream for token in chunk.token_ids]
    new = next(n for n in range(len(tokens)) if tokens[n:] == _after(adapted, prompt, tokens, n))
    assert 0 < new < 300
    assert tokens[:new] == adapted.adapter_golden(prompt, 0, "a", 3, new)


async def test_more_of_them_than_vllm_keeps(adapted: VllmUnderTest, replica: Replica) -> None:
    """What it dropped it gets from us; from the directory that it thinks of it would get nothing."""
    prompt, names = adapted.prompts[1], ("a", "b", "c", "d")
    for name in names:
        await send(replica, adapted, name, 1)
    for _ in range(2):
        done = await asyncio.gather(*(collect(replica.generate(ask(prompt, n))) for n in names))
        for name, its in zip(names, done, strict=True):
            assert list(its.token_ids) == adapted.adapter_golden(prompt, 0, name, 1, 8), name


async def test_what_does_not_fit_is_refused_and_changes_nothing(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    await send(replica, adapted, "a", 1)
    before = await replica.digest()
    good = adapted.adapter("a", 2)

    def renamed(old: str, new: str) -> list[tuple[TensorSpec, bytes]]:
        return [
            (msgspec.structs.replace(s, name=s.name.replace(old, new)), data) for s, data in good
        ]

    large = make_adapter(adapted.model(0), "a", 2, rank=9)
    for tensors, meta, why in (
        (renamed("down_proj", "gone_proj"), {}, errors.UnknownNames),
        (renamed("model.layers.0.self_attn.q_proj", "model.embed_tokens"), {}, errors.UnknownNames),
        (renamed("model.layers.0.self_attn.q_proj", "lm_head"), {}, errors.UnknownNames),
        (renamed("lora_B.weight", "bias"), {}, errors.UnknownNames),
        (renamed("q_proj", "k_proj"), {}, errors.ShapeMismatch),
        (good[1:], {}, errors.IncompleteUpdate),
        (_described(large, "adapter:a"), {}, errors.ShapeMismatch),
        (good, {"lora_alpha": "much"}, errors.UpdateRefused),
    ):
        with pytest.raises(why):
            await offered(replica, tensors, "a", 2, **meta)
    assert (await replica.digest()).values == before.values
    prompt = adapted.prompts[0]
    done = await collect(replica.generate(ask(prompt, "a")))
    assert list(done.token_ids) == adapted.adapter_golden(prompt, 0, "a", 1, 8)
    with pytest.raises(errors.WeightsNotLoaded):
        await collect(replica.generate(ask(prompt, "nobody")))


async def test_one_that_arrives_broken_serves_nobody(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    prompt = adapted.prompts[0]
    await send(replica, adapted, "a", 1)
    with pytest.raises(errors.VerifyFailed):
        await send(replica, adapted, "a", 2, Corrupted)
    with pytest.raises(errors.WeightsPoisoned):
        await collect(replica.generate(ask(prompt, "a")))
    done = await collect(replica.generate(ask(prompt)))
    assert list(done.token_ids) == adapted.golden(prompt, 0, 8)
    await send(replica, adapted, "a", 2)
    done = await collect(replica.generate(ask(prompt, "a")))
    assert list(done.token_ids) == adapted.adapter_golden(prompt, 0, "a", 2, 8)


async def test_no_sync_of_the_base_brings_it_back_so_level_2_keeps_it(
    adapted: VllmUnderTest, replica: Replica
) -> None:
    """Slots and copies go with the weights; what a sync brought has a backup, and comes back."""
    prompt = adapted.prompts[0]
    await send(replica, adapted, "a", 1)
    await collect(replica.generate(ask(prompt, "a")))  # vLLM has it in a slot now
    awake = (await replica.memory()).resident(Tag.WEIGHTS)
    await replica.sleep(2)
    asleep = await replica.memory()
    assert asleep.resident(Tag.WEIGHTS) <= 0.05 * awake, asleep
    [own] = [arena for arena in asleep.arenas if arena.group == "adapter:a"]
    assert own.resident == 0
    assert own.backup > 0
    await replica.resume([Tag.WEIGHTS])
    transfer = MemoryTransfer(adapted.weights(1), version=Version(0, 1))
    await replica.update_weights(transfer, version=Version(0, 1))
    await replica.resume([Tag.KV_CACHE])
    done = await collect(replica.generate(ask(prompt, "a")))
    assert list(done.token_ids) == adapted.adapter_golden(prompt, 1, "a", 1, 8)
    versions = (await replica.status()).versions
    assert versions == {"target": Version(0, 1), "adapter:a": Version(0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"tied": True}],
    ids=str,
)
async def test_on_two_ranks_and_on_tied_weights(more: dict[str, Any]) -> None:
    it = under_test("vllm", engine_args=LORA, **more)
    assert isinstance(it, VllmUnderTest)
    replica = Replica(await it.start(), name="vllm", deadlines=it.deadlines)
    shm = load_transport("shm")()
    try:
        await replica.start()
        manager = CheckpointEngineManager(
            [LocalHandle(replica)], shm, policy=SyncPolicy(deadline=60.0)
        )
        tensors = make_adapter(it.model(0), "a", 1)
        source = state_dict_source(tensors, group="adapter:a")
        with one_hop():
            await manager.update_weights(module_source(it.model(1)), Version(0, 1))
            await manager.update_adapter(
                "a",
                source,
                Version(0, 1),
                base=module_source(it.model(1)),
                base_version=Version(0, 1),
            )
        for prompt in it.prompts:
            done = await collect(replica.generate(ask(prompt, "a")))
            assert list(done.token_ids) == it.adapter_golden(prompt, 1, "a", 1, 8)
            done = await collect(replica.generate(ask(prompt)))
            assert list(done.token_ids) == it.golden(prompt, 1, 8)
    finally:
        await replica.close()
        await shm.close()
        await it.finish()


def test_what_is_declared_follows_the_options() -> None:
    with_them = declared(VllmOptions("m", engine_args={"enable_lora": True, "max_lora_rank": 32}))
    assert with_them.adapter
    assert "32" in with_them.adapter.how
    without = declared(VllmOptions("m")).adapter
    assert not without
    assert "enable_lora" in without.how
    with pytest.raises(errors.ConfigError, match="update_weights"):
        VllmOptions("m", engine_args={"default_mm_loras": {}})


def test_a_stock_server_reads_a_refreshed_adapter_at_every_step() -> None:
    """So ``load_inplace`` is no way for ``vllm_http``: see docs/decisions.md."""
    manager = object.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = MagicMock(lora_slots=4, capacity=4)
    manager._adapter_manager.list_adapters.return_value = {1: None}
    reads: list[str] = []

    def read(request: LoRARequest) -> Any:
        reads.append(request.lora_path)
        return MagicMock(id=request.lora_int_id)

    manager._load_adapter = read
    for _ in range(3):
        manager.set_active_adapters({LoRARequest("it", 1, "first")}, None)
    assert reads == []
    for _ in range(3):
        manager.set_active_adapters({LoRARequest("it", 1, "fresh", load_inplace=True)}, None)
    assert reads == ["fresh"] * 3
    manager.set_active_adapters({LoRARequest("it", 2, "other")}, None)
    assert reads[3:] == ["other"]


def _described(tensors: dict[str, torch.Tensor], group: str) -> list[tuple[TensorSpec, bytes]]:
    return [
        (
            TensorSpec(name, tuple(t.shape), "float32", t.numel() * 4, group=group),
            t.contiguous().numpy().tobytes(),
        )
        for name, t in tensors.items()
    ]


def _after(it: VllmUnderTest, prompt: tuple[int, ...], tokens: list[int], at: int) -> list[int]:
    """What version 4 of the adapter says after so many of these tokens."""
    return it.adapter_golden((*prompt, *tokens[:at]), 0, "a", 4, len(tokens) - at)

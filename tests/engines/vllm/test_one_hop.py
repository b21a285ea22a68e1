"""A ticket is opened in vLLM's workers: one hop from the trainer, accepted and committed by all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source, state_dict_source
from hotbunk.checkpoint_engine.transports.shm.sender import ShmOffer
from hotbunk.conformance import tickets
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.plugin import BACKEND, register
from hotbunk.rollout.backends.vllm.update import Receiver
from hotbunk.rollout.contract import (
    GenerateRequest,
    Manifest,
    PauseMode,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import load_transport
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
_ids = count()


async def until(done: Any, seconds: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    for _ in iter(done, True):
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.005)


POLICY = SyncPolicy(deadline=60.0)


def ask(prompt: tuple[int, ...], tokens: int = 8, **sampling: Any) -> GenerateRequest:
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": tokens, **sampling})
    return GenerateRequest(f"h{next(_ids)}", tuple(prompt), chosen)


@contextmanager
def one_hop() -> Iterator[None]:
    async def receive(*_: Any) -> None:
        raise AssertionError("the adapter's own process received it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "receive", receive)
        yield


@pytest.fixture(params=["shm", "disk", "collective"])
async def transport(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    options = {"root": str(tmp_path / "disk")} if request.param == "disk" else {}
    made = load_transport(request.param)(**options)
    yield made
    await made.close()


@pytest.fixture
async def shm() -> AsyncIterator[Any]:
    made = load_transport("shm")()
    yield made
    await made.close()


async def replica_of(it: VllmUnderTest) -> Replica:
    made = Replica(await it.start(), name="vllm")
    await made.start()
    return made


async def sync(replica: Replica, transport: Any, it: VllmUnderTest, version: int) -> Any:
    manager = CheckpointEngineManager([LocalHandle(replica)], transport, policy=POLICY)
    with one_hop():
        report = await manager.update_weights(module_source(it.model(version)), Version(0, version))
    return report.outcomes[0].update


async def told(replica: Replica, it: VllmUnderTest, path: Path, step: int, **how: Any) -> Any:
    """An update by a ticket that each worker makes its own bytes from."""
    file = path / f"{step}.safetensors"
    save_file({n: p.contiguous() for n, p in it.model(step).named_parameters()}, file)
    ranks = replica.capabilities.ranks
    ticket = tickets.ticket(step, ranks=ranks, weights=str(file), bucket_bytes=100_003, **how)
    with one_hop():
        return await replica.update_weights(ticket, version=Version(0, step))


async def is_version(replica: Replica, it: VllmUnderTest, version: int, requests: int = 3) -> None:
    for n in range(requests):
        prompt = it.prompts[n % 3]
        done = await collect(replica.generate(ask(prompt)))
        assert list(done.token_ids) == it.golden(prompt, version, 8)
        assert [span.version for span in done.spans] == [Version(0, version)]


# -- one worker -----------------------------------------------------------------------------------


async def test_every_transport_reaches_the_worker(
    replica: Replica, untied: VllmUnderTest, transport: Any
) -> None:
    for version in (1, 2):
        update = await sync(replica, transport, untied, version)
        assert (update.verified, update.applied) == ("applied", len(untied.weights(version)))
        await is_version(replica, untied, version)
        for spec, content in untied.weights(version):
            assert untied.read_weight(spec.name) == content


async def test_the_trainer_writes_into_vllms_own_memory(
    replica: Replica, untied: VllmUnderTest, shm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte once: no bucket is filled, the parts of fused matrices included."""
    rooms: list[list[int]] = []
    make = ShmOffer.make_halves
    monkeypatch.setattr(
        ShmOffer, "make_halves", lambda self, its: (rooms.append(list(its)), make(self, its))[1]
    )
    await sync(replica, shm, untied, 1)
    assert rooms == [[]]
    await is_version(replica, untied, 1)


async def test_weights_written_in_place_survive_sleep(
    replica: Replica, untied: VllmUnderTest, shm: Any
) -> None:
    manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=POLICY)
    for version in (1, 2):
        await manager.sleep_replicas()
        assert sum(untied.resident(tag) for tag in Tag) == 0
        await manager.update_weights(module_source(untied.model(version)), Version(0, version))
        await is_version(replica, untied, version)


async def test_a_tied_head_is_sent_once_and_follows(tied: VllmUnderTest, shm: Any) -> None:
    replica = await replica_of(tied)
    await sync(replica, shm, tied, 1)
    await is_version(replica, tied, 1)
    assert tied.read_weight("lm_head.weight") == tied.read_weight("model.embed_tokens.weight")


@pytest.mark.parametrize("missing", ["model.layers.0.self_attn.k_proj.weight", "lm_head.weight"])
async def test_what_is_not_whole_is_refused_before_a_byte(
    replica: Replica, untied: VllmUnderTest, shm: Any, missing: str
) -> None:
    """q and v without k corrupt a fused matrix in vLLM's own loader, without a word."""
    named = dict(untied.model(1).named_parameters())
    del named[missing]
    manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=POLICY)
    with pytest.raises(errors.SyncFailed, match=missing):
        await manager.update_weights(state_dict_source(named), Version(0, 1))
    assert (await replica.status()).health is Health.OK
    for spec, content in untied.weights(0):
        assert untied.read_weight(spec.name) == content
    await is_version(replica, untied, 0)


async def test_a_draft_model_is_refused(replica: Replica, untied: VllmUnderTest, shm: Any) -> None:
    source = module_source(untied.model(1), group="draft")
    manifest = Manifest(Version(0, 1), tuple(source.specs()), fingerprint=KIND)
    offer = await shm.offer(source, manifest, ranks=[1], deadline=20.0)
    serving = asyncio.create_task(offer.serve())
    try:
        with pytest.raises((errors.UnsupportedTarget, errors.UpdateRefused)):
            await replica.update_weights(offer.tickets[0], version=Version(0, 1))
    finally:
        await offer.drop(0)
        await serving
        await offer.close()
    engine: Any = untied._engine
    with pytest.raises(Exception, match="draft"):
        await engine.llm.start_draft_weight_update()
    await is_version(replica, untied, 0)


@pytest.mark.parametrize(
    "sender", ["Corrupted", "Truncated", "WrongStart", "Raising", "FailedElsewhere"]
)
async def test_a_broken_update_leaves_nothing_that_the_next_one_meets(
    replica: Replica, untied: VllmUnderTest, tmp_path: Path, sender: str
) -> None:
    """A session of vLLM's own that fails stays open, and what it buffered is replayed."""
    where = {} if sender == "FailedElsewhere" else {"at": -1}
    with pytest.raises(errors.HotbunkError) as failed:
        await told(replica, untied, tmp_path, 1, sender=sender, **where)
    assert isinstance(failed.value, errors.UpdateFailed | errors.EngineFailed)
    engine: Any = untied._engine
    assert await engine.llm.get_weight_version() == str(Version(0, 0)), "the label moves last"
    assert (await replica.status()).health is Health.POISONED
    with pytest.raises(errors.WeightsPoisoned):
        await collect(replica.generate(ask(untied.prompts[0])))
    await told(replica, untied, tmp_path, 2)
    await is_version(replica, untied, 2)


async def test_an_update_that_hangs_ends_in_time_and_can_be_healed(
    replica: Replica, untied: VllmUnderTest, tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    save_file({n: p.contiguous() for n, p in untied.model(1).named_parameters()}, file)
    ticket = tickets.ticket(1, weights=str(file), sender="Hanging", at=0)
    with pytest.raises(errors.DeadlineExceeded):
        await replica.update_weights(ticket, version=Version(0, 1), deadline=2.0)
    await told(replica, untied, tmp_path, 2)
    await is_version(replica, untied, 2)


async def test_frozen_requests_go_on_with_the_new_weights(
    replica: Replica, untied: VllmUnderTest, shm: Any
) -> None:
    prompt = untied.prompts[0]
    running = asyncio.create_task(collect(replica.generate(ask(prompt, 150))))
    streams = untied._engine._flight.streams  # type: ignore[union-attr]
    await until(lambda: any(s.tokens > 10 for s in streams.values()))
    policy = SyncPolicy(deadline=60.0, pause=PauseMode.KEEP, clear_cache=True)
    manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=policy)
    await manager.update_weights(module_source(untied.model(1)), Version(0, 1))
    done = await running
    assert [span.version for span in done.spans] == [Version(0, 0), Version(0, 1)]
    at = done.spans[0].end
    assert list(done.token_ids[:at]) == untied.golden(prompt, 0, at)
    assert list(done.token_ids[at:]) == untied.golden([*prompt, *done.token_ids[:at]], 1, 150 - at)


async def test_vllms_own_update_calls_take_a_ticket(
    replica: Replica, untied: VllmUnderTest, shm: Any
) -> None:
    """As a stock server's routes do: init, start, update, finish."""
    register()  # idempotent: vLLM's plugins have called it
    assert BACKEND in WeightTransferEngineFactory._registry
    engine: Any = untied._engine
    llm = engine.llm
    await replica.pause_generation()
    await llm.start_weight_update()
    with pytest.raises(Exception, match="received"):
        await llm.finish_weight_update()
    source = module_source(untied.model(1))
    manifest = Manifest(Version(0, 1), tuple(source.specs()), fingerprint=KIND)
    offer = await shm.offer(source, manifest, ranks=[1], deadline=30.0)
    serving = asyncio.create_task(offer.serve())
    [ticket] = offer.tickets
    info = {"transport": ticket.transport, "address": ticket.address}
    await llm.update_weights(WeightTransferUpdateRequest(info))
    await llm.finish_weight_update()
    await serving
    await offer.close()
    for spec, content in untied.weights(1):
        assert untied.read_weight(spec.name) == content


# -- two workers that hold halves, and two engine cores that hold the same --------------------------


async def test_two_shards_take_their_halves_and_sleep(
    sharded: VllmUnderTest, shm: Any, tmp_path: Path
) -> None:
    replica = await replica_of(sharded)
    update = await sync(replica, shm, sharded, 1)
    assert update.verified == "applied"
    total = sum(spec.nbytes for spec, _ in sharded.weights(1))
    assert total < update.nbytes < 1.1 * total, "each worker was sent its half, and no more"
    await is_version(replica, sharded, 1)
    digests = await replica.digest()
    assert digests.ranks == (0, 1)
    assert -1 not in digests.values.values()

    refused = tickets.ticket(2, ranks=2, weights=str(tmp_path / "nothing"))
    with pytest.raises(errors.HotbunkError):
        await replica.update_weights(refused, version=Version(0, 2))
    assert (await replica.digest()).values == digests.values
    with pytest.raises(errors.UpdateRefused):  # of one worker, and the other has accepted
        await told(replica, sharded, tmp_path, 2, sender="RefusedElsewhere", rank=1)
    assert (await replica.digest()).values == digests.values
    assert (await replica.status()).health is Health.OK
    await is_version(replica, sharded, 1)

    with pytest.raises(errors.VerifyFailed):
        await told(replica, sharded, tmp_path, 2, sender="Corrupted", rank=1)
    assert (await replica.status()).health is Health.POISONED
    await sync(replica, shm, sharded, 3)
    await is_version(replica, sharded, 3)

    report = await replica.sleep(2)
    assert report.resident() == 0
    for tag in Tag:  # in one of the two, so what the other has mapped goes, too
        assert sharded.starve(tag)
        with pytest.raises(errors.ResumeOutOfMemory):
            await replica.wake_up()
        assert (await replica.memory()).resident() == 0
    assert (await replica.status()).health is Health.OK
    await replica.wake_up(["weights"])
    await sync(replica, shm, sharded, 4)
    await replica.wake_up()
    await is_version(replica, sharded, 4)


async def test_two_engine_cores_are_one_replica(
    copied: VllmUnderTest, shm: Any, tmp_path: Path
) -> None:
    """``collective_rpc`` tells what the first of them did; each of ours answers for itself."""
    replica = await replica_of(copied)
    assert replica.capabilities.ranks == 2
    await sync(replica, shm, copied, 1)
    many = [
        asyncio.create_task(collect(replica.generate(ask(copied.prompts[n % 3])))) for n in range(8)
    ]
    for n, task in enumerate(many):
        assert list((await task).token_ids) == copied.golden(copied.prompts[n % 3], 1, 8)
    engine: Any = copied._engine
    assert len(set(engine.llm.engine_core.core_engines)) == 2

    with pytest.raises(errors.VerifyFailed):  # in the second alone
        await told(replica, copied, tmp_path, 2, sender="Corrupted", rank=1)
    assert (await replica.status()).health is Health.POISONED
    await sync(replica, shm, copied, 3)
    await is_version(replica, copied, 3, requests=6)

    assert (await replica.sleep(2)).resident() == 0
    await replica.wake_up(["weights"])
    await sync(replica, shm, copied, 4)
    await replica.wake_up()
    await is_version(replica, copied, 4, requests=6)
    before = await replica.digest()
    # A bit of the second is flipped: the first still says all is well.
    assert copied.corrupt_weight("model.norm.weight")
    after = await replica.digest()
    assert {n for n in before.values if before.values[n] != after.values[n]} == {
        "model.norm.weight"
    }
    assert after.values["model.norm.weight"] == -1

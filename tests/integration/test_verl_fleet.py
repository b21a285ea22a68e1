"""What verl's driver does around a sync, without verl: real replicas, real trainer ranks' ends.

``VerlFleet`` drives our manager; ``Sending`` is a trainer rank. Here both are in one process, and what
goes between them is bytes, as it is in a Ray job.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.rollout.contract import (
    Deployment,
    FinishReason,
    GenerateRequest,
    Sampling,
    Version,
    collect,
)
from hotbunk.rollout.errors import SyncFailed, TrainerFailed, TransferFailed
from hotbunk.rollout.handle import LocalHandle
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.verl import sending
from hotbunk.trainer_hooks.verl.fleet import RankTransport, TrainerRanksCall, VerlFleet
from hotbunk.trainer_hooks.verl.sending import ADAPTERS, WEIGHTS, Part, Sending
from hotbunk.trainer_hooks.verl.settings import ADAPTER
from hotbunk.trainer_hooks.verl.sources import EngineSource, adapter_group
from hotbunk.trainer_hooks.verl.versions import version_of

pytestmark = pytest.mark.anyio
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


class Trainer:
    """A trainer of some ranks that hold the same model. ``fail``: walks that raise, yet to come."""

    def __init__(self, state: Mapping[str, torch.Tensor], ranks: int = 1) -> None:
        self.state = state
        self.adapter = {
            f"{LAYER}.lora_A.weight": torch.ones(2, 64),
            f"{LAYER}.lora_B.weight": torch.ones(64, 2),
        }
        self.fail = self.walks = self.let_go = 0
        self._gathering = threading.Barrier(ranks)
        self.ranks = [
            Sending(
                {
                    WEIGHTS: Part(EngineSource(self._weights), dict),
                    ADAPTERS: Part(
                        EngineSource(self.adapter.items, group=adapter_group(ADAPTER)),
                        lambda: {"lora_alpha": 4.0},
                    ),
                },
                self._let_go,
                rank=rank,
                world=ranks,
            )
            for rank in range(ranks)
        ]

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks += 1
        fails = self.fail > 0
        self.fail -= fails
        for n, named in enumerate(self.state.items()):
            self._gathering.wait(10)  # every tensor is gathered by all ranks together
            if fails and n == 3:
                raise RuntimeError("out of memory")
            yield named

    def _let_go(self) -> None:
        self.let_go += 1

    def ask(self, verb: str, args: bytes) -> list[Any]:
        return [rank.answer(verb, args) for rank in self.ranks]


class Fleet:
    """A fleet of replicas of the reference engine, and its trainer."""

    def __init__(
        self,
        trainer: Trainer,
        replicas: list[Any],
        *,
        deployment: Deployment = Deployment.STANDALONE,
        adapts: bool = False,
        retries: int = 1,
    ) -> None:
        self.trainer = trainer
        transport = RankTransport(
            TrainerRanksCall(trainer.ask), sending.Begin("shm", deadline=30.0)
        )
        self.restarted: list[str] = []
        self.manager = CheckpointEngineManager(
            [LocalHandle(one) for one in replicas],
            transport,
            deployment=deployment,
            policy=SyncPolicy(deadline=30.0, bucket_bytes=4096),
            frozen_base=adapts,
        )
        self.fleet = VerlFleet(
            self.manager,
            transport,
            self._restart,
            adapts=adapts,
            shares=deployment is Deployment.HYBRID,
            retries=retries,
        )

    async def _restart(self, name: str) -> None:
        self.restarted.append(name)

    async def close(self) -> None:
        for rank in self.trainer.ranks:
            await rank.close(sending.Close())


@pytest.fixture
async def fleet(replica: Any, tiny: Any) -> Any:
    """``await fleet(replicas=, ranks=, ...)``, with the tiny model in the trainer, none in engines."""
    made: list[Fleet] = []

    async def make(replicas: int = 1, ranks: int = 1, **kw: Any) -> Fleet:
        state = dict(load_model(tiny()).state_dict())
        engines = [await replica(load="empty") for _ in range(replicas)]
        made.append(Fleet(Trainer(state, ranks), engines, **kw))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def served(fleet: Fleet) -> set[Version | None]:
    return {status.versions.get("target") for status in await fleet.manager.statuses()}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_step_reaches_every_replica(ranks: int, fleet: Any) -> None:
    one = await fleet(replicas=2, ranks=ranks)
    for step in (0, 1, 2):
        metrics = await one.fleet.update(step)
        assert metrics["checkpoint_engine/committed"] == 2
        assert metrics["checkpoint_engine/failed_attempts"] == 0
        assert await served(one) == {Version(0, step)}


async def test_the_same_step_fills_what_was_discarded_and_skips_what_is_there(fleet: Any) -> None:
    """verl wakes replicas by updating them to the step they are at."""
    one = await fleet(deployment=Deployment.HYBRID)
    first = await one.fleet.update(5)
    await one.manager.sleep_replicas()
    filled = await one.fleet.update(5)
    skipped = await one.fleet.update(None)
    sent = [m["checkpoint_engine/bytes"] for m in (first, filled, skipped)]
    assert sent[0] == sent[1] > 0
    assert sent[2] == 0
    assert one.trainer.let_go == 3
    assert await served(one) == {Version(0, 5)}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_trainer_that_fails_midway_is_asked_again(ranks: int, fleet: Any) -> None:
    one = await fleet(ranks=ranks)
    await one.fleet.update(0)
    one.trainer.fail = ranks  # each rank's next walk
    metrics = await one.fleet.update(1)
    assert metrics["checkpoint_engine/failed_attempts"] == 1
    assert metrics["checkpoint_engine/committed"] == metrics["checkpoint_engine/replicas"] == 1
    assert await served(one) == {Version(0, 1)}
    assert (await one.fleet.update(2))["checkpoint_engine/failed_attempts"] == 0


async def test_only_who_was_not_reached_is_sent_it_again(fleet: Any) -> None:
    one = await fleet(replicas=2)
    first = (await one.fleet.update(0))["checkpoint_engine/bytes"]
    told = one.manager.replicas[1]
    refusing = told.update_weights
    calls = 0

    async def update_weights(*args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise TransferFailed("a cable was pulled")
        return await refusing(*args, **kw)

    told.update_weights = update_weights
    metrics = await one.fleet.update(1)
    assert calls == 2
    assert metrics["checkpoint_engine/bytes"] == first
    assert metrics["checkpoint_engine/committed"] == metrics["checkpoint_engine/replicas"] == 2
    assert await served(one) == {Version(0, 1)}


async def test_a_standalone_replica_goes_on_with_what_it_has(fleet: Any) -> None:
    """In verl 0.9.1 it stays aborted, without its KV cache, for good."""
    one = await fleet(retries=0)
    await one.fleet.update(0)
    refused = dict(one.trainer.state)
    one.trainer.state["model.wings"] = torch.ones(2)
    one.trainer.ranks[0]._parts[WEIGHTS].source._specs = None
    metrics = await one.fleet.update(1)
    assert metrics["checkpoint_engine/committed"] == 0
    assert metrics["checkpoint_engine/failed_attempts"] == 1
    (status,) = await one.manager.statuses()
    assert status.servable
    assert not status.pauses
    assert await served(one) == {Version(0, 0)}
    one.trainer.state = refused
    one.trainer.ranks[0]._parts[WEIGHTS].source._specs = None
    assert (await one.fleet.update(2))["checkpoint_engine/committed"] == 1


async def test_a_replica_that_has_nothing_to_go_on_with_is_an_error(fleet: Any) -> None:
    one = await fleet(deployment=Deployment.HYBRID, retries=1)
    await one.fleet.update(0)
    await one.manager.sleep_replicas()
    one.trainer.fail = 2
    with pytest.raises(SyncFailed, match="out of memory"):
        await one.fleet.update(1)
    assert await served(one) == {None}
    await one.fleet.update(1)
    assert await served(one) == {Version(0, 1)}


def asked(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(name, (5, 6, 7), Sampling(max_tokens=tokens, ignore_eos=True))


async def test_what_an_abort_cut_off_is_held_through_the_turn_until_it_is_resumed(
    fleet: Any,
) -> None:
    """``colocate_async``: abort, sleep, update, resume. A sync opens nothing that the abort closed."""
    one = await fleet(deployment=Deployment.HYBRID)
    await one.fleet.update(0)
    (handle,) = one.manager.replicas
    cut = asyncio.create_task(collect(handle.generate(asked("cut", 200))))
    while not (await handle.status()).running:  # noqa: ASYNC110 - the test's timeout bounds it
        await asyncio.sleep(0.001)
    await one.fleet.abort(reject=False)
    first = await cut
    assert first.finish_reason is FinishReason.ABORT
    assert {span.version for span in first.spans} <= {Version(0, 0)}
    await one.manager.sleep_replicas()
    again = asyncio.create_task(collect(handle.generate(asked("again", 4))))
    await one.fleet.update(1)
    assert (await handle.status()).held == ("again",)
    assert not again.done()
    await one.manager.resume_generation_replicas()
    done = await again
    assert [(s.version, s.start, s.end) for s in done.spans] == [(Version(0, 1), 0, 4)]


async def test_an_adapter_travels_alone_once_its_base_is_there(fleet: Any) -> None:
    one = await fleet(deployment=Deployment.HYBRID, adapts=True)
    sent = []
    for step in range(3):
        sent.append((await one.fleet.update(step))["checkpoint_engine/bytes"])
        await one.manager.sleep_replicas()
    alone = 4 * 2 * (64 + 64)
    whole = sum(tensor.nbytes for tensor in one.trainer.state.values())
    assert sent == [whole + alone, alone, alone]
    assert one.trainer.walks == 2  # its names, and the first sync


async def test_a_rank_that_does_not_answer_is_named_with_what_was_asked(fleet: Any) -> None:
    one = await fleet()

    async def broken() -> bytes:
        raise ConnectionError("the worker died")

    call = TrainerRanksCall(lambda verb, args: [*one.trainer.ask(verb, args), broken()])
    with pytest.raises(TrainerFailed, match="describe: ConnectionError: the worker died"):
        await call(sending.Describe(WEIGHTS), "describe", sending.Described)


@pytest.mark.parametrize(
    "step, newest, wanted",
    [
        (None, None, Version()),
        (None, Version(1, 4), Version(1, 4)),
        (4, None, Version(0, 4)),
        (4, Version(1, 4), Version(1, 4)),
        (5, Version(1, 4), Version(1, 5)),
        (3, Version(1, 4), Version(2, 3)),
    ],
)
async def test_steps_as_versions(step: int | None, newest: Version | None, wanted: Version) -> None:
    assert version_of(step, newest) == wanted

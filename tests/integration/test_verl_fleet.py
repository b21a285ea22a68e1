"""What verl's driver does around a sync, without verl: real replicas, real trainer ranks' ends.

``VerlFleet`` drives our manager; ``Sending`` is a trainer rank. Here both are in one process, and what
goes between them is bytes, as it is in a Ray job.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.rollout.contract import (
    Deployment,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    TokenChunk,
    Version,
    collect,
)
from hotbunk.rollout.errors import SyncFailed, TrainerFailed, TransferFailed
from hotbunk.rollout.handle import LocalHandle
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.verl import sending
from hotbunk.trainer_hooks.verl.fleet import RankTransport, TrainerRanksCall, VerlFleet
from hotbunk.trainer_hooks.verl.handle import opened
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
        pause: PauseMode = PauseMode.ABORT,
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
            policy=SyncPolicy(pause=pause, deadline=30.0, bucket_bytes=4096),
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


async def test_a_request_that_crosses_a_sync_under_keep_loses_no_token(fleet: Any) -> None:
    """verl 0.9.1 has no such pause: it ends what runs, and its client begins again."""
    one = await fleet(pause=PauseMode.KEEP)
    await one.fleet.update(0)
    (handle,) = one.manager.replicas
    chunks = handle.generate(asked("r", 120))
    got = [await anext(chunks)]
    await one.fleet.update(1)
    got += [chunk async for chunk in chunks]
    done = await collect(_again(got))
    assert done.finish_reason is FinishReason.LENGTH
    assert len(done.token_ids) == 120
    assert [span.version for span in done.spans] == [Version(0, 0), Version(0, 1)]
    assert [(span.start, span.end) for span in done.spans] == [
        (0, done.spans[0].end),
        (done.spans[0].end, 120),
    ]
    assert not (await handle.status()).pauses


async def _again(chunks: list[TokenChunk]) -> AsyncIterator[TokenChunk]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("deployment", [Deployment.HYBRID, Deployment.STANDALONE])
async def test_an_adapter_travels_alone_once_its_base_is_there(
    deployment: Deployment, fleet: Any
) -> None:
    """In verl 0.9.1 it never reaches engines elsewhere, and its base does not survive sleep."""
    one = await fleet(replicas=2, ranks=2, deployment=deployment, adapts=True)
    sent = []
    for step in range(3):
        metrics = await one.fleet.update(step)
        sent.append(metrics["checkpoint_engine/bytes"])
        assert metrics["checkpoint_engine/committed"] == 2
        for status in await one.manager.statuses():
            assert status.versions[adapter_group(ADAPTER)] == Version(0, step)
        await one.manager.sleep_replicas()
    alone = 4 * 2 * (64 + 64)
    whole = sum(tensor.nbytes for tensor in one.trainer.state.values())
    assert sent == [2 * (whole + alone), 2 * alone, 2 * alone]
    assert one.trainer.walks == 4  # of each rank: its names, and the first sync


async def test_metrics_have_verls_names(fleet: Any) -> None:
    """What verl's logger is told: its own prefix, numbers only, and every second of the sync."""
    one = await fleet(deployment=Deployment.HYBRID)
    metrics = await one.fleet.update(0)
    assert all(name.startswith("checkpoint_engine/") for name in metrics)
    assert all(isinstance(value, float) for value in metrics.values())
    phases = {
        name: took
        for name, took in metrics.items()
        if name.endswith("_seconds") and name != "checkpoint_engine/seconds"
    }
    assert {"checkpoint_engine/pause_seconds", "checkpoint_engine/sync_seconds"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(metrics["checkpoint_engine/seconds"], abs=1e-6)


async def test_words_of_a_sync_that_broke_off_are_not_heard_in_the_next(fleet: Any) -> None:
    """Rank 0 fails while the other still waits for its word: each offer's words have its number."""
    one = await fleet(ranks=2)
    await one.fleet.update(0)
    one.trainer.fail = 2
    assert (await one.fleet.update(1))["checkpoint_engine/failed_attempts"] == 1
    prefixes = {rank._ranks._prefix for rank in one.trainer.ranks}
    assert len(prefixes) == 1
    for step in (2, 3):
        await one.fleet.update(step)
        again = {rank._ranks._prefix for rank in one.trainer.ranks}
        assert len(again) == 1
        assert not again & prefixes
        prefixes |= again
    assert await served(one) == {Version(0, 3)}


async def test_a_silent_rank_is_waited_for_no_longer_than_was_said(fleet: Any) -> None:
    """verl waits for ever."""
    one = await fleet()

    async def silent() -> bytes:
        await asyncio.sleep(60)
        raise AssertionError

    call = TrainerRanksCall(lambda verb, args: [*one.trainer.ask(verb, args), silent()])
    with pytest.raises(TrainerFailed, match=r"describe: some rank did not answer in 0\.2 s"):
        await call(sending.Describe(WEIGHTS), "describe", sending.Described, deadline=0.2)


async def test_a_pickle_is_no_answer() -> None:
    """Nothing on the way is ever unpickled; verl's own control plane is pickles."""
    with pytest.raises(msgspec.DecodeError):
        opened("verb", b"\x80\x04}\x94\x8c\x05value\x94K\x01s.")  # pickled: {"value": 1}


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

"""Syncs that fail: before a byte all is as it was, after one the replica waits for a full resend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.bucket import Packer
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import (
    Outcome,
    ReplicaOutcome,
    SyncPolicy,
    SyncReport,
)
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.contract import (
    FinishReason,
    PauseMode,
    Retention,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio
SMALL = SyncPolicy(bucket_bytes=10_000)
PROMPT = [5, 6, 7, 8]


def manage(*replicas: Replica, **options: Any) -> CheckpointEngineManager:
    options.setdefault("policy", SMALL)
    return CheckpointEngineManager([LocalHandle(r) for r in replicas], NaiveTransport(), **options)


def only(report: SyncReport) -> ReplicaOutcome:
    (outcome,) = report.outcomes
    return outcome


async def state_of(replica: Replica) -> Mapping[str, object]:
    """Weights, residency and pauses."""
    status, memory = await replica.status(), await replica.memory()
    return {
        "groups": status.groups,
        "versions": status.versions,
        "kv": status.kv,
        "pauses": [(p.owner, p.mode) for p in status.pauses],
        "health": status.health,
        "weights": memory.resident(Tag.WEIGHTS) > 0,
        "kv mapped": [
            a.released
            for a in replica.backend._runner.pool.arenas()  # type: ignore[attr-defined]
            if a.tag == Tag.KV_CACHE
        ]
        == [False],
        "backup": memory.backup(),
    }


class Breaking:
    """A source that breaks after some tensors, as a trainer's gather may."""

    def __init__(self, inner: Any, after: int) -> None:
        self.inner, self.after = inner, after

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[Any]:
        for n, tensor in enumerate(self.inner.tensors()):
            if n == self.after:
                raise RuntimeError("the gather broke")
            yield tensor


def weights(kit: Any, model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in kit.loaded(model).named_parameters()}


# -- refused before a byte: as if nothing had been asked --------------------------------------


async def prepared(target: Replica, state: str) -> None:
    if state == "asleep, level 2":
        await target.sleep(2)
    elif state == "asleep, level 1":
        await target.sleep(1)
    elif state == "asleep, level 0":
        await target.sleep(0)
    elif state == "asleep, weights staged":
        await target.sleep(2)
        await target.wake_up(["weights"])
    elif state == "paused by the caller":
        await target.pause_generation(PauseMode.KEEP)
    else:
        assert state == "awake"


STATES = [
    "awake",
    "paused by the caller",
    "asleep, level 0",
    "asleep, level 1",
    "asleep, level 2",
    "asleep, weights staged",
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "fault, error",
    [
        ("shape", "ShapeMismatch"),
        ("dtype", "ShapeMismatch"),
        ("unknown", "UnknownNames"),
        ("missing", "IncompleteUpdate"),
        ("nothing", "IncompleteUpdate"),
        ("group", "UnsupportedTarget"),
        ("gather", "EngineFailed"),
        ("bucket", "ConfigError"),
    ],
)
async def test_refused_updates_roll_back_to_exactly_what_was(
    tiny: Any, kit: Any, replica: Any, fault: str, error: str, state: str
) -> None:
    model = tiny(seed=0)
    target, values, policy = await replica(model), weights(kit, tiny(seed=1)), SMALL
    source: Any = state_dict_source(values)
    name = "model.layers.0.self_attn.q_proj.weight"
    if fault == "shape":
        values[name] = torch.zeros(3, 3)
    elif fault == "dtype":
        values[name] = values[name].to(torch.int8)
    elif fault == "unknown":
        values["model.layers.7.mlp.weight"] = torch.zeros(2)
    elif fault == "missing":
        del values[name]
    elif fault == "nothing":
        values.clear()
    elif fault == "group":
        source = state_dict_source(values, group="draft")
    elif fault == "gather":
        source = Breaking(source, 0)
    elif fault == "bucket":
        policy = SyncPolicy(bucket_bytes=8)
    await prepared(target, state)
    before = await state_of(target)
    report = await kit.failed(manage(target).update_weights(source, Version(0, 3), policy=policy))
    assert (only(report).outcome, only(report).error_type) == (Outcome.ROLLED_BACK, error)
    assert only(report).version == before["versions"].get("target")
    assert await state_of(target) == before
    await target.check_invariants()
    if state == "awake":
        assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(model, PROMPT)
    # And the same replica takes a good one afterwards.
    good = await manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 4))
    assert only(good).outcome is Outcome.COMMITTED


async def test_a_pause_that_does_not_come_to_its_end_is_undone(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """A drain that outlasts its deadline leaves the pause held: rolling back must end it."""
    target = await replica(tiny(context=2048), deadlines=Deadlines(drain=0.05))
    stream = target.generate(kit.request(PROMPT, 2000, name="long"))
    await kit.first_tokens(stream, 1)
    policy = SyncPolicy(pause=PauseMode.WAIT)
    report = await kit.failed(
        manage(target, policy=policy).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    )
    assert (only(report).outcome, only(report).error_type) == (
        Outcome.ROLLED_BACK,
        "RequestsInFlight",
    )
    assert (await state_of(target))["pauses"] == []
    assert len(await kit.first_tokens(stream, 20)) == 20  # it goes on
    await stream.aclose()


async def test_lower_versions_are_refused_and_a_new_incarnation_is_not_v11_v16(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, source = await replica(tiny(seed=0)), kit.source(tiny(seed=1))
    manager = manage(target)
    await manager.update_weights(source, Version(0, 5))
    assert await manager.newest_version() == Version(0, 5)
    report = await kit.failed(manager.update_weights(source, Version(0, 4)))
    assert only(report).error_type == "VersionRegression"
    assert (await target.status()).versions == {"target": Version(0, 5)}
    await target.sleep(2)  # an emptied engine remembers, too
    report = await kit.failed(manager.update_weights(source, Version(0, 4)))
    assert only(report).error_type == "VersionRegression"
    await manager.update_weights(source, Version(1, 2))
    assert (await target.status()).versions == {"target": Version(1, 2)}


async def test_retention_of_a_rolled_back_sleeper_is_the_one_it_had(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, model = await replica(tiny(seed=0)), tiny(seed=0)
    await target.sleep(1)
    await kit.failed(manage(target).update_weights(Breaking(kit.source(model), 0), Version(0, 1)))
    assert (await target.status()).groups == {"target": "BACKED_UP(0.0)"}
    assert (await target.release(retention=Retention.BACKUP)).resident() == 0
    await target.wake_up()
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(model, PROMPT)


# -- broken after a byte ----------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
async def test_a_failure_after_a_byte_poisons_and_a_full_resend_heals_n7(
    tiny: Any, kit: Any, replica: Any, state: str
) -> None:
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one)
    manager = manage(target)
    await prepared(target, state)
    held = []
    if state != "awake":
        held = [asyncio.ensure_future(kit.complete(target, PROMPT)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert len((await target.status()).held) == 3
    source = Breaking(kit.source(two), 5)
    report = await kit.failed(manager.update_weights(source, Version(0, 1)))
    assert (only(report).outcome, only(report).error_type) == (Outcome.POISONED, "EngineFailed")
    status = await target.status()
    assert status.health is Health.POISONED
    assert status.groups == {"target": "DIRTY"}
    assert (status.versions, status.servable) == ({}, False)
    # Whoever waited is let go at once, and may ask elsewhere.
    for completion in await asyncio.wait_for(asyncio.gather(*held), 5):
        assert (completion.finish_reason, completion.retryable) == (FinishReason.ABORT, True)
        assert "poisoned" in completion.error
    late = await asyncio.wait_for(collect(target.generate(kit.request(PROMPT))), 5)
    assert (late.finish_reason, late.token_ids) == (FinishReason.ABORT, ())
    await target.check_invariants()
    # A delta or a part cannot heal it; everything can, even under the same version.
    again = await manager.update_weights(kit.source(two), Version(0, 1))
    assert only(again).outcome is Outcome.COMMITTED
    await target.resume_generation()
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(two, PROMPT)


async def test_one_flipped_bit_is_caught_u1(
    tiny: Any, kit: Any, replica: Any, monkeypatch: Any
) -> None:
    target = await replica(tiny(seed=0))
    original, count = Packer.next, 0

    def flipping(self: Packer) -> Any:
        nonlocal count
        bucket = original(self)
        count += 1
        if count == 4:
            bucket.data[bucket.entries[0].offset + 7] ^= 0x10
        return bucket

    monkeypatch.setattr(Packer, "next", flipping)
    report = await kit.failed(
        manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    )
    assert (only(report).outcome, only(report).error_type) == (Outcome.POISONED, "VerifyFailed")
    assert "model." in only(report).error or "lm_head" in only(report).error

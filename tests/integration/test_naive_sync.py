"""Sync as a transaction, in one process: what arrives, for whom, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import (
    Outcome,
    ReplicaOutcome,
    SyncPolicy,
    SyncReport,
    Verify,
)
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.contract import (
    PauseMode,
    Version,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.replica import Replica

pytestmark = pytest.mark.anyio
SMALL = SyncPolicy(bucket_bytes=10_000)
PROMPT = [5, 6, 7, 8]


def manage(*replicas: Replica, **options: Any) -> CheckpointEngineManager:
    options.setdefault("policy", SMALL)
    return CheckpointEngineManager([LocalHandle(r) for r in replicas], NaiveTransport(), **options)


def only(report: SyncReport) -> ReplicaOutcome:
    (outcome,) = report.outcomes
    return outcome


def weights(kit: Any, model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in kit.loaded(model).named_parameters()}


# -- it works ---------------------------------------------------------------------------------


async def test_report_of_a_sync_that_committed(tiny: Any, kit: Any, replica: Any) -> None:
    target = await replica(tiny(seed=0))
    source = kit.source(tiny(seed=1))
    report = await manage(target).update_weights(source, Version(0, 7))
    outcome = only(report)
    total = sum(spec.nbytes for spec in source.specs())
    assert outcome.outcome is Outcome.COMMITTED
    assert (outcome.version, report.nbytes) == (Version(0, 7), total)
    assert outcome.update is not None
    assert outcome.update.applied == len(source.specs())
    assert outcome.update.buckets >= total // SMALL.bucket_bytes
    assert outcome.update.verified == "applied"
    assert set(report.phases) == {"pause", "wake_weights", "sync", "let_go", "wake_kv", "other"}
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    status = await target.status()
    assert (status.versions, status.pauses) == ({"target": Version(0, 7)}, ())


async def test_a_bfloat16_engine_gets_the_float32_trainers_weights_cast(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, model = await replica(tiny(seed=0), dtype="bfloat16"), tiny(seed=1)
    report = await manage(target).update_weights(kit.source(model), Version(0, 1))
    binding = target.backend._runner.binding
    for name, value in weights(kit, model).items():
        assert torch.equal(binding.tensor(name), value.to(torch.bfloat16)), name
    assert report.nbytes == sum(s.nbytes for s in kit.source(model).specs()) // 2


async def test_requests_held_by_a_sync_run_on_the_new_weights(
    tiny: Any, kit: Any, replica: Any
) -> None:
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one)
    done: list[Any] = []

    async def ask() -> None:
        done.append(asyncio.ensure_future(kit.complete(target, PROMPT)))
        await asyncio.sleep(0)

    transport = NaiveTransport(on_bucket=ask)
    manager = CheckpointEngineManager([LocalHandle(target)], transport, policy=SMALL)
    await manager.update_weights(kit.source(two), Version(0, 1))
    assert len(done) > 3
    for completion in await asyncio.gather(*done):
        assert list(completion.token_ids) == kit.golden(two, PROMPT)
        assert [s.version for s in completion.spans] == [Version(0, 1)]


async def test_a_kept_request_spans_both_versions_v7(tiny: Any, kit: Any, replica: Any) -> None:
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one)
    policy = SyncPolicy(pause=PauseMode.KEEP, bucket_bytes=10_000)
    stream = target.generate(kit.request(PROMPT, 60))
    begun = await kit.first_tokens(stream, 3)
    await manage(target, policy=policy).update_weights(kit.source(two), Version(0, 1))
    chunks = [chunk async for chunk in stream]
    old = begun + [t for c in chunks if c.version == Version(0, 0) for t in c.token_ids]
    new = [t for c in chunks if c.version == Version(0, 1) for t in c.token_ids]
    assert old == kit.golden(one, PROMPT, 60)[: len(old)]
    # Its KV was made again: what follows is what the new model says after those tokens.
    assert new == kit.golden(two, PROMPT + old, 60 - len(old))
    assert new


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_callers_pause_survives_a_sync_h17(
    tiny: Any, kit: Any, replica: Any, mode: PauseMode
) -> None:
    target = await replica(tiny(seed=0))
    await target.pause_generation(mode)
    await manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert [(p.owner, p.mode) for p in (await target.status()).pauses] == [("caller", mode)]


# -- tied weights -----------------------------------------------------------------------------

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("send", ["embed only", "head only", "both equal", "tied in the trainer"])
async def test_tied_head_follows_its_embedding_g18(
    tiny: Any, kit: Any, replica: Any, family: str, send: str
) -> None:
    one, two = tiny(family, 0, tied=True), tiny(family, 1, tied=True)
    target, values = await replica(one), weights(kit, two)
    if send == "head only":
        values[HEAD] = values.pop(EMBED)
    elif send == "both equal":
        values[HEAD] = values[EMBED].clone()
    elif send == "tied in the trainer":
        values[HEAD] = values[EMBED]
    report = await manage(target).update_weights(state_dict_source(values), Version(0, 1))
    assert only(report).outcome is Outcome.COMMITTED
    binding = target.backend._runner.binding
    assert torch.equal(binding.tensor(EMBED), binding.tensor(HEAD))
    assert binding.tensor(EMBED).data_ptr() == binding.tensor(HEAD).data_ptr()
    assert kit.golden(one, PROMPT) != kit.golden(two, PROMPT)
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(two, PROMPT)


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.APPLIED])
async def test_two_contents_for_one_tied_tensor_are_a_mismatch_g18(
    tiny: Any, kit: Any, replica: Any, verify: Verify
) -> None:
    target, values = await replica(tiny(tied=True)), weights(kit, tiny(seed=1, tied=True))
    values[HEAD] = values[EMBED].clone()
    values[HEAD].view(-1)[-1] += 1e-3
    policy = SyncPolicy(bucket_bytes=10_000, verify=verify)
    report = await kit.failed(
        manage(target, policy=policy).update_weights(state_dict_source(values), Version(0, 1))
    )
    assert (only(report).outcome, only(report).error_type) == (Outcome.POISONED, "TiedMismatch")
    assert EMBED in only(report).error
    assert HEAD in only(report).error


async def test_an_untied_engine_takes_both_from_a_tied_trainer(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, values = await replica(tiny(seed=0)), weights(kit, tiny(seed=1))
    values[HEAD] = values[EMBED]
    await manage(target).update_weights(state_dict_source(values), Version(0, 1))
    binding = target.backend._runner.binding
    for name in (EMBED, HEAD):
        assert torch.equal(binding.tensor(name), values[EMBED])


# -- the same version again -------------------------------------------------------------------


async def test_the_same_version_is_verified_and_not_sent_again_h19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, source = await replica(tiny(seed=0)), kit.source(tiny(seed=1))
    manager = manage(target)
    await manager.update_weights(source, Version(0, 1))
    report = await manager.update_weights(source, Version(0, 1))
    update = only(report).update
    assert update is not None
    assert (update.skipped, update.verified, update.nbytes, report.nbytes) == (
        True,
        "applied",
        0,
        0,
    )
    await target.sleep(1)  # a backup is content, too
    report = await manager.update_weights(source, Version(0, 1))
    update = only(report).update
    assert update is not None
    assert update.skipped
    assert (await target.status()).servable


@pytest.mark.parametrize("how", ["discarded", "changed behind its label"])
async def test_the_same_version_is_sent_again_where_its_content_is_gone_h19(
    tiny: Any, kit: Any, replica: Any, how: str
) -> None:
    target, two = await replica(tiny(seed=0)), tiny(seed=1)
    manager = manage(target)
    await manager.update_weights(kit.source(two), Version(0, 1))
    if how == "discarded":
        await manager.sleep_replicas()
    else:
        target.backend._runner.binding.tensor(EMBED).view(torch.int32)[3, 3] ^= 1
    report = await manager.update_weights(kit.source(two), Version(0, 1))
    update = only(report).update
    assert update is not None
    assert not update.skipped
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(two, PROMPT)


# -- several replicas -------------------------------------------------------------------------


async def test_one_of_three_fails_and_the_others_commit_n6_b20(
    tiny: Any, kit: Any, replica: Any
) -> None:
    two = tiny(seed=1)
    odd = await replica(tiny("qwen2"), name="odd")  # has biases that nobody sends
    targets = [await replica(tiny(seed=0), name="a"), odd, await replica(tiny(seed=0), name="c")]
    report = await kit.failed(manage(*targets).update_weights(kit.source(two), Version(0, 1)))
    assert [(o.replica, o.outcome) for o in report.outcomes] == [
        ("a", Outcome.COMMITTED),
        ("odd", Outcome.ROLLED_BACK),
        ("c", Outcome.COMMITTED),
    ]
    assert "odd" in report.summary()
    assert "IncompleteUpdate" in report.outcomes[1].error_type
    for target in (targets[0], targets[2]):
        assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(two, PROMPT)
    assert (await odd.status()).versions == {"target": Version(0, 0)}


async def test_a_handle_that_raises_anything_at_all_is_one_replicas_outcome(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """A remote handle may raise what its library raises; the others still get their outcome."""

    class Unreachable(LocalHandle):
        async def update_weights(self, *args: Any, **kw: Any) -> Any:
            raise ConnectionResetError("peer went away")

    one, other = await replica(tiny(seed=0), name="one"), await replica(tiny(seed=0), name="two")
    manager = CheckpointEngineManager([Unreachable(one), LocalHandle(other)], NaiveTransport())
    report = await kit.failed(manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1)))
    assert [o.outcome for o in report.outcomes] == [Outcome.ROLLED_BACK, Outcome.COMMITTED]
    assert "peer went away" in report.outcomes[0].error
    assert not (await one.status()).is_paused


async def test_a_dead_replica_is_lost_and_the_others_commit(
    tiny: Any, kit: Any, replica: Any
) -> None:
    dead, alive = await replica(tiny(seed=0), name="dead"), await replica(tiny(seed=0), name="ok")
    await dead.backend.close()
    report = await kit.failed(
        manage(dead, alive).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    )
    assert [o.outcome for o in report.outcomes] == [Outcome.LOST, Outcome.COMMITTED]
    assert report.outcomes[0].error_type == "ReplicaLost"

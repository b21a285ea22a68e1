"""A sync over several replicas, on oracles in virtual time: nobody opens or releases too early."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.policy import Outcome, ReleaseKV, SyncPolicy, SyncReport
from hotbunk.conformance.backends.oracle_kit import ask
from hotbunk.conformance.backends.oracle_pool import Weights, pool
from hotbunk.conformance.rig import check_spans
from hotbunk.rollout.backends.oracle import decode_token
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.capabilities import unsupported
from hotbunk.rollout.contract import FinishReason, Version
from hotbunk.rollout.errors import SyncFailed

pytestmark = pytest.mark.anyio


async def test_nobody_opens_before_the_slowest_has_acknowledged_h12() -> None:
    """Replica 2 acknowledges 50 s late; requests that came meanwhile wait, and get the new weights."""
    late = {2: ("update/commit", Fault(Action.DELAY, seconds=50.0))}
    async with pool(late) as (manager, handles):
        running_ones = [ask(h.replica, f"old{n}", 500) for n, h in enumerate(handles)]
        for one in running_ones:
            await one.started()
        syncing = asyncio.create_task(manager.update_weights(Weights(2), Version(0, 2)))
        await asyncio.sleep(10)
        held = [ask(h.replica, f"new{n}", 5) for n, h in enumerate(handles)]
        await asyncio.sleep(10)
        assert not any(one.done for one in held), "a replica opened before all had acknowledged"
        report = await syncing
        assert report.ok
        acknowledged = [at for what, _, at in handles[0].notes if what == "acknowledged"]
        opened = [at for what, _, at in handles[0].notes if what == "opened"]
        assert len(acknowledged) == len(opened) == 3
        assert max(acknowledged) <= min(opened)
        for one in held:
            done = await one.result()
            assert {decode_token(t).version for t in done.token_ids} == {Version(0, 2)}
        for one in running_ones:
            done = await one.result()
            check_spans(done)
            assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)


async def test_no_kv_leaves_under_a_request_that_runs_k5() -> None:
    """Each replica stands still before its KV goes, also for who comes late."""
    slow = {1: ("pause", Fault(Action.DELAY, seconds=5.0))}
    async with pool(slow, release_kv=ReleaseKV.ALWAYS) as (manager, handles):
        early = [ask(h.replica, f"early{n}", 900) for n, h in enumerate(handles)]
        for one in early:
            await one.started()
        syncing = asyncio.create_task(manager.update_weights(Weights(2), Version(0, 2)))
        late = []
        for moment in range(8):
            await asyncio.sleep(1)
            late += [ask(h.replica, f"l{moment}{n}", 4) for n, h in enumerate(handles)]
        assert (await syncing).ok
        released = [at for what, _, at in handles[0].notes if what == "released"]
        assert len(released) == 3
        begun = [at for what, _, at in handles[0].notes if what == "releases"]
        paused = [at for what, _, at in handles[0].notes if what == "paused"]
        assert min(begun) >= max(paused), "KV went on one while another was not yet quiesced"
        for one in early:
            assert (await one.result()).finish_reason is FinishReason.ABORT
        for one in late:  # an oracle that runs over released KV crashes
            assert len((await one.result()).token_ids) == 4
        for handle in handles:
            await handle.replica.check_invariants()


async def test_a_failed_replica_keeps_no_new_label_and_the_others_have_it_v8() -> None:
    """A fault at the last moment: the version is unchanged where the update did not commit."""
    broken = {1: ("update/verify", Fault(Action.RAISE, RuntimeError("a kernel broke")))}
    async with pool(broken) as (manager, handles):
        with pytest.raises(SyncFailed, match="r1") as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
        outcomes = {o.replica: o.outcome for o in caught.value.report.outcomes}  # type: ignore[attr-defined]
        assert outcomes == {
            "r0": Outcome.COMMITTED,
            "r1": Outcome.POISONED,
            "r2": Outcome.COMMITTED,
        }
        for n, handle in enumerate(handles):
            versions = (await handle.status()).versions
            assert versions.get("target") == (None if n == 1 else Version(0, 2))
        report = await manager.update_weights(Weights(3), Version(0, 3))
        assert report.ok, "a full resend did not heal it"


async def test_an_engine_without_a_kv_only_release_says_so_and_the_others_sync_k8() -> None:
    """It is as it was, serves what it did, and is never slept behind the caller's back instead."""
    async with pool(release_kv=ReleaseKV.ALWAYS) as (manager, handles):
        lacks = unsupported("it can only sleep as a whole")
        engine = handles[1].replica.backend
        engine.capabilities = dataclasses.replace(engine.capabilities, release_kv_cache=lacks)
        with pytest.raises(SyncFailed, match="only sleep as a whole") as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
        report = caught.value.report
        assert isinstance(report, SyncReport)
        ends = [(one.outcome, one.version) for one in report.outcomes]
        assert ends[1] == (Outcome.ROLLED_BACK, Version(0, 1))
        assert ends[0] == ends[2] == (Outcome.COMMITTED, Version(0, 2))
        assert report.outcomes[1].error_type == "Unsupported"
        done = await ask(handles[1].replica, "still", 3).result()
        assert {decode_token(t).version for t in done.token_ids} == {Version(0, 1)}
        keeps = SyncPolicy(release_kv=ReleaseKV.NEVER)
        assert (await manager.update_weights(Weights(2), Version(0, 2), policy=keeps)).ok

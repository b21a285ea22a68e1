"""LoRA adapters: content beside the base, with a version and a poison of its own."""

from __future__ import annotations

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_aborted, check_spans, expect
from hotbunk.conformance.transfers import FailedElsewhere, MemoryTransfer, RefusedElsewhere
from hotbunk.rollout.contract import ADAPTER_PREFIX, Completion, PauseMode, Scope, Version
from hotbunk.rollout.errors import (
    BaseMismatch,
    IncompleteUpdate,
    UpdateFailed,
    UpdateRefused,
    WeightsNotLoaded,
    WeightsPoisoned,
)

NAME = "a"


def _sender(
    rig: Rig,
    version: int,
    base: int,
    kind: type[MemoryTransfer] = MemoryTransfer,
    *,
    name: str = NAME,
    leave_out: int = 0,
) -> MemoryTransfer:
    tensors = rig.ut.adapter(name, version)[leave_out:]
    scope = Scope.adapter(name, Version(0, base))
    return rig.sender(kind, version, tensors=tensors, scope=scope)


def _check(rig: Rig, done: Completion, base: int, version: int, name: str = NAME) -> None:
    check_spans(done)
    prompt = rig.ut.prompts[0]
    want = rig.ut.adapter_golden(prompt, base, name, version, len(done.token_ids))
    assert list(done.token_ids) == want, f"{list(done.token_ids)} and not {want}"


@case(level=Level.SYNC, capability="adapter", smoke=True)
async def adapters_serve_who_asks(rig: Rig) -> None:
    """With the adapter, its tokens; without, those of the base; two names never collide (L2)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    await expect(WeightsNotLoaded, rig.complete(prompt, adapter=NAME))
    await rig.send(_sender(rig, 1, 1))
    await rig.send(_sender(rig, 1, 1, name="b"))
    for name in (NAME, "b"):
        _check(rig, await rig.complete(prompt, adapter=name), 1, 1, name)
    await rig.check_golden(1)
    await rig.send(_sender(rig, 2, 1))
    _check(rig, await rig.complete(prompt, adapter=NAME), 1, 2)
    _check(rig, await rig.complete(prompt, adapter="b"), 1, 1, "b")
    versions = (await rig.replica.status()).versions
    assert versions[ADAPTER_PREFIX + NAME] == Version(0, 2), f"the versions are {versions}"
    await rig.check_golden(1)


@case(level=Level.SYNC, capability="adapter")
async def adapters_need_their_base(rig: Rig) -> None:
    """Made over another base, or without half its tensors: refused, and no adapter appears (L3)."""
    await rig.load(2)
    before = await rig.snapshot()
    await expect(BaseMismatch, rig.send(_sender(rig, 1, 1)))
    await expect(IncompleteUpdate, rig.send(_sender(rig, 1, 2, leave_out=1)))
    assert await rig.snapshot() == before
    await expect(WeightsNotLoaded, rig.complete(rig.ut.prompts[0], adapter=NAME))
    await rig.check_golden(2)


@case(level=Level.FAULT, capability="adapter pause.abort")
async def a_broken_adapter_poisons_itself_only(rig: Rig) -> None:
    """The base goes on, who waits for the base goes on waiting, a resend heals."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    await rig.send(_sender(rig, 1, 1))
    await rig.replica.pause_generation(PauseMode.ABORT)
    base, with_adapter = rig.submit(prompt), rig.submit(prompt, adapter=NAME)
    await rig.moment()
    await expect(UpdateFailed, rig.send(_sender(rig, 2, 1, FailedElsewhere)))
    check_aborted(await with_adapter.result(), retryable=True)
    await rig.moment()
    assert not base.done, "a request for the base was let go"
    await rig.replica.resume_generation()
    rig.check_tokens(await base.result(), prompt, 1)
    await expect(WeightsPoisoned, rig.complete(prompt, adapter=NAME))
    await rig.check_golden(1)
    await rig.send(_sender(rig, 2, 1))
    _check(rig, await rig.complete(prompt, adapter=NAME), 1, 2)


@case(level=Level.COLOCATE, capability="adapter pause.abort release retention.backup")
async def adapters_survive_a_backup(rig: Rig) -> None:
    """A level-1 cycle brings base and adapter back (L1)."""
    await rig.load(1)
    await rig.send(_sender(rig, 1, 1))
    await rig.replica.sleep(1)
    await rig.replica.wake_up()
    _check(rig, await rig.complete(rig.ut.prompts[0], adapter=NAME), 1, 1)
    await rig.check_golden(1)


@case(level=Level.SYNC, capability="adapter")
async def a_refused_adapter_changes_nothing(rig: Rig) -> None:
    """Another rank refuses, a new adapter or a resident one: nothing is made room for (L3)."""
    await rig.load(1)
    await rig.send(_sender(rig, 1, 1))
    before = await rig.snapshot()
    for name in (NAME, "b"):
        await expect(UpdateRefused, rig.send(_sender(rig, 2, 1, RefusedElsewhere, name=name)))
        assert await rig.snapshot() == before
    _check(rig, await rig.complete(rig.ut.prompts[0], adapter=NAME), 1, 1)
    await expect(WeightsNotLoaded, rig.complete(rig.ut.prompts[0], adapter="b"))
    await rig.check_golden(1)

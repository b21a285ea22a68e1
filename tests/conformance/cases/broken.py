"""Updates that break after their first byte: poisoned, silent, and healed by a full one."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_aborted, expect
from hotbunk.conformance.transfers import (
    HOSTILE,
    Corrupted,
    FailedElsewhere,
    Hanging,
    MemoryTransfer,
    Raising,
)
from hotbunk.rollout.contract import PauseMode, Retention, Scope, Tag, Version
from hotbunk.rollout.errors import (
    BaseMismatch,
    DeadlineExceeded,
    HotbunkError,
    UpdateFailed,
    VerifyFailed,
    WeightsPoisoned,
)
from hotbunk.rollout.status import Health


async def _poisoned(rig: Rig, transfer: MemoryTransfer) -> None:
    """The update fails, no token comes, no label moves, the sender knows; a full one heals."""
    error = await expect(HotbunkError, rig.send(transfer))
    assert isinstance(error, (UpdateFailed, DeadlineExceeded)), f"raised {type(error).__name__}"
    assert transfer.aborted_with, "the sender was not told"
    await check_poisoned(rig)


async def check_poisoned(rig: Rig) -> None:
    """Half-written, silent, without a label, and it says so."""
    await rig.check_states("DIRTY")
    status = await rig.replica.status()
    assert status.health is Health.POISONED, f"health is {status.health}"
    assert not status.servable
    for group in rig.fed():
        assert group not in status.versions, f"{group} still says {status.versions[group]}"
    await expect(WeightsPoisoned, rig.complete(rig.ut.prompts[0]))


async def heal(rig: Rig, version: int) -> None:
    """A full update brings it back."""
    await rig.load(version)
    assert (await rig.replica.status()).health is Health.OK
    await rig.check_golden(version)


@case(level=Level.FAULT)
async def hostile_senders(rig: Rig) -> None:
    """Short, corrupt, missing, overlapping or impossible buckets, early and late (N7, V8)."""
    version = 1
    await rig.load(version)
    size = rig.ut.bucket_sizes[1]
    for kind in HOSTILE:
        for at in (0, -1):
            bad = rig.sender(kind, version + 1, at=at, bucket_bytes=size)
            await _poisoned(rig, bad)
            version += 1
            await heal(rig, version)


@case(level=Level.FAULT)
async def a_flipped_bit_is_named(rig: Rig) -> None:
    """One wrong bit anywhere is found, and the tensor is named (U1)."""
    await rig.load(1)
    bad = rig.sender(Corrupted, 2)
    error = await expect(VerifyFailed, rig.send(bad))
    assert len(error.names) < 4, f"the error names {error.names}"
    await check_poisoned(rig)
    await heal(rig, 2)


@case(level=Level.FAULT, smoke=True)
async def sender_dies(rig: Rig) -> None:
    """Gone before the first byte: nothing changed. Gone later: poisoned (N7, B14)."""
    await rig.load(1)
    size = rig.ut.bucket_sizes[1]
    before = await rig.snapshot()
    await expect(UpdateFailed, rig.send(rig.sender(Raising, 2, at=0, bucket_bytes=size)))
    assert await rig.snapshot() == before, "no byte moved and something changed"
    await rig.check_golden(1)
    await _poisoned(rig, rig.sender(Raising, 2, at=-1, bucket_bytes=size))
    await heal(rig, 2)


async def _hanging(bad: Hanging, sending: asyncio.Task[object]) -> None:
    """Until the sender stands still in the middle; an update that ends before says why."""
    reached = bad.reached = asyncio.Event()
    waiting = asyncio.create_task(reached.wait())
    await asyncio.wait({waiting, sending}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not reached.is_set():
        raise AssertionError(f"the update ended before its last bucket: {await sending!r}")


@case(level=Level.FAULT)
async def sender_hangs(rig: Rig) -> None:
    """A deadline ends it; status answers meanwhile (B14, H11, N12)."""
    await rig.load(1)
    bad = rig.sender(Hanging, 2, at=-1, bucket_bytes=rig.ut.bucket_sizes[1])
    sending: asyncio.Task[object] = rig.begin(rig.send(bad, deadline=5 * rig.ut.moment))
    await _hanging(bad, sending)
    status = await rig.replica.status()
    assert not status.servable, "half-written weights are called servable"
    await expect(DeadlineExceeded, sending)
    await check_poisoned(rig)
    await heal(rig, 2)


@case(level=Level.FAULT)
async def caller_gives_up(rig: Rig) -> None:
    """Cancelling an update in the middle leaves it DIRTY, not half-trusted."""
    await rig.load(1)
    bad = rig.sender(Hanging, 2, at=-1, bucket_bytes=rig.ut.bucket_sizes[1])
    sending: asyncio.Task[object] = rig.begin(rig.send(bad))
    await _hanging(bad, sending)
    sending.cancel()
    await asyncio.wait({sending})
    assert sending.cancelled()
    assert bad.aborted_with, "the sender was not told"
    await check_poisoned(rig)
    await heal(rig, 2)


@case(level=Level.FAULT, smoke=True)
async def another_rank_fails(rig: Rig) -> None:
    """Every byte arrived here and the vote failed: poisoned all the same (N6, N7, V8)."""
    await rig.load(1)
    await _poisoned(rig, rig.sender(FailedElsewhere, 2))
    await heal(rig, 2)


@case(level=Level.FAULT)
async def the_old_version_heals(rig: Rig) -> None:
    """A poisoned replica takes back the version it had, whole: no label moved (N7, V8)."""
    await rig.load(1)
    await _poisoned(rig, rig.sender(FailedElsewhere, 2))
    await heal(rig, 1)


@case(level=Level.FAULT, capability="partial")
async def nothing_partial_heals(rig: Rig) -> None:
    """A poisoned replica is healed by a full resend only."""
    await rig.load(1)
    await _poisoned(rig, rig.sender(FailedElsewhere, 2))
    for base in (1, 2):
        scope = Scope.partial(Version(0, base))
        await expect(BaseMismatch, rig.send(rig.transfer(3, scope=scope)))
    await check_poisoned(rig)
    await heal(rig, 3)


@case(level=Level.FAULT, capability="release retention.backup")
async def half_written_weights_are_not_backed_up(rig: Rig) -> None:
    """Sleep and wake do not launder what an update left half-written."""
    await rig.load(1)
    await _poisoned(rig, rig.sender(FailedElsewhere, 2))
    await rig.replica.release([Tag.WEIGHTS], retention=Retention.BACKUP)
    await rig.check_states("DISCARDED")
    await rig.replica.resume([Tag.WEIGHTS])
    await rig.check_states("EMPTY")
    await heal(rig, 2)


@case(level=Level.FAULT, capability="pause.keep")
async def poison_frees_who_waits(rig: Rig) -> None:
    """Held and frozen requests of a poisoned replica end at once, with their tokens (N7)."""
    await rig.load(1)
    [frozen] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP)
    held = rig.submit(rig.ut.prompts[1])
    await rig.moment()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await expect(UpdateFailed, rig.send(rig.sender(FailedElsewhere, 2)))
    for request in (frozen, held):
        check_aborted(await request.result(), retryable=True)
    assert loop.time() - began < rig.ut.deadlines.hold / 2, "they waited for their deadline"
    assert frozen.tokens, "the partial tokens were lost"
    assert frozen.tokens == rig.ut.golden(rig.ut.prompts[0], 1, len(frozen.tokens))
    await rig.replica.resume_generation()
    await check_poisoned(rig)
    await heal(rig, 2)

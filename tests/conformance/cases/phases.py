"""A sender or an engine that fails or hangs, in each phase of an update; engines that die."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.cases.broken import check_poisoned, heal
from hotbunk.conformance.rig import NotApplicable, Rig, check_aborted, expect
from hotbunk.conformance.transfers import Hooked
from hotbunk.conformance.under_test import MEMORY_POINTS, UPDATE_POINTS
from hotbunk.rollout.contract import Retention, Tag
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    EngineFailed,
    HotbunkError,
    ReplicaLost,
    ResumeOutOfMemory,
    TransferFailed,
    UpdateFailed,
)
from hotbunk.rollout.status import Health

LAST = "the last bucket"
PHASES = ("accept", "bucket 0", LAST, "fingerprints", "commit")
BEFORE_A_BYTE = ("accept", "bucket 0")


def _breaking(rig: Rig, version: int, phase: str, *, hangs: bool) -> Hooked:
    transfer = rig.sender(Hooked, version, bucket_bytes=rig.ut.bucket_sizes[1])
    if phase == LAST:
        phase = transfer.last_bucket

    async def hook(now: str) -> None:
        if now == phase and hangs:
            await asyncio.get_running_loop().create_future()
        if now == phase:
            raise TransferFailed(f"the sender is gone in phase {phase}")

    transfer.hook = hook
    return transfer


async def _sender_breaks(rig: Rig, *, hangs: bool) -> None:
    version = 1
    await rig.load(version)
    limit = 5 * rig.ut.moment if hangs else None
    for phase in PHASES:
        before = await rig.snapshot()
        transfer = _breaking(rig, version + 1, phase, hangs=hangs)
        error = await expect(HotbunkError, rig.send(transfer, deadline=limit))
        wanted = DeadlineExceeded if hangs else UpdateFailed
        assert isinstance(error, wanted), f"in phase {phase}: {type(error).__name__}: {error}"
        if phase in BEFORE_A_BYTE:
            assert await rig.snapshot() == before, f"no byte moved in {phase}, and it changed"
            await rig.check_golden(version)
        else:
            await check_poisoned(rig)
        version += 1
        await heal(rig, version)


@case(level=Level.FAULT)
async def a_sender_fails_in_each_phase(rig: Rig) -> None:
    """Before a byte nothing changed; after one it is poisoned; a full resend heals (N7, B14, V8)."""
    await _sender_breaks(rig, hangs=False)


@case(level=Level.FAULT)
async def a_sender_hangs_in_each_phase(rig: Rig) -> None:
    """A deadline ends it, also one that started and never finishes; then likewise (B14, H16, N7)."""
    await _sender_breaks(rig, hangs=True)


async def _heals(rig: Rig, version: int, how: str) -> bool:
    """A full update; what hangs may turn out to do so only now."""
    try:
        await heal(rig, version)
    except HotbunkError:
        if how != "hang":
            raise
        return False
    return True


async def _check_lost(rig: Rig) -> None:
    """It says so, within the deadline that an update has over there, and answers nobody."""
    async with asyncio.timeout(rig.ut.deadlines.update):
        while (await rig.replica.status()).health is not Health.LOST:
            await rig.moment()
    await expect(ReplicaLost, rig.complete(rig.ut.prompts[0]))


async def _engine_breaks(rig: Rig, how: str) -> None:
    version = 1
    untried: list[str] = []
    await rig.load(version)
    for point in UPDATE_POINTS:
        if not rig.ut.sabotage(point, how):
            untried.append(point)
            continue
        before = await rig.snapshot()
        limit = 5 * rig.ut.moment if how == "hang" else None
        transfer = rig.transfer(version + 1, bucket_bytes=rig.ut.bucket_sizes[1])
        error = await expect(HotbunkError, rig.send(transfer, deadline=limit))
        lost = (await rig.replica.status()).health is Health.LOST
        assert lost or how != "hang" or isinstance(error, DeadlineExceeded), f"{point}: {error!r}"
        version += 1
        if not lost and point == "accept":
            assert await rig.snapshot() == before, "it failed before a byte, and changed"
        elif not lost:
            await check_poisoned(rig)
        if lost or not await _heals(rig, version, how):
            await _check_lost(rig)
            await rig.anew()
            await heal(rig, version)
    _say_untried(rig, how, untried, UPDATE_POINTS)


def _say_untried(rig: Rig, how: str, untried: Sequence[str], points: Sequence[str]) -> None:
    """Where nothing could be broken.

    :raises NotApplicable: that is everywhere.
    """
    if len(untried) == len(points):
        raise NotApplicable(f"nothing can be made to {how} inside the engine")
    if untried:
        rig.note(f"not tried, because nothing can be made to {how} there: {', '.join(untried)}")


@case(level=Level.FAULT)
async def an_engine_fails_in_each_phase(rig: Rig) -> None:
    """Its own code raises: a typed error, no label moves, no token comes, a resend heals (N7, V8, B20)."""
    await _engine_breaks(rig, "fail")


@case(level=Level.FAULT)
async def an_engine_hangs_in_each_phase(rig: Rig) -> None:
    """Its own code never returns: poisoned, or lost where it cannot be cancelled (H16, N12)."""
    await _engine_breaks(rig, "hang")


@case(level=Level.FAULT, capability="release")
async def an_engine_fails_in_a_memory_verb(rig: Rig) -> None:
    """What is mapped is unknown then: nothing is served until it is started anew (M6, N13)."""
    rig.off_device()
    untried: list[str] = []
    for point in MEMORY_POINTS:
        await rig.load(1)
        if point == "resume":
            await rig.replica.release([Tag.WEIGHTS], retention=_mildest(rig))
        if not rig.ut.sabotage(point, "fail"):
            untried.append(point)
            continue
        doing = rig.replica.release(retention=_mildest(rig))
        if point == "resume":
            doing.close()
            doing = rig.replica.resume()
        await expect(EngineFailed, doing)
        assert (await rig.replica.status()).health is Health.LOST
        await expect(ReplicaLost, rig.complete(rig.ut.prompts[0]))
        await expect(ReplicaLost, rig.load(2))
        await rig.anew()
    _say_untried(rig, "fail", untried, MEMORY_POINTS)
    await heal(rig, 2)


def _mildest(rig: Rig) -> Retention:
    backs_up = Retention.BACKUP in rig.caps.retentions
    return Retention.BACKUP if backs_up else Retention.DISCARD


@case(level=Level.FAULT, capability="pause.abort release")
async def a_resume_without_room_is_undone(rig: Rig) -> None:
    """Somebody else took the memory: a typed error at once, all as before, a later wake works (M6).

    No room for either tag, so also with the other one mapped already.
    """
    rig.off_device()
    level = 1 if Retention.BACKUP in rig.caps.retentions else 2
    for version, tag in enumerate(Tag, start=1):
        await rig.load(version)
        await rig.replica.sleep(level)
        asleep = await rig.snapshot()
        if not rig.ut.starve(tag):
            raise NotApplicable("the device cannot be made to refuse")
        error = await expect(ResumeOutOfMemory, rig.replica.wake_up())
        assert tag.value in error.tag.split(","), f"the error names {error.tag}"
        assert error.needed > error.free, f"{error.needed} needed and {error.free} free"
        assert await rig.snapshot() == asleep, "a wake that failed left something mapped"
        await rig.replica.wake_up()
        if level == 2:
            await rig.load(version)
        await rig.check_golden(version)


@case(level=Level.FAULT)
async def killed_and_started_anew(rig: Rig) -> None:
    """Killed with work in flight: nobody waits for ever; its successor takes a full update (N3, N13)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    if not await rig.ut.kill():
        raise NotApplicable("it cannot be killed from outside")
    for one in running:
        try:
            done = await asyncio.wait_for(one.result(), rig.ut.deadlines.hold)
        except HotbunkError:
            continue
        check_aborted(done)
    await expect(HotbunkError, rig.load(2))
    await expect(HotbunkError, rig.complete(rig.ut.prompts[0]))
    status = await rig.replica.status()
    assert not status.servable or status.backend.busy, "a dead engine is called servable"
    await rig.anew()
    await heal(rig, 3)

"""The frame of an update: what its sender is asked for, and sessions that start and finish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.cases.broken import heal
from hotbunk.conformance.rig import Rig, expect
from hotbunk.conformance.steps import Steps
from hotbunk.conformance.transfers import FailedElsewhere, MemoryTransfer, RefusedElsewhere
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import SessionError, UpdateFailed, UpdateRefused

Step = Callable[[], Awaitable[object]]


def _check_frame(transfer: MemoryTransfer, begins: list[str], ends: str) -> None:
    """Asked for in this order, each once, and then for its end alone; a sender may hear that twice."""
    inside, after = transfer.events[: len(begins)], set(transfer.events[len(begins) :])
    wanted = f"the sender saw {transfer.events}, not {begins} and {ends}"
    assert inside == begins, wanted
    assert after == {ends}, wanted


def _buckets(transfer: MemoryTransfer) -> list[str]:
    return [event for event in transfer.events if event.startswith("bucket ")]


@case(level=Level.SYNC)
async def a_sender_is_asked_for_each_step_once(rig: Rig) -> None:
    """Accept, every bucket in order, fingerprints, a vote: once each, or told that it is over (G9, B16)."""
    await rig.load(1)
    size = rig.ut.bucket_sizes[1]
    refused = rig.sender(RefusedElsewhere, 2, bucket_bytes=size)
    await expect(UpdateRefused, rig.send(refused))
    _check_frame(refused, ["accept"], "abort")
    whole = rig.transfer(2, bucket_bytes=size)
    await rig.send(whole)
    buckets = _buckets(whole)
    assert buckets == [f"bucket {n}" for n in range(len(buckets))], f"buckets came as {buckets}"
    assert whole.events == ["accept", *buckets, "fingerprints", "commit"], (
        f"the sender saw {whole.events[:1]}, {len(buckets)} buckets, {whole.events[1:][len(buckets) :]}"
    )
    failed = rig.sender(FailedElsewhere, 3, bucket_bytes=size)
    await expect(UpdateFailed, rig.send(failed))
    _check_frame(failed, ["accept", *buckets, "fingerprints", "commit"], "abort")
    await heal(rig, 3)


async def _out_of_turn(rig: Rig, steps: Steps, **doing: Step) -> None:
    """Each is refused, and nothing at all changed."""
    before, label = await rig.snapshot(), await steps.label()
    for what, step in doing.items():
        try:
            await expect(SessionError, step())
        except AssertionError as error:
            raise AssertionError(f"{what.replace('_', ' ')}: {error}") from error
        assert await rig.snapshot() == before, f"{what.replace('_', ' ')} changed something"
        assert await steps.label() == label, f"{what.replace('_', ' ')} moved the label"


async def _whole(rig: Rig, steps: Steps, version: int) -> None:
    """A session from its start to its finish, and tokens of what it brought."""
    await steps.start()
    transfer = rig.transfer(version)
    report = await steps.update(transfer)
    total = len(transfer.manifest.tensors)
    assert report.applied == total, f"applied {report.applied} of {total}"
    told = await steps.finish(Version(0, version))
    assert told == Version(0, version), f"version {version} was sent, and {told} is finished"
    assert await steps.label() == told, "the label is not what was finished"
    await rig.ut.settle(rig.replica)
    await rig.check_golden(version)


async def _last(rig: Rig, steps: Steps, version: int) -> None:
    """One more, which ends a case: who drives the engine from here may not have heard of any."""
    await _whole(rig, steps, version)
    if steps.past_the_front:
        await rig.anew()


@case(level=Level.SYNC)
async def an_update_in_steps(rig: Rig) -> None:
    """Start, update, finish: what it finishes with is what was committed, again and again (G9).

    What failed cannot be finished, only aborted; the next session heals it.
    """
    await rig.load(1)
    steps = await rig.steps()
    for version in (2, 3):
        await _whole(rig, steps, version)
    for error, sender in ((UpdateRefused, RefusedElsewhere), (UpdateFailed, FailedElsewhere)):
        await steps.start()
        await expect(error, steps.update(rig.sender(sender, 4)))
        await expect(SessionError, steps.finish())
        await steps.abort()
    await _last(rig, steps, 4)


@case(level=Level.SYNC)
async def finish_without_start(rig: Rig) -> None:
    """Nothing was started: no finish, no abort, no update; one that is finished is over (G9, B17)."""
    await rig.load(1)
    steps = await rig.steps()
    early = rig.transfer(2)
    await _out_of_turn(
        rig,
        steps,
        a_finish_without_a_start=steps.finish,
        an_abort_without_a_start=steps.abort,
        an_update_without_a_start=lambda: steps.update(early),
    )
    assert not early.bytes_moved, "bytes moved before a start"
    await rig.check_golden(1)
    await steps.start()
    await steps.update(rig.transfer(2))
    await steps.finish()
    await _out_of_turn(rig, steps, a_second_finish=steps.finish)
    late = rig.transfer(3)
    await _out_of_turn(rig, steps, an_update_after_the_finish=lambda: steps.update(late))
    assert not late.bytes_moved, "bytes moved after the finish"
    await _last(rig, steps, 3)


@case(level=Level.SYNC)
async def a_start_is_finished_once(rig: Rig) -> None:
    """Started twice, finished with nothing sent, or as something else: refused, and it goes on (G9, B16).

    Whoever comes next ends it: the client before it is told so.
    """
    await rig.load(1)
    steps = await rig.steps()
    await steps.start()
    await _out_of_turn(
        rig, steps, a_second_start=steps.start, a_finish_with_nothing_sent=steps.finish
    )
    await rig.check_golden(1)
    await steps.update(rig.transfer(2))
    await _out_of_turn(rig, steps, a_finish_of_another_version=lambda: steps.finish(Version(0, 7)))
    assert await steps.finish(Version(0, 2)) == Version(0, 2)
    await steps.start()
    await _out_of_turn(rig, steps, a_finish_with_nothing_new=steps.finish)
    other = await rig.steps()
    stale = rig.transfer(3)
    await _out_of_turn(
        rig,
        other,
        a_start_of_who_was_before=steps.start,
        a_finish_of_who_was_before=steps.finish,
        an_update_of_who_was_before=lambda: steps.update(stale),
    )
    assert not stale.bytes_moved, "bytes of a client that was before moved"
    await _last(rig, other, 3)

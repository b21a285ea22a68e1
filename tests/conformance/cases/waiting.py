"""Requests that wait, are turned away, aborted or dropped."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_aborted, expect
from hotbunk.rollout.contract import FinishReason, PauseMode, Sampling, Version
from hotbunk.rollout.errors import ReplicaRejecting, RequestRejected, UsageError


@case(capability="pause.abort")
async def held_requests_end_at_the_deadline(rig: Rig) -> None:
    """A held request waits at most ``hold``, then ends with abort and a retryable error."""
    await rig.load(1)
    await rig.replica.pause_generation()
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = await rig.complete(rig.ut.prompts[0])
    waited = loop.time() - began
    check_aborted(done, retryable=True)
    assert not done.token_ids
    hold = rig.ut.deadlines.hold
    assert hold * 0.9 <= waited <= hold + 2, f"it waited {waited:g} s and the deadline is {hold:g}"
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case(capability="pause.keep")
async def frozen_requests_end_at_the_deadline(rig: Rig) -> None:
    """A frozen request, too; its partial tokens stand."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP)
    done = await running.result()
    check_aborted(done, retryable=True)
    assert done.token_ids, "the partial tokens were lost"
    rig.check_tokens(done, rig.ut.prompts[0], 1, cut=True)
    await rig.replica.resume_generation()
    await rig.moment()
    status = await rig.replica.status()
    assert not status.backend.running, "the engine still runs a request that ended"
    await rig.check_golden(1)


@case(capability="pause.abort")
async def reject_turns_requests_away(rig: Rig) -> None:
    """reject=True: new requests get a retryable error at once, and those held are let go."""
    await rig.load(1)
    await rig.replica.pause_generation()
    held = rig.submit(rig.ut.prompts[0])
    await rig.moment()
    assert not held.done
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.replica.pause_generation(reject=True)
    check_aborted(await held.result(), retryable=True)
    assert loop.time() - began < rig.ut.deadlines.hold / 2, "it waited for its deadline"
    error = await expect(ReplicaRejecting, rig.complete(rig.ut.prompts[1]))
    assert error.retryable
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case(capability="abort")
async def abort_leaves_admission_open(rig: Rig) -> None:
    """abort(ids) ends those and nobody else, and the next request runs (U5, A1)."""
    await rig.load(1)
    first = rig.request(rig.ut.prompts[0], rig.ut.long_tokens)
    running = [rig.read(first), rig.submit(rig.ut.prompts[1], rig.ut.long_tokens)]
    for request in running:
        await request.started()
    report = await rig.replica.abort([first.request_id, "nobody"])
    assert report.aborted == (first.request_id,), f"aborted {report.aborted}"
    assert report.unknown == ("nobody",), f"unknown {report.unknown}"
    done = await running[0].result()
    check_aborted(done)
    assert done.token_ids
    rig.check_tokens(await rig.complete(rig.ut.prompts[2]), rig.ut.prompts[2], 1)
    other = await running[1].result()
    assert other.finish_reason is FinishReason.LENGTH
    rig.check_tokens(other, rig.ut.prompts[1], 1)


@case(capability="abort pause.keep")
async def abort_reaches_held_and_frozen(rig: Rig) -> None:
    """abort() ends requests wherever they are, and the pause stays."""
    await rig.load(1)
    [frozen] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP)
    held = rig.submit(rig.ut.prompts[1])
    await rig.moment()
    report = await rig.replica.abort()
    assert len(report.aborted) == 2, f"aborted {report.aborted}"
    for request in (frozen, held):
        check_aborted(await request.result())
    assert frozen.tokens
    assert (await rig.replica.status()).is_paused
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case(capability="pause.abort")
async def requests_that_end_while_they_are_aborted(rig: Rig) -> None:
    """Short requests finish in the very tick of their abort: nothing hangs, nothing is lost (H2)."""
    await rig.load(1)
    for tokens in range(1, 6):
        running = [rig.submit(prompt, tokens) for prompt in rig.ut.prompts]
        await running[0].started()
        await rig.replica.pause_generation(PauseMode.ABORT)
        for request, prompt in zip(running, rig.ut.prompts, strict=True):
            rig.check_tokens(await request.result(), prompt, 1, cut=True)
        await rig.replica.resume_generation()
    await rig.check_golden(1)


@case()
async def dropping_the_stream_ends_the_request(rig: Rig) -> None:
    """A client that goes away leaves nothing running."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    running.task.cancel()
    await asyncio.wait({running.task})
    await rig.moment()
    status = await rig.replica.status()
    assert not status.running, f"the gate still knows {status.running}"
    assert not status.backend.running, f"the engine still runs {status.backend.running}"
    await rig.check_golden(1)


@case(level=Level.SYNC)
async def a_pinned_version_is_served_or_refused(rig: Rig) -> None:
    """A request pinned to a version starts under that version only."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    rig.check_tokens(await rig.complete(prompt, version=Version(0, 1)), prompt, 1)
    error = await expect(RequestRejected, rig.complete(prompt, version=Version(0, 2)))
    assert error.retryable
    await rig.load(2)
    rig.check_tokens(await rig.complete(prompt, version=Version(0, 2)), prompt, 2)


@case()
async def senseless_requests_are_refused(rig: Rig) -> None:
    """No prompt or a senseless one, no tokens or responses, an id in use: a UsageError; others go on."""
    await rig.load(1)
    await expect(UsageError, rig.complete(()))
    await expect(UsageError, rig.complete((1, -1, 2)))
    await expect(UsageError, rig.complete(rig.ut.prompts[0], -1))
    await expect(UsageError, rig.complete(rig.ut.prompts[0], sampling=Sampling(n=0)))
    twice = rig.request(rig.ut.prompts[0])
    first = rig.read(twice)
    await asyncio.sleep(0)
    await expect(UsageError, rig.read(twice).result())
    rig.check_tokens(await first.result(), rig.ut.prompts[0], 1)

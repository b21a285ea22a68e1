"""Pauses: modes, escalation, owners."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_aborted, expect
from hotbunk.rollout.contract import FinishReason, PauseMode, Tag
from hotbunk.rollout.errors import SessionError


async def _held(rig: Rig) -> None:
    """A new request waits, and runs when generation opens."""
    prompt = rig.ut.prompts[2]
    new = rig.submit(prompt)
    await rig.moment()
    assert not new.tokens, "a request started during a pause"
    assert not new.done, "a request that came during a pause ended"
    await rig.replica.resume_generation()
    rig.check_tokens(await new.result(), prompt, 1)


@case(capability="pause.abort", smoke=True)
async def pause_abort(rig: Rig) -> None:
    """abort ends what runs, with its partial tokens; new requests are held (H3, V5, K1, H4)."""
    await rig.load(1)
    before = (await rig.replica.status()).backend.tokens_generated
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    report = await rig.replica.pause_generation(PauseMode.ABORT)
    made = (await rig.replica.status()).backend.tokens_generated - before
    assert len(report.aborted) == 2, f"aborted {report.aborted}"
    for request, prompt in zip(running, rig.ut.prompts, strict=False):
        done = await request.result()
        check_aborted(done)
        assert done.token_ids, "the partial tokens were lost"
        rig.check_tokens(done, prompt, 1, cut=True)
    came = sum(len(one.tokens) for one in running)
    assert came >= made, f"{made} tokens were made, and {came} came"
    if not made:
        rig.note("how many tokens were made is not told")
    await _held(rig)


@case(capability="pause.wait")
async def pause_wait(rig: Rig) -> None:
    """wait returns when what runs has finished; new requests are held (H4)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2])
    pausing = rig.begin(rig.replica.pause_generation(PauseMode.WAIT))
    await rig.pausing()
    late = rig.submit(rig.ut.prompts[2])
    report = await pausing
    assert len(report.finished) == 2, f"finished {report.finished}"
    for request, prompt in zip(running, rig.ut.prompts, strict=False):
        done = await request.result()
        assert done.finish_reason is FinishReason.LENGTH, f"finished with {done.finish_reason}"
        assert len(done.token_ids) == rig.ut.long_tokens
        rig.check_tokens(done, prompt, 1)
    assert not late.tokens, "a request that came during the drain was started"
    await _held(rig)
    rig.check_tokens(await late.result(), rig.ut.prompts[2], 1)


@case(capability="pause.keep", smoke=True)
async def pause_keep(rig: Rig) -> None:
    """keep freezes what runs and goes on where it stood; new requests are held (V12)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    report = await rig.replica.pause_generation(PauseMode.KEEP)
    assert len(report.frozen) == 2, f"frozen {report.frozen}"
    await rig.moment()
    stood = [len(request.tokens) for request in running]
    await rig.moment()
    assert [len(request.tokens) for request in running] == stood, "a frozen request went on"
    await _held(rig)
    await rig.cut(running, 1)


@case(capability="pause.abort")
async def pause_when_idle(rig: Rig) -> None:
    """In any mode, again and again: quick, twice is once, and it does nothing meanwhile (H7, H17)."""
    await rig.load(1)
    await rig.complete(rig.ut.prompts[0])
    for mode in [one for one in PauseMode if rig.caps.pause.get(one)] * 2:
        for _ in range(2):
            report = await rig.replica.pause_generation(mode)
            assert report.aborted == report.frozen == report.finished == ()
        status = await rig.replica.status()
        assert status.is_paused, f"{mode.value} twice is no pause"
        assert status.backend.paused
        await rig.replica.resume_generation()
        await rig.replica.resume_generation()
        assert not (await rig.replica.status()).is_paused, f"{mode.value} outlived its resume"
    before = (await rig.replica.status()).backend.steps
    await rig.replica.pause_generation(PauseMode.ABORT)
    await rig.moment()
    made = (await rig.replica.status()).backend.steps - before
    assert made <= 1, "a paused engine makes steps"
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case(capability="pause.abort pause.wait")
async def abort_beats_wait(rig: Rig) -> None:
    """abort during a drain ends it: both calls return (H6)."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    waiting = rig.begin(rig.replica.pause_generation(PauseMode.WAIT))
    await rig.pausing()
    await rig.replica.pause_generation(PauseMode.ABORT)
    await waiting
    done = await running.result()
    check_aborted(done)
    rig.check_tokens(done, rig.ut.prompts[0], 1, cut=True)
    await _held(rig)


@case(capability="pause.abort pause.keep")
async def abort_beats_keep(rig: Rig) -> None:
    """abort ends frozen requests, with the tokens they had."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP)
    report = await rig.replica.pause_generation(PauseMode.ABORT)
    assert len(report.aborted) == 1, f"aborted {report.aborted}"
    done = await running.result()
    check_aborted(done)
    assert done.token_ids
    await _held(rig)


@case(capability="pause.wait pause.keep")
async def wait_after_keep_finishes(rig: Rig) -> None:
    """wait after keep lets the frozen finish."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0])
    await rig.replica.pause_generation(PauseMode.KEEP)
    report = await rig.replica.pause_generation(PauseMode.WAIT)
    assert len(report.finished) == 1, f"finished {report.finished}"
    done = await running.result()
    assert done.finish_reason is FinishReason.LENGTH
    rig.check_tokens(done, rig.ut.prompts[0], 1)
    await _held(rig)


@case(capability="pause.wait pause.keep")
async def keep_after_wait_freezes(rig: Rig) -> None:
    """keep during a drain freezes the rest: both calls return, and nothing is lost."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    waiting = rig.begin(rig.replica.pause_generation(PauseMode.WAIT))
    await rig.pausing()
    report = await rig.replica.pause_generation(PauseMode.KEEP)
    await waiting
    assert len(report.frozen) == 1, f"frozen {report.frozen}"
    await rig.moment()
    stood = len(running.tokens)
    await rig.moment()
    assert len(running.tokens) == stood, "a frozen request went on"
    assert not running.done, (
        f"the frozen request ended with {(await running.result()).finish_reason}"
    )
    await _held(rig)
    await rig.cut([running], 1)


@case(capability="pause.abort")
async def two_pauses_at_once(rig: Rig) -> None:
    """Two concurrent pauses of one owner both return, and one resume opens (H6)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    await asyncio.gather(*(rig.replica.pause_generation(PauseMode.ABORT) for _ in range(2)))
    for request in running:
        check_aborted(await request.result())
    await rig.replica.resume_generation()
    await rig.check_golden(1)


@case(capability="pause.wait")
async def resume_during_a_drain(rig: Rig) -> None:
    """resume while wait is pending: the pause says so, requests go on, generation is open."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    waiting = rig.begin(rig.replica.pause_generation(PauseMode.WAIT))
    await rig.pausing()
    await rig.replica.resume_generation()
    await expect(SessionError, waiting)
    assert not running.done, "the drain ran to its end instead"
    new = await rig.complete(rig.ut.prompts[1])
    rig.check_tokens(new, rig.ut.prompts[1], 1)
    await rig.cut([running], 1)


@case(capability="pause.abort", smoke=True)
async def owners_do_not_open_for_each_other(rig: Rig) -> None:
    """Generation is open when no owner holds a pause (H21)."""
    await rig.load(1)
    await rig.replica.pause_generation(owner="outer")
    await rig.replica.pause_generation(owner="inner")
    new = rig.submit(rig.ut.prompts[0])
    await rig.replica.resume_generation(owner="inner")
    await rig.replica.resume_generation(owner="stranger")
    await rig.moment()
    assert not new.tokens, "one owner's resume ended another's pause"
    await rig.load(2)
    await rig.moment()
    assert not new.tokens, "a sync ended a caller's pause"
    await rig.replica.resume_generation(owner="outer")
    rig.check_tokens(await new.result(), rig.ut.prompts[0], 2)


@case(level=Level.COLOCATE, capability="pause.abort release")
async def callers_pause_survives_a_wake(rig: Rig) -> None:
    """wake undoes sleep's pause and no other (H17)."""
    await rig.load(1)
    level = 1 if "backup" in rig.caps.retentions else 0
    await rig.replica.pause_generation()
    await rig.replica.sleep(level)
    await rig.replica.wake_up()
    status = await rig.replica.status()
    assert status.is_paused, "the wake ended the caller's pause"
    assert not status.is_sleeping
    new = rig.submit(rig.ut.prompts[0])
    await rig.moment()
    assert not new.tokens, "the wake opened generation under a caller's pause"
    await rig.replica.resume_generation()
    rig.check_tokens(await new.result(), rig.ut.prompts[0], 1)


@case(level=Level.COLOCATE, capability="pause.abort release")
async def sleep_survives_a_callers_resume(rig: Rig) -> None:
    """A caller's resume undoes the caller's pause and not sleep's."""
    await rig.load(1)
    level = 1 if "backup" in rig.caps.retentions else 0
    await rig.replica.sleep(level)
    await rig.replica.pause_generation()
    await rig.replica.resume_generation()
    status = await rig.replica.status()
    assert status.is_sleeping
    new = rig.submit(rig.ut.prompts[0])
    await rig.moment()
    assert not new.tokens
    assert not new.done, "a request did not wait for the wake"
    await rig.replica.wake_up()
    rig.check_tokens(await new.result(), rig.ut.prompts[0], 1)


@case(level=Level.COLOCATE, capability="pause.abort")
async def sleep_level_0_is_a_pause(rig: Rig) -> None:
    """Level 0 releases nothing; wake opens again."""
    await rig.load(1)
    tags = list(Tag) if rig.sees("memory") else []
    before = {tag: rig.ut.resident(tag) for tag in tags}
    await rig.replica.sleep(0)
    assert {tag: rig.ut.resident(tag) for tag in tags} == before
    await rig.check_states("RESIDENT", kv="RESIDENT")
    new = rig.submit(rig.ut.prompts[0])
    await rig.moment()
    assert not new.tokens
    await rig.replica.wake_up()
    rig.check_tokens(await new.result(), rig.ut.prompts[0], 1)


@case(capability="pause.abort")
async def clear_cache_forgets(rig: Rig) -> None:
    """clear_cache=True: no later token comes from KV made before the pause; it is or-ed (C9)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    await rig.complete(prompt)
    await rig.replica.pause_generation(clear_cache=True)
    report = await rig.replica.pause_generation(clear_cache=False)
    assert report.cleared_cache, "the second pause took the first one's clear_cache back"
    await rig.replica.resume_generation()
    done = await rig.complete(prompt)
    rig.check_uncached(done, "tokens of KV outlived clear_cache")
    rig.check_tokens(done, prompt, 1)


@case(capability="pause.keep")
async def clear_cache_false_counts_stale_tokens(rig: Rig) -> None:
    """clear_cache=False: kept KV may be reused, and the report counts its tokens (C9)."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    report = await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    if rig.sees("stale tokens"):
        assert report.stale_tokens >= len(rig.ut.prompts[0]) or report.cleared_cache, (
            f"{report.stale_tokens} stale tokens for a prompt of {len(rig.ut.prompts[0])}"
        )
    await rig.replica.resume_generation()
    await rig.cut([running], 1)

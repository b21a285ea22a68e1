"""Memory and updates with work in flight."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_aborted, expect
from hotbunk.rollout.contract import FinishReason, PauseMode, Tag
from hotbunk.rollout.errors import RequestsInFlight


@case(level=Level.COLOCATE, capability="release")
async def release_waits_or_refuses(rig: Rig) -> None:
    """With steps running at the deadline: RequestsInFlight, nothing released, all go on (K1, K5)."""
    await rig.load(1)
    before = await rig.snapshot()
    running = await rig.caught(*rig.ut.prompts[:2])
    doing = rig.replica.release(retention=rig.off_device(), deadline=0.0)
    error = await expect(RequestsInFlight, doing)
    assert len(error.ids) == 2, f"the error names {error.ids}"
    assert error.retryable
    assert await rig.snapshot() == before, "something was released all the same"
    for request, prompt in zip(running, rig.ut.prompts, strict=False):
        done = await request.result()
        assert done.finish_reason is FinishReason.LENGTH
        rig.check_tokens(done, prompt, 1)
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="release_kv_cache pause.wait")
async def kv_release_drains_first(rig: Rig) -> None:
    """Given time, a KV release waits for what runs, and holds what comes (K1, K2)."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0])
    releasing = rig.begin(rig.replica.release_kv_cache())
    await asyncio.sleep(0)
    late = rig.submit(rig.ut.prompts[1])
    await releasing
    rig.check_resident(Tag.KV_CACHE, 0)
    rig.check_tokens(await running.result(), rig.ut.prompts[0], 1)
    assert not late.tokens, "a request was admitted onto memory being freed"
    await asyncio.wait({late.task})
    if late.task.exception() is None:  # the drain took longer than a request is held
        check_aborted(await late.result(), retryable=True)
    assert not late.tokens, "it was served without KV"
    await rig.replica.resume_kv_cache()
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.keep keep_release release_kv_cache")
async def frozen_requests_survive_a_kv_release(rig: Rig) -> None:
    """Frozen requests lose their KV and are recomputed: the result is the uninterrupted one (C3)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    report = await rig.replica.release_kv_cache()
    assert report.recomputed_requests == 2, f"{report.recomputed_requests} counted"
    await rig.moment()
    await rig.replica.resume_kv_cache()
    await rig.replica.resume_generation()
    await rig.cut(running, 1)
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.keep keep_release release retention.backup")
async def frozen_requests_survive_a_sleep(rig: Rig) -> None:
    """The same over sleep(1, mode=keep) and a wake."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.sleep(1, mode=PauseMode.KEEP)
    await rig.moment()
    assert not running.done, "sleep ended a kept request"
    await rig.replica.wake_up()
    await rig.cut([running], 1)


@case(level=Level.SYNC, capability="pause.keep keep_release release_kv_cache")
async def frozen_requests_meet_new_weights_and_new_kv(rig: Rig) -> None:
    """keep, KV out, update, KV in: the rest is what the new weights make of the prefix (C3)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    [running] = await rig.caught(prompt)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    await rig.replica.release_kv_cache()
    await rig.load(2)
    await rig.replica.resume_kv_cache()
    kept = list(running.tokens)
    await rig.replica.resume_generation()
    done = await running.result()
    rest = list(done.token_ids[len(kept) :])
    assert kept == rig.ut.golden(prompt, 1, len(kept))
    assert rest == rig.ut.golden([*prompt, *kept], 2, len(rest))


@case(level=Level.COLOCATE, capability="pause.abort release", smoke=True)
async def sleep_aborts_and_releases(rig: Rig) -> None:
    """sleep under load: partial tokens arrive, memory goes, no request is lost (K1, M7)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts, endless=True)
    level = 1 if "backup" in rig.caps.retentions else 2
    await rig.replica.sleep(level)
    for request, prompt in zip(running, rig.ut.prompts, strict=True):
        done = await request.result()
        assert done.finish_reason is FinishReason.ABORT
        rig.check_tokens(done, prompt, 1, cut=True)
    rig.check_resident(Tag.KV_CACHE, 0)
    await rig.replica.wake_up()
    await rig.load(2)
    await rig.check_golden(2)


@case(level=Level.SYNC)
async def updates_wait_for_what_runs(rig: Rig) -> None:
    """An update without a pause drains first: old requests are all old, new ones all new (H1, H7)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2])
    updating = rig.begin(rig.load(2))
    await asyncio.sleep(0)
    late = rig.submit(rig.ut.prompts[2])
    await updating
    for request, prompt in zip(running, rig.ut.prompts, strict=False):
        rig.check_tokens(await request.result(), prompt, 1)
    rig.check_tokens(await late.result(), rig.ut.prompts[2], 2)
    assert not (await rig.replica.status()).is_paused, "the update left its pause behind"


@case(level=Level.SYNC, capability="pause.abort")
async def resume_waits_for_an_update(rig: Rig) -> None:
    """A caller's resume in the middle of an update opens nothing before it ends (H1)."""
    await rig.load(1)
    await rig.replica.pause_generation()
    held = rig.submit(rig.ut.prompts[0])
    updating = rig.begin(rig.send(rig.transfer(2, bucket_bytes=rig.ut.bucket_sizes[-1])))
    await asyncio.sleep(0)
    await rig.replica.resume_generation()
    await updating
    rig.check_tokens(await held.result(), rig.ut.prompts[0], 2)


@case(level=Level.COLOCATE, capability="pause.keep keep_release keep_kv release_kv_cache")
async def frozen_requests_get_their_kv_back(rig: Rig) -> None:
    """keep_kv: what is frozen goes on with the KV it had, and the report counts it (C9)."""
    await rig.load(1)
    running = await rig.caught(*rig.ut.prompts[:2], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    for _ in range(2):
        report = await rig.replica.release_kv_cache(keep_kv=True)
        kept = (report.kept_requests, report.recomputed_requests)
        assert kept == (2, 0), f"{kept} kept and recomputed"
        assert rig.ut.resident(Tag.KV_CACHE) == 0
        await rig.moment()
        await rig.replica.resume_kv_cache()
    await rig.replica.resume_generation()
    await rig.cut(running, 1)
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.keep keep_release keep_kv release retention.backup")
async def frozen_requests_get_their_kv_back_with_the_weights(rig: Rig) -> None:
    """The same over a sleep to a backup: another model has the device meanwhile (C9)."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    report = await rig.replica.sleep(1, mode=PauseMode.KEEP, clear_cache=False, keep_kv=True)
    assert report.kept_requests == 1, f"{report.kept_requests} kept"
    assert rig.ut.resident(Tag.KV_CACHE) == 0
    await rig.moment()
    await rig.replica.wake_up()
    await rig.cut([running], 1)


@case(level=Level.SYNC, capability="pause.keep keep_release keep_kv release_kv_cache")
async def saved_kv_dies_with_its_weights(rig: Rig) -> None:
    """An update between release and resume: the rest is what new weights make of it (C1, C3)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    [running] = await rig.caught(prompt)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    report = await rig.replica.release_kv_cache(keep_kv=True)
    assert report.kept_requests == 1, f"{report.kept_requests} kept"
    await rig.load(2)
    await rig.replica.resume_kv_cache()
    kept = list(running.tokens)
    await rig.replica.resume_generation()
    rest = list((await running.result()).token_ids[len(kept) :])
    assert kept == rig.ut.golden(prompt, 1, len(kept))
    assert rest == rig.ut.golden([*prompt, *kept], 2, len(rest)), "KV of older weights was read"


@case(level=Level.COLOCATE, capability="pause.keep keep_release keep_kv release_kv_cache")
async def a_release_without_keep_drops_saved_kv(rig: Rig) -> None:
    """The stricter of two releases holds: the KV is lost, counted, and computed again."""
    await rig.load(1)
    [running] = await rig.caught(rig.ut.prompts[0], endless=True)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    await rig.replica.release_kv_cache(keep_kv=True)
    report = await rig.replica.release_kv_cache()
    lost = (report.kept_requests, report.recomputed_requests)
    assert lost == (0, 1), f"{lost} kept and recomputed"
    assert (await rig.replica.memory()).backup(Tag.KV_CACHE) == 0, "it is still kept somewhere"
    await rig.replica.resume_kv_cache()
    await rig.replica.resume_generation()
    await rig.cut([running], 1)

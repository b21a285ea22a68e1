"""The state table, walked: releases and resumes in every subset of tags, retention and order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import NotApplicable, Rig, expect
from hotbunk.rollout.contract import PauseMode, Retention, Tag
from hotbunk.rollout.errors import KVNotResident, UnknownTag, WeightsNotLoaded
from hotbunk.rollout.status import Health

SUBSETS: tuple[Sequence[str] | None, ...] = (
    ["weights"],
    ["kv_cache"],
    ["weights", "kv_cache"],
    ["kv_cache", "weights", "kv_cache"],
    None,
    [],
)
OFF = {Retention.BACKUP: "BACKED_UP", Retention.DISCARD: "DISCARDED"}


async def _walk(rig: Rig, retention: Retention) -> None:
    full = {tag: rig.ut.resident(tag) for tag in Tag}
    version = 1
    await rig.load(version)
    for tags in SUBSETS:
        wanted = [t.value for t in Tag] if tags is None else tags
        if list(wanted) == ["kv_cache"] and not rig.caps.release_kv_cache:
            continue
        weights, kv = "weights" in wanted, "kv_cache" in wanted
        gone = weights and retention is not Retention.RESIDENT
        state = OFF.get(retention, "RESIDENT") if gone else "RESIDENT"
        for _ in range(2):  # the second time changes nothing
            await rig.replica.release(tags, retention=retention)
            await rig.check_states(state, kv="RELEASED" if kv else "RESIDENT")
            now = rig.ut.resident(Tag.WEIGHTS)
            most = full[Tag.WEIGHTS] // 10 if not rig.unfed() else full[Tag.WEIGHTS] - 1
            assert now <= most if gone else now == full[Tag.WEIGHTS], (
                f"{now} of {full[Tag.WEIGHTS]} bytes of weights after release({tags})"
            )
            now = rig.ut.resident(Tag.KV_CACHE)
            assert now == 0 if kv else now > 0, f"{now} bytes of KV after release({tags})"
        lost = gone and retention is Retention.DISCARD
        for _ in range(2):
            await rig.replica.resume(tags)
            await rig.check_states("EMPTY" if lost else "RESIDENT", kv="RESIDENT")
        if lost:
            await expect(WeightsNotLoaded, rig.complete(rig.ut.prompts[0]))
            version += 1
            await rig.load(version)
        await rig.check_golden(version)


@case(capability="release retention.discard")
async def walk_discard(rig: Rig) -> None:
    """Every subset of tags, discarded and resumed, twice each (A5, M9)."""
    await _walk(rig, Retention.DISCARD)


@case(capability="release retention.backup", smoke=True)
async def walk_backup(rig: Rig) -> None:
    """Every subset of tags, backed up and resumed, twice each (A5, M9)."""
    await _walk(rig, Retention.BACKUP)


@case(capability="release retention.resident")
async def walk_resident(rig: Rig) -> None:
    """RESIDENT keeps weights where they are, or is refused; KV content is never retained (F4)."""
    await _walk(rig, Retention.RESIDENT)


@case(capability="pause.abort release retention.discard", smoke=True)
async def discarded_weights_never_serve(rig: Rig) -> None:
    """Level 2, wake everything, no update: an error, never tokens (G1, G2)."""
    await rig.load(1)
    await rig.replica.sleep(2)
    await rig.replica.wake_up()
    await rig.check_states("EMPTY", kv="RESIDENT")
    for prompt in rig.ut.prompts:
        error = await expect(WeightsNotLoaded, rig.complete(prompt))
        assert error.remedy, "the error gives no advice"
    assert not (await rig.replica.status()).servable
    await rig.load(2)
    await rig.check_golden(2)


@case(capability="release retention.discard retention.backup")
async def discard_drops_a_backup(rig: Rig) -> None:
    """BACKUP, then DISCARD of what is backed up: nothing returns by itself."""
    await rig.load(1)
    await rig.replica.release(retention=Retention.BACKUP)
    await rig.replica.release(retention=Retention.DISCARD)
    await rig.check_states("DISCARDED", kv="RELEASED")
    backup = rig.ut.host_backup()
    assert not backup or rig.unfed(), f"{backup} bytes of host memory are still taken"
    await rig.replica.resume()
    await rig.check_states("EMPTY", kv="RESIDENT")
    await expect(WeightsNotLoaded, rig.complete(rig.ut.prompts[0]))
    await rig.load(2)
    await rig.check_golden(2)


@case(capability="release retention.discard retention.backup")
async def backup_after_discard_brings_nothing_back(rig: Rig) -> None:
    """There is nothing to back up where content was discarded, mapped or not."""
    await rig.load(1)
    await rig.replica.release([Tag.WEIGHTS], retention=Retention.DISCARD)
    await rig.replica.release([Tag.WEIGHTS], retention=Retention.BACKUP)
    await rig.check_states("DISCARDED")
    await rig.replica.resume([Tag.WEIGHTS])
    await rig.replica.release([Tag.WEIGHTS], retention=Retention.BACKUP)
    await rig.check_states("DISCARDED")
    await rig.replica.resume()
    await rig.check_states("EMPTY", kv="RESIDENT")


@case(capability="release_kv_cache")
async def no_tokens_without_kv(rig: Rig) -> None:
    """With KV released and generation open, a request is told so."""
    await rig.load(1)
    await rig.replica.release_kv_cache()
    await rig.check_states("RESIDENT", kv="RELEASED")
    await expect(KVNotResident, rig.complete(rig.ut.prompts[0]))
    await rig.replica.resume_kv_cache()
    await rig.replica.resume_kv_cache()
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def backups_are_given_back(rig: Rig) -> None:
    """Ten level-1 cycles: memory and host memory are flat, one copy at most (M9, M16)."""
    await rig.load(1)
    sizes, hosts = set(), set()
    for _ in range(10):
        await rig.replica.sleep(1)
        sizes.add((rig.ut.resident(Tag.WEIGHTS), rig.ut.resident(Tag.KV_CACHE)))
        await rig.replica.wake_up()
        hosts.add(rig.ut.host_backup())
        sizes.add((rig.ut.resident(Tag.WEIGHTS), rig.ut.resident(Tag.KV_CACHE)))
    assert len(sizes) == 2, f"memory drifts: {sorted(sizes)}"
    assert hosts <= {0, None}, f"backups stay on the host: {hosts}"
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.discard")
async def discard_takes_no_host_memory(rig: Rig) -> None:
    """Weights that will be overwritten are not copied (M17)."""
    if rig.ut.host_backup() is None:
        raise NotApplicable("host memory cannot be told from outside")
    if rig.unfed():
        raise NotApplicable("groups that no sync feeds are backed up")
    await rig.load(1)
    await rig.replica.sleep(2)
    assert rig.ut.host_backup() == 0, f"{rig.ut.host_backup()} bytes of backups"


@case(level=Level.COLOCATE, capability="release")
async def release_reports_what_it_freed(rig: Rig) -> None:
    """What was to go is gone; the report, the memory verb and the device agree (M10, M12)."""
    await rig.load(1)
    before = sum(rig.ut.resident(tag) for tag in Tag)
    report = await rig.replica.release(retention=rig.off_device())
    freed = before - sum(rig.ut.resident(tag) for tag in Tag)
    rig.check_resident(Tag.KV_CACHE, 0, "the KV cache was released, and is still there")
    assert report.freed == freed, f"reported {report.freed}, the device says {freed}"
    again = await rig.replica.release(retention=rig.off_device())
    assert again.freed == 0, f"the second release freed {again.freed}"
    said = await rig.replica.memory()
    for tag in Tag:
        assert said.resident(tag) == rig.ut.resident(tag), f"memory() is wrong about {tag}"
    assert report.measured_by in ("process", "device", "accounting")


@case(smoke=True)
async def bad_tags_change_nothing(rig: Rig) -> None:
    """An unknown tag or a bare string is an error on every verb that takes tags (F7)."""
    await rig.load(1)
    before = await rig.snapshot()
    bad: tuple[Sequence[str], ...] = (["weight"], ["weights", "graphs"], "weights")
    for tags in bad:
        for verb in (rig.replica.release, rig.replica.resume, rig.replica.wake_up):
            await expect(UnknownTag, verb(tags))
    assert await rig.snapshot() == before
    await rig.check_golden(1)


async def _changes_nothing(rig: Rig, *meaningless: Callable[[], Awaitable[object]]) -> None:
    """Awake, paused and asleep."""
    await rig.load(1)
    await _refuses(rig, meaningless)
    await rig.check_golden(1)
    if not rig.caps.pause.get(PauseMode.ABORT):
        return
    await rig.replica.pause_generation()
    await _refuses(rig, meaningless)
    await rig.replica.resume_generation()
    await rig.check_golden(1)
    if rig.caps.release and Retention.BACKUP in rig.caps.retentions:
        await rig.replica.sleep(1)
        await _refuses(rig, meaningless)
        await rig.replica.wake_up()
        await rig.check_golden(1)


async def _refuses(rig: Rig, meaningless: Sequence[Callable[[], Awaitable[object]]]) -> None:
    before = await rig.snapshot()
    for call in meaningless:
        await expect(ValueError, call())
    assert await rig.snapshot() == before
    assert before.health == Health.OK


@case(smoke=True)
async def bad_pause_modes_change_nothing(rig: Rig) -> None:
    """A pause in a mode that no engine has is a ValueError (A7)."""
    doze: Any = "doze"
    await _changes_nothing(rig, lambda: rig.replica.pause_generation(doze))


@case(smoke=True)
async def bad_sleep_modes_change_nothing(rig: Rig) -> None:
    """A sleep in a mode that no engine has is a ValueError, before anything is released (A7)."""
    doze: Any = "doze"
    await _changes_nothing(rig, lambda: rig.replica.sleep(1, mode=doze))


@case(smoke=True)
async def bad_levels_change_nothing(rig: Rig) -> None:
    """An unknown sleep level or retention is a ValueError (A7)."""
    levels: list[Any] = [3, -1, "deep"]
    retention: Any = "disc"
    await _changes_nothing(
        rig,
        *(partial(rig.replica.sleep, level) for level in levels),
        lambda: rig.replica.release(retention=retention),
    )

"""Memory that changes hands: staged wakes, peaks, cycles, and who asks meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import NotApplicable, Rig
from hotbunk.conformance.transfers import Hooked
from hotbunk.rollout.contract import Retention, Tag, Version

CYCLES = 20
LOOKS = 8  # at memory while an update's buckets come: on some devices a look takes a while
TOLERANCE = 1e-3  # of a log-prob; the same kernels on the same bits differ by rounding at most


def _resident(rig: Rig) -> dict[Tag, int]:
    return {tag: rig.ut.resident(tag) for tag in Tag}


def _all_bytes(rig: Rig) -> int:
    return sum(_resident(rig).values()) if rig.sees("memory") else 0


def _low(rig: Rig, full: int) -> int:
    """The most that may stay of ``full`` bytes of weights: little, or what no sync feeds."""
    return full - 1 if rig.unfed() else full // 10


async def _staged(rig: Rig, level: int, order: Sequence[Tag]) -> None:
    full = _resident(rig)
    await rig.replica.sleep(level)
    now = _resident(rig)
    assert now[Tag.WEIGHTS] <= _low(rig, full[Tag.WEIGHTS]), f"asleep with {now} of {full} bytes"
    assert now[Tag.KV_CACHE] == 0, f"asleep with {now[Tag.KV_CACHE]} bytes of KV"
    for n, tag in enumerate(order):
        other, before = order[1 - n], _resident(rig)
        await rig.replica.wake_up([tag])
        now = _resident(rig)
        assert now[tag] == full[tag], f"{now[tag]} of {full[tag]} bytes after waking {tag}"
        assert now[other] == before[other], f"waking {tag} moved {other}"
        awake = not (await rig.replica.status()).is_sleeping
        assert awake == (n == 1), f"after waking {order[: n + 1]} it says that awake is {awake}"


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def memory_comes_back_in_stages_from_a_backup(rig: Rig) -> None:
    """Level 1: both tags go, and each comes back alone, in either order (M3, M7)."""
    await rig.load(1)
    for order in ((Tag.WEIGHTS, Tag.KV_CACHE), (Tag.KV_CACHE, Tag.WEIGHTS)):
        await _staged(rig, 1, order)
        await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.discard")
async def memory_comes_back_in_stages_from_nothing(rig: Rig) -> None:
    """Level 2 likewise; content comes with an update, between the stages or after (M3, G1)."""
    for version, order in enumerate(
        ((Tag.WEIGHTS, Tag.KV_CACHE), (Tag.KV_CACHE, Tag.WEIGHTS)), start=1
    ):
        await _staged(rig, 2, order)
        await rig.load(version)
        await rig.check_golden(version)


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup", smoke=True)
async def half_awake_serves_nobody(rig: Rig) -> None:
    """With one tag awake requests are held, and nothing computes on memory that is away (G1, K1)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    for first, second in ((Tag.WEIGHTS, Tag.KV_CACHE), (Tag.KV_CACHE, Tag.WEIGHTS)):
        await rig.replica.sleep(1)
        await rig.replica.wake_up([first])
        running = rig.submit(prompt)
        await rig.moment()
        assert not running.tokens, f"tokens with only {first} awake"
        assert not running.done, f"a request ended with only {first} awake"
        await rig.replica.wake_up([second])
        rig.check_tokens(await running.result(), prompt, 1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def sleeping_twice_is_sleeping_once(rig: Rig) -> None:
    """A second sleep, and a wake of what is awake, change nothing (A5, M9)."""
    await rig.load(1)
    awake = await rig.snapshot()
    await rig.replica.wake_up()
    assert await rig.snapshot() == awake, "a wake of an awake engine changed something"
    await rig.replica.sleep(1)
    asleep = await rig.snapshot()
    again = await rig.replica.sleep(1)
    assert again.freed == 0, f"the second sleep freed {again.freed} bytes"
    assert await rig.snapshot() == asleep, "a second sleep changed something"
    await rig.replica.wake_up()
    await rig.replica.wake_up()
    assert await rig.snapshot() == awake, "it is not as it was before it slept"
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def requests_during_a_sleep_are_held_and_served(rig: Rig) -> None:
    """Who asks while another model has the device waits, and gets every token (K5, H4)."""
    await rig.load(1)
    await rig.replica.sleep(1)
    held = [rig.submit(prompt) for prompt in rig.ut.prompts]
    await rig.moment()
    assert not any(one.tokens or one.done for one in held), "served while it slept"
    assert len((await rig.replica.status()).held) == len(held)
    await rig.replica.wake_up()
    for one, prompt in zip(held, rig.ut.prompts, strict=True):
        rig.check_tokens(await one.result(), prompt, 1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def nothing_cached_survives_a_sleep(rig: Rig) -> None:
    """KV content is never retained: a prompt that was cached is computed anew (C1, C3)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    await rig.complete(prompt)
    await rig.replica.sleep(1)
    await rig.replica.wake_up()
    done = await rig.complete(prompt)
    rig.check_uncached(done, "tokens of released KV were reused")
    rig.check_tokens(done, prompt, 1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.discard", smoke=True)
async def the_peak_is_weights_and_a_bucket(rig: Rig) -> None:
    """Weights, update, KV: while buckets come, the KV cache is away and no second copy is there.

    (M1, M2, M5)
    """
    full = _resident(rig)
    await rig.replica.sleep(2)
    await rig.replica.wake_up([Tag.WEIGHTS])
    size = rig.ut.bucket_sizes[1]
    transfer = rig.sender(Hooked, 1, bucket_bytes=size)
    seen: list[dict[Tag, int]] = []

    every = max(1, -(-transfer.manifest.total_bytes // size) // LOOKS)

    async def look(phase: str) -> None:
        name, _, number = phase.partition(" ")
        if name != "bucket" or int(number) % every == 0 or phase == transfer.last_bucket:
            seen.append(_resident(rig))

    transfer.hook = look
    await rig.send(transfer)
    peak = {tag: max(one[tag] for one in seen) for tag in Tag}
    assert peak[Tag.KV_CACHE] == 0, f"{peak[Tag.KV_CACHE]} bytes of KV during the update"
    most = full[Tag.WEIGHTS] + size
    assert peak[Tag.WEIGHTS] <= most, f"{peak[Tag.WEIGHTS]} bytes of weights, {most} are enough"
    rig.note(f"peak {peak[Tag.WEIGHTS]} bytes of weights, resident {full[Tag.WEIGHTS]}")
    await rig.replica.wake_up([Tag.KV_CACHE])
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release")
async def twenty_cycles_are_flat(rig: Rig) -> None:
    """Sleep, wake, update, serve: freed and residual bytes are those of the first cycle (U10, M9)."""
    discards = Retention.DISCARD in rig.caps.retentions
    level = 2 if discards else 1
    if level == 1:
        rig.off_device()
    await rig.load(1)
    freed: list[int] = []
    residual: list[int] = []
    awake: list[int] = []
    for step in range(2, CYCLES + 2):
        before = _all_bytes(rig)
        await rig.replica.sleep(level)
        residual.append(_all_bytes(rig))
        freed.append(before - residual[-1])
        await rig.replica.wake_up([Tag.WEIGHTS])
        stairs = (before, residual[-1], _all_bytes(rig))
        for nbytes in stairs if rig.sees("memory") else ():
            rig.measure("resident bytes", nbytes)
        await rig.send(rig.transfer(1 + step % 2, label=Version(0, step)))
        await rig.replica.wake_up([Tag.KV_CACHE])
        await rig.complete(rig.ut.prompts[step % len(rig.ut.prompts)])
        awake.append(_all_bytes(rig))
    for name, figures in (("freed", freed), ("residual", residual), ("awake", awake)):
        assert len(set(figures)) == 1, f"{name} bytes drift over {CYCLES} cycles: {figures}"
    if rig.sees("memory"):
        rig.note(f"{CYCLES} cycles, each: {freed[0]} bytes freed, {residual[0]} left")
    await rig.load(CYCLES + 2)
    await rig.check_golden(CYCLES + 2)


async def _log_probs(rig: Rig) -> list[float]:
    """Of the same greedy tokens, whatever else there is."""
    done = await asyncio.gather(*(rig.complete(prompt) for prompt in rig.ut.prompts))
    return [value for one in done for value in one.logprobs]


@case(level=Level.COLOCATE, capability="pause.abort release", smoke=True)
async def log_probs_survive_a_cycle(rig: Rig) -> None:
    """The same weights give the same log-probs before a sleep, after it, and after a reload (G6)."""
    cycles = [r for r in (Retention.BACKUP, Retention.DISCARD) if r in rig.caps.retentions]
    if not cycles:
        raise NotApplicable("weights never leave the device")
    await rig.load(1)
    before = await _log_probs(rig)
    for retention in cycles:
        await rig.replica.sleep(1 if retention is Retention.BACKUP else 2)
        await rig.replica.wake_up([Tag.WEIGHTS])
        if retention is Retention.DISCARD:
            await rig.load(1)
        await rig.replica.wake_up([Tag.KV_CACHE])
        after = await _log_probs(rig)
        worst = max(abs(a - b) for a, b in zip(before, after, strict=True))
        assert worst <= TOLERANCE, f"after {retention.value} log-probs are off by {worst:g}"

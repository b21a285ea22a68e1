"""Tokens come from the weights that the label says, whatever the engine went through."""

from __future__ import annotations

import asyncio

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import Rig, check_spans
from hotbunk.rollout.contract import FinishReason, PauseMode, Retention, Tag, Version
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes

BATCHING = 1e-2  # by which a log-prob may differ, as kernels of another batch size round otherwise


@case(smoke=True)
async def goldens_of_two_versions(rig: Rig) -> None:
    """Every update reaches every prompt (G12)."""
    for prompt in rig.ut.prompts:
        one, two = (rig.ut.golden(prompt, v, rig.ut.tokens) for v in (1, 2))
        assert one != two, f"the goldens of two versions are equal on {prompt}"
    for version in (1, 2, 3):
        await rig.load(version)
        await rig.check_golden(version)


@case()
async def company_changes_nothing(rig: Rig) -> None:
    """A prompt is answered in a batch as it is alone, beside longer ones and its own double, too."""
    await rig.load(1)
    prompts = [*rig.ut.prompts, *rig.ut.prompts[:2]]
    alone = [await rig.complete(prompt) for prompt in prompts]
    together = await asyncio.gather(*(rig.complete(prompt) for prompt in prompts))
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        rig.check_tokens(one, prompt, 1)
        rig.check_tokens(other, prompt, 1)
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        worst = max(abs(a - b) for a, b in pairs)
        assert worst < BATCHING, f"in company log-probs are off by {worst:g}"


@case(level=Level.COLOCATE, capability="pause.abort release retention.backup")
async def golden_after_a_backup_cycle(rig: Rig) -> None:
    """Sleep level 1 and wake: same weights wherever they are seen from, serving is open again (G5, H17)."""
    await rig.load(1)
    await rig.replica.sleep(1)
    await rig.replica.wake_up()
    assert not (await rig.replica.status()).is_paused, "sleep's pause outlived the wake"
    await rig.check_golden(1)


@case(level=Level.COLOCATE, capability="pause.abort release retention.discard", smoke=True)
async def golden_after_a_discard_cycle(rig: Rig) -> None:
    """Sleep level 2, wake the weights, update, wake the KV cache: the trainer's usual way (M3)."""
    await rig.load(1)
    await rig.replica.sleep(2)
    await rig.replica.wake_up([Tag.WEIGHTS])
    rig.check_resident(Tag.KV_CACHE, 0, "waking the weights brought KV memory back")
    await rig.load(2)
    await rig.replica.wake_up([Tag.KV_CACHE])
    await rig.check_golden(2)


@case(level=Level.COLOCATE, capability="release_kv_cache", smoke=True)
async def golden_after_a_kv_only_release(rig: Rig) -> None:
    """Weights do not notice that KV memory left and came back (K6)."""
    await rig.load(1)
    await rig.complete(rig.ut.prompts[0])
    names = [spec.name for spec, _ in rig.ut.weights(1)] if rig.sees("bytes") else []
    before = {name: rig.ut.read_weight(name) for name in names}
    weights = rig.ut.resident(Tag.WEIGHTS) if rig.sees("memory") else 0
    await rig.replica.release_kv_cache()
    rig.check_resident(Tag.WEIGHTS, weights, "weights memory moved")
    assert {name: rig.ut.read_weight(name) for name in names} == before
    await rig.replica.resume_kv_cache()
    done = await rig.complete(rig.ut.prompts[0])
    rig.check_uncached(done, "tokens of KV survived its own release")
    await rig.check_golden(1)


@case(level=Level.SYNC, smoke=True)
async def bytes_are_the_ones_sent(rig: Rig) -> None:
    """Read past the engine's verbs, every tensor holds what the trainer sent (U1)."""
    for version in (1, 2):
        await rig.load(version)
        for spec, content in rig.ut.weights(version):
            for name in spec.names:
                assert rig.ut.read_weight(name) == content, f"{name} differs from what was sent"


@case(level=Level.SYNC, capability="digest")
async def digest_reads_what_lies_there(rig: Rig) -> None:
    """The digest of every tensor equals the fingerprint of the bytes sent (U1)."""
    await rig.load(1)
    tensors = rig.ut.weights(1)
    said = await rig.replica.digest([spec.name for spec, _ in tensors])
    assert said.kind == KIND, f"fingerprints of kind {said.kind}"
    for spec, content in tensors:
        assert said.values[spec.name] == fingerprint_bytes(content), f"{spec.name} differs"


@case(level=Level.COLOCATE, capability="digest release retention.backup retention.discard")
async def cycle_parity(rig: Rig) -> None:
    """After DISCARD and an update, *all* state equals that after BACKUP and the same update.

    Buffers, aliases, ties and attributes included (G3, G5, G6).
    """
    found = []
    for retention, version in ((Retention.BACKUP, 1), (Retention.DISCARD, 1)):
        label = Version(0, 1 if retention is Retention.BACKUP else 2)
        await rig.replica.release(retention=retention)
        await rig.replica.resume()
        await rig.send(rig.transfer(version, label=label))
        found.append(dict((await rig.replica.digest()).values))
    backup, discard = found
    differ = sorted(n for n in backup | discard if backup.get(n) != discard.get(n))
    assert not differ, f"state that a discard lost or changed: {differ}"


@case(level=Level.SYNC, smoke=True)
async def no_kv_outlives_its_weights(rig: Rig) -> None:
    """A prompt that was cached under one version is computed anew under the next (C1)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    await rig.complete(prompt)
    await rig.send(rig.transfer(2))
    done = await rig.complete(prompt)
    rig.check_uncached(done, "tokens of older KV were reused")
    rig.check_tokens(done, prompt, 2)


@case(level=Level.SYNC, capability="pause.keep", smoke=True)
async def kept_request_continues_under_new_weights(rig: Rig) -> None:
    """keep, update, resume: what was said stands, and the rest is what the new weights make of it.

    The oracle is a fresh engine that continues the same prefix; spans cover it all (V6, V7, C3).
    """
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    [running] = await rig.caught(prompt)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=True)
    await rig.moment()
    kept = list(running.tokens)
    await rig.load(2)
    await rig.moment()
    assert running.tokens == kept, "a frozen request went on before generation opened"
    await rig.replica.resume_generation()
    done = await running.result()
    check_spans(done)
    assert done.finish_reason is FinishReason.LENGTH
    assert kept == rig.ut.golden(prompt, 1, len(kept))
    rest = list(done.token_ids[len(kept) :])
    assert rest == rig.ut.golden([*prompt, *kept], 2, len(rest)), (
        "the rest is not what the new weights make of the prefix"
    )
    if not rig.sees("spans"):
        return
    spans = [(s.version, s.start, s.end) for s in done.spans]
    total = len(done.token_ids)
    assert spans == [(Version(0, 1), 0, len(kept)), (Version(0, 2), len(kept), total)], (
        f"the spans are {spans}"
    )


@case(level=Level.SYNC, capability="pause.keep")
async def new_requests_never_share_stale_kv(rig: Rig) -> None:
    """clear_cache=False is about requests in flight: a new one with the same prefix (C2)."""
    await rig.load(1)
    prompt = rig.ut.prompts[0]
    [running] = await rig.caught(prompt)
    await rig.replica.pause_generation(PauseMode.KEEP, clear_cache=False)
    await rig.load(2)
    await rig.replica.resume_generation()
    for _ in range(2):  # the second may read KV that the first or the old one left
        done = await rig.complete(prompt)
        rig.check_tokens(done, prompt, 2)
    check_spans(await running.result())
    rig.check_tokens(await rig.complete(prompt), prompt, 2)

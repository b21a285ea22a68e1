"""What an update must have done, and not only said: compared with a fresh engine and with memory."""

from __future__ import annotations

from collections.abc import Mapping

from hotbunk.conformance.case import Level, case
from hotbunk.conformance.rig import NotApplicable, Rig, Running, expect
from hotbunk.conformance.transfers import FailedElsewhere, Hooked, RefusedElsewhere, Silent
from hotbunk.conformance.under_test import Tensors
from hotbunk.rollout.contract import PauseMode, Scope, Version, digest_name
from hotbunk.rollout.errors import (
    HotbunkError,
    UpdateFailed,
    VerifyFailed,
    WeightsPoisoned,
)
from hotbunk.rollout.status import Health


async def _digests(rig: Rig) -> dict[str, int]:
    """Of all state, parameters or not; nothing where it cannot be read."""
    return dict((await rig.replica.digest()).values) if rig.caps.digest else {}


def _largest(tensors: Tensors) -> str:
    return max(tensors, key=lambda one: one[0].nbytes)[0].name


@case(level=Level.SYNC, smoke=True)
async def an_update_equals_a_fresh_engine(rig: Rig) -> None:
    """After updates 1, 2, 3: tokens and *all* state are those of an engine that only saw 3.

    A round trip of the bytes proves less: what is derived from them is compared, too (G6, G8, U8).
    """
    for version in (1, 2, 3):
        await rig.load(version)
        await rig.complete(rig.ut.prompts[0])
    await rig.check_golden(3)
    updated = await _digests(rig)
    log_probs = [(await rig.complete(prompt)).logprobs for prompt in rig.ut.prompts]
    await rig.anew()
    await rig.load(3)
    await rig.check_golden(3)
    fresh = await _digests(rig)
    differ = sorted(n for n in updated | fresh if updated.get(n) != fresh.get(n))
    assert not differ, f"not what a fresh engine has: {differ}"
    for prompt, before in zip(rig.ut.prompts, log_probs, strict=True):
        after = (await rig.complete(prompt)).logprobs
        off = max(abs(a - b) for a, b in zip(before, after, strict=True))
        assert off < 1e-3, f"log-probs are off by {off:g} from a fresh engine's"


@case(level=Level.SYNC)
async def every_group_moves_with_an_update(rig: Rig) -> None:
    """Target, draft, encoder: each group's bytes and label are the new ones (G16)."""
    if len(rig.fed()) < 2:
        raise NotApplicable("there is one weight group")
    for version in (1, 2):
        await rig.load(version)
        said = (await rig.replica.status()).versions
        for group in rig.fed():
            assert said[group] == Version(0, version), f"{group} says {said[group]}"
        for spec, content in rig.ut.weights(version):
            assert rig.ut.read_weight(spec.name) == content, f"{spec.group}'s {spec.name} is old"


@case(level=Level.SYNC, capability="partial")
async def one_tensor_at_a_time(rig: Rig) -> None:
    """Each name in an update of its own: parts of a fused tensor arrive apart (B17, G5)."""
    await rig.load(1)
    old = {spec.name: content for spec, content in rig.ut.weights(1)}
    new = rig.ut.weights(2)
    if len({spec.group for spec, _ in new}) > 1:
        new = [one for one in new if one[0].group == new[0][0].group]
    for step, (spec, content) in enumerate(new, start=2):
        base = Version(0, step - 1)
        await rig.send(rig.transfer(step, tensors=[(spec, content)], scope=Scope.partial(base)))
        old[spec.name] = content
    for spec, _ in rig.ut.weights(2):
        for name in spec.names:
            assert rig.ut.read_weight(name) == old[spec.name], f"{name} is wrong"


@case(level=Level.SYNC)
async def requests_that_come_during_an_update(rig: Rig) -> None:
    """Between two buckets: held, then all of the new version, never of half of it (H1, H4, G1)."""
    await rig.load(1)
    transfer = rig.sender(Hooked, 2, bucket_bytes=rig.ut.bucket_sizes[1])
    late: list[Running] = []

    async def ask(phase: str) -> None:
        if phase in ("bucket 0", transfer.last_bucket, "commit"):
            late.append(rig.submit(rig.ut.prompts[len(late) % len(rig.ut.prompts)]))
            await rig.moment()
            assert not any(one.tokens or one.done for one in late), f"served in phase {phase}"

    transfer.hook = ask
    await rig.send(transfer)
    assert len(late) >= 2
    for n, one in enumerate(late):
        rig.check_tokens(await one.result(), rig.ut.prompts[n % len(rig.ut.prompts)], 2)


@case(level=Level.SYNC)
async def the_label_moves_last(rig: Rig) -> None:
    """While anything may still fail, nobody says the new version, nor is it servable (V8, U7)."""
    await rig.load(1)
    transfer = rig.sender(Hooked, 2, bucket_bytes=rig.ut.bucket_sizes[1])
    early: list[str] = []

    async def look(phase: str) -> None:
        status = await rig.replica.status()
        said: list[Mapping[str, Version]] = [status.versions, status.backend.versions]
        if any(Version(0, 2) in versions.values() for versions in said):
            early.append(phase)
        assert not status.servable or phase in ("accept", "bucket 0"), f"servable in {phase}"

    transfer.hook = look
    await rig.send(transfer)
    assert not early, f"the new version was said in {early}"
    assert await rig.label() == Version(0, 2)
    await rig.check_golden(2)


@case(level=Level.SYNC, capability="digest")
async def a_planted_corruption_is_found(rig: Rig) -> None:
    """The checker, checked: a bit that changed behind everybody's back shows, by name (U1).

    And the same version is not skipped over it: its bytes are sent again.
    """
    await rig.load(1)
    clean = await _digests(rig)
    name = _largest(rig.ut.weights(1))
    [spec] = [spec for spec, _ in rig.ut.weights(1) if spec.name == name]
    if not rig.ut.corrupt_weight(name):
        raise NotApplicable("nothing can be changed behind its back")
    found = await _digests(rig)
    differ = {n for n in clean if clean[n] != found[n]}
    wanted = {digest_name(spec.group, one) for one in spec.names}
    assert differ & wanted, (
        f"{name} was changed, and the digest shows {sorted(differ) or 'nothing'}"
    )
    mine = {digest_name(s.group, n) for s, _ in rig.ut.weights(1) for n in s.names}
    assert not differ & mine - wanted, f"only {name} was changed: {sorted(differ)}"
    report = await rig.load(1)
    assert not report.skipped, "skipped by its label, over content that is not its own"
    assert await _digests(rig) == clean
    await rig.check_golden(1)


@case(level=Level.SYNC)
async def verification_reads_memory(rig: Rig) -> None:
    """What is compared is what lies in the engine, not what came: a late change is found (U1)."""
    report = await rig.load(1)
    if report.verified != "applied":
        raise NotApplicable(f"it says itself that it compares what was sent: {report.verified}")
    transfer = rig.sender(Hooked, 2, bucket_bytes=rig.ut.bucket_sizes[1])
    tensors = rig.ut.weights(2)
    name = next(spec.name for spec, content in tensors if content)
    [content] = [content for spec, content in tensors if spec.name == name]
    rig.ut.read_weight(name)  # says now if it cannot be seen
    planted = False

    async def plant(phase: str) -> None:
        nonlocal planted
        if phase == "fingerprints" and rig.ut.read_weight(name) == content:
            planted = rig.ut.corrupt_weight(name)

    transfer.hook = plant
    error: VerifyFailed | None = None
    try:
        await rig.send(transfer)
    except VerifyFailed as raised:
        error = raised
    if not planted:
        assert error is None, f"nothing was wrong with {error.names}"
        raise NotApplicable("nothing can be changed between the last bucket and the comparison")
    assert error is not None, f"{name} was changed after it came, and nobody noticed"
    assert name in error.names, f"the error names {error.names} and not {name}"
    await rig.load(3)
    await rig.check_golden(3)


@case(level=Level.SYNC)
async def nothing_sent_is_no_success(rig: Rig) -> None:
    """An offer without a single bucket fails, whatever the sender says (B16, B17)."""
    await rig.load(1)
    await expect(UpdateFailed, rig.send(rig.sender(Silent, 2)))
    assert await rig.label() != Version(0, 2), "the label moved, and nothing came"
    if (await rig.replica.status()).servable:
        await rig.check_golden(1)
    await rig.load(3)
    await rig.check_golden(3)


@case(level=Level.SYNC)
async def an_update_error_leaves_the_server_answering(rig: Rig) -> None:
    """After a refusal and after a failure every verb that looks or pauses still answers (N7, H3)."""
    await rig.load(1)
    mode = next(mode for mode in PauseMode if rig.caps.pause.get(mode))
    for kind in (RefusedElsewhere, FailedElsewhere):
        await expect(HotbunkError, rig.send(rig.sender(kind, 2)))
        status = await rig.replica.status()
        assert status.health is not Health.LOST, "an update error lost the replica"
        assert not status.backend.busy, "the engine does not answer"
        assert (await rig.replica.memory()).arenas, "memory() knows nothing any more"
        await rig.replica.pause_generation(mode)
        await rig.replica.resume_generation()
        if kind is RefusedElsewhere:
            await rig.check_golden(1)
        else:
            await expect(WeightsPoisoned, rig.complete(rig.ut.prompts[0]))
    await rig.load(2)
    await rig.check_golden(2)

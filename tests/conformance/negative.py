"""The other side of a declaration: what is UNSUPPORTED raises ``Unsupported`` and changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from hotbunk.conformance.rig import NotApplicable, Rig, Snapshot, expect
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.contract import PauseMode, Retention, Sampling, Scope, ScopeKind, Tag, Version
from hotbunk.rollout.errors import Unsupported

Attempt = Callable[[Rig], Awaitable[object]]

# What a replica refuses for its engine is tried on the bare engine, too: one that acts although it
# declares that it does not is found out.
DIRECT: dict[str, Attempt] = {
    "release": lambda rig: rig.engine.release(retention=_any_retention(rig)),
    "release_kv_cache": lambda rig: rig.engine.release_kv_cache(),
    "retention.backup": lambda rig: rig.engine.release([Tag.WEIGHTS], retention=Retention.BACKUP),
    "retention.discard": lambda rig: rig.engine.release([Tag.WEIGHTS], retention=Retention.DISCARD),
    "retention.resident": lambda rig: rig.engine.release(
        [Tag.WEIGHTS], retention=Retention.RESIDENT
    ),
    "pause.abort": lambda rig: rig.engine.pause_generation(PauseMode.ABORT),
    "pause.wait": lambda rig: rig.engine.pause_generation(PauseMode.WAIT),
    "pause.keep": lambda rig: rig.engine.pause_generation(PauseMode.KEEP),
    "partial": lambda rig: _engine_update(rig, Scope.partial),
    "delta": lambda rig: _engine_update(rig, Scope.delta),
    "adapter": lambda rig: _engine_update(rig, lambda base: Scope.adapter("a", base)),
    "keep_kv": lambda rig: rig.engine.release_kv_cache(keep_kv=True),
    "abort": lambda rig: rig.engine.abort(["nobody"]),
    "digest": lambda rig: rig.engine.digest(),
}


def _offer(rig: Rig, scope: Scope) -> MemoryTransfer:
    tensors = None
    if scope.kind is ScopeKind.ADAPTER:
        with suppress(NotImplementedError):  # then the base's weights have to do
            tensors = rig.ut.adapter(scope.name, 2)
    return rig.transfer(2, scope=scope, tensors=tensors)


def _any_retention(rig: Rig) -> Retention:
    return min(rig.caps.retentions, default=Retention.DISCARD)


async def _engine_update(rig: Rig, scope: Callable[[Version], Scope]) -> object:
    base = await rig.label()
    assert base is not None
    transfer = _offer(rig, scope(base))
    return await rig.engine.update_weights(
        transfer, version=transfer.manifest.version, scope=transfer.manifest.scope
    )


def _release(retention: Retention) -> Attempt:
    return lambda rig: rig.replica.release([Tag.WEIGHTS], retention=retention)


def _pause(mode: PauseMode) -> Attempt:
    return lambda rig: rig.replica.pause_generation(mode)


def _update(scope: Callable[[Version], Scope]) -> Attempt:
    async def attempt(rig: Rig) -> object:
        base = await rig.label()
        assert base is not None
        transfer = _offer(rig, scope(base))
        try:
            return await rig.send(transfer)
        finally:
            assert not transfer.bytes_moved, "bytes moved in an update that is not supported"

    return attempt


async def _abort(rig: Rig) -> object:
    [running] = await rig.caught(rig.ut.prompts[0])
    try:
        return await rig.replica.abort()
    finally:
        await running.result()


async def _keep_release(rig: Rig) -> object:
    [running] = await rig.caught(rig.ut.prompts[0])
    await rig.replica.pause_generation(PauseMode.KEEP)
    before = await rig.snapshot()
    try:
        return await rig.replica.release([Tag.KV_CACHE])
    finally:
        assert await rig.snapshot() == before, "a release that is not supported changed something"
        await rig.replica.resume_generation()
        rig.check_tokens(await running.result(), rig.ut.prompts[0], 1)


def _sampling(**wants: Any) -> Attempt:
    async def attempt(rig: Rig) -> object:
        asked = rig.request(rig.ut.prompts[0], sampling=Sampling(0.0, max_tokens=4, **wants))
        return await rig.read(asked).result()

    return attempt


ATTEMPTS: dict[str, Attempt] = {
    "release": lambda rig: rig.replica.release(),
    "release_kv_cache": lambda rig: rig.replica.release_kv_cache(),
    "retention.backup": _release(Retention.BACKUP),
    "retention.discard": _release(Retention.DISCARD),
    "retention.resident": _release(Retention.RESIDENT),
    "pause.abort": _pause(PauseMode.ABORT),
    "pause.wait": _pause(PauseMode.WAIT),
    "pause.keep": _pause(PauseMode.KEEP),
    "partial": _update(Scope.partial),
    "delta": _update(Scope.delta),
    "adapter": _update(lambda base: Scope.adapter("a", base)),
    "abort": _abort,
    "digest": lambda rig: rig.replica.digest(),
    "keep_release": _keep_release,
    "keep_kv": lambda rig: rig.replica.release([Tag.KV_CACHE], keep_kv=True),
    "samples": _sampling(n=2),
    "stop_strings": _sampling(stop=("x",)),
    "top_logprobs": _sampling(logprobs=2),
}


async def refused(rig: Rig, capability: str) -> None:
    """The negative run for one capability.

    :raises AssertionError: it was not refused, or something changed.
    :raises NotApplicable: there is no verb to try it with.
    """
    attempt = ATTEMPTS.get(capability)
    if attempt is None:
        raise NotApplicable(f"nothing to refuse: {capability} is a property, not a verb")
    await rig.load(1)
    before = await rig.snapshot()
    error = await expect(Unsupported, attempt(rig))
    assert error.backend == rig.caps.backend, f"the error names backend {error.backend!r}"
    await _check_unchanged(rig, before)
    direct = DIRECT.get(capability)
    if direct is None:
        return
    quiet = [mode for mode in PauseMode if rig.caps.pause.get(mode)]
    if quiet:  # the engine's verbs are called with generation standing still
        await rig.replica.pause_generation(quiet[0], clear_cache=False)
    await expect(Unsupported, direct(rig))
    if quiet:
        await rig.replica.resume_generation()
    await _check_unchanged(rig, before)


async def _check_unchanged(rig: Rig, before: Snapshot) -> None:
    after = await rig.snapshot()
    assert after == before, f"it was refused and yet changed {before} to {after}"
    await rig.check_golden(1)

"""One sync as a transaction: steps over many replicas, each with its undo.

One replica's failure never decides the others': N replicas end in N outcomes. Phases are joint: no
memory is taken back before every replica stands still, no byte is sent before every one is ready,
and none opens before the slowest has committed.

    pause          generation stands still, on the sync's own account (who sleeps does already)
    wake_weights   sleepers map their weights; the others give KV back if the policy says so
    sync           offer, accept, transfer, apply, verify, commit
    let_go         the trainer gives its memory back, on all its ranks
    wake_kv        KV comes back, and every pause of the sync's ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.observe import Observer
from hotbunk.checkpoint_engine.policy import (
    OnFailure,
    Outcome,
    ReleaseKV,
    SyncPolicy,
    Verify,
)
from hotbunk.checkpoint_engine.ranks import LetGo, trainer_failed
from hotbunk.checkpoint_engine.run import ASK_WAIT, Run, typed
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout import errors
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FULL,
    TARGET,
    Manifest,
    Retention,
    Scope,
    ScopeKind,
    Tag,
    Ticket,
    Version,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.gate import SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.lifecycle import KV, Weights
from hotbunk.rollout.status import Health, ReplicaStatus

log = logging.getLogger(__name__)
SENDER_WAIT = 5.0  # seconds


class Part(msgspec.Struct, frozen=True):
    """One thing a sync brings: a source under a version. Later parts stand on earlier ones."""

    source: WeightSource
    version: Version
    scope: Scope = FULL
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def group(self) -> str:
        """The weight group whose version it changes."""
        adapter = self.scope.kind is ScopeKind.ADAPTER
        return f"{ADAPTER_PREFIX}{self.scope.name}" if adapter else TARGET

    def manifest(self, policy: SyncPolicy) -> Manifest:
        """What is offered of it."""
        return Manifest(
            self.version,
            self.source.specs(),
            self.scope,
            policy.bucket_bytes,
            "none" if policy.verify is Verify.OFF else KIND,
            self.metadata,
        )


class Transaction:
    """One sync of some replicas.

    :param sleeps: whether sleep and wake are calls at all (not STANDALONE, ``free_cache_engine``).
    :param frees: whether memory may be released around the sync (``free_cache_engine``).
    """

    def __init__(
        self,
        handles: Sequence[ReplicaHandle],
        transport: Transport,
        policy: SyncPolicy,
        *,
        sleeps: bool,
        frees: bool,
        observer: Observer,
    ) -> None:
        self.runs = [Run(handle) for handle in handles]
        self.phases: dict[str, float] = {}  # wall-clock seconds, over all replicas
        self._transport = transport
        self._policy = policy
        self._sleeps = sleeps
        self._frees = frees
        self._observer = observer

    async def run(self, parts: Sequence[Part], let_go: LetGo | None) -> None:
        """Every run ends in an outcome. Cancelled: each is led back, or at its commit."""
        try:
            await self._each("pause", self._pause)
            await self._each("wake_weights", self._make_room)
            with self._timed("sync"):
                for part in parts:
                    await self._send(part)
            with self._timed("let_go"):
                await self._let_go(let_go)
            await self._each("wake_kv", self._open)
        except asyncio.CancelledError:
            await asyncio.gather(*(self._cut_off(run) for run in self.runs))
            raise

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._observer.phase(name):
            yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    async def _each(self, phase: str, work: Callable[[Run], Awaitable[None]]) -> None:
        """One phase, on every replica still under way; the next begins when all have ended it."""
        with self._timed(phase):
            going = [run for run in self.runs if run.outcome is None]
            await asyncio.gather(*(self._one(phase, run, work(run)) for run in going))

    async def _one(self, phase: str, run: Run, work: Awaitable[None]) -> None:
        """What a replica raises is its outcome alone. A handle that never answers is cut off."""
        try:
            async with run.phase(phase):
                limit = asyncio.timeout(self._policy.longest)
                try:
                    async with limit:
                        await work
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise errors.DeadlineExceeded(
                        phase, self._policy.longest, where=run.handle.name
                    ) from error
        except errors.HotbunkError as error:
            await self._failed(run, error)
        # A boundary: handles and transports are anybody's.
        except Exception as error:  # noqa: BLE001
            await self._failed(run, engine_failed(phase, error))

    # -- the steps ----------------------------------------------------------------------------

    async def _pause(self, run: Run) -> None:
        """Generation stands still."""
        handle, policy = run.handle, self._policy
        before = run.before = await handle.status()
        if before.health is Health.LOST:
            raise errors.ReplicaLost(f"replica {handle.name} is lost")
        if before.is_sleeping:
            return
        fenced = still_held(before)  # by an earlier sync
        run.opens = not fenced  # held from its first moment, also if it never is complete
        await handle.pause_generation(policy.pause, clear_cache=policy.clear_cache, owner=SYNC)
        if self._frees:
            run.wakes_kv = fenced and before.kv is KV.RELEASED

    async def _make_room(self, run: Run) -> None:
        """The weights' memory is mapped; KV stays as it is unless the policy wants it away."""
        handle, before = run.handle, run.before
        assert before is not None
        if before.is_sleeping:
            if self._sleeps and _weights_away(before):
                run.undo.append(partial(handle.release, [Tag.WEIGHTS], retention=_was(before)))
                run.saw(await handle.wake_up([Tag.WEIGHTS]))
            return
        wanted = self._frees and self._policy.release_kv == ReleaseKV.ALWAYS
        if wanted and before.kv is KV.RESIDENT:
            run.wakes_kv = True
            run.undo.append(handle.resume_kv_cache)
            await run.look()
            run.saw(await handle.release_kv_cache())

    async def _send(self, part: Part) -> None:
        """One offer to every replica still under way; sender and receivers go on together."""
        going = [run for run in self.runs if run.outcome is None]
        if not going:
            return
        try:
            manifest = part.manifest(self._policy)
            offer = await self._transport.offer(
                part.source,
                manifest,
                ranks=[run.handle.capabilities.ranks for run in going],
                deadline=self._policy.deadline,
            )
        # A boundary: sources and transports are anybody's.
        except Exception as error:  # noqa: BLE001
            failure = typed("offer", error)
            await asyncio.gather(*(self._failed(run, failure) for run in going))
            return
        serving = asyncio.create_task(offer.serve())

        async def update(number: int, run: Run) -> None:
            try:
                await self._update(run, offer.tickets[number], manifest)
            except BaseException:
                await offer.drop(number)  # nobody waits for it
                raise

        try:
            await asyncio.gather(
                *(self._one("sync", run, update(n, run)) for n, run in enumerate(going))
            )
        finally:
            await _ended(serving, f"the sender of version {manifest.version}")
            await offer.close()

    async def _update(self, run: Run, ticket: Ticket, manifest: Manifest) -> None:
        update = await run.handle.update_weights(
            ticket,
            version=manifest.version,
            scope=manifest.scope,
            deadline=self._policy.deadline,
        )
        run.updates.append(update)
        run.committed = run.committed or not update.skipped

    async def _let_go(self, let_go: LetGo | None) -> None:
        """The trainer gives its memory back. If it cannot, no KV cache may be mapped."""
        going = [run for run in self.runs if run.outcome is None]
        if let_go is None or not going:
            return
        failure: errors.HotbunkError | None = None
        try:
            await let_go()
        except errors.HotbunkError as error:
            failure = error
        # A boundary: trainers raise what their own libraries raise.
        except Exception as error:  # noqa: BLE001
            failure = trainer_failed(error)
        if failure is not None:
            failure.at("the trainer did not let go")
            for run in going:
                run.ended(Outcome.FENCED, failure)

    async def _open(self, run: Run) -> None:
        """KV comes back and every pause of ours ends. Nothing correctness needs comes later."""
        handle = run.handle
        if self._sleeps and (await handle.status()).is_sleeping:
            run.saw(await handle.wake_up([Tag.KV_CACHE]))
        elif run.wakes_kv:
            run.saw(await handle.resume_kv_cache())
        await handle.resume_generation(owner=SYNC)
        run.ended(Outcome.COMMITTED)

    # -- when it goes wrong -------------------------------------------------------------------

    async def _failed(self, run: Run, error: errors.HotbunkError) -> None:
        """Ask the replica what is left of it, and undo what can be undone."""
        try:
            async with asyncio.timeout(ASK_WAIT):
                status = await run.handle.status()
            if status.health is Health.LOST:
                run.ended(Outcome.LOST, error)
            elif run.committed:
                run.ended(Outcome.FENCED, error)
            elif status.health is Health.POISONED:
                # Its pauses stay: whoever waits was let go, and nobody may start.
                run.ended(Outcome.POISONED, error)
            else:
                async with asyncio.timeout(self._policy.longest):
                    while run.undo:
                        await run.undo.pop()()
                    if run.opens and self._policy.on_failure == OnFailure.KEEP:
                        await run.handle.resume_generation(owner=SYNC)
                        run.opens = False
                run.ended(Outcome.ROLLED_BACK, error)
        # A boundary: it cannot be asked, or cannot be led back.
        except Exception as broken:
            log.exception("replica %s is in doubt", run.handle.name)
            error.__context__ = broken
            run.ended(Outcome.IN_DOUBT, error)

    async def _cut_off(self, run: Run) -> None:
        """The sync was cancelled."""
        if run.committed and not run.wakes_kv:
            # Opens what never slept; a sleeper has its weights, and its own pause.
            with suppress(errors.HotbunkError):
                await run.handle.resume_generation(owner=SYNC)
        elif run.outcome is None:
            await self._failed(run, errors.SessionError("the sync was cancelled"))


def still_held(status: ReplicaStatus) -> bool:
    """Whether a sync that ended left its pause held."""
    return any(pause.owner == SYNC for pause in status.pauses)


async def _ended(task: asyncio.Task[None], what: str) -> None:
    """Every receiver has ended, so a sender has nothing left to do; what it met, they know."""
    done, _ = await asyncio.wait({task}, timeout=SENDER_WAIT)
    if not done:
        log.warning("%s had not noticed %g s after the last receiver ended", what, SENDER_WAIT)
        task.cancel()
        await asyncio.wait({task}, timeout=SENDER_WAIT)
    elif not task.cancelled() and task.exception() is not None:
        log.warning("%s failed: %s", what, task.exception())


def _weights_away(status: ReplicaStatus) -> bool:
    away = (Weights.BACKED_UP.value, Weights.DISCARDED.value)
    return any(state.startswith(away) for state in status.groups.values())


def _was(status: ReplicaStatus) -> Retention:
    """The retention that leads back to what was: a group's override is the replica's business."""
    discarded = any(s.startswith(Weights.DISCARDED.value) for s in status.groups.values())
    return Retention.DISCARD if discarded else Retention.BACKUP

"""The sync as a transaction over many replicas.

A sync is a list of steps, each with its undo. One replica's failure never decides the others': a
sync of N replicas ends in N outcomes. This is the colocated ("naive") path: the trainer's memory
and the engine's take turns.

    sleep_replicas   pause(sleep's own) -> quiesce -> release(weights + KV)
    update_weights   resume(weights) -> offer, accept, transfer, apply, verify, commit
                     -> the trainer lets go, on all its ranks -> resume(KV): sleep's pause ends
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from hotbunk.checkpoint_engine.observe import Observer, Unobserved
from hotbunk.checkpoint_engine.policy import (
    Outcome,
    ReleaseKV,
    ReplicaOutcome,
    SyncPolicy,
    SyncReport,
    Verify,
)
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.rollout import errors
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.contract import (
    FULL,
    Deployment,
    Manifest,
    MemoryReport,
    Retention,
    Scope,
    Tag,
    Ticket,
    UpdateReport,
    Version,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.gate import SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.lifecycle import KV, Weights
from hotbunk.rollout.status import Health, ReplicaStatus

log = logging.getLogger(__name__)
SENDER_WAIT = 5.0  # seconds
LetGo = Callable[[], Awaitable[None]]


class _Run:
    """One replica's way through one sync: what was done, and how to undo it."""

    def __init__(self, handle: ReplicaHandle) -> None:
        self.handle = handle
        self.phases: dict[str, float] = {}
        self.undo: list[Callable[[], Awaitable[object]]] = []  # until the commit
        self.committed = False
        self.wakes_kv = False  # KV was away before, or is for the time of the sync
        self.update: UpdateReport | None = None
        self.outcome: Outcome | None = None
        self.error: errors.HotbunkError | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def ended(self, outcome: Outcome, error: errors.HotbunkError | None = None) -> None:
        self.outcome, self.error = outcome, error

    def result(self, version: Version) -> ReplicaOutcome:
        assert self.outcome is not None
        has_it = self.outcome in (Outcome.COMMITTED, Outcome.FENCED)
        return ReplicaOutcome(
            self.handle.name,
            self.outcome,
            version if has_it else None,
            self.update,
            str(self.error or ""),
            type(self.error).__name__ if self.error else "",
            self.phases,
        )


class CheckpointEngineManager:
    """Sleeps, wakes and updates a set of replicas for one trainer.

    :param free_cache_engine: False: no release and no resume is ever called; updates still work.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        transport: Transport,
        *,
        deployment: Deployment = Deployment.HYBRID,
        policy: SyncPolicy | None = None,
        free_cache_engine: bool = True,
        observer: Observer | None = None,
    ) -> None:
        names = [handle.name for handle in replicas]
        if len(set(names)) != len(names):
            raise errors.UsageError(f"replica names must differ: {names}")
        self.replicas = list(replicas)
        self.transport = transport
        self.deployment = deployment
        self.policy = policy or SyncPolicy()
        self.free_cache_engine = free_cache_engine
        self._observer = observer or Unobserved()

    @property
    def _sleeps(self) -> bool:
        return self.free_cache_engine and self.deployment is not Deployment.STANDALONE

    # -- sleep and wake -----------------------------------------------------------------------

    async def sleep_replicas(self) -> dict[str, MemoryReport]:
        """Make room for the other tenant of the device; a report a replica.

        HYBRID discards what a sync brings back, COLOCATED keeps a backup; STANDALONE, or with
        ``free_cache_engine=False``, nothing is called and the reports say so in ``emulated``.

        :raises HotbunkError: the first failure, after every replica was tried.
        """
        if not self._sleeps:
            why = (
                "a standalone engine shares its device with nobody"
                if self.free_cache_engine
                else "free_cache_engine is off"
            )
            return {h.name: MemoryReport(emulated=f"no-op: {why}") for h in self.replicas}
        with self._observer.phase("sleep"):
            results = await asyncio.gather(
                *(h.sleep(self._level(h), mode=self.policy.pause) for h in self.replicas),
                return_exceptions=True,
            )
        return dict(zip((h.name for h in self.replicas), _all_or_raise(results), strict=True))

    def _level(self, handle: ReplicaHandle) -> int:
        discards = Retention.DISCARD in handle.capabilities.retentions
        return 2 if self.deployment is Deployment.HYBRID and discards else 1

    async def wake_replicas(self) -> dict[str, MemoryReport]:
        """Undo sleep without a sync (COLOCATED: backups are restored).

        After a sleep that discarded, use :meth:`update_weights`: generation would otherwise be
        refused for want of content.
        """
        if not self._sleeps:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        with self._observer.phase("wake_kv"):
            results = await asyncio.gather(
                *(h.wake_up(None) for h in self.replicas), return_exceptions=True
            )
        return dict(zip((h.name for h in self.replicas), _all_or_raise(results), strict=True))

    async def statuses(self) -> list[ReplicaStatus]:
        """Every replica's own word. A restarted manager continues from here."""
        return list(await asyncio.gather(*(h.status() for h in self.replicas)))

    async def newest_version(self) -> Version | None:
        """The highest version any replica holds: where a restarted trainer continues."""
        held = [v for s in await self.statuses() for v in s.versions.values()]
        return max(held, default=None)

    async def close(self) -> None:
        """Close every replica."""
        _all_or_raise(
            await asyncio.gather(*(h.close() for h in self.replicas), return_exceptions=True)
        )

    # -- the transaction ----------------------------------------------------------------------

    async def update_weights(
        self,
        source: WeightSource,
        version: Version,
        *,
        scope: Scope = FULL,
        policy: SyncPolicy | None = None,
        let_go: LetGo | None = None,
    ) -> SyncReport:
        """Bring every replica to ``version``; what slept is awake afterwards.

        ``let_go`` is called once, after the last byte and before any KV cache is mapped: the
        trainer gives its memory back there, and returns when all its ranks have.

        Cancelled: what had committed keeps its version, but no KV cache is mapped; every other
        replica is as it was, or poisoned.

        :raises SyncFailed: not every replica committed; carries the report with each outcome.
        """
        chosen = policy or self.policy
        manifest = Manifest(
            version,
            source.specs(),
            scope,
            chosen.bucket_bytes,
            "none" if chosen.verify is Verify.OFF else KIND,
        )
        runs = [_Run(handle) for handle in self.replicas]
        began = time.perf_counter()
        phases: dict[str, float] = {}
        try:
            with self._timed(phases, "wake_weights"):
                await self._each(runs, "wake_weights", partial(self._prepare, policy=chosen))
            with self._timed(phases, "sync"):
                await self._send(runs, source, manifest, chosen)
            with self._timed(phases, "let_go"):
                await self._let_go(runs, let_go)
            with self._timed(phases, "wake_kv"):
                await self._each(runs, "wake_kv", self._open)
        except asyncio.CancelledError:
            await asyncio.gather(*(self._cut_off(run) for run in runs))
            raise
        seconds = time.perf_counter() - began
        phases["other"] = seconds - sum(phases.values())
        report = SyncReport(version, tuple(r.result(version) for r in runs), phases, seconds)
        if not report.ok:
            raise errors.SyncFailed(
                f"version {version} did not reach every replica: {report.summary()}", report
            )
        return report

    @contextmanager
    def _timed(self, phases: dict[str, float], name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._observer.phase(name):
            yield
        phases[name] = time.perf_counter() - began

    async def _each(
        self, runs: Sequence[_Run], phase: str, work: Callable[[_Run], Awaitable[None]]
    ) -> None:
        """One phase, on every replica still under way. What one raises is its outcome alone."""

        async def one(run: _Run) -> None:
            try:
                with run.phase(phase):
                    await work(run)
            except errors.HotbunkError as error:
                await self._failed(run, error)
            # A boundary: handles and transports are anybody's.
            except Exception as error:  # noqa: BLE001
                await self._failed(run, engine_failed(phase, error))

        await asyncio.gather(*(one(run) for run in runs if run.outcome is None))

    async def _prepare(self, run: _Run, policy: SyncPolicy) -> None:
        """Generation stands still and the weights' memory is mapped; KV stays as it is."""
        handle = run.handle
        before = await handle.status()
        if before.health is Health.LOST:
            raise errors.ReplicaLost(f"replica {handle.name} is lost")
        if before.is_sleeping:
            if self._sleeps and _weights_away(before):
                run.undo.append(partial(handle.release, [Tag.WEIGHTS], retention=_was(before)))
                await handle.wake_up([Tag.WEIGHTS])
            return
        fenced = any(pause.owner == SYNC for pause in before.pauses)  # by an earlier sync
        if not fenced:  # a pause is held from its first moment, also if it never is complete
            run.undo.append(partial(handle.resume_generation, owner=SYNC))
        await handle.pause_generation(policy.pause, clear_cache=policy.clear_cache, owner=SYNC)
        if self.free_cache_engine:
            run.wakes_kv = fenced and before.kv is KV.RELEASED
            if policy.release_kv == ReleaseKV.ALWAYS and before.kv is KV.RESIDENT:
                run.wakes_kv = True
                run.undo.append(handle.resume_kv_cache)
                await handle.release_kv_cache()

    async def _send(
        self, runs: Sequence[_Run], source: WeightSource, manifest: Manifest, policy: SyncPolicy
    ) -> None:
        """One offer to every replica still under way; sender and receivers go on together."""
        going = [run for run in runs if run.outcome is None]
        if not going:
            return
        try:
            offer = await self.transport.offer(
                source, manifest, ranks=[1] * len(going), deadline=policy.deadline
            )
        # A boundary: transports are anybody's.
        except Exception as error:  # noqa: BLE001
            failure = _typed("offer", error)
            await asyncio.gather(*(self._failed(run, failure) for run in going))
            return
        serving = asyncio.create_task(offer.serve())
        try:

            async def update(run: _Run) -> None:
                number = going.index(run)
                try:
                    await self._update(run, offer.tickets[number], manifest, policy)
                except BaseException:
                    await offer.drop(number)
                    raise

            await self._each(going, "sync", update)
        finally:
            await _ended(serving, f"the sender of version {manifest.version}")
            await offer.close()

    async def _update(
        self, run: _Run, ticket: Ticket, manifest: Manifest, policy: SyncPolicy
    ) -> None:
        run.update = await run.handle.update_weights(
            ticket, version=manifest.version, scope=manifest.scope, deadline=policy.deadline
        )
        run.committed = True

    async def _let_go(self, runs: Sequence[_Run], let_go: LetGo | None) -> None:
        """The trainer gives its memory back. If it cannot, no KV cache may be mapped."""
        going = [run for run in runs if run.outcome is None]
        if let_go is None or not going:
            return
        failure: errors.HotbunkError | None = None
        try:
            await let_go()
        except errors.HotbunkError as error:
            failure = error
        # A boundary: trainers raise what their own libraries raise.
        except Exception as error:  # noqa: BLE001
            failure = errors.TrainerFailed(
                f"{type(error).__name__}: {error}",
                remote_traceback="".join(traceback.format_exception(error)),
            )
        if failure is not None:
            failure.at("the trainer did not let go")
            for run in going:
                run.ended(Outcome.FENCED, failure)

    async def _open(self, run: _Run) -> None:
        """KV comes back and every pause of ours ends. Nothing correctness needs comes later."""
        handle = run.handle
        if self._sleeps and (await handle.status()).is_sleeping:
            await handle.wake_up([Tag.KV_CACHE])
        elif run.wakes_kv:
            await handle.resume_kv_cache()
        await handle.resume_generation(owner=SYNC)
        run.ended(Outcome.COMMITTED)

    async def _failed(self, run: _Run, error: errors.HotbunkError) -> None:
        """Ask the replica what is left of it, and undo what can be undone."""
        try:
            status = await run.handle.status()
            if status.health is Health.LOST:
                run.ended(Outcome.LOST, error)
            elif run.committed:
                run.ended(Outcome.FENCED, error)
            elif status.health is Health.POISONED:
                # Its pauses stay: whoever waits was let go, and nobody may start.
                run.ended(Outcome.POISONED, error)
            else:
                while run.undo:
                    await run.undo.pop()()
                run.ended(Outcome.ROLLED_BACK, error)
        # A boundary: it cannot be asked, or cannot be led back.
        except Exception as broken:
            log.exception("replica %s is in doubt", run.handle.name)
            error.__context__ = broken
            run.ended(Outcome.IN_DOUBT, error)

    async def _cut_off(self, run: _Run) -> None:
        """The sync was cancelled."""
        if run.committed and not run.wakes_kv:
            # Opens what never slept; a sleeper has its weights, and its own pause.
            with suppress(errors.HotbunkError):
                await run.handle.resume_generation(owner=SYNC)
        elif run.outcome is None:
            await self._failed(run, errors.SessionError("the sync was cancelled"))


def _typed(step: str, error: Exception) -> errors.HotbunkError:
    return error if isinstance(error, errors.HotbunkError) else engine_failed(step, error)


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


def _all_or_raise(results: Sequence[MemoryReport | BaseException | None]) -> list[MemoryReport]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [r for r in results if isinstance(r, MemoryReport)]

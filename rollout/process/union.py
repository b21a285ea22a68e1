"""What several ranks report, as one engine's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from hotbunk.rollout.contract import (
    AbortReport,
    ArenaReport,
    BackendStatus,
    Digests,
    MemoryReport,
    PauseReport,
    UpdateReport,
)
from hotbunk.rollout.process.grid import DIFFERENT, Grid, union_of

T = TypeVar("T")


def memory(reports: Sequence[MemoryReport]) -> MemoryReport:
    """Bytes add up, arena by arena."""
    arenas: dict[tuple[str, str], ArenaReport] = {}
    for report in reports:
        for arena in report.arenas:
            key = (arena.tag, arena.group)
            so_far = arenas.get(key, ArenaReport(*key, 0, 0))
            arenas[key] = ArenaReport(
                *key,
                so_far.reserved + arena.reserved,
                so_far.resident + arena.resident,
                so_far.backup + arena.backup,
            )
    return msgspec.structs.replace(
        reports[0],
        arenas=tuple(arenas.values()),
        freed=_sum(reports, lambda r: r.freed),
        mapped=_sum(reports, lambda r: r.mapped),
        recomputed_requests=_sum(reports, lambda r: r.recomputed_requests),
        kept_requests=_sum(reports, lambda r: r.kept_requests),
        seconds=max(r.seconds for r in reports),
    )


def update(reports: Sequence[UpdateReport], wanted: Sequence[int], offered: int) -> UpdateReport:
    """Bytes add up; of the ``offered`` tensors so many are applied as the worst rank left out.

    ``wanted``: of how many each rank takes a part.
    """
    short = max(want - report.applied for report, want in zip(reports, wanted, strict=True))
    return msgspec.structs.replace(
        reports[0],
        applied=offered - short,
        nbytes=_sum(reports, lambda r: r.nbytes),
        buckets=_sum(reports, lambda r: r.buckets),
        verified=min((r.verified for r in reports), key=("none", "transfer", "applied").index),
        seconds=max(r.seconds for r in reports),
    )


def pause(reports: Sequence[PauseReport]) -> PauseReport:
    """Each request is in one rank."""
    return PauseReport(
        reports[0].mode,
        aborted=_joined(r.aborted for r in reports),
        finished=_joined(r.finished for r in reports),
        frozen=_joined(r.frozen for r in reports),
        cleared_cache=any(r.cleared_cache for r in reports),
        stale_tokens=_sum(reports, lambda r: r.stale_tokens),
        seconds=max(r.seconds for r in reports),
    )


def abort(reports: Sequence[AbortReport], wanted: Sequence[str] | None) -> AbortReport:
    """Unknown is what no rank knows."""
    ended = _joined(r.aborted for r in reports)
    return AbortReport(ended, tuple(sorted(set(wanted or ()) - set(ended))))


def status(reports: Sequence[BackendStatus]) -> BackendStatus:
    """Counts add up; a version is told only where all ranks hold it."""
    first = reports[0].versions
    return BackendStatus(
        paused=all(r.paused for r in reports),
        running=_joined(r.running for r in reports),
        waiting=_joined(r.waiting for r in reports),
        frozen=_joined(r.frozen for r in reports),
        versions={
            group: version
            for group, version in first.items()
            if all(r.versions.get(group) == version for r in reports)
        },
        kv_blocks_total=_sum(reports, lambda r: r.kv_blocks_total),
        kv_blocks_used=_sum(reports, lambda r: r.kv_blocks_used),
        tokens_generated=_sum(reports, lambda r: r.tokens_generated),
        steps=_sum(reports, lambda r: r.steps),
        preemptions=_sum(reports, lambda r: r.preemptions),
        cached_tokens=_sum(reports, lambda r: r.cached_tokens),
        busy=any(r.busy for r in reports),
    )


def digest(reports: Sequence[Digests], grid: Grid) -> Digests:
    """Of whole tensors: what the ranks of a copy have together, if all copies have the same.

    Else :data:`DIFFERENT`.
    """
    values: dict[str, int] = {}
    for number, copy in enumerate(grid.copies()):
        its = [reports[rank] for rank in copy]
        found = union_of([r.values for r in its], [r.slices for r in its])
        if number == 0:
            values = found
        for name in values.keys() | found.keys():
            if values.get(name) != found.get(name):
                values[name] = DIFFERENT
    return Digests(values, reports[0].kind, tuple(range(len(reports))))


def _sum(reports: Iterable[T], of: Callable[[T], int]) -> int:
    return sum(map(of, reports))


def _joined(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(one for part in parts for one in part)

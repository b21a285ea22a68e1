"""A sync's report for people: a table, bars over time, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome, SyncReport

MARKS = "░▒▓█▚▞"  # one a phase, in turns
STYLES = {
    Outcome.COMMITTED: "green",
    Outcome.DEFERRED: "cyan",
    Outcome.ROLLED_BACK: "yellow",
    Outcome.FENCED: "yellow",
}


def table(report: SyncReport) -> Table:
    """A row a replica: outcome, version, milliseconds a phase, bytes, GB/s; the slowest is marked.

    Below: least, median and most over the replicas, the sync's own wall-clock time, and the memory
    that a replica was seen to hold at most, by tag and in all, where it was measured.
    """
    phases = phases_of(report)
    made = Table(
        title=_title(report),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("replica", "outcome", "version"):
        made.add_column(column, no_wrap=True)
    for column in (*(name.replace("_", " ") for name in phases), "all", "MB", "GB/s"):
        made.add_column(column, justify="right")
    for one in report.outcomes:
        slowest = len(report.outcomes) > 1 and one.replica == report.slowest and one.seconds > 0
        made.add_row(
            f"{one.replica} (slowest)" if slowest else one.replica,
            Text(
                one.outcome.value + (", fenced" if one.fenced else ""),
                STYLES.get(one.outcome, "red"),
            ),
            "-" if one.version is None else str(one.version),
            *(_ms(one.phases.get(name)) for name in phases),
            _ms(one.seconds),
            f"{_nbytes(one) / 1e6:.1f}",
            _rate(one),
        )
    if len(report.outcomes) > 1:
        spread = report.spread()
        made.add_section()
        for n, name in enumerate(("least", "median", "most")):
            values = [spread[phase][n] if phase in spread else None for phase in phases]
            made.add_row(name, "", "", *map(_ms, values), "", "", "")
    made.add_section()
    wall = [report.phases.get(name) for name in phases]
    made.add_row(
        "wall clock",
        "",
        "",
        *map(_ms, wall),
        _ms(report.seconds),
        f"{report.nbytes / 1e6:.1f}",
        "",
    )
    held = {phase: peak for phase, (peak, _) in report.memory().items()}
    if held:
        made.add_section()
        tags = dict.fromkeys(tag for peak in held.values() for tag in peak.tags)
        for tag in tags:
            of_tag = [held[p].tags.get(tag) if p in held else None for p in phases]
            made.add_row(f"peak MB, {tag}", "", "", *map(_mb, of_tag), "", "", "")
        total = [held[p].total if p in held else None for p in phases]
        made.add_row("peak MB, all", "", "", *map(_mb, total), "", "", "")
    return made


def timeline(report: SyncReport, width: int = 60) -> RenderableType:
    """A bar a replica: which phase it was in, over the time of the sync.

    Below: the phases, each with the most memory that a replica was seen to hold in it.
    """
    events = [event for one in report.outcomes for event in one.timeline]
    if not events:
        return Text("no replica was part of a transaction")
    start = min(event.start for event in events)
    whole = max(event.start + event.seconds for event in events) - start or 1e-9
    phases = phases_of(report)
    mark = {name: MARKS[n % len(MARKS)] for n, name in enumerate(phases)}
    name_width = max(len(one.replica) for one in report.outcomes)
    lines = []
    for one in report.outcomes:
        cells = [" "] * width
        for event in one.timeline:
            first = int((event.start - start) / whole * width)
            last = int((event.start + event.seconds - start) / whole * width)
            for cell in range(min(first, width - 1), min(max(last, first + 1), width)):
                cells[cell] = mark[event.name]
        lines.append(Text(f"{one.replica:>{name_width}} |{''.join(cells)}|"))
    held = report.memory()
    legend = "  ".join(
        f"{mark[name]} {name}" + (f" {_mb(held[name][0].total)} MB" if name in held else "")
        for name in phases
    )
    lines.append(Text(f"{'':>{name_width}}  {legend}; {whole * 1e3:.1f} ms", "dim"))
    return Group(*lines)


def trace(report: SyncReport) -> list[dict[str, Any]]:
    """Chrome-trace events (microseconds), a thread a replica: for Perfetto and chrome://tracing."""
    return list(_events(report))


def _events(report: SyncReport) -> Iterator[dict[str, Any]]:
    starts = [event.start for one in report.outcomes for event in one.timeline]
    start = min(starts, default=0.0)
    for tid, one in enumerate(report.outcomes):
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": tid,
            "args": {"name": one.replica},
        }
        for event in one.timeline:
            yield {
                "name": event.name,
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "ts": (event.start - start) * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"outcome": one.outcome.value, "error": event.error or one.error},
            }
            if event.name in one.memory:
                yield {
                    "name": f"{one.replica}: most bytes held",
                    "ph": "C",
                    "pid": 1,
                    "ts": (event.start - start) * 1e6,
                    "args": dict(one.memory[event.name].tags),
                }


def phases_of(report: SyncReport) -> list[str]:
    """The phases some replica was in, in their order."""
    return list(dict.fromkeys(name for one in report.outcomes for name in one.phases))


def _title(report: SyncReport) -> str:
    if report.superseded_by is not None:
        return f"version {report.version}: not sent, {report.superseded_by} came meanwhile"
    return f"version {report.version}: {report.seconds * 1e3:.1f} ms; phases in ms"


def _nbytes(one: ReplicaOutcome) -> int:
    return sum(update.nbytes for update in one.updates)


def _rate(one: ReplicaOutcome) -> str:
    seconds = sum(update.seconds for update in one.updates if not update.skipped)
    return f"{_nbytes(one) / seconds / 1e9:.2f}" if seconds and _nbytes(one) else "-"


def _mb(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e6:.1f}" if nbytes >= 1e6 or not nbytes else f"{nbytes / 1e6:.2g}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"

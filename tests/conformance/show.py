"""Results on a terminal: the table, why cases failed, and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotbunk.conformance.case import CaseResult, Status
from hotbunk.conformance.runner import accepted
from hotbunk.conformance.under_test import BackendUnderTest

_STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.UNSUPPORTED: "cyan",
    Status.NOT_RUN: "dim",
    Status.ERROR: "bold magenta",
}


def show(console: Console, described: BackendUnderTest, results: Sequence[CaseResult]) -> None:
    """Print all of it."""
    console.print(_table(described.name, results))
    for line in _details(described, results):
        console.print(line)
    console.print(_summary(results), highlight=False)


def _table(backend: str, results: Sequence[CaseResult]) -> Table:
    table = Table(title=f"conformance of {backend}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("case", overflow="fold")
    table.add_column("level", no_wrap=True, min_width=8)
    table.add_column("status", no_wrap=True, min_width=20)
    table.add_column("seconds", justify="right", no_wrap=True, min_width=7)
    for result in results:
        status = Text(result.status.value, _STYLES[result.status])
        table.add_row(result.case, result.level.value, status, f"{result.seconds:.2f}")
    return table


def _details(described: BackendUnderTest, results: Sequence[CaseResult]) -> Iterator[Text]:
    """Why cases failed or were not run, and what others measured."""
    for result in results:
        detail = result.detail
        if result.status is Status.NOT_RUN:
            expected = described.expected_not_run.get(result.case)
            detail = expected or f"{detail} (and nobody said that it would not run)"
        if detail:
            style = _STYLES[result.status]
            bad = not accepted(result, described)
            said = Text(result.status.value, "bold red" if bad else style)
            yield Text.assemble(said, f" {result.case}: {detail}")


def _summary(results: Sequence[CaseResult]) -> Text:
    counts = Counter(result.status for result in results)
    shown = [(f"{counts[s]} {s.value}", _STYLES[s]) for s in Status if counts[s]]
    return Text(", ").join(Text(text, style) for text, style in shown)

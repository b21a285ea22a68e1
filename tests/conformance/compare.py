"""Two runs side by side: what changed, and whether for the worse."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hotbunk.conformance.case import CaseResult, Status
from hotbunk.conformance.matrix import Matrix, read_matrix

ABSENT = "absent"
_WORSE = {
    Status.PASS: 0,
    Status.UNSUPPORTED: 1,  # one promise less
    Status.NOT_RUN: 2,
    ABSENT: 2,
    Status.FAIL: 3,
    Status.ERROR: 4,
}


class Change(NamedTuple):
    """A case that ended otherwise in ``b`` than in ``a``."""

    case: str
    a: str
    b: str
    detail: str  # of b

    @property
    def worse(self) -> bool:
        """Whether something that was shown is not any more. A case that is new is no regression."""
        return self.a != ABSENT and _WORSE[self.b] > _WORSE[self.a]


def changes(a: Matrix, b: Matrix) -> list[Change]:
    """Regressions first, else in the order of ``a``."""
    before, after = _by_name(a), _by_name(b)
    found = [
        Change(name, _status(before, name), _status(after, name), _detail(after, name))
        for name in {**before, **after}
        if _status(before, name) != _status(after, name)
    ]
    return sorted(found, key=lambda change: not change.worse)


def show(a: Path, b: Path) -> int:
    """Print it; 1 if something is worse in ``b``.

    :raises ConfigError: one of them is no matrix.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    left, right = read_matrix(a), read_matrix(b)
    found = changes(left, right)
    console = Console()
    table = Table(title=f"{left.title} -> {right.title}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("case", "A", "B"):
        table.add_column(name, overflow="fold")
    for change in found:
        style = "bold red" if change.worse else "green"
        table.add_row(change.case, change.a, Text(change.b, style))
    if found:
        console.print(table)
    for change in found:
        if change.worse and change.detail:
            console.print(f"{change.case}: {change.detail}", markup=False, highlight=False)
    worse = sum(change.worse for change in found)
    same = len(left.cases) - sum(change.a != ABSENT for change in found)
    console.print(f"{same} alike, {len(found) - worse} changed, {worse} worse", highlight=False)
    return 1 if worse else 0


def _by_name(matrix: Matrix) -> dict[str, CaseResult]:
    return {one.case: one for one in matrix.cases}


def _status(results: dict[str, CaseResult], name: str) -> str:
    return results[name].status if name in results else ABSENT


def _detail(results: dict[str, CaseResult], name: str) -> str:
    return results[name].detail if name in results else ""

"""``hotbunk sync-drill``: the table, and whether every promise held."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from hotbunk.checkpoint_engine import show
from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.conformance.drill.plan import draw
from hotbunk.conformance.drill.run import TRANSPORTS, Round, drill
from hotbunk.rollout.errors import ConfigError


def run(
    *,
    faults: int,
    seed: int,
    transports: list[str],
    replicas: int,
    ranks: int,
    only: int | None,
    json: Path | None,
) -> int:
    """See :func:`hotbunk.cli.sync_drill`. Returns the exit code."""
    if faults < 1 or replicas < 1 or ranks < 1:
        raise ConfigError("faults, replicas and ranks must be 1 or more")
    for name in transports:
        if name not in TRANSPORTS:
            raise ConfigError(f"no drill over {name!r}", remedy=f"there are {list(TRANSPORTS)}")
    plan = draw(faults, seed, transports or TRANSPORTS, replicas=replicas, ranks=ranks)
    if only is not None:
        plan = [fault for fault in plan if fault.number == only]
        if not plan:
            raise ConfigError(f"there is no fault {only} among {faults}")
    out, err = Console(), Console(stderr=True)

    told: list[int] = []

    def tell(one: Round) -> None:
        told.append(len(one.broken))
        f = one.fault
        where = f"r{f.replica} rank {f.rank} " if f.at.reached else ""
        text = f"{f.number:4d} {f.transport} {f.deployment} {where}{f.point}[{f.nth}] {f.how}: "
        err.print(text + ", ".join(one.outcomes), highlight=False, soft_wrap=True)
        for broken in one.broken:
            err.print(f"     [red]{broken}[/red]", highlight=False, soft_wrap=True)

    rounds = asyncio.run(drill(plan, replicas=replicas, ranks=ranks, tell=tell))
    for broken in rounds[-1].broken[told[-1] :]:  # known at the end alone
        err.print(f"     [red]{broken}[/red]", highlight=False, soft_wrap=True)
    out.print(_table(rounds))
    longest = max((one.report for one in rounds if one.report), key=_seconds, default=None)
    if longest is not None:
        out.print(show.table(longest), show.timeline(longest))
    many = sum(bool(one.broken) for one in rounds)
    out.print(
        f"{len(rounds)} faults, seed {seed}, {replicas} replicas of {ranks} rank(s), simulated "
        f"engines in real processes: "
        + (f"{many} with broken promises" if many else "every promise held"),
        highlight=False,
        soft_wrap=True,
    )
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(rounds), indent=1))
    return 1 if many else 0


def _seconds(report: SyncReport) -> float:
    return report.seconds


def _table(rounds: list[Round]) -> Table:
    """A row for each transport, point and kind of fault."""
    table = Table(title="sync-drill", title_justify="left")
    for column in ("transport", "point", "fault"):
        table.add_column(column)
    for column in ("n", "the faulty replica", "slowest", "broken"):
        table.add_column(column, justify="right")
    kinds: dict[tuple[str, str, str], list[Round]] = {}
    for one in rounds:
        f = one.fault
        kinds.setdefault((f.transport, f.point, f.how.value), []).append(one)
    for key, of_kind in sorted(kinds.items()):
        ends = Counter(o.outcomes[o.fault.replica] if o.outcomes else "-" for o in of_kind)
        table.add_row(
            *key,
            str(len(of_kind)),
            ", ".join(f"{n} {outcome}" for outcome, n in sorted(ends.items())),
            f"{max(o.seconds for o in of_kind):.1f} s",
            str(sum(bool(o.broken) for o in of_kind)),
        )
    return table

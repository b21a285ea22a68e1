"""``hotbunk bench``: a benchmark's rows as a table, as JSON and as a section of docs/benchmarks.md."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hotbunk.benchmarks.rows import Row, machine, markdown, write_json, write_markdown
from hotbunk.rollout.errors import ConfigError, closest
from hotbunk.rollout.registry import missing

# Each has run(tell) -> (rows, settings).
BENCHMARKS = {
    name: f"hotbunk.benchmarks.{name}"
    for name in ("dip", "kernels", "manager", "pool", "sync", "vllm")
}


def run(name: str, *, json: Path | None, md: Path | None, peer_python: Path | None = None) -> None:
    """See :func:`hotbunk.cli.bench`.

    :raises UsageError: no such benchmark, or it needs a package that is not installed.
    """
    if name not in BENCHMARKS:
        known = sorted(BENCHMARKS)
        raise ConfigError(
            f"no benchmark {name!r}{closest(name, known)}", remedy=f"there are {known}"
        )
    options = {} if peer_python is None else {"peer_python": peer_python}
    if options and name != "manager":
        raise ConfigError(f"bench {name} has no peer in another interpreter")
    console = Console(stderr=True)
    try:
        module = importlib.import_module(BENCHMARKS[name])
    except ModuleNotFoundError as error:
        raise missing(name, error) from error
    with console.status(name) as status:
        rows, settings = module.run(lambda part: status.update(f"{name}: {part}"), **options)
    Console().print(_table(name, rows))
    Console().print(f"{machine()}; {settings}", highlight=False, soft_wrap=True)
    if json is not None:
        write_json(rows, json)
    if md is not None:
        write_markdown(md, name, markdown(name, rows, settings))


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("row", no_wrap=True)
    for column in ("ours", "peer", "limit", "unit", "x peer", "of limit"):
        table.add_column(column, justify="right")
    for r in rows:
        numbers = (r.ours, r.peer, r.limit)
        ratios = (r.ratio_peer, r.ratio_limit)
        table.add_row(
            r.name,
            *("-" if x is None else f"{x:.1f}" for x in numbers),
            r.unit,
            *("-" if x is None else f"{x:.2f}" for x in ratios),
        )
    return table

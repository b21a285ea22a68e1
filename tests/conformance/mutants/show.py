"""``hotbunk conformance --mutants``: the table of who noticed what."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from hotbunk import __version__
from hotbunk.conformance.mutants import all_mutants
from hotbunk.conformance.mutants.run import Kill, hunt

FEWEST = 25  # mutants; a suite that is tried with fewer has not been tried
FILE = "mutants.json"


def run_all(out: Path | None) -> int:
    """Hunt them all, print the table, write ``mutants.json``; 0 if the case about it killed each."""
    mutants = all_mutants()
    hunting = hunt(mutants)
    kills = list(
        track(hunting, "mutants", len(mutants), console=Console(stderr=True), transient=True)
    )
    console = Console()
    console.print(_table(kills))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.encode({"hotbunk": __version__, "mutants": kills})
        path = out / FILE
        path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    killed = sum(kill.killed for kill in kills)
    console.print(f"{killed} of {len(kills)} killed", highlight=False)
    return 0 if killed == len(kills) >= FEWEST else 1


def _table(kills: list[Kill]) -> Table:
    table = Table(title="mutants", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mutant", overflow="fold")
    table.add_column("killed by", overflow="fold")
    table.add_column("what is broken", overflow="fold")
    for kill in kills:
        lives = f"LIVES: not {kill.expected}" + (f", but {kill.case}" if kill.case else "")
        by = Text(kill.case, "green") if kill.killed else Text(lives, "bold red")
        table.add_row(kill.mutant, by, kill.breaks)
    return table

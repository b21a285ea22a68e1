"""What every benchmark gives: rows of a common shape, measured in turns.

A row compares rates, so more is better: ``ratio_peer`` says how many times the peer's rate ours is,
``ratio_limit`` which share of the limit is reached. A ratio without a meaning is None.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

REPEATS = 9


class Row(msgspec.Struct, frozen=True):
    """One comparison. ``spread``: least and most of ours, then of the peer."""

    name: str
    ours: float
    peer: float | None
    limit: float | None
    unit: str
    ratio_peer: float | None
    ratio_limit: float | None
    n: int
    spread: list[float]
    peer_is: str = ""


def in_turns(
    calls: Iterable[Callable[[], object]],
    repeats: int = REPEATS,
    *,
    before: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of each call, ``repeats`` times, in turns, so that a busy moment hits all of them.

    :param before: called before each, and not timed.
    """
    calls = list(calls)
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, seconds, strict=True):
            before()
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return seconds


def rate_row(
    name: str,
    nbytes: int,
    ours: Callable[[], object],
    peer: Callable[[], object],
    peer_is: str,
    limit: tuple[int, Callable[[], object]],
) -> Row:
    """Rates in GB/s over ``nbytes``; ``limit``: bytes, and a call that moves them once."""
    mine, theirs, most = in_turns([ours, peer, limit[1]])
    rates = [nbytes / s / 1e9 for s in mine]
    peers = [nbytes / s / 1e9 for s in theirs]
    rate, other = statistics.median(rates), statistics.median(peers)
    top = limit[0] / statistics.median(most) / 1e9
    return Row(
        name,
        rate,
        other,
        top,
        "GB/s",
        rate / other,
        rate / top,
        len(rates),
        [min(rates), max(rates), min(peers), max(peers)],
        peer_is,
    )


def machine() -> str:
    """This machine, in a line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {cores} cores, {gib:.0f} GiB, Linux {platform.release()}"


def write_json(rows: Iterable[Row], path: Path) -> None:
    """A JSON array of rows."""
    plain = msgspec.to_builtins(list(rows))
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


HEAD = """# Benchmarks

Written by `hotbunk bench NAME --md docs/benchmarks.md`, which replaces the section of that name. Rates:
more is better. Ratios compare what one run measured in turns; other work on the machine moves the
rates, hence the spread.
"""


def write_markdown(path: Path, name: str, section: str) -> None:
    """Put a section into a document, in place of an older one of that name."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    head, *parts = (text or HEAD).split("\n## ")
    sections = {part.partition("\n")[0]: part for part in parts}
    sections[name] = section.removeprefix("## ")
    whole = "\n\n## ".join(part.strip("\n") for part in [head, *sections.values()])
    path.write_text(whole + "\n", encoding="utf-8")


def markdown(name: str, rows: Iterable[Row], settings: str) -> str:
    """The section of docs/benchmarks.md."""
    lines = [
        f"## {name}",
        "",
        f"{machine()}. {settings}. Medians, in turns with the peer and the limit; [least, most].",
        "",
        "| row | ours | peer | limit | x peer | of limit | n | the peer |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def shown(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    for r in rows:
        low, high, *others = r.spread
        span = f"{low:.1f}, {high:.1f}"
        other = f" [{others[0]:.1f}, {others[1]:.1f}]" if others else ""
        lines.append(
            f"| `{r.name}` | {r.ours:.1f} [{span}] {r.unit} | {shown(r.peer)}{other} | "
            f"{shown(r.limit)} | {shown(r.ratio_peer, '.2f')} | {shown(r.ratio_limit, '.2f')} | "
            f"{r.n} | {r.peer_is} |"
        )
    return "\n".join(lines) + "\n"

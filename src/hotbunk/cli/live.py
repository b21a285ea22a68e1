"""A run as it goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hotbunk.trainer_hooks.recipes.config import RunConfig

_BARS = "▁▂▃▄▅▆▇█"
_ROWS = 8
# On a narrow terminal these columns are left out, in this order.
_LEAST_WANTED = (
    "lost",
    "again",
    "late",
    "froz",
    "pre",
    "hit",
    "vers",
    "held",
    "run",
    "KV",
    "weights",
    "tok/s",
    "sync",
)
_COLUMNS = (
    ("step", "step"),
    ("reward", "reward/mean"),
    ("Δlogprob", "rollout/logprob_diff_max"),
    ("tok/s", "rollout/tokens_per_s"),
    ("run", "rollout/running_max"),
    ("held", "rollout/held_max"),
    ("froz", "rollout/frozen_max"),
    ("pre", "rollout/preemptions"),
    ("hit", "rollout/cached_tokens"),
    ("vers", "rollout/versions"),
    ("stale", "rollout/staleness_max"),
    ("backlog", "rollout/backlog"),
    ("lost", "rollout/tokens_lost"),
    ("again", "rollout/tokens_recomputed"),
    ("late", "rollout/superseded"),
    ("overlap", "rollout/overlap"),
    ("generate", "timing_s/generate"),
    ("wait", "timing_s/wait"),
    ("train", "timing_s/train"),
    ("sync", "timing_s/update_weights"),
    ("stall", "rollout/stalled_s"),
    ("weights", "memory/weights_bytes"),
    ("W asleep", "memory/weights_bytes_asleep"),
    ("KV", "memory/kv_cache_bytes"),
    ("KV asleep", "memory/kv_cache_bytes_asleep"),
    ("peak", "memory/peak_bytes"),
)


class LiveTable:
    """Shows steps as they end. ``rewards`` is the whole curve so far."""

    def __init__(self, config: RunConfig, *, first_step: int = 0) -> None:
        self._config = config
        self._first = first_step
        self._console = Console()
        self._rows: deque[Mapping[str, object]] = deque(maxlen=_ROWS)
        self._rewards: list[float] = []
        self._began = time.monotonic()
        self._every = max((config.steps - first_step) // 20, 1)
        self._note = ""
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, metrics: Mapping[str, object]) -> None:
        """A step ended."""
        self._rows.append(metrics)
        self._rewards.append(_number(metrics["reward/mean"]))
        if self._live is not None:
            self._live.update(self._view())
        elif (len(self._rewards) - 1) % self._every == 0:
            cells = (
                f"{title} {_cell(key, metrics[key])}" for title, key in _COLUMNS if key in metrics
            )
            sys.stdout.write("  ".join(cells) + "\n")
            sys.stdout.flush()

    def say(self, note: str) -> None:
        """A remark under the table."""
        self._note = note
        if self._live is not None:
            self._live.update(self._view())
        else:
            sys.stdout.write(note + "\n")

    def farewell(self, run_dir: Path, *, interrupted: bool) -> None:
        """The end, and where things are."""
        tenth = max(len(self._rewards) // 10, 1)
        first, last = self._rewards[:tenth], self._rewards[-tenth:]
        word = "stopped" if interrupted else "done"
        gain = sum(last) / len(last) - sum(first) / len(first) if last else 0.0
        self._console.print(
            f"{word} after {len(self._rewards)} steps in {time.monotonic() - self._began:.0f} s; "
            f"mean reward {sum(first) / max(len(first), 1):.2f} -> "
            f"{sum(last) / max(len(last), 1):.2f} (gain {gain:+.2f})"
        )
        self._console.print(f"report: {run_dir / 'report.html'}", soft_wrap=True, highlight=False)

    def _view(self) -> Group:
        table = Table(title=f"{self._config.preset}: {self._config.task.name}", expand=False)
        known = self._rows[-1] if self._rows else {}
        columns = _fitting(self._console.width, [c for c in _COLUMNS if c[1] in known])
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(_cell(key, row[key]) for _, key in columns))
        done = self._first + len(self._rewards)
        lines = [Text(f"step {done} of {self._config.steps}   {_spark(self._rewards)}")]
        if self._rows:
            lines.append(Text(str(self._rows[-1].get("rollout/sample", "")), style="dim"))
        if self._note:
            lines.append(Text(self._note, style="yellow"))
        return Group(table, *lines)


def _fitting(width: int, columns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the columns that a terminal of ``width`` characters has room for."""
    for title in _LEAST_WANTED:
        if sum(max(len(name), 5) + 3 for name, _ in columns) + 1 <= width:
            break
        columns = [column for column in columns if column[0] != title]
    return columns


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _cell(key: str, value: object) -> str:
    number = _number(value)
    if math.isnan(number):
        return "-"  # nothing to tell: no token was comparable, or a replica was away
    if key.startswith("memory/"):
        return f"{number / 2**20:.1f}M"
    if key.startswith("timing_s/") or key == "rollout/stalled_s":
        return f"{number * 1e3:.0f}ms"
    if key == "rollout/overlap":
        return f"{100 * number:.0f}%"
    if key == "rollout/logprob_diff_max":
        return f"{number:.0e}"
    if key == "reward/mean":
        return f"{number:.3f}"
    return f"{number:.0f}"


def _spark(values: list[float], width: int = 60) -> str:
    """Rewards lie in [0, 1]; each mark is the mean of its share of the steps."""
    if not values:
        return ""
    count = min(width, len(values))
    marks = []
    for n in range(count):
        part = values[n * len(values) // count : (n + 1) * len(values) // count]
        marks.append(_BARS[min(int(sum(part) / len(part) * len(_BARS)), len(_BARS) - 1)])
    return "".join(marks)

"""Reading a run directory back: metrics, timeline and configuration, whole or not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes.recorder import METRICS_FILE
from hotbunk.trainer_hooks.recipes.timeline import TIMELINE_FILE, TimelineView, read_timeline

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Run:
    """What a run directory says. ``rows`` are the metrics lines by step, the last word on each.

    ``config`` is the configuration's text; ``warnings`` says, for readers, what was left out.
    """

    name: str
    rows: Sequence[Mapping[str, object]]
    timeline: TimelineView
    config: str
    warnings: list[str] = field(default_factory=list)

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of the metric ``key``, where it is a usable number."""
        pairs = [(number_or_none(row["step"]), number_or_none(row.get(key))) for row in self.rows]
        usable = [(step, value) for step, value in pairs if step is not None and value is not None]
        return [step for step, _ in usable], [value for _, value in usable]

    def logprob_tolerance(self) -> float | None:
        """The logprob tolerance of the run: from its metrics, else its configuration, else None."""
        for row in reversed(self.rows):
            for key, value in row.items():
                if "logprob" in key and "tol" in key:
                    return number_or_none(value)
        pattern = r"^\s*\w*logprob\w*tol\w*:\s*([-+.\deE]+)\s*(?:#.*)?$"
        found = re.search(pattern, self.config, re.MULTILINE)
        try:
            return number_or_none(float(found[1])) if found else None
        except ValueError:
            return None


def read_run(directory: Path) -> Run:
    """The run in ``directory``; files that are missing or broken leave their part empty."""
    warnings: list[str] = []
    try:
        timeline = read_timeline(directory / TIMELINE_FILE)
    except ConfigError as error:
        warnings.append(f"{TIMELINE_FILE} is left out: {error.what}")
        timeline = TimelineView()
    if timeline.dropped:
        warnings.append(f"The timeline dropped {timeline.dropped} events in the run's middle.")
    rows = _rows(_content(directory / METRICS_FILE, warnings), warnings)
    config = _content(directory / CONFIG_FILE, warnings).decode("utf-8", "replace")
    return Run(directory.resolve().name, rows, timeline, config, warnings)


def number_or_none(value: object) -> float | None:
    """``value`` as a float where it is a finite number of sensible size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Sums and differences of larger ones would overflow; none is a sensible metric.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _content(path: Path, warnings: list[str]) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        warnings.append(f"{path.name} is left out: {error.strerror}")
        return b""


def _rows(content: bytes, warnings: list[str]) -> list[dict[str, object]]:
    rows: dict[int, dict[str, object]] = {}
    broken = 0
    for text in content.split(b"\n"):
        if not text.strip():
            continue
        try:
            row = msgspec.json.decode(text, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            broken += 1
            continue
        step = row.get("step")
        if type(step) is int and abs(step) < 2**53:
            rows[step] = row
        else:
            broken += 1
    if broken:
        warnings.append(f"{broken} line(s) of {METRICS_FILE} are broken and were left out.")
    return [rows[step] for step in sorted(rows)]

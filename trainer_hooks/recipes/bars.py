"""Bar charts of where a run's time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hotbunk.trainer_hooks.recipes.charts import (
    COLOURS,
    LEFT,
    RIGHT,
    WIDTH,
    box,
    frame,
    legend,
    line,
    seconds_text,
    short,
    text_at,
    ticks,
)


def step_bars(steps: Sequence[float], by_phase: Mapping[str, Sequence[float]], title: str) -> str:
    """Seconds of each phase, stacked, one bar a step; neighbours are averaged above 120 steps."""
    if not steps or not by_phase:
        return ""
    size = math.ceil(len(steps) / 120)
    groups = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    heights = {
        name: [sum(values[index] for index in group) / len(group) for group in groups]
        for name, values in by_phase.items()
    }
    top, bottom, height = 30.0, 214.0, 240.0
    sums = [sum(column) for column in zip(*heights.values(), strict=True)]
    high = max(*sums, 1e-9) * 1.05
    scale = (bottom - top) / high
    parts = [legend(LEFT, 16, [(name, place) for place, name in enumerate(by_phase)])]
    for tick in ticks(0, high):
        y = bottom - tick * scale
        parts.append(line(LEFT, y, WIDTH - RIGHT, y))
        label = seconds_text(tick) if tick else "0"
        parts.append(text_at(LEFT - 8, y + 4, label, "soft", "end"))
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = min(slot * 0.82, 48.0)
    labelled = max(1, math.ceil(len(groups) / 12))
    for place, group in enumerate(groups):
        x, y = LEFT + slot * (place + 0.5) - wide / 2, bottom
        for colour, values in enumerate(heights.values()):
            part = values[place] * scale
            y -= part
            parts.append(box(x, y, wide, part, f"c{colour % COLOURS} area"))
        if place % labelled == 0:
            label = f"{steps[group[0]]:.0f}"
            parts.append(text_at(x + wide / 2, height - 8, label, "soft", "middle"))
    return frame(height, "".join(parts), title)


def named_bars(values: Mapping[str, float], title: str) -> str:
    """One horizontal bar a name, with its duration and its share of the sum."""
    if not values:
        return ""
    row, left = 26.0, 170.0
    whole, most = sum(values.values()), max(*values.values(), 1e-12)
    parts = []
    for place, (name, value) in enumerate(values.items()):
        y = place * row + 6
        wide = value / most * (WIDTH - left - 150)
        parts.append(text_at(left - 10, y + 13, short(name, 24), "", "end"))
        parts.append(box(left, y, max(wide, 1.0), 17, f"c{place % COLOURS} area"))
        share = f"{seconds_text(value)}  ·  {100 * value / whole:.3g} %" if whole > 0 else "0"
        parts.append(text_at(left + wide + 8, y + 13, share, "soft"))
    return frame(row * len(values) + 8, "".join(parts), title)

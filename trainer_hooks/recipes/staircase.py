"""The picture of hotbunk: memory by tag over the phases of one training step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes import charts
from hotbunk.trainer_hooks.recipes.timeline import (
    TIMELINE_FILE,
    MemorySample,
    Span,
    TimelineView,
    read_timeline,
    replace_file,
)

# From the bottom up: who stays at the bottom is who stays.
_TAG_ORDER = ("trainer", "weights", "kv_cache", "bucket")
_HEIGHT, _TOP, _BOTTOM = 380.0, 66.0, 336.0
# A stretch outside every phase is drawn where it is at least this share of the step.
_GAP_SHARE = 0.01
# After the last phase: what the next step begins with, so that the last stair is seen.
_NEXT = 40.0


@dataclass(frozen=True)
class _Band:
    label: str
    start: float
    end: float


def staircase_svg(
    timeline: TimelineView, *, step: int | None = None, title: str = "", standalone: bool = True
) -> str:
    """Stacked memory by tag over one step's phases; an empty string where nothing was sampled.

    ``step`` defaults to a representative one: among the steps with the most different phases (the
    first step aside, where there are others), the one of median length. A phase is as wide as its
    share of the step, but never too narrow for its name, so widths are not to scale; durations
    are written below. ``standalone`` makes the text a whole ``.svg`` file.

    :raises ConfigError: the timeline has no step of that number.
    """
    chosen = _choose(timeline) if step is None else step
    if chosen is None:
        return ""
    if chosen not in timeline.steps:
        raise ConfigError(f"the timeline has no step {chosen}")
    window = timeline.steps[chosen]
    bands = _bands(timeline.spans, window)
    levels = _levels(timeline.memory, window)
    if not bands or not levels:
        return ""
    title = title or f"Memory by tag over the phases of step {chosen}"
    return charts.frame(_HEIGHT, _draw(bands, levels, title), title, standalone=standalone)


def write_staircase(run_dir: str | Path, path: str | Path, *, step: int | None = None) -> Path:
    """Draw the staircase of a recorded run into the file ``path`` (an ``.svg``); return the path.

    :raises ConfigError: the run has no timeline with phases and memory samples in it.
    """
    svg = staircase_svg(read_timeline(Path(run_dir) / TIMELINE_FILE), step=step)
    if not svg:
        raise ConfigError(f"run {run_dir} recorded no phases with memory samples")
    replace_file(Path(path), svg.encode() + b"\n")
    return Path(path)


# -- what to draw -----------------------------------------------------------------------------


def _choose(timeline: TimelineView) -> int | None:
    phases = {
        step: len({band.label for band in _bands(timeline.spans, window) if band.label})
        for step, window in _sampled_steps(timeline).items()
    }
    if not phases:
        return None
    later = {step: count for step, count in phases.items() if step != min(timeline.steps)}
    fullest = later or phases
    best = [step for step, count in fullest.items() if count == max(fullest.values())]
    lengths = {step: timeline.steps[step].end - timeline.steps[step].start for step in best}
    middle = median(lengths.values())
    return min(best, key=lambda step: (abs(lengths[step] - middle), step))


def _sampled_steps(timeline: TimelineView) -> dict[int, Span]:
    """The steps in which memory was sampled; at most about 200 of them, evenly spread."""
    steps = {
        step: window
        for step, window in sorted(timeline.steps.items())
        if _within(timeline.memory, window)
    }
    keep = max(1, len(steps) // 200)
    return dict(list(steps.items())[::keep])


def _within(samples: Sequence[MemorySample], window: Span) -> Sequence[MemorySample]:
    first = bisect_left(samples, window.start, key=lambda sample: sample.at)
    last = bisect_right(samples, window.end, key=lambda sample: sample.at)
    return samples[first:last]


def _bands(spans: Sequence[Span], window: Span) -> list[_Band]:
    """The step cut at every phase's begin and end; each piece is named by its innermost phase."""
    first = bisect_left(spans, window.start - 1e-6, key=lambda span: span.start)
    last = bisect_right(spans, window.end, key=lambda span: span.start)
    inside = [span for span in spans[first:last] if span.end <= window.end + 1e-6]
    tracks = {span.track for span in inside}
    track = "trainer" if "trainer" in tracks else min(tracks, default="")
    inside = [span for span in inside if span.track == track]
    cuts = sorted({window.start, window.end, *(s.start for s in inside), *(s.end for s in inside)})
    bands: list[_Band] = []
    for start, end in pairwise(cuts):
        around = [span for span in inside if span.start <= start and span.end >= end]
        inner = max(around, key=lambda span: (span.start, -span.end)) if around else None
        # What is left of a phase around its inner ones is like a gap: shown only where it is long.
        whole = inner is not None and (inner.start, inner.end) == (start, end)
        if not whole and end - start < _GAP_SHARE * (window.end - window.start):
            continue
        bands.append(_Band(inner.name if inner else "", start, end))
    return bands if any(band.label for band in bands) else []


def _levels(samples: Sequence[MemorySample], window: Span) -> list[MemorySample]:
    """The samples within the step, led by the level it began with."""
    before = bisect_left(samples, window.start, key=lambda sample: sample.at)
    inside = list(_within(samples, window))
    if before:
        return [MemorySample(window.start, samples[before - 1].by_tag), *inside]
    return [MemorySample(window.start, inside[0].by_tag), *inside] if inside else []


# -- drawing ----------------------------------------------------------------------------------


def _widths(bands: Sequence[_Band]) -> list[float]:
    room = charts.WIDTH - charts.LEFT - charts.RIGHT - _NEXT
    least = [_label_width(band.label) for band in bands]
    if sum(least) >= room:
        return [width * room / sum(least) for width in least]
    times = [band.end - band.start for band in bands]
    spare = room - sum(least)
    return [
        width + spare * time / (sum(times) or 1.0) for width, time in zip(least, times, strict=True)
    ]


def _label_width(label: str) -> float:
    return max(52.0, 7.0 * min(len(label), 20) + 16) if label else 18.0


def _draw(bands: Sequence[_Band], levels: Sequence[MemorySample], title: str) -> str:
    widths = _widths(bands)
    lefts = [charts.LEFT + sum(widths[:place]) for place in range(len(widths))]

    def px(at: float) -> float:
        for band, left, width in zip(bands, lefts, widths, strict=True):
            if at < band.start:
                return left
            if at <= band.end:
                return left + width * (at - band.start) / ((band.end - band.start) or 1.0)
        return lefts[-1] + widths[-1]

    tags = _tags(levels)
    totals = [sum(sample.by_tag.values()) for sample in levels]
    peak = max(totals)
    high = max(peak * 1.12, 1.0)
    scale = (_BOTTOM - _TOP) / high
    end = lefts[-1] + widths[-1]
    right = end + _NEXT
    parts = [_ground(bands, lefts, widths)]
    for tick in charts.byte_ticks(high):
        y = _BOTTOM - tick * scale
        parts.append(charts.line(charts.LEFT, y, right, y))
        parts.append(charts.text_at(charts.LEFT - 8, y + 4, charts.bytes_text(tick), "soft", "end"))
    xs = [px(sample.at) for sample in levels] + [right]
    under = [0.0] * len(levels)
    for place, tag in enumerate(tags):
        over = [
            base + sample.by_tag.get(tag, 0) for base, sample in zip(under, levels, strict=True)
        ]
        lower = _outline(xs, [_BOTTOM - value * scale for value in under])
        upper = _outline(xs, [_BOTTOM - value * scale for value in over])
        points = "L".join([*upper, *reversed(lower)])
        parts.append(f'<path class="c{place % charts.COLOURS} area" opacity=".88" d="M{points}Z"/>')
        under = over
    edge = "L".join(_outline(xs, [_BOTTOM - value * scale for value in totals]))
    parts.append(f'<path class="edge" d="M{edge}"/>')
    y = _BOTTOM - peak * scale
    parts.append(charts.line(charts.LEFT, y, right, y, "rule"))
    parts.append(
        charts.text_at(right - 6, y - 6, f"peak {charts.bytes_text(peak)}", "strong", "end")
    )
    parts.append(charts.line(end, _TOP - 18, end, _BOTTOM))
    parts.append(charts.text_at(end + _NEXT / 2, _TOP - 4, "next", "soft", "middle"))
    parts.append(charts.line(charts.LEFT, _BOTTOM, right, _BOTTOM, "edge"))
    parts.append(charts.text_at(charts.LEFT, 17, charts.short(title, 60), "strong"))
    entries = [(_legend_text(tag, levels), place) for place, tag in enumerate(tags)]
    parts.append(charts.legend(charts.LEFT, 38, entries))
    return "".join(parts)


def _ground(bands: Sequence[_Band], lefts: Sequence[float], widths: Sequence[float]) -> str:
    parts = []
    for place, (band, left, width) in enumerate(zip(bands, lefts, widths, strict=True)):
        if place % 2 == 0:
            parts.append(charts.box(left, _TOP - 18, width, _BOTTOM - _TOP + 18, "band"))
        middle, fits = left + width / 2, int((width - 6) / 6.6)
        label = charts.short(band.label.replace("_", " "), max(1, fits))
        parts.append(charts.text_at(middle, _TOP - 4, label, "strong", "middle"))
        took = charts.seconds_text(band.end - band.start) if band.label else ""
        parts.append(charts.text_at(middle, _BOTTOM + 17, took, "soft", "middle"))
    note = "phase durations; widths are not to scale"
    parts.append(charts.text_at(charts.LEFT, _BOTTOM + 36, note, "soft"))
    return "".join(parts)


def _tags(levels: Sequence[MemorySample]) -> list[str]:
    seen: Mapping[str, None] = {tag: None for sample in levels for tag in sample.by_tag}
    known = [tag for tag in _TAG_ORDER if tag in seen]
    return known + sorted(tag for tag in seen if tag not in _TAG_ORDER)


def _legend_text(tag: str, levels: Sequence[MemorySample]) -> str:
    sizes = [sample.by_tag.get(tag, 0) for sample in levels]
    return f"{charts.short(tag, 16)} {charts.bytes_text(min(sizes))} to {charts.bytes_text(max(sizes))}"


def _outline(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Points of a step curve: ``ys[i]`` holds from ``xs[i]`` to ``xs[i + 1]``."""
    points = []
    for place, y in enumerate(ys):
        points.append(f"{xs[place]:.1f} {y:.1f}")
        points.append(f"{xs[place + 1]:.1f} {y:.1f}")
    return points

"""Charts as SVG text: no script, no font, no resource from outside; readable in light and dark.

Every piece of text is escaped here, so callers pass names as they are.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH = 960.0
LEFT, RIGHT = 72.0, 16.0
COLOURS = 8

# The custom properties give both themes one set of names; `.cN` colours hold on either ground.
STYLE = """
.hb{--bg:#fff;--ink:#1d2530;--soft:#5d6879;--line:#dfe4ec;--band:#f2f4f8}
@media (prefers-color-scheme:dark){
.hb{--bg:#12161d;--ink:#e7ebf1;--soft:#98a3b3;--line:#2b3340;--band:#1a2029}}
svg.hb{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.hb text{fill:var(--ink)}.hb .soft{fill:var(--soft)}.hb .strong{font-weight:600}
.hb .ground{fill:var(--bg)}.hb .band{fill:var(--band)}
.hb .grid{stroke:var(--line);fill:none}.hb .edge{stroke:var(--ink);fill:none;stroke-width:1.4}
.hb .rule{stroke:var(--soft);stroke-dasharray:5 4;fill:none}
.hb .curve{fill:none;stroke-linejoin:round}
.c0{fill:#5b83e0;stroke:#5b83e0}.c1{fill:#2ba58c;stroke:#2ba58c}
.c2{fill:#e5a13a;stroke:#e5a13a}.c3{fill:#d8587b;stroke:#d8587b}
.c4{fill:#8d79d6;stroke:#8d79d6}.c5{fill:#4aa8c9;stroke:#4aa8c9}
.c6{fill:#9a8c6b;stroke:#9a8c6b}.c7{fill:#7d8896;stroke:#7d8896}
.area{stroke:none}
"""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Series:
    """One curve; ``colour`` picks a ``.cN`` class, ``opacity`` and ``width`` are SVG's."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    opacity: float = 1.0
    width: float = 2.0


# -- text and numbers -------------------------------------------------------------------------


def escape(text: str) -> str:
    """``text`` for HTML or XML, attributes too; characters that XML forbids become U+FFFD."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True)


def short(text: str, most: int) -> str:
    """``text``, cut to ``most`` characters."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def bytes_text(size: float) -> str:
    """``1.5 GiB``: three significant digits, binary units."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}" if abs(size) < 1000 else f"{size:.0f} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """``2.1 ms``, ``3.4 s``, ``5 min``: what a reader wants of a duration."""
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def number_text(value: float) -> str:
    """A plain number, four significant digits."""
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers within [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def byte_ticks(high: float) -> list[float]:
    """Multiples of a power of two bytes from 0 up to ``high``, three to six of them."""
    step = 2.0 ** max(0, math.ceil(math.log2(max(high, 1.0) / 5)))
    return [index * step for index in range(int(high / step) + 1)]


# -- pieces -----------------------------------------------------------------------------------


def text_at(
    x: float, y: float, text: str, kind: str = "", anchor: str = "start", extra: str = ""
) -> str:
    """A line of text; ``kind`` is a class of ``STYLE``."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{extra}>'
        f"{escape(text)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A filled rectangle."""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" '
        f'height="{max(0.0, height):.2f}"/>'
    )


def legend(x: float, y: float, entries: Sequence[tuple[str, int]]) -> str:
    """Coloured squares with names from left to right; what does not fit is left out."""
    parts = []
    for name, colour in entries:
        name = short(name, 32)
        wide = 30 + 6.6 * len(name)
        if x + wide > WIDTH:
            break
        parts.append(box(x, y - 9, 11, 11, f"c{colour % COLOURS} area"))
        parts.append(text_at(x + 16, y, name, "soft"))
        x += wide
    return "".join(parts)


def frame(height: float, body: str, title: str, *, standalone: bool = False) -> str:
    """An SVG element around ``body``; ``standalone`` makes a file of its own (style, ground)."""
    style = f"<style>{STYLE}</style>" if standalone else ""
    ground = box(0, 0, WIDTH, height, "ground") if standalone else ""
    size = f'width="{WIDTH:.0f}" height="{height:.0f}"' if standalone else 'width="100%"'
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    return (
        f'<svg{space} class="hb" viewBox="0 0 {WIDTH:.0f} {height:.0f}" {size} '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{style}{ground}{body}</svg>"
    )


# -- curves -----------------------------------------------------------------------------------


def line_chart(
    series: Sequence[Series],
    title: str,
    *,
    bounds: tuple[float, float] | None = None,
    rule: tuple[float, str] | None = None,
    log: bool = False,
    height: float = 260.0,
) -> str:
    """Curves over training steps. ``rule`` is a dashed level with a label; ``log`` is base 10.

    With ``log``, values of 0 are drawn at the lower edge.
    """
    drawn = [one for one in series if len(one.xs)]
    if not drawn:
        return ""
    values = [y for one in drawn for y in one.ys] + ([rule[0]] if rule else [])
    low, high = _log_bounds(values) if log else bounds or _bounds(values)
    first = min(min(one.xs) for one in drawn)
    last = max(max(one.xs) for one in drawn)
    top, bottom = 30.0, height - 26.0

    def px(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        y = math.log10(max(y, 10**low)) if log else y
        return bottom - (min(max(y, low), high) - low) / (high - low) * (bottom - top)

    marks = ticks(low, high)
    if log:
        marks = list(_every([10.0**power for power in range(round(low), round(high) + 1)], 7))
    parts = [legend(LEFT, 16, [(one.name, one.colour) for one in drawn])]
    for tick in marks:
        parts.append(line(LEFT, py(tick), WIDTH - RIGHT, py(tick)))
        label = f"{tick:.0e}" if log else number_text(tick)
        parts.append(text_at(LEFT - 8, py(tick) + 4, label, "soft", "end"))
    parts += [
        text_at(px(tick), height - 8, f"{tick:.0f}", "soft", "middle")
        for tick in ticks(first, last, 8)
        if tick == int(tick)
    ]
    parts += [_curve(one, px, py) for one in drawn]
    if rule:
        parts.append(line(LEFT, py(rule[0]), WIDTH - RIGHT, py(rule[0]), "rule"))
        parts.append(text_at(WIDTH - RIGHT, py(rule[0]) - 5, rule[1], "soft", "end"))
    return frame(height, "".join(parts), title)


def _curve(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    colour = f"c{one.colour % COLOURS}"
    if len(one.xs) == 1:
        return f'<circle class="{colour}" cx="{px(one.xs[0]):.1f}" cy="{py(one.ys[0]):.1f}" r="3"/>'
    points = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in zip(one.xs, one.ys, strict=True))
    # An inline style, because `.cN` fills what it colours.
    return (
        f'<path class="{colour} curve" style="fill:none" opacity="{one.opacity}" '
        f'stroke-width="{one.width}" d="M{points}"/>'
    )


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # A flat curve, or one that moves by rounding only, still gets an axis of some height.
    room = max((high - low) * 0.06, abs(high) * 1e-6, 1e-9)
    return low - room, high + room


def _log_bounds(values: Sequence[float]) -> tuple[float, float]:
    positive = [value for value in values if value > 1e-300] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = math.ceil(math.log10(max(positive)))
    return (low, high) if high > low else (low - 1, high + 1)


def _every(values: Sequence[float], most: int) -> Sequence[float]:
    return values[:: max(1, math.ceil(len(values) / most))]


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = 600
) -> tuple[list[float], list[float]]:
    """At most about ``most`` points of a curve; each stretch keeps its lowest and its highest."""
    if len(xs) <= most:
        return list(xs), list(ys)
    size = math.ceil(2 * len(xs) / most)
    kept: list[int] = []
    for start in range(0, len(xs), size):
        stretch = range(start, min(start + size, len(xs)))
        kept += sorted({min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)})
    return [xs[index] for index in kept], [ys[index] for index in kept]

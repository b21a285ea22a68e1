"""How many of how many, as a badge: an SVG, and the JSON that badge services read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hotbunk.conformance.case import Status
from hotbunk.conformance.matrix import WELL, Matrix

SVG, JSON = "badge.svg", "badge.json"
LABEL = "hotbunk conformance"
_COLORS = {"brightgreen": "#3c8527", "orange": "#c0630a", "red": "#b32d2d"}
_WIDE, _PAD = 6.4, 12.0  # of a letter at 11 px, and around a text


def message(matrix: Matrix) -> str:
    """``124 of 130``: what was seen to hold, of what there was to try."""
    tried = [one for one in matrix.cases if one.status is not Status.NOT_RUN]
    well = sum(one.status in WELL for one in tried)
    simulated = ", simulated" if matrix.simulated else ""
    return f"{well} of {len(tried)}{simulated}"


def color(matrix: Matrix) -> str:
    """Green if nothing is bad, red if a case failed."""
    bad = matrix.bad()
    if not bad:
        return "brightgreen"
    return "orange" if all(one.status is Status.NOT_RUN for one in bad) else "red"


def write_badges(matrix: Matrix, directory: Path) -> None:
    """Both of them."""
    said, shade = message(matrix), color(matrix)
    encoded = msgspec.json.encode(
        {"schemaVersion": 1, "label": LABEL, "message": said, "color": shade}
    )
    (directory / JSON).write_bytes(encoded + b"\n")
    (directory / SVG).write_text(_svg(said, _COLORS[shade]), encoding="utf-8")


def _svg(said: str, shade: str) -> str:
    left, right = (len(text) * _WIDE + _PAD for text in (LABEL, said))
    whole = left + right
    texts = "".join(
        f'<text x="{x:.1f}" y="14">{text}</text>'
        for x, text in ((left / 2, LABEL), (left + right / 2, said))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole:.0f}" height="20" role="img" '
        f'aria-label="{LABEL}: {said}"><title>{LABEL}: {said}</title>'
        f'<rect width="{left:.1f}" height="20" fill="#444"/>'
        f'<rect x="{left:.1f}" width="{right:.1f}" height="20" fill="{shade}"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )

"""``report.html``: one file for an engine's developers, which loads nothing from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from hotbunk.conformance.badge import message
from hotbunk.conformance.case import REGISTRY, CaseResult, Level, Status
from hotbunk.conformance.clauses import clause_of
from hotbunk.conformance.matrix import Matrix

HTML = "report.html"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top}.n{text-align:right}
.pass{color:#2a6e1b}.fail,.suite-error{color:#b32d2d;font-weight:600}.not-run{color:#777}
.unsupported-verified{color:#1c5f8a}pre{background:#f5f5f3;padding:.6em;overflow:auto;white-space:pre-wrap}
blockquote{border-left:3px solid #bbb;margin:.5em 0;padding:0 1em;color:#444}section{margin:2em 0}
"""
_WIDTH, _HEIGHT = 900, 180


def write_html(matrix: Matrix, directory: Path) -> Path:
    """Write the report."""
    path = directory / HTML
    path.write_text("".join(_page(matrix)), encoding="utf-8")
    return path


def _page(matrix: Matrix) -> Iterator[str]:
    title = f"Conformance of {matrix.title}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
    what = "a simulated engine" if matrix.simulated else "a real engine"
    yield f"<p>{escape(message(matrix))} cases hold, against contract {escape(matrix.contract)}: {what}. "
    yield f"hotbunk {escape(matrix.hotbunk)}, level {escape(matrix.level)}, seed {escape(matrix.seed)}, "
    yield f"{escape(matrix.platform)}.</p>"
    if matrix.unseen:
        yield "<p>Not looked at, because it cannot be seen from outside:</p><ul>"
        yield "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in matrix.unseen.items())
        yield "</ul>"
    yield from _counts(matrix)
    bad = matrix.bad()
    if bad:
        yield "<section><h2>What does not hold</h2>"
        for result in bad:
            yield from _failure(matrix, result)
        yield "</section>"
    for result in matrix.cases:
        for name, values in result.measured.items():
            yield f"<section><h2>{escape(result.case)}: {escape(name)}</h2>{_stairs(values)}</section>"
    yield from _all(matrix)
    yield "</body></html>\n"


def _counts(matrix: Matrix) -> Iterator[str]:
    """Capability x status."""
    by: dict[str, Counter[Status]] = {}
    for result in matrix.cases:
        for name in result.capability.split() or ["(always)"]:
            by.setdefault(name, Counter())[result.status] += 1
    yield "<section><h2>By capability</h2><table><tr><th>capability</th>"
    yield "".join(f'<th class="{s.value}">{s.value}</th>' for s in Status)
    yield "</tr>"
    for name in sorted(by):
        cells = "".join(f'<td class="n {s.value}">{by[name][s] or ""}</td>' for s in Status)
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield "</table></section>"


def _failure(matrix: Matrix, result: CaseResult) -> Iterator[str]:
    yield f'<h3 id="{escape(result.case)}">{escape(result.case)} '
    yield f'<span class="{result.status.value}">{result.status.value}</span></h3>'
    if result.case in REGISTRY:
        yield f"<p>Expected: {escape(REGISTRY[result.case].doc)}</p>"
    clause = clause_of(result.case)
    if clause is not None:
        yield f"<blockquote>{escape(clause.text)} <em>(contract, {escape(clause.section)})</em></blockquote>"
    yield f"<p>Seen:</p><pre>{escape(result.detail)}</pre>"
    if result.log:
        yield f"<p>Logged last:</p><pre>{escape(chr(10).join(result.log))}</pre>"
    yield f"<p>This case alone:</p><pre>{escape(matrix.again(result.case))}</pre>"


def _stairs(values: Sequence[float]) -> str:
    """A staircase, as inline SVG."""
    top = max(values, default=0) or 1
    step = _WIDTH / max(len(values), 1)
    points = []
    for n, value in enumerate(values):
        y = _HEIGHT * (1 - value / top)
        points += [f"{n * step:.1f},{y:.1f}", f"{(n + 1) * step:.1f},{y:.1f}"]
    return (
        f'<svg viewBox="0 -8 {_WIDTH} {_HEIGHT + 16}" width="100%" role="img" '
        f'aria-label="{len(values)} values, at most {top:g}">'
        f'<polyline fill="none" stroke="#1c5f8a" stroke-width="2" points="{" ".join(points)}"/></svg>'
        f"<p>{len(values)} values, from {min(values, default=0):g} to {top:g}.</p>"
    )


def _all(matrix: Matrix) -> Iterator[str]:
    yield "<section><h2>All cases</h2>"
    for level in Level:
        rows = [one for one in matrix.cases if one.level is level]
        if not rows:
            continue
        yield f"<h3>{level.value}</h3><table><tr><th>case</th><th>status</th><th>seconds</th><th>detail</th></tr>"
        for one in rows:
            yield f'<tr><td>{escape(one.case)}</td><td class="{one.status.value}">{one.status.value}</td>'
            yield f'<td class="n">{one.seconds:.2f}</td><td>{escape(one.detail)}</td></tr>'
        yield "</table>"
    yield "</section>"

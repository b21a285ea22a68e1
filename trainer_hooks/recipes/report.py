"""``report.html``: one run on one page, made from the run directory alone.

The page is self-contained: inline SVG and CSS, no script, nothing fetched. Everything that comes
from the run (names, values, the configuration) is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes import bars, charts, report_beside
from hotbunk.trainer_hooks.recipes.charts import Series, escape
from hotbunk.trainer_hooks.recipes.run_files import CONFIG_FILE, Run, number_or_none, read_run
from hotbunk.trainer_hooks.recipes.staircase import staircase_svg
from hotbunk.trainer_hooks.recipes.timeline import replace_file

REPORT_FILE = "report.html"

_TIMING = "timing_s/"
_PAGE_STYLE = """
body.hb{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1000px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:17px;margin:38px 0 4px}
p{margin:4px 0 10px;color:var(--soft)}p.warn{color:var(--ink);border-left:3px solid #e5a13a;
padding-left:10px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:10px;
margin:22px 0 0;padding:0}
.card{background:var(--band);border-radius:10px;padding:11px 14px}
.card dt{color:var(--soft);font-size:13px}.card dd{margin:0;font-size:21px;font-weight:600}
.card dd small{display:block;font-size:12.5px;font-weight:400;color:var(--soft)}
table{border-collapse:collapse;font-size:13.5px}td{padding:3px 18px 3px 0;vertical-align:top}
td:first-child{color:var(--soft)}td{overflow-wrap:anywhere}
pre{background:var(--band);border-radius:10px;padding:12px 14px;overflow:auto;font-size:12.5px}
summary{cursor:pointer;color:var(--soft);margin:6px 0}svg{display:block;margin:8px 0 4px}
"""


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path.

    Reads ``metrics.jsonl``, ``timeline.json`` and ``config.yaml`` where they are there; a file
    that is broken, or not there, leaves its part out and is named on the page.

    :raises ConfigError: ``run_dir`` is no directory.
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ConfigError(f"there is no run directory {directory}")
    path = directory / REPORT_FILE
    replace_file(path, _page(read_run(directory)).encode())
    return path


# -- the page ---------------------------------------------------------------------------------


def _page(run: Run) -> str:
    parts = [f"<h1>{escape(run.name)}</h1>", f"<p>{escape(_subtitle(run))}</p>"]
    parts += [f'<p class="warn">{escape(warning)}</p>' for warning in run.warnings]
    parts.append(_cards(run))
    parts.append(_section("Reward", "The mean over each step's responses.", _reward(run)))
    parts.append(
        _section(
            "Memory over one step",
            "Everybody keeps their memory: engines generate while the trainer works."
            if report_beside.is_beside(run)
            else "Who holds the device when: the engine's share is gone while the trainer works.",
            staircase_svg(run.timeline, standalone=False),
        )
    )
    parts.append(_time(run))
    parts.append(
        _section("Generation beside training", report_beside.note(run), report_beside.body(run))
    )
    parts.append(_section("Generation", _generation_note(run), _generation(run)))
    parts.append(
        _section(
            "Rollout against trainer",
            "The largest difference between the engine's and the trainer's log-probability of a "
            "token that was sampled, each step.",
            _logprobs(run),
        )
    )
    parts.append(_tables(run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.name)} · hotbunk</title>"
        f"<style>{charts.STYLE}{_PAGE_STYLE}</style></head>"
        f'<body class="hb"><main>{"".join(parts)}</main></body></html>\n'
    )


def _section(name: str, about: str, body: str) -> str:
    return f"<h2>{escape(name)}</h2><p>{escape(about)}</p>{body}" if body else ""


def _subtitle(run: Run) -> str:
    if not run.rows:
        return "No step is recorded yet."
    seconds = sum(run.curve(_TIMING + "step")[1])
    took = f" in {charts.seconds_text(seconds)}" if seconds else ""
    return f"{len(run.rows)} step{'s' if len(run.rows) != 1 else ''}{took}, recorded by hotbunk"


def _cards(run: Run) -> str:
    cards: list[tuple[str, str, str]] = []
    rewards = run.curve("reward/mean")[1]
    if rewards:
        share = max(1, len(rewards) // 10)
        first, last = fmean(rewards[:share]), fmean(rewards[-share:])
        begun = f"from {first:.3f}; means of {share} step{'s' if share > 1 else ''}"
        cards.append(("reward at the end", f"{last:.3f}", begun))
    times = run.curve(_TIMING + "step")[1]
    if times:
        cards.append(("median step", charts.seconds_text(median(times)), f"of {len(times)} steps"))
    peaks = run.curve("memory/peak_bytes")[1]
    if peaks:
        cards.append(("peak memory", charts.bytes_text(max(peaks)), "all tags together"))
    for tag, name in (("weights", "engine weights asleep"), ("kv_cache", "KV cache asleep")):
        awake = run.curve(f"memory/{tag}_bytes")[1]
        asleep = run.curve(f"memory/{tag}_bytes_asleep")[1]
        if awake and asleep:
            cards.append(
                (name, charts.bytes_text(max(asleep)), f"{charts.bytes_text(max(awake))} awake")
            )
    replaced = sum(run.curve("rollout/restarts")[1])
    if replaced:
        cards.append(("engines replaced", f"{replaced:.0f}", "they died; a full sync healed each"))
    cards += report_beside.cards(run)
    gaps = run.curve("rollout/logprob_diff_max")[1]
    if gaps:
        limit = run.logprob_tolerance()
        said = "rollout against trainer" if limit is None else f"tolerance {limit:.3g}"
        cards.append(("largest logprob difference", f"{max(gaps):.2e}", said))
    version = next(
        (row["rollout/version"] for row in reversed(run.rows) if "rollout/version" in row), None
    )
    if version is not None:
        cards.append(("weights version", charts.short(str(version), 18), "of the last rollout"))
    items = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small>'
        "</dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>' if cards else ""


def _reward(run: Run) -> str:
    steps, values = run.curve("reward/mean")
    if not values:
        return ""
    size = max(1, len(values) // 15)
    smooth = [fmean(values[max(0, i - size) : i + size + 1]) for i in range(len(values))]
    raw = Series("each step", *charts.thin(steps, values), colour=7, opacity=0.6, width=1.2)
    mean = Series(f"mean of {2 * size + 1} steps", *charts.thin(steps, smooth), width=2.6)
    within = min(values) >= 0 and max(values) <= 1
    drawn = [raw, mean] if len(values) > 2 else [raw]
    return charts.line_chart(drawn, "Reward over steps", bounds=(0.0, 1.0) if within else None)


def _generation_note(run: Run) -> str:
    def total(name: str) -> float:
        return sum(run.curve(f"rollout/{name}")[1])

    return (
        f"Tokens a second, and requests at their most in each step. In all {total('tokens'):.0f} "
        f"tokens, {total('cached_tokens'):.0f} of prompts found in the prefix cache, "
        f"{total('preemptions'):.0f} preemptions; at most "
        f"{max(run.curve('rollout/versions')[1], default=0):.0f} version(s) in one step."
    )


def _generation(run: Run) -> str:
    steps, values = run.curve("rollout/tokens_per_s")
    if not values:
        return ""
    speed = Series("tokens/s", *charts.thin(steps, values), colour=1)
    body = charts.line_chart([speed], "Tokens a second over steps", height=200)
    requests = [
        Series(name, *charts.thin(*run.curve(f"rollout/{name}_max")), colour=place)
        for place, name in enumerate(("running", "held", "frozen"))
        if run.curve(f"rollout/{name}_max")[1]
    ]
    if requests:
        body += charts.line_chart(requests, "Requests over steps", height=200)
    return body


def _logprobs(run: Run) -> str:
    steps, values = run.curve("rollout/logprob_diff_max")
    if not values:
        return ""
    curve = Series("largest difference", *charts.thin(steps, [abs(value) for value in values]), 1)
    limit = run.logprob_tolerance()
    rule = (limit, f"tolerance {limit:.3g}") if limit is not None and limit > 0 else None
    return charts.line_chart(
        [curve], "Logprob difference over steps", rule=rule, log=True, height=220
    )


def _time(run: Run) -> str:
    names = {key: None for row in run.rows for key in row if key.startswith(_TIMING)}
    phases = [key.removeprefix(_TIMING) for key in names if key != _TIMING + "step"]
    steps = [float(str(row["step"])) for row in run.rows]
    seconds = {
        name.replace("_", " "): [
            max(0.0, number_or_none(row.get(_TIMING + name)) or 0.0) for row in run.rows
        ]
        for name in phases
    }
    wholes = [number_or_none(row.get(_TIMING + "step")) or 0.0 for row in run.rows]
    spent = [sum(column) for column in zip(*seconds.values(), strict=True)] if seconds else []
    if spent and any(wholes):
        seconds["other"] = [max(0.0, a - b) for a, b in zip(wholes, spent, strict=True)]
    medians = {name: median(values) for name, values in seconds.items()}
    steps_svg = bars.step_bars(steps, seconds, "Seconds by phase over steps")
    body = steps_svg + bars.named_bars(medians, "Median seconds by phase") if steps_svg else ""
    about = "Each step by phase, then the medians."
    if report_beside.is_beside(run):
        about += " The trainer's own; syncs run beside it."
    return _section("Where the time goes", about, body)


def _tables(run: Run) -> str:
    parts = []
    if run.timeline.notes:
        parts.append("<h2>Versions</h2>" + _table(run.timeline.notes))
    if run.rows:
        last = {key: _shown(value) for key, value in run.rows[-1].items()}
        parts.append(
            f"<details><summary>Every metric of the last step</summary>{_table(last)}</details>"
        )
    if run.config.strip():
        config = escape(run.config)
        parts.append(f"<details><summary>{CONFIG_FILE}</summary><pre>{config}</pre></details>")
    return "".join(parts)


def _shown(value: object) -> str:
    return charts.number_text(value) if isinstance(value, float) else charts.short(str(value), 200)


def _table(rows: Mapping[str, str]) -> str:
    cells = (
        f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"

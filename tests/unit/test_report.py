"""The report page and the staircase, from synthetic runs (no number here was measured)."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes import charts
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder
from hotbunk.trainer_hooks.recipes.report import write_report
from hotbunk.trainer_hooks.recipes.staircase import staircase_svg, write_staircase
from hotbunk.trainer_hooks.recipes.timeline import MemorySample, Span, TimelineView, read_timeline

MIB = 1 << 20
EVIL = "</style></svg><script>alert('x')</script>&\"'\x00\x1b"
VOID = {"meta", "br", "img", "link", "input", "hr"}


def step_line(step: int, **more: object) -> dict[str, object]:
    return {
        "step": step,
        "reward/mean": min(1.0, step / 40),
        "rollout/version": step,
        "rollout/logprob_diff_max": 3e-5,
        "timing_s/generate": 1.0,
        "timing_s/train": 2.0,
        "timing_s/update_weights": 0.5,
        "timing_s/step": 4.0,
        "memory/weights_bytes": 300 * MIB,
        "memory/kv_cache_bytes": 500 * MIB,
        "memory/weights_bytes_asleep": 0,
        "memory/kv_cache_bytes_asleep": 0,
        "memory/peak_bytes": 1100 * MIB,
        **more,
    }


def write_metrics(run: Path, *rows: object) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def synthetic_timeline(steps: int = 3) -> TimelineView:
    """Steps of 10 s: 4 generate, .1 sleep, 4 train, .1 wake, 1.7 sync, .1 wake kv."""
    spans: list[Span] = []
    memory = [MemorySample(0.0, {"kv_cache": 500, "bucket": 0, "weights": 300, "trainer": 200})]
    windows = {}
    for step in range(steps):
        at = start = step * 10.0
        for name, length in (
            ("generate", 4.0),
            ("sleep", 0.1),
            ("train", 4.0),
            ("wake_weights", 0.1),
            ("sync", 1.7),
            ("wake_kv", 0.1),
        ):
            spans.append(Span(name, "trainer", at, at + length))
            at += length
        windows[step] = Span("step", "steps", start, at)
        level = dict(memory[-1].by_tag)
        for when, change in (
            (4.05, {"kv_cache": 0, "weights": 0}),
            (6.0, {"trainer": 700}),
            (8.1, {"trainer": 200}),
            (8.15, {"weights": 300}),
            (8.2, {"bucket": 64}),
            (9.9, {"bucket": 0}),
            (10.0, {"kv_cache": 500}),
        ):
            level = {**level, **change}
            memory.append(MemorySample(start + when, level))
    return TimelineView(spans=spans, memory=memory, steps=windows)


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def checked(path: Path) -> str:
    """The page's text, after checking that it is whole and fetches nothing."""
    page = path.read_text(encoding="utf-8")
    balance = _Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    assert not balance.tags & {"script", "link", "iframe", "object", "embed", "img", "base"}
    assert not re.search(r"https?:|url\(|@import|\ssrc=|javascript:|\son\w+=", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    assert not re.search(r"\b(nan|inf|None)\b", "".join(re.findall(r'[dxy]="[^"]*"', page)))
    return page


def texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]


# -- the page ---------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path) -> None:
    run = tmp_path / "run-7"
    with RunRecorder(run) as recorder:
        recorder.note({"device": "two cores"})
        for step in range(50):
            recorder.memory({"trainer": 10 * MIB, "weights": 20 * MIB, "kv_cache": 30 * MIB})
            with recorder.phase("generate"):
                pass
            with recorder.phase("sleep"):
                recorder.memory({"weights": 0, "kv_cache": 0})
            recorder.record(step, step_line(step))
    (run / "config.yaml").write_text("task:\n  name: copy\n  logprob_tolerance: 1.0e-04 # tight\n")
    assert write_report(run) == run / "report.html"
    page = checked(run / "report.html")
    for said in (
        "run-7",
        "50 steps in 3.33 min",
        "1.000",
        "from 0.050",
        "1.07 GiB",
        "500 MiB awake",
    ):
        assert said in page
    for said in (
        "tolerance 0.0001",
        "3.00e-05",
        "two cores",
        "torch",
        "logprob_tolerance: 1.0e-04",
    ):
        assert said in page
    assert page.count("<svg") == 5
    assert page.count('class="warn"') == 0
    # 4 s a step, of which 3.5 s are in phases.
    assert re.search(r"other</text>.*?500 ms  ·  12.5 %", page)
    assert sorted(path.name for path in run.iterdir())[-1] == "timeline.json"


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_short_runs(tmp_path: Path, rows: int) -> None:
    page = checked(write_report(write_metrics(tmp_path / "r", *map(step_line, range(rows)))))
    expected = {0: "No step is recorded yet", 1: "1 step in", 2: "2 steps in"}
    assert expected[rows] in page


def test_an_empty_directory_and_none(tmp_path: Path) -> None:
    page = checked(write_report(tmp_path))
    assert "No step is recorded yet" in page
    assert "<svg" not in page
    with pytest.raises(ConfigError, match="there is no run directory"):
        write_report(tmp_path / "none")


def test_nothing_from_the_run_is_markup(tmp_path: Path) -> None:
    run = tmp_path / "<b>&run"
    with RunRecorder(run) as recorder:
        recorder.note({EVIL: EVIL})
        recorder.memory({EVIL: 10, "trainer": 5})
        with recorder.phase(EVIL):
            recorder.memory({EVIL: 20})
        recorder.record(0, step_line(0, **{EVIL: EVIL, f"timing_s/{EVIL}": 1.0}))
        recorder.record(1, step_line(1, **{"rollout/version": EVIL}))
    (run / "config.yaml").write_text(EVIL)
    page = checked(write_report(run))
    assert "<b>" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in page
    assert "\x00" not in page
    assert "\x1b" not in page


def test_broken_files_are_named_and_the_rest_is_drawn(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "r", step_line(0), step_line(1))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'[1]\n{"step": "x"}\n{"no": 1}\n\xff\xfe\n' + b"[" * 50_000 + b'\n{"step": 2, "rew'
        )
    (run / "timeline.json").write_text("{")
    (run / "config.yaml").mkdir()
    page = checked(write_report(run))
    assert "6 line(s) of metrics.jsonl are broken" in page
    assert "timeline.json is left out" in page
    assert "config.yaml is left out" in page
    assert "2 steps in" in page


@pytest.mark.parametrize(
    "value",
    [None, "text", True, [], {}, -1, 0, 1e308, -1e308, 5e-324, 10**400, 1e-300, 0.1 + 0.2],
)
def test_strange_values(tmp_path: Path, value: object) -> None:
    keys = [key for key in step_line(0) if key != "step"]
    strange = dict.fromkeys(keys, value)
    rows = [step_line(0), {"step": 1, **strange}, {"step": 2}, {"step": 3, **strange}]
    checked(write_report(write_metrics(tmp_path / "r", *rows)))
    checked(write_report(write_metrics(tmp_path / "r", {"step": 0, **strange})))


def test_strange_steps(tmp_path: Path) -> None:
    rows = [step_line(step) for step in (5, 2**53, 10**30, -3, 5)]
    page = checked(write_report(write_metrics(tmp_path / "r", *rows)))
    assert "2 steps in" in page
    assert "2 line(s)" in page


def test_long_runs_stay_small(tmp_path: Path) -> None:
    rows = [step_line(step, **{"reward/mean": 0.5}) for step in range(20_000)]
    rows[12_345]["rollout/logprob_diff_max"] = 0.7
    path = write_report(write_metrics(tmp_path / "r", *rows))
    checked(path)
    assert path.stat().st_size < 400_000
    assert "7.00e-01" in path.read_text()


@pytest.mark.parametrize(
    "config, shown",
    [
        ("logprob_tolerance: 1e-3", "tolerance 0.001"),
        ("train:\n    max_logprob_diff_tol: 0.02\n", "tolerance 0.02"),
        ("logprob_tolerance: none", "rollout against trainer"),
        ("logprob_tolerance: --e", "rollout against trainer"),
        ("", "rollout against trainer"),
    ],
)
def test_the_tolerance_comes_from_the_config(tmp_path: Path, config: str, shown: str) -> None:
    run = write_metrics(tmp_path / "r", step_line(0), step_line(1))
    (run / "config.yaml").write_text(config)
    assert shown in checked(write_report(run))


def test_the_tolerance_of_the_metrics_goes_first(tmp_path: Path) -> None:
    row = step_line(0, **{"rollout/logprob_tolerance": 0.25})
    run = write_metrics(tmp_path / "r", row)
    (run / "config.yaml").write_text("logprob_tolerance: 1.0")
    assert "tolerance 0.25" in checked(write_report(run))


def test_a_report_is_replaced(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "r", step_line(0))
    first = write_report(run).read_text()
    write_metrics(run, step_line(0), step_line(1))
    assert write_report(run).read_text() != first
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html"]


# -- the staircase ----------------------------------------------------------------------------


def areas(svg: str) -> Iterator[list[tuple[float, float]]]:
    """The corner points of each stacked area, from the bottom up."""
    for path in re.findall(r'<path class="c\d area"[^>]* d="M([^"]*)Z"', svg):
        yield [(float(x), float(y)) for x, y in (point.split() for point in path.split("L"))]


def test_staircase_names_every_phase_and_its_time() -> None:
    svg = staircase_svg(synthetic_timeline())
    said = texts(svg)
    for label in ("generate", "sleep", "train", "wake weights", "sync", "wake kv"):
        assert label in said
    assert said.count("4 s") == 2
    assert said.count("100 ms") == 3
    assert "1.7 s" in said
    assert "peak 1e+03 B" not in said
    assert "peak 1000 B" in said
    assert [text.split()[0] for text in said if " to " in text and "scale" not in text] == [
        "trainer",
        "weights",
        "kv_cache",
        "bucket",
    ]


def test_staircase_heights_are_the_bytes() -> None:
    svg = staircase_svg(synthetic_timeline())
    trainer, weights, kv_cache, bucket = areas(svg)
    floor = max(y for _, y in trainer)
    unit = (floor - min(y for _, y in kv_cache)) / 1000  # generate: 200 + 300 + 500
    heights = {round((floor - y) / unit) for _, y in trainer}
    assert heights == {0, 200, 700}
    # Asleep, the engine's areas have no height: both outlines lie on the trainer's.
    tops = {round((floor - y) / unit) for _, y in kv_cache}
    assert tops == {200, 500, 700, 1000}
    assert {round((floor - y) / unit) for _, y in bucket} == {200, 500, 564, 700, 1000}
    assert {round((floor - y) / unit) for _, y in weights} == {200, 500, 700}


def test_staircase_reads_from_left_to_right() -> None:
    for points in areas(staircase_svg(synthetic_timeline())):
        half = points[: len(points) // 2]
        assert [x for x, _ in half] == sorted(x for x, _ in half)
        assert half[0][0] == charts.LEFT
        assert half[-1][0] <= charts.WIDTH - charts.RIGHT + 0.1


def test_the_representative_step_is_full_and_not_the_first() -> None:
    timeline = synthetic_timeline(6)
    lame = [span for span in timeline.spans if not (30 <= span.start < 40 and span.name == "sync")]
    shown = [f"of step {step}" in staircase_svg(timeline, step=step) for step in timeline.steps]
    assert all(shown)
    without = TimelineView(spans=lame, memory=timeline.memory, steps={0: timeline.steps[0],
                           3: timeline.steps[3], 4: timeline.steps[4]})  # fmt: skip
    assert "of step 4" in staircase_svg(without)
    assert "of step 0" in staircase_svg(synthetic_timeline(1))


def test_inner_phases_replace_the_outer_one() -> None:
    timeline = synthetic_timeline(1)
    outer = Span("update_weights", "trainer", 8.1, 10.0)
    spans = sorted([*timeline.spans, outer], key=lambda span: (span.start, -span.end))
    said = texts(staircase_svg(TimelineView(spans, timeline.memory, timeline.steps)))
    assert "update weights" not in said
    assert "sync" in said


@pytest.mark.parametrize("drop", ["spans", "memory", "steps"])
def test_staircase_without_data(drop: str) -> None:
    whole = synthetic_timeline()
    timeline = TimelineView(
        spans=[] if drop == "spans" else whole.spans,
        memory=[] if drop == "memory" else whole.memory,
        steps={} if drop == "steps" else whole.steps,
    )
    assert staircase_svg(timeline) == ""


def test_staircase_of_nothing_held_and_of_very_much() -> None:
    whole = synthetic_timeline()
    for factor in (0, 1 << 50):
        memory = [
            MemorySample(s.at, {tag: size * factor for tag, size in s.by_tag.items()})
            for s in whole.memory
        ]
        ET.fromstring(staircase_svg(TimelineView(whole.spans, memory, whole.steps)))


def test_hundreds_of_phases_stay_in_the_picture() -> None:
    spans = [Span(f"phase_{i}", "trainer", i * 0.01, (i + 1) * 0.01) for i in range(400)]
    window = {1: Span("step", "steps", 0.0, 4.0)}
    svg = staircase_svg(TimelineView(spans, [MemorySample(1.0, {"trainer": 5})], window))
    rights = [
        float(x) + float(w) for x, w in re.findall(r' x="([\d.]+)" y="[^"]*" width="([\d.]+)"', svg)
    ]
    assert max(rights) <= charts.WIDTH + 0.1


def test_no_such_step() -> None:
    with pytest.raises(ConfigError, match="no step 99"):
        staircase_svg(synthetic_timeline(), step=99)


def test_a_file_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with RunRecorder(run) as recorder:
        for step in range(3):
            with recorder.phase("generate"):
                recorder.memory({"trainer": 3, "weights": 4})
            recorder.record(step, {})
    path = write_staircase(run, tmp_path / "staircase.svg", step=1)
    root = ET.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in path.read_text()
    assert len(read_timeline(run / "timeline.json").steps) == 3
    with pytest.raises(ConfigError, match="recorded no phases"):
        write_staircase(tmp_path, tmp_path / "x.svg")
    assert not (tmp_path / "x.svg").exists()


# -- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (1000, "1000 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * MIB, "1.5 GiB")],
)
def test_bytes_text(size: int, text: str) -> None:
    assert charts.bytes_text(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0, "0 µs"), (2e-6, "2 µs"), (0.0021, "2.1 ms"), (3.44, "3.44 s"), (300.0, "5 min")],
)
def test_seconds_text(seconds: float, text: str) -> None:
    assert charts.seconds_text(seconds) == text


def test_ticks_are_round_and_inside() -> None:
    assert charts.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert charts.ticks(3, 3) == [3]
    assert charts.byte_ticks(1.1 * 1024 * MIB) == [i * 256 * MIB for i in range(5)]


def test_thinning_keeps_the_spikes() -> None:
    ys = [0.0] * 10_000
    ys[4321], ys[7777] = 9.0, -9.0
    xs, thinned = charts.thin(list(range(10_000)), ys, 500)
    assert len(xs) == len(thinned) <= 502
    assert xs == sorted(xs)
    assert thinned[xs.index(4321)] == 9.0
    assert thinned[xs.index(7777)] == -9.0


def test_a_chart_of_large_numbers_is_drawn() -> None:
    """Thousands of tokens a second on a plain axis once overflowed a log axis's marks."""
    curve = charts.Series("tokens/s", [0.0, 1.0], [7400.0, 9800.0])
    assert "8,000" in charts.line_chart([curve], "speed") or "8000" in charts.line_chart(
        [curve], "speed"
    )


def test_engines_that_died_are_told_and_none_is_no_card(tmp_path: Path) -> None:
    rows = [step_line(0, **{"rollout/restarts": 0}), step_line(1, **{"rollout/restarts": 2})]
    page = write_report(write_metrics(tmp_path / "died", *rows)).read_text()
    assert "engines replaced" in page
    calm = write_report(write_metrics(tmp_path / "calm", step_line(0))).read_text()
    assert "engines replaced" not in calm

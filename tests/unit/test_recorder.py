"""The run recorder: what is in its files, after a resume, a kill, and hostile values."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.errors import ConfigError, UsageError
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder
from hotbunk.trainer_hooks.recipes.timeline import read_timeline


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trace(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "timeline.json").read_text())
    return loaded


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in trace(run)["traceEvents"] if event["ph"] == kind]


# -- metrics ----------------------------------------------------------------------------------


def test_a_step_is_on_disk_when_record_returns(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "deep" / "run")
    recorder.record(0, {"reward/mean": 0.25, "note": "größe", "ok": True, "gone": None})
    recorder.record(1, {"reward/mean": float("nan"), "x": float("inf")})
    assert metrics(recorder.run_dir) == [
        {"step": 0, "reward/mean": 0.25, "note": "größe", "ok": True, "gone": None},
        {"step": 1, "reward/mean": None, "x": None},
    ]
    recorder.close()


def test_one_element_arrays_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with RunRecorder(tmp_path) as recorder:
        recorder.record(0, {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": numpy.array([2.0])})
        with pytest.raises(UsageError, match="'d' is not one number"):
            recorder.record(1, {"d": numpy.zeros(3)})
    assert metrics(tmp_path) == [{"step": 0, "a": 0.5, "b": 3, "c": 2.0}]


@pytest.mark.parametrize("value", [[1], {"a": 1}, object(), 1j, b"x"])
def test_other_values_are_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with RunRecorder(tmp_path) as recorder:
        with pytest.raises(UsageError):
            recorder.record(0, {"bad": value})
        recorder.record(0, {"good": 1})
    assert metrics(tmp_path) == [{"step": 0, "good": 1}]


def test_steps_go_up(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.record(3, {})
        for step in (3, 2, -1):
            with pytest.raises(UsageError, match="after step 3"):
                recorder.record(step, {})
        with pytest.raises(UsageError, match="another step"):
            recorder.record(4, {"step": 5})
        for step in ("4", 4.0, True):
            with pytest.raises(UsageError, match="not an integer"):
                recorder.record(step, {})  # type: ignore[arg-type]
        recorder.record(9, {"step": 9})
    assert [row["step"] for row in metrics(tmp_path)] == [3, 9]


def test_text_no_file_can_hold(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.note({"k\udcff": "v\ud800"})
        with recorder.phase("p\ud800", track="t\ud800"):
            recorder.memory({"tag\ud800": 1})
        recorder.record(0, {"a\ud800": "b\ud800\n\x00\x85\u2028\u2029"})
    assert metrics(tmp_path) == [{"step": 0, "a?": "b?\n\x00\x85\u2028\u2029"}]
    assert [event["name"] for event in events(tmp_path, "X")] == ["p?", "step"]


def test_closed_recorder(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.close()
    recorder.close()
    with pytest.raises(UsageError, match="closed"):
        recorder.record(0, {})


# -- resume -----------------------------------------------------------------------------------


def test_a_used_directory_is_refused_without_resume(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.record(0, {})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already has metrics"):
        RunRecorder(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_drops_later_steps_and_goes_on(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        for step in range(6):
            with recorder.phase("train"):
                recorder.memory({"weights": 100 + step})
            recorder.record(step, {"a": step})
    end = max(event["ts"] for event in events(tmp_path, "X"))
    with RunRecorder(tmp_path, resume_step=4) as recorder:
        assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]
        with pytest.raises(UsageError, match="after step 3"):
            recorder.record(3, {})
        with recorder.phase("train"):
            recorder.memory({"weights": 7})
        recorder.record(4, {"a": 40})
    assert [(row["step"], row["a"]) for row in metrics(tmp_path)][-2:] == [(3, 3), (4, 40)]
    assert [row["name"] for row in events(tmp_path, "i")] == ["resumed at step 4"]
    view = read_timeline(tmp_path / "timeline.json")
    assert len(view.spans) == 7
    assert sorted(view.steps) == [0, 1, 2, 3, 4, 5]
    assert view.steps[4].start * 1e6 > end  # the later word on step 4, after the first run's end
    assert {span.track for span in view.spans} == {"trainer"}


def test_resume_survives_half_a_line_and_a_broken_timeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step":0,"a":1}\n\xff\n[]\n{"step":1}\n{"step":2,"a'
    )
    (tmp_path / "timeline.json").write_text('{"traceEvents": [')
    with RunRecorder(tmp_path, resume_step=2) as recorder:
        recorder.record(2, {})
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2]
    assert sum("not a metrics line" in record.message for record in caplog.records) == 3
    assert sorted(read_timeline(tmp_path / "timeline.json").steps) == [2]


def test_resume_in_an_empty_directory(tmp_path: Path) -> None:
    with RunRecorder(tmp_path, resume_step=5) as recorder:
        recorder.record(5, {})
    assert [row["step"] for row in metrics(tmp_path)] == [5]


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    for resume in (None, 1, 2):
        with RunRecorder(tmp_path, resume_step=resume) as recorder:
            recorder.record(resume or 0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "timeline.json"]


KILLED = """
import sys, time
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder
recorder = RunRecorder(sys.argv[1], save_every=0.0)
step = 0
while True:
    with recorder.phase("train"):
        recorder.memory({"weights": step})
    recorder.record(step, {"a": "x" * 2000})
    print(step, flush=True)
    step += 1
"""


def test_kill_nine_leaves_every_recorded_step(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + 60
        said = 0
        while said < 30 and time.monotonic() < deadline:
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    said = max([said, *map(int, rest[:-1])])
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    whole = [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]
    assert whole == list(range(len(whole)))
    assert len(whole) > said
    assert read_timeline(tmp_path / "timeline.json").steps
    with RunRecorder(tmp_path, resume_step=len(whole)) as recorder:
        recorder.record(len(whole), {})
    assert [row["step"] for row in metrics(tmp_path)] == [*whole, len(whole)]
    assert not list(tmp_path.glob(".metrics*"))


# -- timeline ---------------------------------------------------------------------------------


def test_the_trace_is_what_perfetto_loads(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        with recorder.phase("generate"):
            time.sleep(0.01)
        now = time.monotonic()
        recorder.span("prefill", now - 0.005, now, args={"tokens": 7, "who": Path("x")})
        recorder.memory({"weights": 10, "kv_cache": 20})
        recorder.record(0, {})
    loaded = trace(tmp_path)
    assert loaded["otherData"]["dropped_events"] == 0
    assert loaded["otherData"]["python"].startswith("3.")
    assert all({"name", "ph", "pid"} <= event.keys() for event in loaded["traceEvents"])
    complete = {event["name"]: event for event in events(tmp_path, "X")}
    assert 10_000 <= complete["generate"]["dur"] < 1_000_000
    assert complete["prefill"]["dur"] == pytest.approx(5000, abs=1)
    assert complete["prefill"]["args"] == {"tokens": 7, "who": "x"}
    assert complete["step"]["args"] == {"step": 0}
    names = {
        e["args"]["name"]: e["tid"] for e in events(tmp_path, "M") if e["name"] == "thread_name"
    }
    assert names.keys() == {"trainer", "rollout", "steps"}
    assert len(set(names.values())) == 3
    assert complete["generate"]["tid"] == names["trainer"]
    assert any(event["name"] == "process_name" for event in events(tmp_path, "M"))
    (counter,) = events(tmp_path, "C")
    assert counter["name"] == "memory"
    assert counter["args"] == {"weights": 10, "kv_cache": 20}
    assert complete["step"]["ts"] <= counter["ts"] <= complete["step"]["dur"]


def test_a_phase_that_raises_is_timed_and_marked(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    with pytest.raises(ZeroDivisionError), recorder.phase("train"):
        1 / 0  # noqa: B018
    assert recorder.take_timings().keys() == {"train"}
    recorder.close()
    assert events(tmp_path, "X")[0]["args"] == {"error": "ZeroDivisionError"}


def test_timings_add_up_and_are_taken_once(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        for _ in range(2):
            with recorder.phase("a"), recorder.phase("b", track="other"):
                time.sleep(0.01)
        timings = recorder.take_timings()
        assert timings.keys() == {"a", "b"}
        assert 0.02 <= timings["b"] <= timings["a"] < 5
        assert recorder.take_timings() == {}


def test_peaks_are_of_the_step_and_of_the_sum(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        assert recorder.take_peaks() == {}
        recorder.memory({"trainer": 10, "weights": 5})
        recorder.memory({"trainer": 2, "kv_cache": 9})
        recorder.memory({"kv_cache": 0})
        # The sum's peak is of one moment (2 + 5 + 9), not the sum of the tags' peaks.
        assert recorder.take_peaks() == {"trainer": 10, "weights": 5, "kv_cache": 9, "total": 16}
        # What is held now counts for the next step.
        assert recorder.take_peaks() == {"trainer": 2, "weights": 5, "kv_cache": 0, "total": 7}
        for wrong in (-1, 1.5, True, "1"):
            with pytest.raises(UsageError, match="'weights' must be a number of bytes"):
                recorder.memory({"weights": wrong})  # type: ignore[dict-item]
        assert recorder.take_peaks()["weights"] == 5


@pytest.mark.parametrize("resumed", [False, True])
def test_long_runs_keep_head_and_tail(tmp_path: Path, resumed: bool) -> None:
    recorder = RunRecorder(tmp_path, max_events=100, save_every=1e9)
    for step in range(500):
        recorder.record(step, {})
    if resumed:
        recorder.close()
        recorder = RunRecorder(tmp_path, resume_step=500, max_events=100)
        dropped, first = 400 + 1, 451  # the mark of the resume is an event too
    else:
        dropped, first = 400, 450
    recorder.close()
    steps = [event["args"]["step"] for event in events(tmp_path, "X")]
    assert steps == [*range(50), *range(first, 500)]
    marks = [event for event in events(tmp_path, "i") if "dropped" in event["name"]]
    assert [mark["name"] for mark in marks] == [f"{dropped} events dropped"]
    assert trace(tmp_path)["otherData"]["dropped_events"] == dropped
    assert read_timeline(tmp_path / "timeline.json").dropped == dropped
    assert len(metrics(tmp_path)) == 500


def test_the_timeline_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, save_every=0.0)
    recorder.record(0, {})
    assert read_timeline(tmp_path / "timeline.json").steps.keys() == {0}
    recorder.close()


def test_many_threads(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)

    def work(number: int) -> None:
        for place in range(50):
            with recorder.phase("p", track=f"t{number}"):
                recorder.memory({f"tag{number}": place})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    view = read_timeline(tmp_path / "timeline.json")
    assert len(view.spans) == len(view.memory) == 400
    assert len({span.track for span in view.spans}) == 8


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"traceEvents": 3}',
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"name": "memory", "ph": "C", "args": {"a": "x"}}]}',
    ],
)
def test_a_file_that_is_no_timeline(tmp_path: Path, content: str) -> None:
    (tmp_path / "timeline.json").write_text(content)
    with pytest.raises(ConfigError, match=r"timeline\.json cannot be read"):
        read_timeline(tmp_path / "timeline.json")

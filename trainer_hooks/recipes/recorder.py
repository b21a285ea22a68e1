"""What a run leaves behind while it runs: ``metrics.jsonl`` and ``timeline.json``.

A run killed at any moment leaves every finished step in ``metrics.jsonl`` and a valid, slightly
older ``timeline.json``. No torch here.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hotbunk.rollout.errors import ConfigError, UsageError
from hotbunk.trainer_hooks.recipes.timeline import (
    MEMORY_COUNTER,
    STEP_TRACK,
    TIMELINE_FILE,
    Timeline,
    clean_text,
    replace_file,
)

METRICS_FILE = "metrics.jsonl"
TOTAL = "total"

_log = logging.getLogger(__name__)
_LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
_VERSIONED = ("hotbunk", "torch", "transformers", "safetensors", "numpy")


class RunRecorder:
    """Records one run into ``run_dir``; safe to call from several threads.

    ``resume_step`` is the step the run goes on with: lines from that step on are dropped from
    ``metrics.jsonl`` before the first new one, in one atomic replacement, and the timeline goes on
    after its last event. ``max_events`` bounds the timeline's memory (about 150 bytes an event);
    ``save_every`` is the least number of seconds between two writes of it.

    :raises ConfigError: ``run_dir`` already has metrics and ``resume_step`` is None.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        resume_step: int | None = None,
        max_events: int = 200_000,
        save_every: float = 5.0,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._levels: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._last_step: int | None = None
        path = self.run_dir / METRICS_FILE
        if resume_step is not None:
            self._last_step = _truncate(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise ConfigError(
                f"run directory {self.run_dir} already has metrics",
                remedy="resume that run, or choose another directory",
            )
        now = time.monotonic()
        self._timeline = Timeline(self.run_dir / TIMELINE_FILE, now, max_events)
        if resume_step is not None and self._timeline.continue_from_file():
            self._timeline.instant(f"resumed at step {resume_step}", now)
        self._timeline.notes.update(_versions())
        self._step_start = now
        self._save_every = save_every
        self._next_save = now + save_every
        self._file = path.open("ab")

    # -- steps --------------------------------------------------------------------------------

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append one step's line and mark the step in the timeline.

        Values are numbers, strings, booleans or None; a one-element tensor or array counts as its
        number, and NaN and infinities become null (JSON has none).

        :raises UsageError: a step not above the last one, another kind of value, or a closed
            recorder; nothing is written.
        """
        line = _line(step, metrics)
        with self._lock:
            if self._file.closed:
                raise UsageError("the recorder is closed")
            if self._last_step is not None and step <= self._last_step:
                raise UsageError(f"step {step} was recorded after step {self._last_step}")
            self._file.write(line)
            self._file.flush()
            self._last_step = step
            now = time.monotonic()
            self._timeline.complete("step", STEP_TRACK, self._step_start, now, {"step": step})
            self._step_start = now
            if now >= self._next_save:
                try:
                    self._timeline.save()
                except OSError as error:
                    _log.warning("the timeline could not be written: %s", error)
                spent = time.monotonic() - now
                # A long timeline takes longer to write; at most a fiftieth of the run goes there.
                self._next_save = time.monotonic() + max(self._save_every, 50 * spent)

    # -- time ---------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, track: str = "trainer") -> Iterator[None]:
        """Time the block as a phase of the step, also where it raises (the event then says what)."""
        start = time.monotonic()
        args: dict[str, object] = {}
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            end = time.monotonic()
            with self._lock:
                self._timeline.complete(name, track, start, end, args)
                self._seconds[name] = self._seconds.get(name, 0.0) + end - start

    def span(
        self,
        name: str,
        start: float,
        end: float,
        *,
        track: str = "rollout",
        args: Mapping[str, object] | None = None,
    ) -> None:
        """Add a span measured elsewhere; both times are seconds of ``time.monotonic()``.

        That clock is one for all processes of a machine, so an engine's process can report its
        own. Spans are drawn only; ``take_timings`` counts phases.
        """
        with self._lock:
            self._timeline.complete(name, track, start, end, args or {})

    def take_timings(self) -> dict[str, float]:
        """Seconds in each phase since the last call, by name."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    # -- memory -------------------------------------------------------------------------------

    def memory(self, by_tag: Mapping[str, int]) -> None:
        """Sample bytes by tag (``trainer``, ``weights``, ``kv_cache``, ``bucket``, ...).

        A tag that is not named keeps its last value, so different parts may report their own.

        :raises UsageError: a negative or non-integer number of bytes.
        """
        for tag, size in by_tag.items():
            if type(size) is not int or size < 0:
                raise UsageError(f"memory of {tag!r} must be a number of bytes, not {size!r}")
        with self._lock:
            self._levels.update(by_tag)
            for tag, size in {**self._levels, TOTAL: sum(self._levels.values())}.items():
                self._peaks[tag] = max(self._peaks.get(tag, 0), size)
            self._timeline.counter(MEMORY_COUNTER, time.monotonic(), self._levels)

    def take_peaks(self) -> dict[str, int]:
        """The most bytes seen since the last call, by tag, and of all tags together (``total``).

        What is held right now counts for the next stretch too. Empty before the first sample.
        """
        with self._lock:
            peaks = self._peaks
            self._peaks = dict(self._levels)
            if self._levels:
                self._peaks[TOTAL] = sum(self._levels.values())
        return peaks

    def counter(self, name: str, values: Mapping[str, int]) -> None:
        """Sample whole numbers that are drawn together (``requests``: running, held, ...)."""
        with self._lock:
            self._timeline.counter(name, time.monotonic(), values)

    # -- the end ------------------------------------------------------------------------------

    def note(self, facts: Mapping[str, str]) -> None:
        """Facts about the run for the report (versions, devices); the last word on a key wins."""
        with self._lock:
            self._timeline.notes.update({key: str(value) for key, value in facts.items()})

    def save(self) -> None:
        """Write ``timeline.json`` now."""
        with self._lock:
            self._timeline.save()

    def close(self) -> None:
        """Write the timeline and close the files; a second call does nothing."""
        with self._lock:
            if not self._file.closed:
                self._file.close()
                self._timeline.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _line(step: int, metrics: Mapping[str, object]) -> bytes:
    row: dict[str, object] = {"step": step}
    for key, value in metrics.items():
        row[clean_text(key)] = _plain(key, value)
    if type(step) is not int or row["step"] != step:
        raise UsageError(f"step {step!r} is not an integer, or the metrics name another step")
    line = msgspec.json.encode(row)
    # Legal in JSON, but str.splitlines(), which many readers use, splits there.
    for raw, escaped in _LINE_BREAKS.items():
        line = line.replace(raw, escaped)
    return line + b"\n"


def _plain(key: str, value: object) -> object:
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"metric {key!r} is not one number: {error}") from error
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UsageError(f"metric {key!r} is a {type(value).__name__}, not a number or a string")


def _truncate(path: Path, resume_step: int) -> int | None:
    """Drop the lines from ``resume_step`` on, and broken ones; return the last step left."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    kept: list[bytes] = []
    last: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = msgspec.json.decode(line, type=_Step).step
        except msgspec.MsgspecError:
            # A kill in the middle of a write leaves half a line at the end.
            _log.warning("%s:%d is not a metrics line; dropped", path, number)
            continue
        if step < resume_step:
            kept.append(line + b"\n")
            last = step if last is None else max(last, step)
    replace_file(path, *kept)
    return last


class _Step(msgspec.Struct):
    step: int


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

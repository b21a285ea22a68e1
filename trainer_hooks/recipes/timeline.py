"""A Chrome trace of a run, bounded in memory, written atomically; and how one is read back.

Times go in as seconds of ``time.monotonic()`` (one clock for all processes of a machine) and come
out as microseconds since the run began, which is what Perfetto and chrome://tracing load.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hotbunk.rollout.errors import ConfigError

TIMELINE_FILE = "timeline.json"
STEP_TRACK = "steps"
MEMORY_COUNTER = "memory"
_PID = 1


class _Event(msgspec.Struct, omit_defaults=True):
    """One trace event; times and durations in microseconds."""

    name: str
    ph: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    s: str = ""
    args: dict[str, msgspec.Raw] = {}


class _Read(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815 - the format's name
    otherData: dict[str, str | int | float | None] = {}  # noqa: N815


class Timeline:
    """Trace events of one run. Not safe for threads: the recorder holds its lock.

    At most ``max_events`` are kept: the first half of them and the newest; how many were dropped
    between the two is said in the file.
    """

    def __init__(self, path: Path, origin: float, max_events: int) -> None:
        self.path = path
        self.notes: dict[str, str] = {}
        self._origin = origin
        self._head_room = max(1, max_events // 2)
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=max(1, max_events - self._head_room))
        self._dropped = 0
        self._gap_ts: float | None = None
        self._tracks: dict[str, int] = {}

    def complete(
        self, name: str, track: str, start: float, end: float, args: Mapping[str, object]
    ) -> None:
        """A span from ``start`` to ``end`` (seconds of the monotonic clock)."""
        ts = self._us(start)
        length = max(0.0, self._us(end) - ts)
        event = {"name": clean_text(name), "ph": "X", "pid": _PID, "tid": self._track(track)}
        self._keep(_encode({**event, "ts": ts, "dur": round(length, 3), "args": dict(args)}), ts)

    def counter(self, name: str, at: float, values: Mapping[str, int]) -> None:
        """A sample of several values that are drawn stacked; each holds until the next sample."""
        ts = self._us(at)
        event = {
            "name": name,
            "ph": "C",
            "pid": _PID,
            "ts": ts,
            "args": {clean_text(tag): size for tag, size in values.items()},
        }
        self._keep(_encode(event), ts)

    def instant(self, name: str, at: float) -> None:
        """A mark across the whole trace."""
        self._keep(_encode(_mark(name, self._us(at))), self._us(at))

    def save(self) -> None:
        """Write the file; a reader sees the old one or the new one, whole."""
        lines = [self._named(0, "process_name", "hotbunk")]
        for track, tid in self._tracks.items():
            lines.append(self._named(tid, "thread_name", track))
            order = {"sort_index": tid}
            lines.append(_encode(self._meta(tid, "thread_sort_index", order)))
        lines += self._head
        if self._dropped:
            gap = _mark(f"{self._dropped} events dropped", self._gap_ts or 0.0)
            lines.append(_encode({**gap, "args": {"dropped": self._dropped}}))
        lines += self._tail
        notes = {clean_text(key): clean_text(value) for key, value in self.notes.items()}
        other = _encode({**notes, "dropped_events": self._dropped})
        replace_file(
            self.path,
            b'{"displayTimeUnit":"ms","otherData":' + other + b',"traceEvents":[\n',
            b",\n".join(lines),
            b"\n]}\n",
        )

    def continue_from_file(self) -> bool:
        """Take over an earlier file's events and go on after its end; False where none is usable."""
        try:
            read = msgspec.json.decode(self.path.read_bytes(), type=_Read)
            events = [(raw, msgspec.json.decode(raw, type=_Event)) for raw in read.traceEvents]
        except (OSError, msgspec.MsgspecError):
            return False
        end = 0.0
        for raw, event in events:
            if event.ph == "M":
                if event.name == "thread_name" and "name" in event.args:
                    self._tracks[msgspec.json.decode(event.args["name"], type=str)] = event.tid
                continue
            if event.ph == "i" and "dropped" in event.args:
                self._gap_ts = event.ts
                continue
            end = max(end, event.ts + event.dur)
            self._keep(bytes(raw), event.ts)
        dropped = read.otherData.get("dropped_events")
        self._dropped += dropped if isinstance(dropped, int) else 0
        # The run was away for an unknown time; it goes on one millisecond after its last event.
        self._origin -= (end + 1000.0) / 1e6
        return True

    def _us(self, at: float) -> float:
        return round(max(0.0, at - self._origin) * 1e6, 3)

    def _track(self, track: str) -> int:
        track = clean_text(track)
        return self._tracks.setdefault(track, max(self._tracks.values(), default=0) + 1)

    def _meta(self, tid: int, name: str, args: Mapping[str, object]) -> dict[str, object]:
        return {"name": name, "ph": "M", "pid": _PID, "tid": tid, "args": dict(args)}

    def _named(self, tid: int, what: str, name: str) -> bytes:
        return _encode(self._meta(tid, what, {"name": name}))

    def _keep(self, line: bytes, ts: float) -> None:
        if len(self._head) < self._head_room:
            self._head.append(line)
            return
        if len(self._tail) == self._tail.maxlen:
            self._dropped += 1
            if self._gap_ts is None:
                self._gap_ts = ts
        self._tail.append(line)


def _mark(name: str, ts: float) -> dict[str, object]:
    return {"name": name, "ph": "i", "s": "g", "pid": _PID, "tid": 0, "ts": ts}


def clean_text(text: str) -> str:
    """``text`` without lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _encode(value: object) -> bytes:
    # Anything else than JSON's own types is shown as text: a trace must not end a run.
    return msgspec.json.encode(value, enc_hook=str)


def replace_file(path: Path, *parts: bytes) -> None:
    """Write ``parts`` to ``path`` so that a reader, or a kill, sees the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# -- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A named stretch of time; seconds since the run began."""

    name: str
    track: str
    start: float
    end: float


@dataclass(frozen=True)
class MemorySample:
    """Bytes by tag at one moment (seconds since the run began); they hold until the next one."""

    at: float
    by_tag: Mapping[str, int]


@dataclass(frozen=True)
class TimelineView:
    """What a timeline file says, sorted by time. ``steps`` maps nothing twice: the last run wins."""

    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    steps: dict[int, Span] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0


def read_timeline(path: Path) -> TimelineView:
    """The timeline in ``path``; an empty view where there is no such file.

    :raises ConfigError: the file is there and is no timeline.
    """
    try:
        read = msgspec.json.decode(path.read_bytes(), type=_Read)
        events = [msgspec.json.decode(raw, type=_Event) for raw in read.traceEvents]
        return _view(events, read.otherData)
    except FileNotFoundError:
        return TimelineView()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"timeline {path} cannot be read: {error}") from error


def _view(events: list[_Event], other: Mapping[str, str | int | float | None]) -> TimelineView:
    def text(event: _Event, key: str) -> str:
        return msgspec.json.decode(event.args[key], type=str) if key in event.args else ""

    tracks = {e.tid: text(e, "name") for e in events if e.ph == "M" and e.name == "thread_name"}
    spans: list[Span] = []
    memory: list[MemorySample] = []
    steps: dict[int, Span] = {}
    for event in events:
        if event.ph == "X":
            start = event.ts / 1e6
            span = Span(event.name, tracks.get(event.tid, ""), start, start + event.dur / 1e6)
            if span.track == STEP_TRACK and "step" in event.args:
                steps[msgspec.json.decode(event.args["step"], type=int)] = span
            else:
                spans.append(span)
        elif event.ph == "C" and event.name == MEMORY_COUNTER:
            tags = {tag: msgspec.json.decode(raw, type=int) for tag, raw in event.args.items()}
            memory.append(MemorySample(event.ts / 1e6, tags))
    dropped = other.get("dropped_events")
    return TimelineView(
        spans=sorted(spans, key=lambda span: (span.start, -span.end)),
        memory=sorted(memory, key=lambda sample: sample.at),
        steps=steps,
        notes={key: value for key, value in other.items() if isinstance(value, str)},
        dropped=dropped if isinstance(dropped, int) else 0,
    )

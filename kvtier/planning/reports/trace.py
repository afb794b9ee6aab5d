"""Traces: what took time in steps, as events in lanes, written as a Chrome trace (opens in https://ui.perfetto.dev).

The simulator and the runtime write the same events. A trace file has one process for each cache, and in it one thread
for each lane that anything happened in:

    step     one event for each forward, with what was moved in it; plans are marks
    compute  the device, layer by layer: what is before a layer's attention, and the attention; waiting is left out
    up       fetches, host -> device
    down     write-backs, device -> host
    host     attention of host threads
    wait     the device has its part of an attention call, and waits for the host's
    stall    attention, or room for new tokens, waits for a copy of blocks
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from kvtier.errors import ConfigError
from kvtier.planning.policy import Policy
from kvtier.planning.step import StepPlan, StepRecord

#: Lanes from top to bottom, and what a reader is shown.
LANES = {
    "step": "steps and plans",
    "compute": "compute",
    "up": "link up (fetch)",
    "down": "link down (write back)",
    "host": "host attention",
    "wait": "wait for host attention",
    "stall": "stall",
}
#: What `otherData.format` of a file says.
FORMAT = "kvtier trace 1"
#: Events that a file holds at the most; some 150 bytes each.
LIMIT = 2_000_000
#: Events that are sorted and written together.
CHUNK = 4096
#: Numbers of threads of a lane: more devices of all caches share them.
_DEVICES = 100
#: Nanoseconds by which sums of seconds may be off.
_ROUNDED = 2


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time, or a mark.

    Attributes:
        lane: one of `LANES`.
        name: what it was.
        start: seconds, on any clock that all events share.
        seconds: that it took; None: it is a mark, a point in time.
        args: numbers to show with it: bytes, blocks, layer, step.
        cache: whose it was.
        device: the compute device, where there is one.
    """

    lane: str
    name: str
    start: float
    seconds: float | None
    args: Mapping[str, Any] = field(default_factory=dict)
    cache: str = ""
    device: str = ""

    @property
    def end(self) -> float:
        """When it was over, seconds."""
        return self.start + (self.seconds or 0.0)


class TraceWriter:
    """Writes events to a file as they come, in bounded memory.

    The file is written under another name in the same folder, and renamed when it is whole: by `close`, which leaving
    the `with` block calls, also by an exception. Not safe for threads.

    Args:
        path: of the file, or of a link to it; an older one is replaced.
        origin: the time that is 0 in the file, seconds.
        limit: events that are written at the most; the rest is counted, and the file says how many those are.

    Attributes:
        written: events so far.
        dropped: events beyond the limit, or after the disk was full.
        error: why writing failed, if it did.

    Raises:
        OSError: the file cannot be made, or something else is there, such as a pipe.
    """

    def __init__(self, path: str | os.PathLike[str], *, origin: float = 0.0, limit: int = LIMIT) -> None:
        self.path = Path(os.path.realpath(path))  # where a link leads to: it stays
        if self.path.is_dir():  # else it is found out when all is written, and cannot be renamed
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if self.path.exists() and not self.path.is_file():  # a file would take the place of a pipe, or of a device
            raise OSError(errno.EINVAL, "A trace is written to a file, and this is something else", os.fspath(path))
        self.origin = origin
        self.limit = limit
        self.written = self.dropped = 0
        self.error: OSError | None = None
        self.closed = False
        self._buffer: list[Event] = []
        self._flushing = False
        self._caches: dict[str, int] = {}
        self._devices: dict[tuple[str, str], int] = {}
        self._threads: dict[tuple[int, int], str] = {}
        #: Where the last event of a lane ends, in nanoseconds.
        self._ends: dict[tuple[int, int], int] = {}
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            self._file: IO[bytes] = open(self._part, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            error.filename = str(self.path)  # nobody has asked for the other one
            raise
        self._good = 0
        self._write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def add(self, event: Event) -> None:
        """One more event."""
        if self.closed or self.written >= self.limit or self.error is not None:
            self.dropped += 1
            return
        self.written += 1
        self._buffer.append(event)
        if len(self._buffer) >= CHUNK:
            self._flush()

    def close(self, notes: Mapping[str, Any] | None = None) -> None:
        """Write what is left and give the file its name. Idempotent.

        Args:
            notes: about the whole, to be found in the file's `otherData`.

        Raises:
            OSError: the disk is full, or the folder is gone; no file was made, and an older one is as it was.
        """
        if self.closed:
            return
        self._flush()
        self.closed = True
        other = {"format": FORMAT, "events": self.written, "dropped": self.dropped, **(notes or {})}
        names = self._names() or [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "kvtier"}}]
        end = ",\n".join(map(_json, names)) + '],"otherData":' + _json(other) + "}\n"
        self._write(end.encode())
        try:
            self._file.close()
            if self.error is not None:
                raise self.error
            os.replace(self._part, self.path)
        except OSError:
            self._part.unlink(missing_ok=True)
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _flush(self) -> None:
        count = len(self._buffer)
        if self._flushing or not count:
            return
        self._flushing = True
        try:
            lines = [self._line(event) for event in sorted(self._buffer[:count], key=lambda x: x.start)]
            self._write("".join(_json(line) + ",\n" for line in lines).encode())
            del self._buffer[:count]
        finally:
            self._flushing = False

    def _line(self, event: Event) -> dict[str, Any]:
        pid = self._caches.setdefault(event.cache, len(self._caches) + 1)
        device = self._devices.setdefault((event.cache, event.device), len(self._devices) % _DEVICES)
        tid = _DEVICES * list(LANES).index(event.lane) + device + 1
        self._threads[pid, tid] = LANES[event.lane] + (f", {event.device}" if event.device else "")
        start, seconds = event.start - self.origin, event.seconds or 0.0
        begin, end = round(start * 1e9), round((start + seconds) * 1e9)
        if event.seconds is not None:
            # A viewer drops what overlaps what is before it in its lane, if only by what a sum was rounded.
            last = self._ends.get((pid, tid), begin)
            begin = last if begin < last <= begin + _ROUNDED else begin
            end = max(begin, end)
            self._ends[pid, tid] = end
        line: dict[str, Any] = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": _microseconds(begin),
            "cat": event.lane,
            "name": event.name,
            "args": {name: _finite(value) for name, value in event.args.items()},
        }
        return line | ({"ph": "i", "s": "t"} if event.seconds is None else {"dur": _microseconds(end - begin)})

    def _names(self) -> list[dict[str, Any]]:
        """Names of processes and threads. Viewers show threads by number, or by index: lane by lane, and within a lane
        device by device."""
        lines: list[dict[str, Any]] = []
        for cache, pid in self._caches.items():
            lines.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": cache or "kvtier"}})
        for (pid, tid), name in sorted(self._threads.items()):
            for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
                lines.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})
        return lines

    def _write(self, data: bytes) -> None:
        """All of it, behind what was written whole: an interrupt in the middle leaves nothing half."""
        if self.error is not None:
            return
        try:
            self._file.seek(self._good)
            self._file.truncate()
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            self._good += len(data)
        except OSError as error:
            self.error = error


def write_trace(path: str | os.PathLike[str], events: Iterable[Event], notes: Mapping[str, Any] | None = None) -> None:
    """Write events to a file; see `TraceWriter`. Raises OSError."""
    writer = TraceWriter(path)
    try:
        for event in events:
            writer.add(event)
    finally:
        writer.close(notes)


def read_trace(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a file that `TraceWriter` has written, by their start.

    Raises:
        OSError: there is none. ConfigError: it is no such file.
    """
    try:
        return _events(json.loads(Path(path).read_bytes()))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is not a trace that kvtier has written.") from error


def _events(document: Any) -> list[Event]:
    """What a file holds. Raises whatever its content leads to where it is no trace."""
    if not str(document["otherData"]["format"]).startswith("kvtier trace"):
        raise ValueError("it is of another program")
    lines = document["traceEvents"]
    caches = {x["pid"]: x["args"]["name"] for x in lines if x["name"] == "process_name"}
    names = {(x["pid"], x["tid"]): x["args"]["name"] for x in lines if x["name"] == "thread_name"}
    found: list[Event] = []
    for line in lines:
        if line["ph"] == "M":
            continue
        seconds = line["dur"] / 1e6 if line["ph"] == "X" else None
        device = names[line["pid"], line["tid"]].partition(", ")[2]
        found.append(
            Event(line["cat"], line["name"], line["ts"] / 1e6, seconds, line["args"], caches[line["pid"]], device)
        )
    return sorted(found, key=lambda x: x.start)


def _microseconds(ns: int) -> float:
    """As trace files have it. Perfetto multiplies by 1000 and cuts off what is behind the point."""
    found = ns / 1000
    return found if int(found * 1000) == ns else math.nextafter(found, math.inf)


def busy_seconds(events: Iterable[Event], lane: str) -> float:
    """Seconds in which anything happened in a lane; what overlaps, as on two devices, counts once."""
    return sum(end - start for start, end in _joined(events, lane))


def hidden_share(events: Sequence[Event], lane: str = "up", behind: str = "compute") -> float | None:
    """The share of a lane's time in which another one was busy too: of fetches, the part that computing hid.

    Returns:
        0.0 to 1.0; None if nothing happened in the lane.
    """
    spans, others = _joined(events, lane), _joined(events, behind)
    total = sum(end - start for start, end in spans)
    both, i = 0.0, 0
    for start, end in spans:
        while i < len(others) and others[i][1] <= start:
            i += 1
        j = i
        while j < len(others) and others[j][0] < end:
            both += min(end, others[j][1]) - max(start, others[j][0])
            j += 1
    return both / total if total > 0 else None


def timeline(events: Iterable[Event], width: int = 100) -> str:
    """Lanes as lines for a terminal: `#` where a lane is busy, `+` where it is for a part of the time, `|` a plan.

    Args:
        events: of one trace, or of some of its steps.
        width: characters for the whole time.

    Returns:
        A line for the clock, then one for each lane of each cache with its busy time and share.
    """
    events = list(events)
    if not events:
        return "nothing happened"
    first = min(x.start for x in events)
    whole = max(max(x.end for x in events) - first, 1e-9)
    cell = whole / width
    rows: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        rows.setdefault((event.cache, event.device, event.lane), []).append(event)
    labels = {key: " ".join([*filter(None, key[:2]), key[2]]) for key in rows}
    margin = max(map(len, labels.values()))
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e3, "ms")) if whole * s >= 1), (1e6, "us"))
    clock = f"0{f'{whole * scale:.4g} {unit}':>{width - 1}}"
    lines = [f"{'':{margin}} {clock}"]
    for key in sorted(rows, key=lambda key: (key[0], list(LANES).index(key[2]), key[1])):
        share = [0.0] * width
        for start, end in _joined(rows[key], key[2]):
            for i in range(int((start - first) / cell), min(int((end - first) / cell) + 1, width)):
                low, high = first + i * cell, first + (i + 1) * cell
                share[i] += max(min(end, high) - max(start, low), 0.0) / cell
        marks = ["#" if x > 0.95 else "+" if x > 0 else "." for x in share]
        for event in rows[key]:
            if event.seconds is None or key[2] == "step":
                marks[min(int((event.start - first) / cell), width - 1)] = "|"
        took = busy_seconds(rows[key], key[2])
        lines.append(f"{labels[key]:{margin}} {''.join(marks)} {took * scale:9.4g} {unit} {took / whole:5.0%}")
    return "\n".join(lines)


def plan_args(plan: StepPlan, policy: Policy, cache: int, device: str) -> dict[str, Any]:
    """What is shown with the mark of a plan: what is fetched, who decided that and why, and what is expected of it."""
    found: dict[str, Any] = {
        "policy": type(policy).__name__,
        "fetch_blocks": sum(x.fetch for x in plan.layers),
        "keep_blocks": sum(x.keep for x in plan.layers),
        "reserve_bytes": plan.reserve,
    }
    prediction, decisions = policy.prediction(cache, device), policy.decisions(cache, device)
    if prediction is not None:
        found |= {"share_fetched": prediction.share, "predicted_seconds": prediction.seconds}
        found["binding"] = prediction.binding
    if decisions:
        found |= {"reason": decisions[-1].reason, "decided_at_step": decisions[-1].step}
    return found


def step_args(record: StepRecord) -> dict[str, Any]:
    """What is shown with a step: all that its record has, but what the event says itself."""
    names = [x.name for x in fields(record) if x.name not in ("cache", "seconds")]
    return {name: getattr(record, name) for name in names}


def _finite(value: Any) -> Any:
    """JSON has no infinity, and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: object) -> str:
    # What a policy tells may be numbers of another library.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_number)


def _number(value: Any) -> float | str:
    try:
        return cast("float | str", _finite(float(value)))
    except (TypeError, ValueError):
        return str(value)


def _joined(events: Iterable[Event], lane: str) -> list[tuple[float, float]]:
    """The times in which a lane is busy, in order and apart."""
    found: list[tuple[float, float]] = []
    for event in sorted((x for x in events if x.lane == lane and x.seconds), key=lambda x: x.start):
        if found and event.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.end))
        else:
            found.append((event.start, event.end))
    return found

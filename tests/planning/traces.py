"""What every trace file has to be, whoever wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvtier.planning.reports.trace import FORMAT, LANES


def problems(path: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a trace file; empty if nothing is."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    lines: list[dict[str, Any]] = document["traceEvents"]
    found: list[str] = []
    notes = document["otherData"]
    processes = {x["pid"] for x in lines if x["name"] == "process_name"}
    threads = {(x["pid"], x["tid"]): x["args"]["name"] for x in lines if x["name"] == "thread_name"}
    order = {(x["pid"], x["tid"]): x["args"]["sort_index"] for x in lines if x["name"] == "thread_sort_index"}
    events = [x for x in lines if x["ph"] != "M"]
    if notes["format"] != FORMAT or notes["events"] != len(events):
        found.append(f"the notes are {notes}, and there are {len(events)} events")
    lanes = list(LANES)
    for pid in processes:
        sorted_lanes = [
            threads[key].partition(", ")[0] for key in sorted(order, key=order.__getitem__) if key[0] == pid
        ]
        if sorted_lanes != sorted(sorted_lanes, key=list(LANES.values()).index):
            found.append(f"lanes of process {pid} are in the order {sorted_lanes}")
    for x in events:
        where = f"{x['name']} at {x['ts']}"
        if x["pid"] not in processes or (x["pid"], x["tid"]) not in threads:
            found.append(f"{where}: its lane has no name")
        elif x["cat"] not in lanes or threads[x["pid"], x["tid"]].partition(", ")[0] != LANES[x["cat"]]:
            found.append(f"{where}: it is in the lane {x['cat']}")
        if x["ts"] < 0 or (x["ph"] == "X" and not x["dur"] >= 0) or x["ph"] not in ("X", "i"):
            found.append(f"{where}: {x}")
        needed = {"step"} | ({"bytes", "blocks", "layer"} if x["cat"] in ("up", "down", "host") else set())
        if needed - set(x["args"]):
            found.append(f"{where}: no {needed - set(x['args'])} in {x['args']}")
    # As Perfetto reads them: it cuts nanoseconds off, and drops an event that overlaps the one before it in its lane.
    ends: dict[tuple[int, int], int] = {}
    for x in sorted((x for x in events if x["ph"] == "X"), key=lambda x: int(x["ts"] * 1000)):
        key, start = (x["pid"], x["tid"]), int(x["ts"] * 1000)
        if start < ends.get(key, 0):
            found.append(f"{x['name']} at {x['ts']} in {threads[key]}: the one before ends at {ends[key] / 1000}")
        ends[key] = start + int(x["dur"] * 1000)
    return found

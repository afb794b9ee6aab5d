"""What is counted is Prometheus' text, and adds up."""

from __future__ import annotations

import math
import re

from kvtier.serving.http.metrics import Metrics

SAMPLE = re.compile(r'^kvtier:(\w+)\{model_name="a\\"b"(?:,(\w+)="([^"]*)")?\} (\S+)$')


def test_every_line_is_a_comment_or_a_sample_and_histograms_add_up() -> None:
    metrics = Metrics('a"b')
    for i in range(10):
        times = {"queued": 0.005 * i, "first": 0.01 * i, "seconds": 0.1 * i}
        metrics.ended("stop", prompt=8, cached=i, tokens=4, preempted=1, **times)
    metrics.ended("cancelled", prompt=0, cached=0, tokens=0, preempted=0, queued=None, first=None, seconds=0.0)
    metrics.refused(429)
    found: dict[tuple[str, str], float] = {}
    kinds: dict[str, str] = {}
    for line in metrics.text({"num_requests_running": ("that run", 3)}).splitlines():
        if line.startswith("# TYPE "):
            kinds[line.split()[2].removeprefix("kvtier:")] = line.split()[3]
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            found[match[1], match[3] or ""] = float(match[4])
    assert found["num_requests_running", ""] == 3
    assert found["prompt_tokens_total", ""] == 80
    assert found["prefix_cache_hits_total", ""] == 45
    assert found["request_success_total", "stop"] == 10
    assert found["request_success_total", "cancelled"] == 1
    assert found["request_refused_total", "429"] == 1
    for name in (n for n, kind in kinds.items() if kind == "histogram"):
        buckets = [value for (n, label), value in found.items() if n == f"{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"{name}_count", ""] == 10
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in found} <= {*kinds}
    assert math.isclose(metrics.usual_seconds, 0.45)

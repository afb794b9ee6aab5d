"""What is counted, in Prometheus' text format. Names end as vLLM's do, so that dashboards need another prefix only."""

from __future__ import annotations

import bisect
import collections
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence

#: Upper limits of buckets: seconds of waits, seconds between tokens, tokens.
_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BETWEEN = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("from arrival to the first token", _WAITS),
    "request_queue_time_seconds": ("from arrival to the first step with a part of the request", _WAITS),
    "time_per_output_token_seconds": ("between tokens of a request, on average", _BETWEEN),
    "e2e_request_latency_seconds": ("from arrival to the last token", _WAITS),
    "request_prompt_tokens": ("tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("tokens of an answer", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens_total": "tokens of prompts",
    "generation_tokens_total": "tokens that were generated",
    "prefix_cache_queries_total": "tokens of prompts that were looked up",
    "prefix_cache_hits_total": "tokens of prompts that were not computed again",
    "num_preemptions_total": "times that a request gave up its blocks",
}
#: Requests whose time says how long the queue takes.
_RECENT = 64


class _Histogram:
    """Counts by buckets."""

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.limits, value)] += 1
        self.total += value


class Metrics:
    """Counts what ends. Any thread.

    Args:
        model: its name, a label of everything.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._ended: dict[str, int] = {}
        self._refused: dict[int, int] = {}
        self._histograms = {name: _Histogram(limits) for name, (_, limits) in _HISTOGRAMS.items()}
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT)

    def refused(self, status: int) -> None:
        """A request was refused with a status."""
        with self._lock:
            self._refused[status] = self._refused.get(status, 0) + 1

    def ended(
        self,
        reason: str,
        *,
        prompt: int,
        cached: int,
        tokens: int,
        preempted: int,
        queued: float | None,
        first: float | None,
        seconds: float,
    ) -> None:
        """A sequence has ended.

        Args:
            reason: "stop", "length", "cancelled", "error".
            prompt, cached: tokens of its prompt, where it is the first of that, and those that were there.
            tokens: that were generated.
            preempted: times.
            queued, first, seconds: from arrival to the first step with a part of it, to the first token, None where
                there is none, and to the end.
        """
        with self._lock:
            self._ended[reason] = self._ended.get(reason, 0) + 1
            counts = (prompt, tokens, prompt, cached, preempted)
            for name, count in zip(_COUNTERS, counts, strict=True):
                self._counters[name] += count
            if prompt:
                self._histograms["request_prompt_tokens"].observe(prompt)
            if reason in ("stop", "length"):
                self._recent.append(seconds)
                self._histograms["e2e_request_latency_seconds"].observe(seconds)
                self._histograms["request_generation_tokens"].observe(tokens)
            if queued is not None:
                self._histograms["request_queue_time_seconds"].observe(queued)
            if first is not None:
                self._histograms["time_to_first_token_seconds"].observe(first)
                if tokens > 1:
                    between = (seconds - first) / (tokens - 1)
                    self._histograms["time_per_output_token_seconds"].observe(between)

    @property
    def usual_seconds(self) -> float:
        """From arrival to the end, of recent requests on average; 1 before there are any."""
        with self._lock:
            return sum(self._recent) / len(self._recent) if self._recent else 1.0

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it.

        Args:
            gauges: what is the case now, each with what it is.
        """
        lines: list[str] = []
        with self._lock:
            for name, (what, value) in gauges.items():
                lines += self._lines(name, what, "gauge", [("", value)])
            for name, what in _COUNTERS.items():
                lines += self._lines(name, what, "counter", [("", self._counters[name])])
            ended = [(f'finished_reason="{x}"', count) for x, count in sorted(self._ended.items())]
            lines += self._lines("request_success_total", "sequences that have ended, by why", "counter", ended)
            refused = [(f'status="{x}"', count) for x, count in sorted(self._refused.items())]
            lines += self._lines("request_refused_total", "requests that were refused", "counter", refused)
            for name, (what, _) in _HISTOGRAMS.items():
                lines += self._histogram(name, what, self._histograms[name])
        return "\n".join([*lines, ""])

    def _lines(self, name: str, what: str, kind: str, values: Iterable[tuple[str, float]]) -> list[str]:
        found = [f"# HELP kvtier:{name} {what}", f"# TYPE kvtier:{name} {kind}"]
        return found + [f"kvtier:{name}{self._labels(label)} {value!r}" for label, value in values]

    def _histogram(self, name: str, what: str, of: _Histogram) -> list[str]:
        upto = list(itertools.accumulate(of.counts))
        buckets = [(f'le="{limit:g}"', n) for limit, n in zip((*of.limits, float("inf")), upto, strict=True)]
        found = self._lines(name, what, "histogram", [])
        found += [
            f"kvtier:{name}_bucket{self._labels(label.replace('inf', '+Inf'))} {count}" for label, count in buckets
        ]
        return [
            *found,
            f"kvtier:{name}_sum{self._labels('')} {of.total!r}",
            f"kvtier:{name}_count{self._labels('')} {upto[-1]}",
        ]

    def _labels(self, more: str) -> str:
        model = self._model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return "{" + ",".join([f'model_name="{model}"', *([more] if more else [])]) + "}"

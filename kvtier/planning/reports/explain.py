"""`Explanation`: what `cache.explain()` returns. Numbers to read, and a string of them for people."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.config import format_size
from kvtier.planning.costs import Decision
from kvtier.planning.policies.names import POLICIES
from kvtier.planning.reports.analysis import WORTH, Analysis
from kvtier.planning.step import StepRecord
from kvtier.stats import LayerResidency, Printed, TierStats

#: Characters of a line of the text.
WIDTH = 110
#: What reasons of decisions mean.
REASONS = {
    "first": "to see what the host does while the link is idle",
    "model": "predicted to be the fastest",
    "probe": "tried for a few steps, next to what was best",
    "back": "what was tried was no better",
}
#: Why a policy leaves blocks on the host, where it is not for want of room alone.
PLACES = {
    "all-fetch": "part of the device is kept free for what is fetched",
    "pie": "whole layers take turns on the device",
    "neo": "whole sequences are on either side",
}
#: Rates for a reader: name, words, unit, factor.
RATES = (
    ("up", "link up", "GB/s", 1e-9),
    ("down", "link down", "GB/s", 1e-9),
    ("host", "attention on the host", "GB/s", 1e-9),
    ("device", "on the device", "GB/s", 1e-9),
    ("shared", "host's loss to a busy link", "%", 100.0),
)


@dataclass(frozen=True, slots=True)
class Explanation(Printed):
    """What is where in a cache and why, what its steps take, and what would change that. `print` it.

    Attributes:
        condition: "closed", "unused" (no tokens yet), "one tier" (there is no device tier), "resident" (nothing is
            spilled), or "spilled".
        device, host: the tiers of the memory, which other caches may use too.
        layers: where the KV of each layer is.
        resident_bytes: in layers that are not tiered, outside the budgets.
        policy: its name, as `TieredKVCache(policy=...)` takes it, or that of its class.
        decision: the last one about this cache, where the policy keeps a log.
        analysis: of a decode step, for each device with a tier.
        steps: the last steps that decoded and in which anything was spilled, the latest last, each with the seconds
            that the policy predicted of it, where it did: of one token, or of some, whichever there are more of.
        native_missing: as in `CacheStats`.
    """

    condition: str
    device: TierStats
    host: TierStats
    layers: tuple[LayerResidency, ...]
    resident_bytes: int
    policy: str
    decision: Decision | None
    analysis: tuple[Analysis, ...]
    steps: tuple[tuple[StepRecord, float | None], ...]
    native_missing: str = ""

    @property
    def seen(self) -> float | None:
        """Seconds of a step: the median of the last ones."""
        return statistics.median(x.seconds for x, _ in self.steps) if self.steps else None

    @property
    def predicted(self) -> float | None:
        """Seconds of a step that the policy predicted: the median of the same steps; None: it predicts nothing."""
        found = [x for _, x in self.steps if x is not None]
        return statistics.median(found) if found else None

    @property
    def error(self) -> float | None:
        """The median absolute relative error of these predictions, each against its own step: of a step that ends with
        a user's pause nobody knows what it took."""
        found = [abs(x - record.seconds) / record.seconds for record, x in self.steps if x is not None]
        return statistics.median(found) if found else None

    @property
    def binding(self) -> str | None:
        """What makes a step as long as it is, on the device that waits longest; None where nothing is known of it."""
        known = [x for x in self.analysis if x.binding is not None and x.predicted is not None]
        return max(known, key=lambda x: x.predicted - x.base).binding if known else None  # type: ignore[operator]

    def __str__(self) -> str:
        lines: list[tuple[str, str]] = []
        if self.condition == "closed":
            return "closed: the cache has given everything back."
        if self.condition == "unused":
            lines.append(("where", f"no tokens yet; {self._tiers(budgets=True)}"))
            lines.append(("policy", f"{self._policy}; nothing to decide yet"))
            return _text(lines)
        tiered = any(x.kind == "tiered" for x in self.layers)
        lines.append(("where", self._tiers()))
        lines += [("", x) for x in _placed(self.layers)]
        both = sum(x.both_blocks for x in self.layers)
        if both:
            lines.append(
                ("", f"{both} blocks are on both, and counted in both: they can leave the device without a copy.")
            )
        if self.condition == "one tier":
            why = "there is no device tier: all blocks begin and stay on the host, attended to there."
            if not tiered:
                why = "no layer is tiered: windows and recurrent states are bounded, and stay with the model."
                if any(x.grows for x in self.layers):
                    why = "no layer is tiered: what they keep stays with the model, outside every budget."
            lines.append(("why", why))
        elif self.condition == "resident":
            lines.append(("why", f"every block is on the device: {self._policy} has nothing to decide."))
        else:
            lines.append(("why", self._why()))
            lines.append(("steps", self._steps()))
            for analysis in self.analysis:
                lines += _analysed(analysis, named=len(self.analysis) > 1)
        if self.native_missing and tiered and self.condition in ("one tier", "spilled"):
            head = "" if any(x == "if" for x, _ in lines) else "if"
            text = "the native kernel instead of torch: attention on the host several times as fast; "
            lines.append((head, text + self.native_missing))
        return _text(lines)

    @property
    def _policy(self) -> str:
        return f"the {self.policy} policy" if self.policy in POLICIES else self.policy

    def _tiers(self, *, budgets: bool = False) -> str:
        parts = []
        for name, tier in (("device", self.device), ("host", self.host)):
            if tier.budget:
                used = "" if budgets else f"{format_size(tier.bytes)} of "
                blocks = "" if budgets else f" ({tier.used_blocks} blocks)"
                parts.append(f"{name} {used}{format_size(tier.budget)}{blocks}")
        if self.resident_bytes:
            parts.append(f"{format_size(self.resident_bytes)} in layers that are not tiered")
        return ", ".join(parts) or "nothing is allocated, and budgets are found at the first forward"

    def _why(self) -> str:
        spilled = sum(x.spilled_bytes for x in self.analysis)
        share = sum(x.share * x.spilled_bytes for x in self.analysis) / spilled if spilled else 0.0
        what = f"{format_size(spilled)} are spilled to the host{self._cause(spilled, share)}; "
        if share > 0.995:
            what += "a step fetches all of that"
        elif share < 0.005:
            what += "the host attends to all of that"
        else:
            what += f"a step fetches {share:.0%} of that, the host attends to the rest"
        if self.decision is None:
            return f"{what}, as {self._policy} says."
        reason = REASONS.get(self.decision.reason, self.decision.reason)
        return f"{what}, as {self._policy} decided at step {self.decision.step}: {reason}."

    def _cause(self, spilled: int, share: float) -> str:
        """Why the device does not hold so many bytes, of which a step fetches a share; "" where it is not known."""
        if self.policy in PLACES:
            return f" ({PLACES[self.policy]})"
        if share >= 0.005:
            return " (part of the device is kept free for what is fetched)"
        blocks = sum(x.spilled_blocks for x in self.analysis)
        free = self.device.budget - self.device.bytes + self.device.free_blocks * (spilled // max(blocks, 1))
        return " (the device has no room for them)" if spilled > free else ""

    def _steps(self) -> str:
        if self.seen is None:
            return "none seen yet"
        text = f"{_duration(self.seen)} each, the median of the last {len(self.steps)}"
        if self.predicted is None:
            return f"{text}; the policy predicts nothing"
        return f"{text}; predicted {_duration(self.predicted)}, wrong by {self.error:.1%} in the median"


def _analysed(found: Analysis, *, named: bool) -> list[tuple[str, str]]:
    """Lines about one device."""
    lines: list[tuple[str, str]] = []
    where = f"{found.device}: " if named else ""
    if found.predicted is None:
        return [("bound", f"{where}not known before a few steps that decode were seen")]
    times = [f"{_duration(found.base)} computing", f"{_duration(found.link)} on the link"]
    if found.overlaps:
        times.append(f"{_duration(found.exposed)} waiting for the host")
    # Of one device it is said with the steps.
    wrong = f"; predictions of its part are wrong by {found.error:.1%} in the median" if named and found.error else ""
    lines.append(("bound", f"{where}by {found.binding}: {', '.join(times)}{wrong}"))
    if found.slower < 0.95 and found.exposed:
        lines.append(("", f"While the link is busy, the host attends at {found.slower:.0%} of its rate."))
    for head, some in (("rates", _rates(found)), ("if", _changes(found))):
        lines += [("" if i else head, f"{where}{text}") for i, text in enumerate(some)]
    return lines


def _rates(found: Analysis) -> list[str]:
    """The rates that are reckoned with, a line for each source."""
    sources: dict[str, list[str]] = {}
    for name, words, unit, factor in RATES:
        source = "measured" if found.rates.measured else "estimates, not measured"
        source = "seen in steps" if name in found.learned else source
        if found.overlaps or name in found.learned:  # with no overlap, nothing is reckoned with the others
            sources.setdefault(source, []).append(f"{words} {getattr(found.rates, name) * factor:.3g} {unit}")
    return [f"{source}: {', '.join(rates)}" for source, rates in sources.items()]


def _changes(found: Analysis) -> list[str]:
    """What would make a step faster, and what would not."""
    worth = [x for x in found.changes if x.gain >= WORTH]
    lines = [str(x) for x in worth]
    if not found.overlaps:
        lines.append(
            "the device is emulated in the host's memory, and copies add to a step: without a device_budget nothing is "
            "copied, which is the fastest on a CPU"
        )
    elif not worth:
        lines.append(
            f"nothing: a step is {found.binding}-bound, and more device budget, a faster link or a faster host would "
            f"each gain less than {WORTH - 1:.0%}"
        )
    nothing = [x.change for x in found.changes if x.gain < WORTH]
    if worth and nothing:
        lines.append(f"nothing would come of {', or of '.join(nothing)}")
    return lines


def _placed(layers: Sequence[LayerResidency]) -> list[str]:
    """A line for each kind of layers."""
    kinds: dict[str, list[LayerResidency]] = {}
    for x in layers:
        kinds.setdefault(x.kind, []).append(x)
    lines = []
    for kind, some in kinds.items():
        text = f"{_numbers([x.layer for x in some])}: {_range([x.tokens for x in some])} tokens"
        if kind != "tiered":
            grows = ": not tiered, and it grows with the context" if any(x.grows for x in some) else ""
            lines.append(f"{text}, in {kind}, {format_size(sum(x.bytes for x in some))}{grows}")
            continue
        counts = {tier: [getattr(x, f"{tier}_blocks") for x in some] for tier in ("device", "host")}
        placed = [f"{_range(counts[tier])} on the {tier}" for tier in counts if any(counts[tier])]
        lines.append(f"{text}; blocks of each: {' and '.join(placed) or 'none'}")
    return lines


def _numbers(found: Sequence[int]) -> str:
    """Layers 0-3, 5, 7-9."""
    runs: list[list[int]] = []
    for x in found:
        if runs and x == runs[-1][1] + 1:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    if len(runs) > 4:
        return f"{len(found)} layers of {found[0]}-{found[-1]}"
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(found) == 1 else f"layers {text}"


def _range(found: Sequence[int]) -> str:
    return f"{min(found)}" if min(found) == max(found) else f"{min(found)}-{max(found)}"


def _duration(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "us"))
    return f"{seconds * scale:.3g} {unit}"


def _text(lines: Sequence[tuple[str, str]]) -> str:
    """A head and its text a line, wrapped."""
    found = []
    for head, body in lines:
        found += textwrap.wrap(body, WIDTH, initial_indent=f"{head:<7}", subsequent_indent=" " * 9)
    return "\n".join(found)

"""What things cost: seconds predicted from rates, and rates learned from what steps really took."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.planning.step import LayerState, StepRecord

#: Steps over which a rate is the median. A change is believed once it fills half of them; a shorter burst is not.
WINDOW = 15
#: A rate that changes by such a share between two steps is another rate, not noise.
JUMP = 0.15
#: The link is idle if it is busy for less than such a share of a step; the most that it takes from the host's rate.
IDLE, MOST_LOST = 0.2, 0.8


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is. The defaults are estimates: a PCIe 4.0 x16 link, a server's memory, an A100's.

    Attributes:
        up, down: of the link, bytes per second to the device and from it.
        host: of attention on the host, bytes of KV per second.
        device: of attention on the device, bytes of KV per second.
        copy_overhead: seconds that one layer's fetch takes besides.
        host_overhead: seconds that one layer's host attention takes besides: query down, threads woken, result up.
        shared: share of the host's rate that is lost while the link is busy.
        measured: whether these were measured on this machine.
    """

    up: float = 22e9
    down: float = 22e9
    host: float = 60e9
    device: float = 1.2e12
    copy_overhead: float = 10e-6
    host_overhead: float = 60e-6
    shared: float = 0.2
    measured: bool = False


class Median:
    """The median of the last values. It follows a lasting change after half a window, and ignores a shorter one."""

    __slots__ = ("_values", "value")

    def __init__(self, window: int = WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self.value: float | None = None

    def add(self, value: float) -> None:
        """One more value, in place of the oldest."""
        self._values.append(value)
        self.value = statistics.median(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class Prediction:
    """What a step is predicted to take.

    Attributes:
        share: of the spilled blocks that is fetched.
        seconds: of the step.
        base: of all that does not depend on where KV is.
        exposed: in which the device waits for host attention.
        link: in which the link is busy.
        fetched_bytes, host_bytes: fetched, and attended to on the host.
        slower: what the host's rate is multiplied with for the link being busy.
    """

    share: float
    seconds: float
    base: float
    exposed: float
    link: float
    fetched_bytes: int
    host_bytes: int
    slower: float = 1.0

    @property
    def binding(self) -> str:
        """What makes the step as long as it is: "link", "host" or "compute"."""
        if self.link >= self.base + self.exposed:
            return "link"
        return "host" if self.exposed > 0.05 * self.seconds else "compute"


class CostModel:
    """Predicts seconds, and learns from records.

    Args:
        rates: to begin with.
    """

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = Rates() if rates is None else rates
        self._up, self._down, self._base = Median(), Median(), Median()
        # What the host attends to in a second with the link idle; with the link busy; and what that costs it.
        self._alone, self._beside, self._lost = Median(), Median(), Median()
        #: Relative errors of the predictions of steps, the last ones.
        self.errors: deque[float] = deque(maxlen=64)

    @property
    def base(self) -> float:
        """Seconds of a step besides waiting for host attention and the link; 0.0 before the first record."""
        return self._base.value or 0.0

    @property
    def error(self) -> float | None:
        """The mean absolute relative error of the last predictions; None before the first."""
        return statistics.fmean(self.errors) if self.errors else None

    def step(self, groups: Sequence[Group], share: float, extra_bytes: float = 0.0, part: float = 1.0) -> Prediction:
        """Predict a step that fetches a share of each layer's spilled blocks.

        Args:
            groups: of the step's layers; see `alike`.
            share: 0 to 1; layers that the host cannot attend to are fetched whole.
            extra_bytes: by which every layer would spill more (less, where negative) with this share.
            part: of the model that these layers are.
        """
        rates, base = self.rates, self.base * part
        link = exposed = 0.0
        fetched = hosted = 0
        slower = 1.0
        # How busy the link is decides how fast the host attends: once around is enough, for it changes little.
        for _ in range(2):
            link = exposed = 0.0
            fetched = hosted = 0
            per_byte = 1 / (rates.host * slower)
            for layer, count in groups:
                nbytes, had = layer.block_bytes, layer.spilled
                spilled = max(had + extra_bytes / nbytes, 0)
                take = int(spilled * share + 0.5) if share < 1 and layer.host_attention else spilled
                if take:
                    link += count * (rates.copy_overhead + take * nbytes / rates.up)
                    fetched += int(count * take * nbytes)
                left = (spilled - take) * nbytes
                if left > 0:
                    hosted += int(count * left)
                    resident = (layer.resident + had - spilled + take) * nbytes
                    wait = rates.host_overhead + left * per_byte - resident / rates.device
                    if wait > 0:
                        exposed += count * wait
            total = max(base + exposed, link)
            if not (link and hosted) or not total:
                break
            slower = 1 - rates.shared * min(link / total, 1.0)
        return Prediction(share, max(base + exposed, link), base, exposed, link, fetched, hosted, slower)

    def observe(self, record: StepRecord, prediction: Prediction | None, part: float = 1.0) -> bool:
        """Learn from a step.

        Args:
            record: what it took.
            prediction: what was predicted of it; None: nothing, so that only rates are learned.
            part: of the model that the prediction is of.

        Returns:
            whether a rate is no longer what it was, so that what was seen before says little.
        """
        rates, changed = self.rates, dict[str, float]()
        for name, median, moved, seconds in (
            ("up", self._up, record.bytes_up, record.seconds_up),
            ("down", self._down, record.bytes_down, record.seconds_down),
        ):
            if moved and seconds > 0:
                median.add(moved / seconds)
                assert median.value is not None
                changed[name] = median.value
        if record.host_bytes and record.host_seconds > 0 and record.seconds > 0:
            changed |= self._host_rates(record)
        jumped = False
        if changed:
            jumped = any(
                abs(value - getattr(rates, name)) > JUMP * getattr(rates, name)
                for name, value in changed.items()
                if name != "shared"
            )
            self.rates = replace(rates, **changed)  # type: ignore[arg-type]
        if prediction is not None and record.seconds > 0 and part > 0:
            if self._base.value is not None:
                self.errors.append(abs(prediction.seconds - record.seconds * part) / (record.seconds * part))
            before = self.base
            self._base.add(max(record.seconds - record.stall_seconds - prediction.exposed / part, 0.0))
            jumped = jumped or abs(self.base - before) > JUMP * before
        return jumped

    def _host_rates(self, record: StepRecord) -> dict[str, float]:
        """The host's rate with the link idle, and what it loses to a busy link, after one more step."""
        seen, busy = record.host_bytes / record.host_seconds, min(record.seconds_up / record.seconds, 1.0)
        if busy < IDLE:
            self._alone.add(seen)
        else:
            before = self._beside.value
            self._beside.add(seen / (1 - self.rates.shared * busy))
            if self._alone.value is not None:
                self._lost.add(min(max((1 - seen / self._alone.value) / busy, 0.0), MOST_LOST))
            if before is not None and abs(self._beside.value / before - 1) > JUMP:  # type: ignore[operator]
                self._alone = Median()  # another host: what it did alone is not known any more
        found = {} if self._lost.value is None else {"shared": self._lost.value}
        rate = self._alone.value if self._alone.value is not None else self._beside.value
        assert rate is not None
        return found | {"host": rate}


#: Layers that are alike, and how many.
Group = tuple[LayerState, int]


def alike(layers: Sequence[LayerState]) -> list[Group]:
    """Layers with the same numbers, counted: a model has few kinds, so that a prediction does not grow with layers."""
    found: dict[tuple[int, int, int, bool], list[LayerState]] = {}
    for x in layers:
        found.setdefault((x.block_bytes, x.resident, x.spilled, x.host_attention), []).append(x)
    return [(some[0], len(some)) for some in found.values()]


def fetched_blocks(layer: LayerState, share: float) -> int:
    """Whole blocks that a share of a layer's spilled ones is."""
    return int(layer.spilled * share + 0.5) if layer.host_attention else layer.spilled

"""What things cost: seconds predicted from rates, and rates learned from what steps really took."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.planning.fit import line_of
from kvtier.planning.makespan.groups import Groups, parted
from kvtier.planning.makespan.linear import OF_EACH, LinearPart
from kvtier.planning.makespan.overlap import AT_A_TIME, BusyParts, LayerSeconds, is_uneven
from kvtier.planning.rates import FASTEST, WINDOW, Median, Rates
from kvtier.planning.step import StepRecord

#: A rate that changes by such a share between two steps is another rate, not noise.
JUMP = 0.15
#: The link is idle if it is busy for less than such a share of a step; the most that it takes from the host's rate.
IDLE, MOST_LOST = 0.2, 0.8
#: What a busy link takes from the host's rate is learned where it is busy for such a part of host attention: the less
#: that is, the more noise counts.
LOUD = 0.5
#: Steps that stall for longer than such a part of them have the link busy all the time.
STALLED = 0.01
#: The most that an overhead is taken to be, seconds a layer.
MOST_OVERHEAD = 1e-3
#: The part of a copy that moves bytes, at the least; the rest is overhead.
LEAST_MOVING = 1 / 8
#: The most of the time of copies that may be overhead, where they tell the link's rate while blocks are still moving:
#: there are more of them than predicted.
MOST_OVERHEADS = 0.25
#: What a copy takes besides its bytes may be measured wrong by such a part: so much says nothing of the link's rate.
UNSURE = 1 / 16
#: Copies that differ so much in bytes tell what a copy takes besides; looked at after so many steps that fetch, for it
#: takes longer than all else that is learned from one.
DIFFERENT, OFTEN = 1.5, 8
#: A step that moved other bytes than planned, by such a part of what is spilled, says little: blocks are still moving.
MOVING = 0.1
#: Blocks of a layer's fetch, on average, that may lack room without any of them waiting for that.
ROUNDED = 0.5


@dataclass(slots=True)
class Prediction:
    """What a step is predicted to take.

    Attributes:
        share: of the spilled blocks that is fetched.
        seconds: of the step.
        base: of the linear part and of device attention; 0.0 before the linear part is known.
        exposed: in which the device waits for host attention.
        link: in which the link is busy.
        fetching: that fetches take, one behind the other: the link, and waits for the room of the layer before.
        fetched_bytes, host_bytes: fetched, and attended to on the host.
        device: of device attention.
        layers: of the step.
        copies: with which all of that is fetched.
        busy: share of host attention during which the link is busy.
        waits: for layers that are alike, how many, the bytes that the host attends to in each, the seconds of device
            attention behind which that hides, and those that the fetch of each takes.
        uneven: whether layers fetch so different amounts that fetches run into the turns of other layers.
        error: what predictions of such steps have been wrong by, relative, the median of the last ones; None before the
            first.
    """

    share: float
    seconds: float
    base: float
    exposed: float
    link: float
    fetching: float
    fetched_bytes: int
    host_bytes: int
    device: float = 0.0
    layers: int = 0
    copies: int = 0
    busy: float = 0.0
    waits: tuple[tuple[float, float, float, float], ...] = ()
    uneven: bool = False
    error: float | None = None

    @property
    def binding(self) -> str:
        """What makes the step as long as it is: "link", "host" or "compute"."""
        if self.fetching >= self.base + self.exposed:
            return "link"
        return "host" if self.exposed > 0.05 * self.seconds else "compute"


@dataclass(slots=True)
class Decision:
    """Why a step is as it is.

    Attributes:
        step: number of the cache's step on the device, of those that were planned.
        reason: "first", "model" (a better prediction), "probe", or "back" (a probe brought nothing).
        prediction: of the choice.
        before: the share before.
    """

    step: int
    reason: str
    prediction: Prediction
    before: float


class CostModel:
    """Predicts seconds, and learns from records.

    Args:
        rates: to begin with.
        chooses: whether shares are chosen with it. Then what it takes for too little is soon seen at another share.
        linear: seconds of a step besides attention and waiting, to begin with; None: not known.
        one_share: whether steps fetch one share of all layers, and not all of some.
    """

    def __init__(
        self,
        rates: Rates | None = None,
        *,
        chooses: bool = False,
        linear: float | None = None,
        one_share: bool = True,
    ) -> None:
        self._chooses, self._one_share = chooses, one_share
        rates = Rates() if rates is None else rates
        self.rates = replace(rates, host_overhead=min(rates.host_overhead, MOST_OVERHEAD))
        self._up, self._down = Median(), Median()
        self._linear = LinearPart(linear)
        # Layers in which the host attends, in the last step that had some.
        self._waiting = 0.0
        #: What the host is known to attend to in a second, before any step has shown it.
        self._known = self.rates.host if self.rates.measured else None
        self._shared = self.rates.shared
        # What the host attends to in a second with the link idle; with the link busy; and what that costs it.
        self._alone, self._overlapped, self._lost = Median(), Median(), Median()
        # Of the last steps that fetched: seconds and bytes of a copy, which tell what one takes besides its bytes,
        # unless that was measured.
        self._copies: deque[tuple[float, float]] = deque(maxlen=2 * WINDOW)
        self._copied = 0
        self._busy_parts = BusyParts()
        # Relative errors of the last predictions.
        self._errors = Median(64)

    @property
    def error(self) -> float | None:
        """The median absolute relative error of the last predictions, for a step in which somebody waits tells nothing;
        None before the first."""
        return self._errors.value

    @property
    def linear(self) -> float | None:
        """Seconds of a step besides attention and waiting; None before the first record."""
        return None if self._linear.value is None else max(self._linear.value, 0.0)

    @property
    def learned(self) -> tuple[str, ...]:
        """The rates that steps have shown; the others are as they were given."""
        few = self._few
        shown = {
            "up": len(self._up) >= few,
            "down": len(self._down) >= few,
            "host": bool(len(self._alone) or len(self._overlapped)),
            "shared": len(self._lost) >= few,
        }
        return tuple(name for name, is_shown in shown.items() if is_shown)

    @property
    def _few(self) -> int:
        """Steps that have to show another rate: one that was measured is not given up for less."""
        return OF_EACH if self.rates.measured else 1

    def step(
        self,
        groups: Groups,
        share: float,
        extra_bytes: float = 0.0,
        part: float = 1.0,
        room: float = math.inf,
    ) -> Prediction:
        """Predict a step that fetches a share of each layer's spilled blocks.

        Args:
            groups: of the step's layers; see `alike`.
            share: 0 to 1; layers that the host cannot attend to are fetched whole.
            extra_bytes: that would be spilled besides with this share, of the layers that have most on the device;
                where negative, that would come back, to those that have least there.
            part: of the model that these layers are.
            room: bytes that are kept free for what is fetched: no layer has more of it there at a time. What else a
                layer was to fetch the host attends to.
        """
        rates = self.rates
        up, device_rate, copy_overhead = rates.up, rates.device, rates.copy_overhead
        link = exposed = device = busy_bytes = longest = sent = 0.0
        fetched = hosted = 0
        known, layers = self.linear, groups.total
        linear = (known or 0.0) * part / max(layers, 1)
        links, kinds = list[float](), list[tuple[int, float, float, float, float, float]]()
        for (layer, count), spilled in zip(groups, groups.spilled_after(extra_bytes), strict=True):
            nbytes = layer.block_bytes
            if layer.host_attention:
                take, fetch, leave = parted(spilled, share, room // nbytes)
            else:
                take, fetch, leave = spilled, min(spilled, 1.0), 0.0
            on_link = fetch * copy_overhead + take * nbytes / up
            if take:
                sent += count * fetch
                longest = max(longest, take * nbytes)
                link += count * on_link
                fetched += int(count * take * nbytes)
            attended = (layer.resident + layer.spilled - spilled + take + layer.sequences) * nbytes / device_rate
            device += count * attended
            links.append(on_link)
            kinds.append((count, take, leave, on_link, attended, (spilled - take) * nbytes))
        parts = None
        uneven = known is not None and link > 0 and is_uneven(links)
        if uneven:
            alone_of, reads = zip(*((left / rates.host, attended) for *_, attended, left in kinds), strict=True)
            seconds_of = LayerSeconds(links, alone_of, reads)
            parts = self._busy_parts.of(share, groups, rates, linear * layers, seconds_of)
        waits = []
        for i, (count, _, leave, on_link, attended, left) in enumerate(kinds):
            if leave > 0:
                alone = left / rates.host
                hosted += int(count * left)
                # A layer's turn on the link begins as the layer before it ends, with the linear part.
                busy = min(max(on_link - linear, 0.0) / alone, 1.0) if parts is None else parts[i]
                busy_bytes += count * left * busy
                waits.append((count * leave, left / leave, attended, on_link))
                by_host = rates.host_overhead + alone / leave / (1 - rates.shared * busy)
                exposed += count * leave * max(by_host - attended, 0.0)
        base = 0.0 if known is None else linear * layers + device
        busy = busy_bytes / hosted if hosted else 0.0
        fetching, copies = link, round(sent)
        if AT_A_TIME * longest > room:
            link, fetching, copies = self._short_of_room(groups, [take for _, take, *_ in kinds], room)
        seconds = max(base + exposed, fetching)
        return Prediction(
            *(share, seconds, base, exposed, link, fetching, fetched, hosted, device, layers, copies, busy),
            *(tuple(waits), uneven, self._errors.value),
        )

    def _short_of_room(self, groups: Groups, takes: Sequence[float], room: float) -> tuple[float, float, int]:
        """Seconds in which the link is busy, seconds that fetches take one behind the other, and copies, where two
        layers' fetches do not fit into the room: a part of a layer's waits for the layer before it to be read, and is a
        copy of its own.

        Args:
            groups: of the layers.
            takes: blocks that a layer of each group fetches.
            room: bytes.
        """
        rates, link, fetching, copies = self.rates, 0.0, 0.0, 0
        order = [i for i in groups.order if takes[i]]
        # How often each kind of layer is behind each: the first one is behind the last one of the step before.
        for (i, before), count in Counter(zip(order, [order[-1], *order[:-1]], strict=True)).items():
            take, nbytes = takes[i], groups[i][0].block_bytes
            late = take - max(room - takes[before] * groups[before][0].block_bytes, 0.0) // nbytes
            on_link, alone = rates.copy_overhead + take * nbytes / rates.up, 0.0
            copies += count
            if late > ROUNDED:
                late = min(late, take)
                alone = rates.copy_overhead + late * nbytes / rates.up + take * nbytes / rates.device
                if late < take:
                    on_link += rates.copy_overhead
                    copies += count
            link += count * on_link
            fetching += count * max(on_link, alone)
        return link, fetching, copies

    def observe(
        self,
        record: StepRecord,
        prediction: Prediction | None,
        part: float = 1.0,
        *,
        alike: bool = True,
        copies: int | None = None,
    ) -> tuple[str, ...]:
        """Learn from a step.

        Args:
            record: what it took.
            prediction: what was predicted of it; None: nothing, so that only rates are learned.
            part: of the model that the prediction is of.
            alike: whether it is a step of the kind that this model predicts. Others tell the link's rates: more queries
                take longer for the same bytes.
            copies: in which the step fetched, on all devices; None: as predicted.

        Returns:
            which of the link's rate ("up"), the host's and the linear part are no longer what they were: what was seen
            before says little then.
        """
        rates, changed = self.rates, dict[str, float]()
        if copies is None:
            copies = 0 if prediction is None else prediction.copies
        moving = prediction is not None and self._moving(record, prediction, part)
        for name, median, moved, seconds, overhead in (
            ("up", self._up, record.bytes_up, record.seconds_up, copies * rates.copy_overhead),
            ("down", self._down, record.bytes_down, record.seconds_down, 0.0),
        ):
            if moved and seconds > 0 and not (moving and overhead > MOST_OVERHEADS * seconds):
                known: float = getattr(rates, name)
                says_nothing = rates.measured and abs(seconds - overhead - moved / known) <= UNSURE * overhead
                median.add(known if says_nothing else moved / max(seconds - overhead, seconds * LEAST_MOVING))
                assert median.value is not None
                if len(median) >= self._few:
                    changed[name] = median.value
        if alike and record.host_bytes and record.host_seconds > 0 and record.seconds > 0:
            changed |= self._host_rates(record, prediction, part)
        jumped: tuple[str, ...] = ()
        if copies and record.bytes_up and record.seconds_up > 0 and not rates.measured:
            self._copies.append((record.seconds_up / copies, record.bytes_up / copies))
            self._copied += 1
            if self._copied % OFTEN == 0:
                changed |= self._copy_overhead(rates.copy_overhead)
        if changed:
            # Of rates that steps are predicted with.
            jumped = tuple(
                name
                for name in ("up", "host")
                if name in changed and abs(changed[name] - getattr(rates, name)) > JUMP * getattr(rates, name)
            )
            self.rates = replace(rates, **changed)  # type: ignore[arg-type]
        if prediction is not None and record.seconds > 0 and part > 0 and not moving:
            if self._linear.value is not None:
                self._errors.add(abs(prediction.seconds - record.seconds * part) / (record.seconds * part))
            for_host, for_copies = self._waits(record, prediction, part)
            rest = record.seconds - for_host - for_copies - prediction.device / part
            if self._learn_linear(rest, prediction, part, self._is_late(record, prediction, for_copies)):
                jumped = (*jumped, "linear")
            self._fit_overheads(prediction, part)
        return jumped

    def _copy_overhead(self, known: float) -> dict[str, float]:
        """What a copy takes besides its bytes, and the link's rate, from copies of different size; nothing without."""
        sizes = [nbytes for _, nbytes in self._copies]
        small = min(sizes)
        larger = sum([nbytes >= DIFFERENT * small for nbytes in sizes])
        if not OF_EACH <= larger <= len(sizes) - OF_EACH:
            return {}
        overhead, per_byte = line_of(self._copies)
        # Once more without what was disturbed.
        kept = [x for x in self._copies if abs(overhead + per_byte * x[1] - x[0]) <= JUMP * x[0]]
        if OF_EACH <= len(kept) < len(sizes):
            overhead, per_byte = line_of(kept)
        overhead = min(overhead, MOST_OVERHEAD)
        if per_byte <= 0 or abs(overhead - known) < JUMP * max(overhead, known):
            return {}
        self._up = Median()
        for seconds, nbytes in list(self._copies)[-WINDOW:]:
            self._up.add(nbytes / max(seconds - overhead, seconds * LEAST_MOVING))
        assert self._up.value is not None
        return {"copy_overhead": overhead, "up": self._up.value}

    def _fit_overheads(self, prediction: Prediction, part: float) -> None:
        """Where steps take less than what is known of their parts, less of the host's overhead is; then of the device's
        attention."""
        seen = self._linear
        if len(seen) < OF_EACH or seen.value is None or seen.value >= 0:
            return
        rates, over = self.rates, -seen.value * part
        waiting = sum([x[0] for x in prediction.waits])
        if waiting:
            less = min(rates.host_overhead, over / waiting)
            rates, over = replace(rates, host_overhead=rates.host_overhead - less), over - less * waiting
        if over > 0 and prediction.device > 0:
            left = max(1 - over / prediction.device, 1 - MOST_LOST)
            rates = replace(rates, device=min(rates.device / left, FASTEST))
        self.rates = rates
        self._linear = LinearPart(0.0, hosted=waiting > 0)

    def _moving(self, record: StepRecord, prediction: Prediction, part: float) -> bool:
        """Whether a step carried out something other than what was predicted, as after a change of the share."""
        if self._linear.value is None or part < 1:
            return False
        spilled = prediction.fetched_bytes + prediction.host_bytes
        return abs(record.bytes_up - prediction.fetched_bytes) > MOVING * spilled

    def _is_late(self, record: StepRecord, prediction: Prediction, for_copies: float) -> bool:
        """Whether a step waited for the link, so that the linear part is at most what is left of it. Where nobody
        chooses another share that is taken for it. Of a step in which no layer stalled it is not enough that it was
        predicted to."""
        waited = prediction.fetching > (1 - JUMP) * (prediction.base + prediction.exposed)
        waited = waited and record.stall_seconds > STALLED * record.seconds
        waited = waited or for_copies > STALLED * record.seconds
        return waited and self._chooses and bool(prediction.waits)

    def _learn_linear(self, seconds: float, prediction: Prediction, part: float, late: bool) -> bool:
        """The linear part. What it seems to be longer with host attention than without is that one's overhead.

        Returns:
            whether it is no longer what it was in such steps.
        """
        found, waiting = self._linear, sum([x[0] for x in prediction.waits])
        self._waiting = waiting or self._waiting
        first, before = found.value is None, found.of(waiting > 0)
        found.add(seconds, hosted=waiting > 0, late=late)
        more = None if late else found.more_with_host()
        if more is not None:
            overhead = self.rates.host_overhead + more * part / max(self._waiting, 1)
            self.rates = replace(self.rates, host_overhead=min(max(overhead, 0.0), MOST_OVERHEAD))
            self._linear = LinearPart(found.without.value, hosted=waiting > 0)
            return False
        if before is None:
            return first
        assert found.value is not None
        return abs(found.value - before) > JUMP * (before + prediction.device / part)

    def _waits(self, record: StepRecord, prediction: Prediction, part: float) -> tuple[float, float]:
        """Seconds in which the device waited for host attention, from what that took, and for copies alone. A layer
        that needs both waits for its copies while the host attends for it."""
        if not prediction.host_bytes:
            return 0.0, record.stall_seconds
        if not record.host_bytes:
            return prediction.exposed / part, record.stall_seconds
        per_byte, alone, both = record.host_seconds / record.host_bytes, 0.0, 0.0
        for count, left, attended, on_link in prediction.waits:
            waited = count * max(self.rates.host_overhead + left * per_byte - attended, 0.0)
            if on_link and self._one_share:
                both += waited
            else:
                alone += waited
        return (alone + both) / part, max(record.stall_seconds - both / part, 0.0)

    def _host_rates(self, record: StepRecord, prediction: Prediction | None, part: float) -> dict[str, float]:
        """The host's rate with the link idle, and what it loses to a busy link, after one more step."""
        seen = record.host_bytes / record.host_seconds
        busy = min(record.seconds_up / record.seconds, 1.0)
        if prediction is not None and prediction.copies and prediction.waits:
            if self.linear is None:
                return {}  # nobody knows yet for how much of host attention the link was busy
            busy = self._busy(record, prediction, part)
            if self._waits(record, prediction, part)[1] > STALLED * record.seconds:
                busy = 1.0  # the link is behind
        if busy < IDLE:
            self._alone.add(seen / (1 - self.rates.shared * busy))
        else:
            before = self._overlapped.value
            self._overlapped.add(seen / (1 - self.rates.shared * busy))
            now = self._overlapped.value
            assert now is not None
            if self._known is not None and now > self._known * (1 + JUMP):
                self._known = None  # with a busy link it does more than it was said to do alone
            alone = self._rate_alone()
            if alone is not None and busy >= LOUD:
                self._lost.add(min(max((1 - seen / alone) / busy, 0.0), MOST_LOST))
            # The first ones differ, for blocks still move.
            if before is not None and len(self._overlapped) > WINDOW // 2 and abs(now / before - 1) > JUMP:
                # Another host: what it did alone, and what it lost, is not known any more.
                self._alone, self._known, self._lost = Median(), None, Median()
                return {"host": now, "shared": self._shared}
        lost = self._lost.value if len(self._lost) >= self._few else None
        found = {} if lost is None else {"shared": lost}
        alone = self._rate_alone()
        host = self._overlapped.value if alone is None else alone
        assert host is not None
        return found | {"host": host}

    def _busy(self, record: StepRecord, prediction: Prediction, part: float) -> float:
        """The share of host attention during which the link was busy: longer or shorter than predicted in all layers
        alike."""
        slower = record.seconds_up * part / prediction.link
        if prediction.uneven:
            return min(prediction.busy * slower, 1.0)
        linear = (self.linear or 0.0) * part / prediction.layers
        attended = [left / self.rates.host for _, left, _, _ in prediction.waits]
        busy = [
            count * min(max(on_link * slower - linear, 0.0), seconds)
            for (count, _, _, on_link), seconds in zip(prediction.waits, attended, strict=True)
        ]
        return sum(busy) / sum([x[0] * seconds for x, seconds in zip(prediction.waits, attended, strict=True)])

    def _rate_alone(self) -> float | None:
        """The host's rate with the link idle; None: not known. What was said of it counts until some steps have shown
        another one: of the first ones nobody knows yet how busy the link was."""
        few = self._known is not None and len(self._alone) < OF_EACH
        return self._known if few else self._alone.value

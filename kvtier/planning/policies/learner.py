"""`ShareLearner`: which share of one cache's spilled blocks is fetched, learned from what its steps take.

Grows, shrinks, probes and remembers as Pie does (section 3.4.2). What each rule gave: docs/design/planner.md.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.planning.costs import JUMP, CostModel, Decision, Prediction
from kvtier.planning.makespan.groups import Groups, alike
from kvtier.planning.policies.shares import room_for
from kvtier.planning.rates import WINDOW, Median, Rates
from kvtier.planning.step import LayerState, StepPlan, StepRecord, StepState

#: Shares of the spilled blocks that are considered: so many, evenly from none to all.
CHOICES = 33
#: Steps between two looks at the choice, and the part by which spilled blocks may change before an earlier one.
PERIOD, DRIFT = 8, 0.05
#: A look predicts the choices that are so far away from the present one; where one of these gains, each so many-th one;
#: after so many looks, one predicts all of them.
AWAY, SPACING, BELIEVED = (1, 4, 16), 4, 16
#: A choice is left for another that promises so much less, or a quarter of what predictions are off by, up to so much.
HYSTERESIS, MOST_HYSTERESIS = 0.01, 0.05
#: A choice that is not yet believed is left for another that promises so much less.
SURE = 0.1
#: What a choice gave is believed after so many steps of it; of as many the median is kept, for so many steps.
SEEN, MEMORY = 11, 512
#: Steps in the beginning that fetch nothing, which shows what the host does with the link idle.
START = 1
#: Where nobody has measured the link, the first step that fetches takes no longer than the one before, on a link so
#: many times slower than estimated.
CAUTION = 6
#: Steps after a change of the choice that say little of it: blocks have yet to move.
SETTLE = 3
#: Steps between two probes at first and at the most, and how far away they try; the second where the first costs more.
PROBE, RARELY, NEAR = 64, 1024, (3, 1)
#: What a probe may be predicted to cost: such a part of the steps since the last one. So what is believed of choices
#: that nobody makes, as after a disturbance, is looked at again some time, however bad it seems.
PRICE = 0.0025
#: A probe ends after so many steps that took longer than before it.
GIVEN_UP = 3
#: A rate that changes is followed at the next look, but for the last of so many changes in so many steps: it goes to
#: and fro.
JUMPS, CALM = 4, 64
#: Steps of a cache in which rates change because nothing is known yet.
LEARNED = 2 * WINDOW
#: Steps between two looks then: enough to measure a choice, and no multiple of a short period, of which each look would
#: see the same part.
RESTLESS_PERIOD = 21
#: What choices are predicted to take at one look.
_Predict = Callable[[int], Prediction]


@dataclass(slots=True)
class _Seen:
    """What a choice gave: seconds of a step as a multiple of the prediction. Of a probe that was given up, the steps
    that it had are enough."""

    ratio: Median = field(default_factory=lambda: Median(SEEN))
    at: int = 0
    given_up: bool = False


@dataclass(slots=True)
class _Told:
    """A step that nothing was learned from yet: its number, what was predicted of it, in how many copies it fetched on
    all devices, and whether it is of the kind that is planned."""

    step: int
    record: StepRecord
    prediction: Prediction | None
    copies: int
    alike: bool


@dataclass(slots=True)
class ShareLearner:
    """What is known of one cache's steps of one kind on one device, those of one token or of some, and which share of
    the spilled blocks is fetched in the next one.

    Attributes:
        model: what steps cost.
        choice: the share that is fetched, in parts of `CHOICES - 1`; made once `started`.
        step: number of the step under way.
        told: steps that nothing was learned from yet.
        prediction: of the step under way; None: it is not planned.
        plan: of these `layers`, for `planned_for` and `planned_layers`; `reserve` is of it.
        groups: of `grouped`, the layers that were grouped last.
        expected: what `plan` is predicted to take, while nothing is learned.
        part: of the model's layers that the device has.
        decisions: the latest changes of the choice.
    """

    model: CostModel
    choice: int = 0
    step: int = 0
    looked: int = -PERIOD
    near_looks: int = 0
    chosen: int = 0
    starting: bool = False
    fetched: bool = False
    compared: bool = False
    jumped: bool = False
    jumps: deque[int] = field(default_factory=lambda: deque(maxlen=JUMPS))
    spilled: int = 0
    reserve: int = 0
    device_bytes: int = 0
    started: bool = False
    seen: dict[int, _Seen] = field(default_factory=dict)
    prediction: Prediction | None = None
    expected: Prediction | None = None
    told: list[_Told] = field(default_factory=list)
    part: float = 1.0
    plan: StepPlan | None = None
    planned_for: tuple[object, ...] = ()
    planned_layers: list[LayerState] = field(default_factory=list)
    layers: list[LayerState] | None = None
    layers_spilled: int = 0
    groups: Groups = field(default_factory=lambda: alike([]))
    grouped: list[LayerState] = field(default_factory=list)
    probe_from: int | None = None
    probe_until: int = 0
    probe_limit: float = 0.0
    probe_bad: int = 0
    probed: int = 0
    tried: int = -1
    tried_until: int = -1
    tried_link: float = 0.0
    moved_until: int = -1
    next_probe: int = PROBE
    interval: int = PROBE
    side: int = 1
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def restless(self) -> bool:
        """Whether a rate goes to and fro."""
        return len(self.jumps) == JUMPS and self.step - self.jumps[0] <= CALM

    @property
    def free(self) -> bool:
        """Whether no choice is held on to: none is made yet, or what it was made for has changed."""
        return not self.started or self.starting or self.jumped

    # Learning

    def tell(self, record: StepRecord, copies: int, *, alike: bool) -> None:
        """Learn from what a step took, now or before the next look at the choice.

        Args:
            record: of the step.
            copies: in so many it fetched on all devices.
            alike: it is of the kind that is planned here.
        """
        self.told.append(_Told(self.step, record, self.prediction, copies, alike))
        self.prediction = None
        if len(self.told) >= RESTLESS_PERIOD or not self._is_calm():
            self.learn()

    def _is_calm(self) -> bool:
        """Whether nothing has to be learned before the next look at the choice. What a look reads is in no cache of the
        processor between two steps: to learn from some records at once takes little longer than from one."""
        settled = self.started and not self.starting and self.probe_from is None
        return settled and self.step > LEARNED and self.step - self.chosen > SETTLE

    def learn(self) -> None:
        """Learn from the steps since the last time."""
        told, self.told, self.expected = self.told, [], None
        stale = False
        for step in told:
            if stale:  # what was predicted before a rate changed says nothing of the steps behind that
                step.prediction = None
            stale = self._learn_from(step) or stale

    def _learn_from(self, told: _Told) -> bool:
        """Learn from a step. Whether what was predicted so far is of other rates."""
        rates, at, record, prediction = self.model.rates, told.step, told.record, told.prediction
        jumped = self.model.observe(record, prediction, self.part, alike=told.alike, copies=told.copies)
        if jumped and at > LEARNED:
            self.jumps.append(at)
        new = bool(jumped) and not self.restless
        tried = at <= self.tried_until and not ("up" in jumped and self._is_another_link(at, rates))
        if new and (tried or (at <= self.moved_until and "up" not in jumped)):
            # It is the change of the choice that shows other rates: what others gave is what it was.
            self._rescale(rates)
        elif new:
            self.seen.clear()
            self.looked, self.jumped, self.probe_from = -PERIOD, True, None  # no probe tells anything now
            self.interval = PROBE
            self.next_probe = min(self.next_probe, at + PROBE)
            return True
        seconds = record.seconds * self.part
        if at - self.chosen > SETTLE and prediction is not None and prediction.base and seconds > 0:
            self._note(at, seconds / prediction.seconds, seconds)
        # Where parts turn out to be less than they are taken for, rates are others too.
        now = self.model.rates
        return new or (now.device, now.host_overhead) != (rates.device, rates.host_overhead)

    def _is_another_link(self, at: int, before: Rates) -> bool:
        """Whether the link's rate, which has jumped, is another one than before the last probe, whose end is some steps
        ago. Then it is no rate of the probe's, unless what a copy takes besides was fitted with it."""
        now, known = self.model.rates, self.tried_link
        back = self.probe_from is None and at - self.chosen > SETTLE
        return back and now.copy_overhead == before.copy_overhead and abs(now.up - known) > JUMP * known

    def _note(self, at: int, ratio: float, seconds: float) -> None:
        """What the choice gave in a step: seconds, and their ratio to the prediction."""
        if self.probe_from is not None and seconds > self.probe_limit:
            self.probe_bad += 1
            if self.probe_bad == GIVEN_UP:
                self.probe_until = at
        seen = self.seen.setdefault(self.choice, _Seen())
        seen.ratio.add(ratio)
        seen.at = at
        seen.given_up = self.probe_from is not None and self.probe_bad >= GIVEN_UP

    # Choosing

    def group(self, layers: list[LayerState]) -> Groups:
        """The layers that are alike: the same object, as long as these are what they were."""
        if self.grouped is not layers and self.grouped != layers:
            self.groups = alike(layers)
        self.grouped = layers
        return self.groups

    def is_due(self, spilled: int) -> bool:
        """Whether to look at the choice in this step, in which so many blocks are spilled."""
        if self.probe_from is not None:
            return self.step >= self.probe_until
        if self.starting:
            return self.step > START
        period = RESTLESS_PERIOD if self.restless else PERIOD
        return self.step - self.looked >= period or abs(spilled - self.spilled) > DRIFT * self.spilled

    def look(self, state: StepState, spilled: int, number: int) -> None:
        """Choose a share, perhaps another one.

        Args:
            state: of the step.
            spilled: blocks, in all layers.
            number: of the step, as decisions have it: of all kinds.
        """
        self.looked = self.step
        groups = self.group(state.layers)
        self.part = len(state.layers) / max(state.model_layers, len(state.layers))
        self.spilled = spilled
        predict = functools.cache(functools.partial(self._predict, groups))
        attends = any([x.host_attention for x, _ in groups])
        reason, was_free = "model", self.free
        if self.probe_from is not None:
            best, reason = self._after_probe(predict)
        else:
            best = self._best(predict) if attends else CHOICES - 1
            self.starting = attends and not (self.started or self.model.rates.measured)
            if self.starting:
                best, reason = 0, "first"
            elif not self.model.rates.measured and "up" not in self.model.learned and (best or not self.fetched):
                best, reason, self.starting = self._careful(predict, best), "first", True
                self.fetched = True
            elif best == self.choice and self._may_compare():
                best, reason = self._compare(predict)
            elif best == self.choice and attends and self._may_probe():
                best, reason = self._probe(predict)
        if best != self.choice or not self.started:
            before = self.choice / (CHOICES - 1)
            self.choice, self.chosen, self.started = best, self.step, True
            self.seen.pop(best, None)  # what it gives is measured again
            shown = self.step + SETTLE + WINDOW
            if reason in ("probe", "back"):
                self.tried_until = shown
            elif reason == "model" and not was_free:
                self.moved_until = shown
            self.decisions.append(Decision(number, reason, predict(best), before))

    def _is_young(self) -> bool:
        """Whether the choice has yet to show what it is worth."""
        return self.step - self.chosen < SEEN + SETTLE

    def _has_faded(self, predict: _Predict) -> bool:
        """Whether the choice promises less now than when it was made: by other rates, or for a longer context."""
        promised = self.decisions[-1].prediction.seconds if self.decisions else 0.0
        return predict(self.choice).seconds > promised * (1 + HYSTERESIS)

    def _careful(self, predict: _Predict, best: int) -> int:
        """The largest share up to the best that costs little, should the link be far slower than estimated. Where the
        best is none, the largest that is expected to cost little: the link may be far faster, too."""
        rates, before = self.model.rates, predict(0).seconds
        most = before * rates.up / CAUTION
        if not best:
            least = before * (1 + MOST_HYSTERESIS)
            best = next((x for x in range(CHOICES - 1, 0, -1) if predict(x).seconds <= least), 0)
            if not best:
                return 0
        # Of few blocks small shares are none, and show nothing of the link.
        some = next((x for x in range(1, best) if predict(x).fetched_bytes), best)
        return next((x for x in range(best, some, -1) if predict(x).fetched_bytes <= most), some)

    def _predict(self, groups: Groups, choice: int) -> Prediction:
        share = choice / (CHOICES - 1)
        room = room_for(groups, share, self.device_bytes, self.reserve)
        return self.model.step(groups, share, room - self.reserve, self.part, room)

    def _expected(self, predict: _Predict, choice: int) -> float:
        """Predicted seconds, corrected by what this choice, or the nearest that was tried, gave."""
        return self._corrected(predict(choice).seconds, choice, self._believed())

    def _believed(self) -> list[tuple[int, float]]:
        """Choices that were tried for long enough, and what each gave, as a multiple of the prediction."""
        return [
            # Of rates that go to and fro, the median is one of them.
            (choice, seen.ratio.mean if self.restless else seen.ratio.value)
            for choice, seen in self.seen.items()
            if len(seen.ratio) >= (GIVEN_UP if seen.given_up else SEEN)
            and self.step - seen.at <= MEMORY
            and seen.ratio.value is not None
        ]

    def _corrected(self, seconds: float, choice: int, believed: Sequence[tuple[int, float]]) -> float:
        if not believed:
            return seconds
        near, ratio = min(believed, key=lambda x: abs(x[0] - choice))
        # What is wrong about one choice is less wrong about another, the further away it is.
        return seconds * (1 + (ratio - 1) * 0.5 ** (abs(near - choice) / NEAR[0]))

    def _best(self, predict: _Predict) -> int:
        believed, free = self._believed(), self.free

        def expected(choice: int) -> float:
            return self._corrected(predict(choice).seconds, choice, believed)

        # A choice is given the time to show what it is worth, unless what it is chosen for has changed.
        sure = self._is_young() and not self._has_faded(predict)
        gain = max(self._hysteresis(), SURE if sure else 0.0)
        self.near_looks += 1
        if self.near_looks > BELIEVED:
            self.near_looks, seen = 0, {x: expected(x) for x in range(CHOICES)}
        else:
            seen = {} if free else {x: expected(x) for x in _near(self.choice)}
            if seen and seen[self.choice] <= min(seen.values()) * (1 + gain / SPACING):
                return self.choice
            seen |= {x: expected(x) for x in _some(self.choice) if x not in seen}
        best = _least(expected, seen)
        if not free and seen[self.choice] <= seen[best] * (1 + gain):
            return self.choice
        self.jumped = False
        return _as_good(expected, seen, seen[best] * (1 + HYSTERESIS / 4))

    def _hysteresis(self) -> float:
        """What another choice has to promise: more, where predictions have been worse."""
        if self.restless:
            return MOST_HYSTERESIS
        return min(max(HYSTERESIS, (self.model.error or 0.0) / 4), MOST_HYSTERESIS)

    # Probing

    def _may_probe(self) -> bool:
        return self.step >= self.next_probe and self.choice in self.seen

    def _probe(self, predict: _Predict) -> tuple[int, str]:
        """Another choice: what would be best but for what it once gave, or one next to the present one, on either side
        in turn. Not one that is predicted to cost too much."""
        now = self._expected(predict, self.choice)
        self.next_probe = self.step + self.interval
        worst = now * (1 + PRICE * (self.step - self.probed) / GIVEN_UP)
        predicted = {x: predict(x).seconds for x in _some(self.choice)}
        best = _least(lambda x: predict(x).seconds, predicted)
        others = [best] if predicted[best] < now * (1 - HYSTERESIS) else []
        self.side = -self.side
        others += [
            min(max(self.choice + side * distance, 0), CHOICES - 1)
            for distance in NEAR
            for side in (self.side, -self.side)
        ]
        for other in others:
            if other not in (self.choice, self.tried) and predict(other).seconds <= worst:
                return self._try(other, now)
        return self.choice, "model"

    def _may_compare(self) -> bool:
        """Whether nobody knows yet what a copy takes besides its bytes."""
        return not (self.compared or self.model.rates.measured or not self.choice) and self.choice in self.seen

    def _compare(self, predict: _Predict) -> tuple[int, str]:
        """Try a share that fetches twice as much, unless that is predicted to cost much: copies of two sizes tell what
        each takes besides its bytes."""
        self.compared = True
        now = self._expected(predict, self.choice)
        fetched = predict(self.choice).fetched_bytes
        for other in range(self.choice + 1, CHOICES):
            predicted = predict(other)
            if predicted.fetched_bytes >= 2 * fetched > 0:
                if predicted.seconds > now * (1 + MOST_HYSTERESIS):
                    break
                self.interval = PROBE // 2
                return self._try(other, now)
        return self.choice, "model"

    def _try(self, other: int, now: float) -> tuple[int, str]:
        """A probe of another choice; `now`: seconds that the present one is expected to take."""
        self.tried, self.tried_link = other, self.model.rates.up
        self.probe_from, self.probe_until = self.choice, self.step + SEEN + SETTLE + 1
        self.probe_limit, self.probe_bad = now * (1 + HYSTERESIS), 0
        return other, "probe"

    def _after_probe(self, predict: _Predict) -> tuple[int, str]:
        before, self.probe_from = self.probe_from, None
        assert before is not None
        least = self._expected(predict, before) * (1 - self._hysteresis())
        better = self.probe_bad < GIVEN_UP and self._expected(predict, self.choice) < least
        self.interval = PROBE if better else min(2 * self.interval, RARELY)
        self.probed = self.step
        self.next_probe = self.step + self.interval
        return (self.choice, "model") if better else (before, "back")

    def _rescale(self, before: Rates) -> None:
        """Rates are others, and what was seen of choices is not: its ratio to what is predicted now."""
        now = self.model.rates
        for choice, seen in self.seen.items():
            new = self._predict(self.groups, choice).seconds
            self.model.rates = before
            old = self._predict(self.groups, choice).seconds
            self.model.rates = now
            if old and new:
                seen.ratio.scale(old / new)


def _near(choice: int) -> list[int]:
    """The choice, those next to it and ever further away, none and all among them. Where the makespan falls ever more
    slowly to its least, with no step but at none and all, one of these gains at least a quarter of what the best one
    does: it is at a quarter of the distance to that, or further."""
    away = [choice + side * distance for distance in AWAY for side in (-1, 1)]
    return sorted({choice, 0, CHOICES - 1, *[x for x in away if 0 < x < CHOICES - 1]})


def _some(choice: int) -> list[int]:
    """The choice, those next to it, and each `SPACING`-th, none and all among them."""
    return [x for x in range(CHOICES) if abs(x - choice) <= 1 or x % SPACING == 0]


def _least(seconds: Callable[[int], float], seen: dict[int, float]) -> int:
    """The choice that takes least, found from some that were seen: what is between each that takes less than the next
    ones, and these, is halved until nothing is. What is looked at besides is added to `seen`."""
    while True:
        order, new = sorted(seen), set[int]()
        for below, x, above in zip([-1, *order], order, [*order[1:], CHOICES], strict=False):
            if seen[x] < seen.get(below, math.inf) and seen[x] <= seen.get(above, math.inf):
                new |= {(max(below, 0) + x) // 2, (x + min(above, CHOICES - 1) + 1) // 2} - seen.keys()
        if not new:
            return min(order, key=seen.__getitem__)  # of equal ones the first
        seen.update({x: seconds(x) for x in new})


def _as_good(seconds: Callable[[int], float], seen: dict[int, float], most: float) -> int:
    """The least choice, and so the least traffic, that takes no more than `most` seconds, where they fall to it."""
    best = min([x for x, each in seen.items() if each <= most])
    below = max([x for x in seen if x < best], default=-1)
    while best - below > 1:
        between = (best + below) // 2
        best, below = (between, below) if seconds(between) <= most else (best, between)
    return best

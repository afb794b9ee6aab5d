"""`Adaptive`: how much of what is spilled is fetched and how much is attended to on the host, priced by measurement.

The makespan of a step, its two rates and what each choice gave: docs/design/planner.md. Grows, shrinks, probes and
remembers as Pie does (section 3.4.2), and spends the CPU where Neo does (section 3.2).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.groups import Groups, alike
from kvtier.planning.policies.shares import FixedShare, room_for
from kvtier.planning.policy import WRITE_THROUGH, Policy
from kvtier.planning.rates import WINDOW, Median, Rates
from kvtier.planning.step import MAX_DECODE_TOKENS, LayerState, StepPlan, StepRecord, StepState

#: Shares of the spilled blocks that are considered: so many, evenly from none to all.
CHOICES = 33
#: Steps between two looks at the choice, and the part by which spilled blocks may change before an earlier one.
PERIOD, DRIFT = 8, 0.05
#: Each so many-th choice is seen by every look, and such looks, one after the other, until one at all choices.
SPACING, BELIEVED = 4, 16
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
#: Caches of which something is kept, the latest ones.
CACHES = 1024


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
class _Cache:
    """What is known of one cache's steps of one kind on one device: those of one token, or of some."""

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
    probe_from: int | None = None
    probe_until: int = 0
    probe_limit: float = 0.0
    probe_bad: int = 0
    probed: int = 0
    tried: int = -1
    tried_until: int = -1
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


#: Of a cache's steps: the device, and whether they are of several tokens each, as those that verify drafts.
_Kind = tuple[str, bool]
#: What choices are predicted to take at one look.
_Predict = Callable[[int], Prediction]


class Adaptive(FixedShare):
    """Fetches what hides behind a step, lets the host attend to the rest, and learns what each costs.

    Args:
        rates: of the machine, such as `HardwareProfile.rates()`; None: what `kvtier.calibrate` stored of it, or else
            estimates. They are refined by what steps take.
        write_through: as of `Policy`.
    """

    def __init__(self, rates: Rates | None = None, *, write_through: float = WRITE_THROUGH) -> None:
        super().__init__(0.0, write_through=write_through)
        self.rates = Rates() if rates is None else rates
        self._given = rates is not None
        self._default = Policy(write_through=write_through)
        #: What is stored of devices.
        self._stored: dict[str, Rates] = {}
        self._caches: dict[int, dict[_Kind, _Cache]] = {}

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        if not state.overlaps or state.tokens > MAX_DECODE_TOKENS:
            # Forwards of many tokens take what they take, and tell nothing of a step that decodes.
            share = self._last_share(state) if state.overlaps else None
            return self._default.plan(state) if share is None else self.plan_of(state, share)
        known = self._cache(state.cache, state.device, state.tokens > 1)
        if known.layers is not state.layers:  # else it is the list of the step before
            known.layers, known.layers_spilled = state.layers, sum([x.spilled for x in state.layers])
        spilled = known.layers_spilled
        if not (spilled or known.started):  # another cache has spilled: nothing is seen here
            return self._default.plan(state)
        known.step += 1
        known.device_bytes = state.device_bytes
        if self._is_due(known, spilled):
            self._learn(known)
            self._look(known, state, spilled)
        return self._as_planned(known, state)

    def use_rates(self, device: str, rates: Rates) -> None:
        """See `Policy.use_rates`. Rates that were given are kept."""
        if not self._given:
            self._stored[device] = rates

    def observe(self, record: StepRecord) -> None:
        """See `Policy.observe`."""
        mine = [(several, known) for (_, several), known in self._caches.get(record.cache, {}).items()]
        # Of what was planned on any device, for steps of whichever kind: the record is of all of it.
        copies = sum([known.prediction.copies for _, known in mine if known.prediction is not None])
        for several, known in mine:
            alike = record.tokens <= MAX_DECODE_TOKENS and (record.tokens > 1) == several
            known.told.append(_Told(known.step, record, known.prediction, copies, alike))
            known.prediction = None
            if len(known.told) >= RESTLESS_PERIOD or not self._is_calm(known):
                self._learn(known)

    # Learning

    def _is_calm(self, known: _Cache) -> bool:
        """Whether nothing has to be learned before the next look at the choice. What a look reads is in no cache of the
        processor between two steps: to learn from some records at once takes little longer than from one."""
        settled = known.started and not known.starting and known.probe_from is None
        return settled and known.step > LEARNED and known.step - known.chosen > SETTLE

    def _learn(self, known: _Cache) -> None:
        """Learn from the steps since the last time."""
        told, known.told, known.expected = known.told, [], None
        stale = False
        for step in told:
            if stale:  # what was predicted before a rate changed says nothing of the steps behind that
                step.prediction = None
            stale = self._learn_from(known, step) or stale

    def _learn_from(self, known: _Cache, told: _Told) -> bool:
        """Learn from a step. Whether what was predicted so far is of other rates."""
        rates, at, record, prediction = known.model.rates, told.step, told.record, told.prediction
        jumped = known.model.observe(record, prediction, known.part, alike=told.alike, copies=told.copies)
        if jumped and at > LEARNED:
            known.jumps.append(at)
        new = bool(jumped) and not known.restless
        if new and (at <= known.tried_until or (at <= known.moved_until and "up" not in jumped)):
            # It is the change of the choice that shows other rates: what others gave is what it was.
            self._rescale(known, rates)
        elif new:
            known.seen.clear()
            known.looked, known.jumped, known.probe_from = -PERIOD, True, None  # no probe tells anything now
            known.interval = PROBE
            known.next_probe = min(known.next_probe, at + PROBE)
            return True
        seconds = record.seconds * known.part
        if at - known.chosen > SETTLE and prediction is not None and prediction.base and seconds > 0:
            self._note(known, at, seconds / prediction.seconds, seconds)
        # Where parts turn out to be less than they are taken for, rates are others too.
        now = known.model.rates
        return new or (now.device, now.host_overhead) != (rates.device, rates.host_overhead)

    def _note(self, known: _Cache, at: int, ratio: float, seconds: float) -> None:
        """What the choice gave in a step: seconds, and their ratio to the prediction."""
        if known.probe_from is not None and seconds > known.probe_limit:
            known.probe_bad += 1
            if known.probe_bad == GIVEN_UP:
                known.probe_until = at
        seen = known.seen.setdefault(known.choice, _Seen())
        seen.ratio.add(ratio)
        seen.at = at
        seen.given_up = known.probe_from is not None and known.probe_bad >= GIVEN_UP

    # Choosing

    def _cache(self, cache: int, device: str, several: bool) -> _Cache:
        mine = self._caches.pop(cache, None)
        if mine is None:
            if len(self._caches) >= CACHES:
                del self._caches[next(iter(self._caches))]
            mine = {}
        kind = (device, several)
        known = mine.pop(kind, None)
        if known is None:
            rates = self._stored.get(device, self.rates)
            latest = next((x for each in (mine, *reversed(self._caches.values())) for x in _on(device, each)), None)
            if latest is not None:  # it is the same link
                link = latest.model.rates
                rates = replace(rates, up=link.up, down=link.down, copy_overhead=link.copy_overhead)
            known = _Cache(CostModel(rates, chooses=True))
        self._caches[cache], mine[kind] = mine, known  # the latest last
        return known

    def _last_share(self, state: StepState) -> float | None:
        """The share of the cache's last step that decoded; None: there was none. The next such step is planned
        again."""
        share = None
        for known in self._of(state.cache, state.device):  # the latest last
            known.prediction = known.plan = None
            share = known.choice / (CHOICES - 1) if known.started else share
        return share

    def _is_due(self, known: _Cache, spilled: int) -> bool:
        if known.probe_from is not None:
            return known.step >= known.probe_until
        if known.starting:
            return known.step > START
        period = RESTLESS_PERIOD if known.restless else PERIOD
        return known.step - known.looked >= period or abs(spilled - known.spilled) > DRIFT * known.spilled

    def _look(self, known: _Cache, state: StepState, spilled: int) -> None:
        """Choose a share, perhaps another one."""
        known.looked = known.step
        groups = alike(state.layers)
        known.part = len(state.layers) / max(state.model_layers, len(state.layers))
        known.spilled = spilled
        predict = functools.cache(functools.partial(self._predict, known, groups))
        attends = any([x.host_attention for x, _ in groups])
        reason, was_free = "model", known.free
        if known.probe_from is not None:
            best, reason = self._after_probe(known, predict)
        else:
            best = self._best(known, predict) if attends else CHOICES - 1
            known.starting = attends and not (known.started or known.model.rates.measured)
            if known.starting:
                best, reason = 0, "first"
            elif not known.model.rates.measured and "up" not in known.model.learned and (best or not known.fetched):
                best, reason, known.starting = self._careful(known, predict, best), "first", True
                known.fetched = True
            elif best == known.choice and self._may_compare(known):
                best, reason = self._compare(known, predict)
            elif best == known.choice and attends and self._may_probe(known):
                best, reason = self._probe(known, predict)
        if best != known.choice or not known.started:
            before = known.choice / (CHOICES - 1)
            known.choice, known.chosen, known.started = best, known.step, True
            known.seen.pop(best, None)  # what it gives is measured again
            number = sum([each.step for each in self._of(state.cache, state.device)])
            shown = known.step + SETTLE + WINDOW
            if reason in ("probe", "back"):
                known.tried_until = shown
            elif reason == "model" and not was_free:
                known.moved_until = shown
            known.decisions.append(Decision(number, reason, predict(best), before))

    def _is_young(self, known: _Cache) -> bool:
        """Whether the choice has yet to show what it is worth."""
        return known.step - known.chosen < SEEN + SETTLE

    def _careful(self, known: _Cache, predict: _Predict, best: int) -> int:
        """The largest share up to the best that costs little, should the link be far slower than estimated. Where the
        best is none, the largest that is expected to cost little: the link may be far faster, too."""
        rates, before = known.model.rates, predict(0).seconds
        most = before * rates.up / CAUTION
        if not best:
            least = before * (1 + MOST_HYSTERESIS)
            best = next((x for x in range(CHOICES - 1, 0, -1) if predict(x).seconds <= least), 0)
            if not best:
                return 0
        return next((x for x in range(best, 1, -1) if predict(x).fetched_bytes <= most), 1)

    def _predict(self, known: _Cache, groups: Groups, choice: int) -> Prediction:
        share = choice / (CHOICES - 1)
        room = room_for(groups, share, known.device_bytes, known.reserve)
        return known.model.step(groups, share, room - known.reserve, known.part, room)

    def _expected(self, known: _Cache, predict: _Predict, choice: int) -> float:
        """Predicted seconds, corrected by what this choice, or the nearest that was tried, gave."""
        return self._corrected(predict(choice).seconds, choice, self._believed(known))

    def _believed(self, known: _Cache) -> list[tuple[int, float]]:
        """Choices that were tried for long enough, and what each gave, as a multiple of the prediction."""
        return [
            # Of rates that go to and fro, the median is one of them.
            (choice, seen.ratio.mean if known.restless else seen.ratio.value)
            for choice, seen in known.seen.items()
            if len(seen.ratio) >= (GIVEN_UP if seen.given_up else SEEN)
            and known.step - seen.at <= MEMORY
            and seen.ratio.value is not None
        ]

    def _corrected(self, seconds: float, choice: int, believed: Sequence[tuple[int, float]]) -> float:
        if not believed:
            return seconds
        near, ratio = min(believed, key=lambda x: abs(x[0] - choice))
        # What is wrong about one choice is less wrong about another, the further away it is.
        return seconds * (1 + (ratio - 1) * 0.5 ** (abs(near - choice) / NEAR[0]))

    def _best(self, known: _Cache, predict: _Predict) -> int:
        believed, free = self._believed(known), known.free

        def expected(choice: int) -> float:
            return self._corrected(predict(choice).seconds, choice, believed)

        # A choice is given the time to show what it is worth, unless what it is chosen for has changed.
        gain = max(self._hysteresis(known), SURE if self._is_young(known) else 0.0)
        known.near_looks += 1
        if known.near_looks > BELIEVED:
            known.near_looks, seen = 0, {x: expected(x) for x in range(CHOICES)}
        else:
            seen = {x: expected(x) for x in _some(known.choice)}
            if not free and seen[known.choice] <= min(seen.values()) * (1 + gain / SPACING):
                return known.choice
        best = _least(expected, seen)
        if not free and seen[known.choice] <= seen[best] * (1 + gain):
            return known.choice
        known.jumped = False
        return _as_good(expected, seen, seen[best] * (1 + HYSTERESIS / 4))

    def _hysteresis(self, known: _Cache) -> float:
        """What another choice has to promise: more, where predictions have been worse."""
        if known.restless:
            return MOST_HYSTERESIS
        return min(max(HYSTERESIS, (known.model.error or 0.0) / 4), MOST_HYSTERESIS)

    # Probing

    def _may_probe(self, known: _Cache) -> bool:
        return known.step >= known.next_probe and known.choice in known.seen

    def _probe(self, known: _Cache, predict: _Predict) -> tuple[int, str]:
        """Another choice: what would be best but for what it once gave, or one next to the present one, on either side
        in turn. Not one that is predicted to cost too much."""
        now = self._expected(known, predict, known.choice)
        known.next_probe = known.step + known.interval
        worst = now * (1 + PRICE * (known.step - known.probed) / GIVEN_UP)
        predicted = {x: predict(x).seconds for x in _some(known.choice)}
        best = _least(lambda x: predict(x).seconds, predicted)
        others = [best] if predicted[best] < now * (1 - HYSTERESIS) else []
        known.side = -known.side
        others += [
            min(max(known.choice + side * distance, 0), CHOICES - 1)
            for distance in NEAR
            for side in (known.side, -known.side)
        ]
        for other in others:
            if other not in (known.choice, known.tried) and predict(other).seconds <= worst:
                return self._try(known, other, now)
        return known.choice, "model"

    def _may_compare(self, known: _Cache) -> bool:
        """Whether nobody knows yet what a copy takes besides its bytes."""
        return not (known.compared or known.model.rates.measured or not known.choice) and known.choice in known.seen

    def _compare(self, known: _Cache, predict: _Predict) -> tuple[int, str]:
        """Try a share that fetches twice as much, unless that is predicted to cost much: copies of two sizes tell what
        each takes besides its bytes."""
        known.compared = True
        now = self._expected(known, predict, known.choice)
        fetched = predict(known.choice).fetched_bytes
        for other in range(known.choice + 1, CHOICES):
            predicted = predict(other)
            if predicted.fetched_bytes >= 2 * fetched > 0:
                if predicted.seconds > now * (1 + MOST_HYSTERESIS):
                    break
                known.interval = PROBE // 2
                return self._try(known, other, now)
        return known.choice, "model"

    def _try(self, known: _Cache, other: int, now: float) -> tuple[int, str]:
        """A probe of another choice; `now`: seconds that the present one is expected to take."""
        known.tried = other
        known.probe_from, known.probe_until = known.choice, known.step + SEEN + SETTLE + 1
        known.probe_limit, known.probe_bad = now * (1 + HYSTERESIS), 0
        return other, "probe"

    def _after_probe(self, known: _Cache, predict: _Predict) -> tuple[int, str]:
        before, known.probe_from = known.probe_from, None
        assert before is not None
        least = self._expected(known, predict, before) * (1 - self._hysteresis(known))
        better = known.probe_bad < GIVEN_UP and self._expected(known, predict, known.choice) < least
        known.interval = PROBE if better else min(2 * known.interval, RARELY)
        known.probed = known.step
        known.next_probe = known.step + known.interval
        return (known.choice, "model") if better else (before, "back")

    def _rescale(self, known: _Cache, before: Rates) -> None:
        """Rates are others, and what was seen of choices is not: its ratio to what is predicted now."""
        now = known.model.rates
        for choice, seen in known.seen.items():
            new = self._predict(known, known.groups, choice).seconds
            known.model.rates = before
            old = self._predict(known, known.groups, choice).seconds
            known.model.rates = now
            if old and new:
                seen.ratio.scale(old / new)

    # The plan

    def _as_planned(self, known: _Cache, state: StepState) -> StepPlan:
        """The choice as a plan for these layers; the last one again where nothing has changed."""
        # The first step of all brings nothing back, whatever room there is.
        key, layers = (known.choice, state.free_bytes, state.device_bytes, state.last is None), state.layers
        share = known.choice / (CHOICES - 1)
        same = known.planned_for == key and (known.planned_layers is layers or known.planned_layers == layers)
        known.planned_layers = layers
        if known.plan is None or not same:
            known.planned_for = key
            known.plan, known.groups = self.plan_of(state, share), alike(state.layers)
            known.reserve = known.plan.reserve
            known.expected = None
        if known.expected is None:
            known.expected = known.model.step(known.groups, share, 0, known.part, known.reserve)
        known.prediction = known.expected
        return known.plan

    # What a user sees

    def prediction(self, cache: int, device: str) -> Prediction | None:
        """See `Policy.prediction`."""
        for several in (False, True):
            known = self._caches.get(cache, {}).get((device, several))
            if known is not None and known.model.linear is not None and known.prediction is not None:
                return known.prediction
        return None

    def decisions(self, cache: int, device: str | None = None) -> list[Decision]:
        """See `Policy.decisions`."""
        found = [x for known in self._of(cache, device) for x in known.decisions]
        return sorted(found, key=lambda x: x.step)

    def model(self, cache: int, device: str | None = None) -> CostModel | None:
        """See `Policy.model`. Of the kind of steps of which there were most."""
        found = max(self._of(cache, device), key=lambda known: known.step, default=None)
        return None if found is None else found.model

    def _of(self, cache: int, device: str | None) -> list[_Cache]:
        return _on(device, self._caches.get(cache, {}))


def _some(choice: int) -> list[int]:
    """The choice, those next to it, and each `SPACING`-th, none and all among them. Where the makespan falls ever more
    slowly to its least, with no step but at none and all, one of these gains at least a quarter of what the best one
    does: it is at a quarter of the distance to that, or further."""
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


def _on(device: str | None, mine: dict[_Kind, _Cache]) -> list[_Cache]:
    """What is known of a cache's steps on a device; None: on any."""
    return [known for (at, _), known in mine.items() if device in (None, at)]

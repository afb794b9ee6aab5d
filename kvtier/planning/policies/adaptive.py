"""`Adaptive`: how much of what is spilled is fetched and how much is attended to on the host, priced by measurement.

The makespan of a step, its two rates and what each choice gave: docs/design/planner.md. Spends the CPU where Neo does
(section 3.2); which share is fetched is learned for each cache (`ShareLearner`).
"""

from __future__ import annotations

from dataclasses import replace

from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.policies.learner import CHOICES, ShareLearner
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import WRITE_THROUGH, Policy
from kvtier.planning.rates import Rates
from kvtier.planning.step import MAX_DECODE_TOKENS, StepPlan, StepRecord, StepState

#: Caches of which something is kept, the latest ones.
CACHES = 1024

#: Of a cache's steps: the device, and whether they are of several tokens each, as those that verify drafts.
_Kind = tuple[str, bool]


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
        self._caches: dict[int, dict[_Kind, ShareLearner]] = {}

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
        if known.is_due(spilled):
            known.learn()
            known.look(state, spilled, sum([each.step for each in self._of(state.cache, state.device)]))
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
            known.tell(record, copies, alike=alike)

    # Caches

    def _cache(self, cache: int, device: str, several: bool) -> ShareLearner:
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
            known = ShareLearner(CostModel(rates, chooses=True))
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

    # The plan

    def _as_planned(self, known: ShareLearner, state: StepState) -> StepPlan:
        """The choice as a plan for these layers; the last one again where nothing has changed."""
        # The first step of all brings nothing back, whatever room there is.
        key, layers = (known.choice, state.free_bytes, state.device_bytes, state.last is None), state.layers
        share = known.choice / (CHOICES - 1)
        same = known.planned_for == key and (known.planned_layers is layers or known.planned_layers == layers)
        known.planned_layers = layers
        if known.plan is None or not same:
            known.planned_for = key
            known.plan = self.plan_of(state, share)
            known.reserve = known.plan.reserve
            known.expected = None
        if known.expected is None:
            known.expected = known.model.step(known.group(layers), share, 0, known.part, known.reserve)
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

    def _of(self, cache: int, device: str | None) -> list[ShareLearner]:
        return _on(device, self._caches.get(cache, {}))


def _on(device: str | None, mine: dict[_Kind, ShareLearner]) -> list[ShareLearner]:
    """What is known of a cache's steps on a device; None: on any."""
    return [known for (at, _), known in mine.items() if device in (None, at)]

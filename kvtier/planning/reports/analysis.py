"""What a decode step is bound by, and what would change it: the state of a step and a policy in, numbers out.

The model is that of docs/design/planner.md, with the rates that the policy has learned, or, where it learns nothing,
that the last steps show. Nothing here is measured for the occasion.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.config import format_size
from kvtier.planning.costs import CostModel, Prediction
from kvtier.planning.makespan.groups import Groups, alike
from kvtier.planning.policies.shares import FixedShare, room_for, room_of
from kvtier.planning.policy import Policy, checked_prediction, fill
from kvtier.planning.rates import Rates
from kvtier.planning.reports.log import Logged
from kvtier.planning.step import MAX_DECODE_TOKENS, LayerState, StepRecord, StepState

#: Shares of the spilled blocks that are considered where the policy chooses one.
SHARES = 33
#: A gain smaller than this is none.
WORTH = 1.01
#: The link is taken to wait for room, not for its rate, if it is busy for less than this while attention waits for it.
BUSY, STALLED = 0.8, 0.05


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a change would bring.

    Attributes:
        change: in words.
        more_bytes: of device budget; 0 for other changes.
        seconds: that a step would take then.
        gain: of what a step takes now, as a multiple of that.
    """

    change: str
    more_bytes: int
    seconds: float
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {self.gain:.2f}x" if self.gain >= WORTH else f"{self.change}: nothing"


@dataclass(frozen=True, slots=True)
class Analysis:
    """One compute device's part of a decode step.

    Attributes:
        device: which.
        overlaps: whether copies and host attention go on while it computes.
        spilled_blocks, spilled_bytes: on the host only, or on the device for one step.
        share: of them that a step fetches.
        predicted: seconds of a step by the model, as the policy last learned from steps; None before the first step
            that was seen.
        error: what such predictions have been wrong by, relative, the median of the last ones; None before the first.
        resident: seconds if all were on the device.
        link, exposed, base: seconds in which the link is busy, in which the device waits for host attention, and in
            which it computes.
        slower: the host's rate with the link as busy as it is, as a share of its rate alone.
        binding: what makes a step as long as it is: "compute", "link", "host attention" or "device memory" (fetches
            wait for room); None as long as nothing is known.
        rates: that this is computed with.
        learned: those of them that steps have shown.
        changes: what would change it, the largest gain first.
    """

    device: str
    overlaps: bool
    spilled_blocks: int
    spilled_bytes: int
    share: float
    predicted: float | None
    error: float | None
    resident: float | None
    link: float
    exposed: float
    base: float
    slower: float
    binding: str | None
    rates: Rates
    learned: tuple[str, ...]
    changes: tuple[WhatIf, ...]


def decoded(history: Sequence[tuple[StepRecord, float | None]]) -> tuple[tuple[StepRecord, float | None], ...]:
    """Of steps, and what was predicted of them, those that decode: of one token each, or of some that verify drafts,
    whichever there are more of."""
    one = tuple(x for x in history if x[0].tokens == 1)
    several = tuple(x for x in history if 1 < x[0].tokens <= MAX_DECODE_TOKENS)
    return one if len(one) >= len(several) else several


def analyse(
    state: StepState,
    policy: Policy,
    history: Sequence[StepRecord],
    *,
    more_bytes: Sequence[int] = (),
    rates: Rates | None = None,
) -> Analysis:
    """What binds a decode step, and what would change it.

    Args:
        state: of a step that decodes.
        policy: that plans it. Nothing of it is changed.
        history: the last steps of its kind, the latest last; see `decoded`.
        more_bytes: device budgets to consider, as what is added; none: a round one, and what holds everything.
        rates: of the machine, as measured, where the policy learns none; None: estimates.
    """
    steps = [x for x in history if x.tokens <= MAX_DECODE_TOKENS and x.seconds > 0]
    blocks = sum([x.spilled for x in state.layers])
    nbytes = sum([x.spilled * x.block_bytes for x in state.layers])
    more = list(more_bytes) or [_round(state.device_bytes // 4), nbytes]
    if state.overlaps:
        case = _Case(state, policy, steps, rates)
        now, model = case.predict(), case.model
        changes = _changes(case, [x for x in more if not blocks or x <= nbytes])
        resident = case.predict(more_bytes=nbytes, shares=(0.0,)).seconds if blocks else now.seconds
        known = model.linear is not None
    else:
        now, model = _one_after_the_other(steps), CostModel(rates)
        for step in steps:
            model.observe(step, None)
        changes = [
            _what_if(_budget(x, nbytes), x, now.base + now.link * (1 - min(x / nbytes, 1.0)), now.seconds)
            for x in more
            if blocks and x <= nbytes and now.seconds
        ]
        resident, known = now.base, bool(steps)
    return Analysis(
        device=state.device,
        overlaps=state.overlaps,
        spilled_blocks=blocks,
        spilled_bytes=nbytes,
        share=min(now.fetched_bytes / nbytes, 1.0) if state.overlaps and nbytes else now.share,
        predicted=now.seconds if known else None,
        error=now.error,
        resident=resident if known else None,
        link=now.link,
        exposed=now.exposed,
        base=now.base,
        slower=1 - model.rates.shared * now.busy,
        binding=_binding(now, steps, resident) if known else None,
        rates=model.rates,
        learned=model.learned,
        changes=tuple(sorted(changes, key=lambda x: -x.gain)) if known and blocks else (),
    )


class _Case:
    """A step of a state under a policy, and what it would take if something were different."""

    def __init__(self, state: StepState, policy: Policy, steps: Sequence[StepRecord], rates: Rates | None) -> None:
        self.state = state
        self.groups = alike(state.layers)
        self.part = len(state.layers) / max(state.model_layers, len(state.layers))
        learned = policy.model(state.cache, state.device)
        expected = checked_prediction(policy.prediction(state.cache, state.device))
        self.chooses = learned is not None
        decisions = policy.decisions(state.cache, state.device)
        if expected is None and decisions:
            expected = decisions[-1].prediction  # between two steps
        self.share = _share(policy, steps) if expected is None else expected.share
        self.model = CostModel(rates, one_share=_fixed(policy) is not None) if learned is None else learned
        self.room = room_of(self.groups, self.share, state.device_bytes)
        if learned is None:
            for step in steps:
                self.model.observe(step, self.model.step(self.groups, self.share, 0.0, self.part, self.room), self.part)

    def predict(
        self,
        *,
        more_bytes: int = 0,
        rates: Rates | None = None,
        hosted: bool = False,
        shares: Sequence[float] | None = None,
    ) -> Prediction:
        """The best of some shares.

        Args:
            more_bytes: of device budget.
            rates: others than there are.
            hosted: host threads may attend to all layers.
            shares: None: the present one.
        """
        groups = alike(_with_room(self.state.layers, more_bytes)) if more_bytes else self.groups
        if hosted:
            groups = Groups([(replace(x, host_attention=True), n) for x, n in groups], groups.order, groups.layers)
        model, found = copy.copy(self.model), list[Prediction]()  # others plan with theirs meanwhile
        model.rates = self.model.rates if rates is None else rates
        for share in (self.share,) if shares is None else shares:
            room = room_for(groups, share, self.state.device_bytes + more_bytes, self.room)
            found.append(model.step(groups, share, room - self.room, self.part, room))
        return min(found, key=lambda x: x.seconds)

    @property
    def shares(self) -> Sequence[float]:
        """That the policy would choose from, if something were different."""
        return [i / (SHARES - 1) for i in range(SHARES)] if self.chooses else (self.share,)


def _with_room(layers: Sequence[LayerState], more_bytes: int) -> list[LayerState]:
    """Layers as they are with so much more room, which makes the emptiest as full as the others."""
    found = list(layers)
    sizes = [(i, x.resident * x.block_bytes, x.spilled * x.block_bytes) for i, x in enumerate(layers)]
    for i, nbytes in fill(sizes, more_bytes):
        back = nbytes // layers[i].block_bytes
        found[i] = replace(layers[i], spilled=layers[i].spilled - back, resident=layers[i].resident + back)
    return found


def _fixed(policy: Policy) -> FixedShare | None:
    """The policy, or that behind a log, where it asks for one share of all layers."""
    if isinstance(policy, Logged):
        policy = policy.policy
    return policy if isinstance(policy, FixedShare) and type(policy).plan is FixedShare.plan else None


def _share(policy: Policy, steps: Sequence[StepRecord]) -> float:
    """The share of what is spilled that a policy asks for: the one that it fixes, or as the last steps show. These show
    less where the room for fetches was short."""
    fixed = _fixed(policy)
    if fixed is not None:
        return fixed.share
    shares = [x.bytes_up / (x.bytes_up + x.host_bytes) for x in steps if x.bytes_up + x.host_bytes]
    return statistics.median(shares) if shares else 0.0


def _one_after_the_other(steps: Sequence[StepRecord]) -> Prediction:
    """A step in which copies only add to it: as the last ones were."""
    if not steps:
        return Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    seconds, stalled = statistics.median(x.seconds for x in steps), statistics.median(x.stall_seconds for x in steps)
    fetched, hosted = statistics.median(x.bytes_up for x in steps), statistics.median(x.host_bytes for x in steps)
    share = fetched / (fetched + hosted) if fetched + hosted else 0.0
    return Prediction(share, seconds, seconds - stalled, 0.0, stalled, stalled, int(fetched), int(hosted))


def _binding(now: Prediction, steps: Sequence[StepRecord], resident: float) -> str:
    if now.seconds <= resident * 1.05:
        return "compute"
    stalled = statistics.median([x.stall_seconds / x.seconds for x in steps] or [0.0])
    waits = now.fetching > now.base + now.exposed or (now.exposed and stalled > STALLED)
    if waits and now.link < BUSY * now.seconds:
        return "device memory"
    return "host attention" if now.binding == "host" else "link"


def _changes(case: _Case, more: Sequence[int]) -> list[WhatIf]:
    """Each thing that would change a step, with what it would bring."""
    rates, now = case.model.rates, case.predict(shares=case.shares).seconds
    nbytes = sum([x.spilled * x.block_bytes for x in case.state.layers])
    if now <= 0:
        return []
    found = [_what_if(_budget(x, nbytes), x, case.predict(more_bytes=x, shares=case.shares).seconds, now) for x in more]
    others = [
        ("a link twice as fast", replace(rates, up=2 * rates.up), False),
        ("attention on the host twice as fast", replace(rates, host=2 * rates.host), False),
    ]
    if any(not x.host_attention for x in case.state.layers):
        others[1] = ("attention on the host (host_attention=True)", rates, True)
    for change, with_rates, hosted in others:
        shares = (0.0, *case.shares) if hosted else case.shares
        found.append(_what_if(change, 0, case.predict(rates=with_rates, hosted=hosted, shares=shares).seconds, now))
    return found


def _what_if(change: str, more_bytes: int, seconds: float, now: float) -> WhatIf:
    return WhatIf(change, more_bytes, seconds, now / seconds if seconds > 0 else 1.0)


def _budget(more_bytes: int, spilled_bytes: int) -> str:
    everything = ", which holds all of this" if more_bytes >= spilled_bytes else ""
    return f"{format_size(more_bytes)} more device budget{everything}"


def _round(nbytes: int) -> int:
    """A power of two of bytes, for a reader."""
    return 1 << max(nbytes.bit_length() - 1, 0)

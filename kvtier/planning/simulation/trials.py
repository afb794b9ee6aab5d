"""Random machines, models and loads; and how a policy does in them against every fixed share and the bound from below.

for seed in range(100):
    trial = Trial.drawn(seed)
    seconds = trial.run(MyPolicy(), steps=200)
    print(seconds / trial.best_share(steps=200))
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

from kvtier.planning.policies.shares import FixedShare, all_attend, all_fetch
from kvtier.planning.policy import Policy
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.bound import lower_bound
from kvtier.planning.simulation.simulate import Load, Machine, Simulation

#: Fixed shares that an exhaustive search tries, but for the one of nothing.
SHARES = 16
#: Tokens of a block.
BLOCK = 64
#: What is done without a choice.
SIMPLE: dict[str, Callable[[], Policy]] = {"all-attend": all_attend, "all-fetch": all_fetch, "default": Policy}


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting.

    Attributes:
        seed: of the setting and of its noise.
        load, machine: as of the simulation.
    """

    seed: int
    load: Load
    machine: Machine

    @classmethod
    def even(cls, seed: int) -> Trial:
        """A setting at random in which all layers are alike: 8 to 24 layers, 1 to 8 sequences of 2k to 16k tokens that
        grow, a device budget of a quarter to nearly all of the KV; links of 3 to 100 GB/s, hosts of 5 to 200, noise of
        up to 5%."""
        rng = random.Random(seed)
        layers, sequences, context = rng.choice((8, 16, 24)), rng.choice((1, 2, 4, 8)), rng.choice((2048, 8192, 16384))
        block = rng.choice((1024, 2048, 4096)) * BLOCK
        kv = layers * sequences * context // BLOCK * block
        budget = int(kv * rng.uniform(0.25, 0.95)) + 2 * layers * sequences * block
        rates = Rates(
            up=10 ** rng.uniform(9.5, 11),
            host=10 ** rng.uniform(9.7, 11.3),
            device=10 ** rng.uniform(11.7, 12.5),
            host_overhead=rng.uniform(10e-6, 150e-6),
            shared=rng.uniform(0, 0.5),
        )
        load = Load(layers, 10 ** rng.uniform(-4.5, -2.7), block, BLOCK, context, sequences, budget)
        return cls(seed, load, Machine(rates, noise=rng.choice((0.0, 0.02, 0.05))))

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        """As `even`, and a copy takes 0 to 500 us besides; in a part of the settings steps verify drafts, so that a
        context grows by up to 16 tokens in each; in others layers keep different parts of it, or have windows."""
        trial, rng = cls.even(seed), random.Random(-1 - seed)
        overhead = rng.choice((0.0, *(10 ** rng.uniform(-6, -3.3) for _ in range(3))))
        rates = replace(trial.machine.rates, copy_overhead=overhead)
        kept = rng.choice(
            ((), (), (), (1.0, 0.5), (1.0, 0.0), (1.0, 0.0, 0.0, 0.25), (rng.random(), 1.0, rng.random()))
        )
        load = replace(trial.load, tokens=rng.choice((1, 1, 1, 4, 16)), kept=kept)
        if kept:
            # The budget is of the same part of what there is.
            filled = load.sequences * load.block_bytes
            sealed = [load.sealed(layer, load.context // BLOCK) for layer in load.tiered]
            part = (load.device_bytes - 2 * load.layers * filled) / (load.layers * (load.context // BLOCK) * filled)
            load = replace(load, device_bytes=int(part * sum(sealed) * filled) + 2 * len(sealed) * filled)
        return replace(trial, load=load, machine=replace(trial.machine, rates=rates))

    def calibrated(self, error: float) -> Rates:
        """The rates of the machine as a calibration sees them: each wrong by a normal error of that size."""
        rng = random.Random(self.seed)
        names = [x.name for x in fields(Rates) if x.name != "measured"]
        found = {name: getattr(self.machine.rates, name) * max(rng.gauss(1, error), 0.5) for name in names}
        return replace(self.machine.rates, **found, measured=True)

    def run(self, policy: Policy, steps: int) -> float:
        """Seconds of so many steps, the first ones included."""
        return Simulation(policy, self.machine, self.load, self.seed).run(steps)

    def best_share(self, steps: int) -> float:
        """The same with the best fixed share, found by trying them all."""
        return min(self.run(FixedShare(i / SHARES), steps) for i in range(SHARES + 1))

    def simplest(self, steps: int) -> float:
        """The same with the best of the ways without a choice."""
        return min(self.run(make(), steps) for make in SIMPLE.values())

    def bound(self, steps: int) -> float:
        """Seconds that no policy falls below; see `lower_bound`."""
        return lower_bound(self.load, self.machine, steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a policy did in some settings: each a multiple, 1.0 is as good.

    Attributes:
        shares: of the seconds of the best fixed share.
        simple: of the seconds of the best way without a choice.
        bounds: of the bound from below.
    """

    shares: tuple[float, ...]
    simple: tuple[float, ...]
    bounds: tuple[float, ...]

    def within(self, part: float) -> float:
        """The share of the settings in which it is at most so much slower than the best fixed share."""
        return sum(x <= 1 + part for x in self.shares) / len(self.shares)


def compare(trials: list[Trial], policies: dict[str, Callable[[Trial], Policy]], steps: int) -> dict[str, Comparison]:
    """Run policies in the same settings.

    Args:
        trials: the settings.
        policies: makes each for a setting.
        steps: of a run.
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in policies}
    for trial in trials:
        run = partial(trial.run, steps=steps)
        best, simple, bound = trial.best_share(steps), trial.simplest(steps), trial.bound(steps)
        for name, make in policies.items():
            seconds = run(make(trial))
            found[name].append((seconds / best, seconds / simple, seconds / bound))
    return {name: Comparison(*zip(*some, strict=True)) for name, some in found.items()}

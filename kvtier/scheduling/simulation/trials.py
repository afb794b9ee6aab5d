"""Random loads on random machines: the way back by price against either way always."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvtier.planning.hardware.machines import MACHINES, ModelSize
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.simulation.loads import lognormal, poisson
from kvtier.scheduling.simulation.outcome import Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import simulate

#: Sizes of models as they are published; parameters in round numbers.
MODELS = {
    "llama-3.1-8b": ModelSize(32, 4096, 32, 128, 8, 8_030_000_000, 7_505_000_000, embedding=525_000_000),
    "llama-2-7b": ModelSize(32, 4096, 32, 128, 32, 6_740_000_000, 6_607_000_000, embedding=131_000_000),
    "llama-2-13b": ModelSize(40, 5120, 40, 128, 40, 13_020_000_000, 12_852_000_000, embedding=164_000_000),
    "qwen3-1.7b": ModelSize(28, 2048, 16, 128, 8, 1_720_000_000, 1_720_000_000),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting.

    Attributes:
        requests, profile: what is simulated.
        max_tokens, max_running: of a step.
    """

    requests: list[Request]
    profile: Profile
    max_tokens: int
    max_running: int

    @classmethod
    def drawn(cls, seed: int, count: int = 60) -> Trial:
        """A random one: machine and model, lengths, rate, and memory for too few of the requests."""
        draw = random.Random(seed)
        where = MACHINES[draw.choice(["h100", "a100", "l40s", "rtx4090", "h200"])]
        where = replace(
            where,
            overlaps=draw.random() < 0.5,
            link=where.link * draw.choice([0.03, 0.1, 0.3, 1.0, 3.0]),
        )
        model = MODELS[draw.choice(list(MODELS))]
        prompt, output = 2 ** draw.uniform(3, 10), 2 ** draw.uniform(6, 10)
        most = int(4 * (prompt + output))
        requests = poisson(
            count,
            draw.choice([float("inf"), 2 ** draw.uniform(0, 6)]),
            lognormal(prompt, draw.uniform(0.1, 1.0), most),
            lognormal(output, draw.uniform(0.1, 1.0), most),
            seed=seed,
        )
        largest = max(-(-(x.prompt + x.output) // 16) for x in requests)
        usual = sum(-(-(x.prompt + x.output) // 16) for x in requests) / count
        device = max(largest, round(usual * draw.uniform(2, 10)))
        host = round(device * draw.choice([0.0, 0.25, 1.0, 4.0]))
        profile = Profile(where, model, device, host, 16, 1e-3, write_through=draw.random() < 0.5)
        return cls(requests, profile, draw.choice([512, 2048, 8192]), draw.choice([16, 64, 256]))

    def seconds(self, ways: str | None) -> float:
        """Until all requests have ended; None: ways by price."""
        found = simulate(
            self.requests,
            self.profile,
            FirstComeFirstServed(),
            ways=ways,
            max_tokens=self.max_tokens,
            max_running=self.max_running,
        )
        return found.seconds


def against_the_better(seed: int) -> tuple[float, float, float]:
    """Seconds of a random trial: by price, always swap, always recompute."""
    trial = Trial.drawn(seed)
    return trial.seconds(None), trial.seconds("swap"), trial.seconds("recompute")

"""A simulator of resumes: many conversations go on at once, over one link and on one device.

The decision is the one that runs in production; what carries it out is a model of an engine with chunked prefill:
loads pass disk and link one after the other, layer by layer; the device computes one forward at a time, first come,
first served among those that need not wait, and a forward waits in a layer for what it reads there.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.planning.resuming.prefix import Busy, PrefixRun, Prices, Resume, ResumePlan, fixed_part
from kvtier.planning.resuming.resume import always, decide

#: Tokens of a forward that overtakes others, at the least.
LEAST = 256
#: Decides about one conversation: from it, prices, and what is queued.
Decider = Callable[[Resume, Prices, Busy], ResumePlan]


def always_load(what: Resume, prices: Prices, busy: Busy) -> ResumePlan:
    """All that is on the host or on disk is loaded."""
    return always(what, prices, busy, "load")


def always_recompute(what: Resume, prices: Prices, busy: Busy) -> ResumePlan:
    """All that is on the host or on disk is recomputed."""
    return always(what, prices, busy, "recompute")


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of the machine, against what prices say: factors of seconds, and the spread of each duration.

    Attributes:
        device, link, disk, host: what the predicted seconds are multiplied with.
        noise: relative standard deviation of each forward and each copy.
    """

    device: float = 1.0
    link: float = 1.0
    disk: float = 1.0
    host: float = 1.0
    noise: float = 0.0


@dataclass(slots=True)
class _Forward:
    """A forward of some tokens; it reads what comes with the loads up to a number."""

    tokens: int
    past: int
    loads: int
    hosted: float = 0.0


@dataclass(slots=True)
class _Request:
    """A conversation under way."""

    number: int
    what: Resume
    began: float
    forwards: list[_Forward]
    #: When each layer of each group of loads has come.
    arrivals: list[list[float]]
    predicted: float


@dataclass(slots=True)
class Resumed:
    """What happened.

    Attributes:
        seconds: of each conversation, from its arrival to its first new token's forward.
        total: until the last one had it.
        device, link: seconds in which they worked.
        plans: decided, in the order of arrival.
    """

    seconds: list[float] = field(default_factory=list)
    total: float = 0.0
    device: float = 0.0
    link: float = 0.0
    plans: list[ResumePlan] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean seconds of a conversation."""
        return statistics.fmean(self.seconds)


def resumed(
    conversations: Sequence[Resume],
    prices: Prices,
    decider: Decider = decide,
    *,
    at_once: int = 1,
    truth: Truth | None = None,
    seed: int = 0,
) -> Resumed:
    """Let conversations go on, a number of them at a time: when one is done, the next one arrives.

    Args:
        conversations: in the order of arrival.
        prices: what decisions are made from.
        decider: decides about each when it arrives.
        at_once: how many are under way at a time.
        truth: of the machine; None: prices are right.
        seed: of the noise.
    """
    return _Engine(prices, decider, truth or Truth(), seed).run(conversations, at_once)


class _Engine:
    def __init__(self, prices: Prices, decider: Decider, truth: Truth, seed: int) -> None:
        self.prices, self.decider, self.truth = prices, decider, truth
        self.random = random.Random(seed)
        self.now = self.link = self.disk = 0.0
        self.active: list[_Request] = []
        self.found = Resumed()
        self.fixed = fixed_part(prices.prefill)

    def run(self, conversations: Sequence[Resume], at_once: int) -> Resumed:
        """See `resumed`."""
        waiting = list(conversations)
        self.found.seconds = [0.0] * len(waiting)
        arrived = 0
        while arrived < len(waiting) or self.active:
            while arrived < len(waiting) and len(self.active) < at_once:
                self.arrive(arrived, waiting[arrived])
                arrived += 1
            self.compute()
        self.found.total = self.now
        return self.found

    def arrive(self, number: int, what: Resume) -> None:
        """Decide, and queue its loads."""
        prices = self.prices
        busy = Busy(
            max(self.link - self.now, 0.0) / self.truth.link,
            max(self.disk - self.now, 0.0) / self.truth.disk,
            sum(request.predicted for request in self.active),
        )
        plan = self.decider(what, prices, busy)
        self.found.plans.append(plan)
        request = _Request(number, what, self.now, [], [], plan.device)
        position = again = 0
        loads: list[PrefixRun] = []
        hosted = 0.0
        for choice in plan.choices:
            tokens = choice.stop - choice.start
            if choice.verb == "recompute":
                again += tokens
            else:
                if again:
                    self.load(request, loads)
                    self.add(request, again, position - again)
                    again, loads = 0, []
                if choice.verb == "load":
                    loads.append(PrefixRun(choice.where, tokens, choice.nbytes))
                elif choice.verb == "attend":
                    hosted += choice.nbytes
            position += tokens
        self.load(request, loads)
        self.add(request, again + what.new, position - again, hosted)
        self.active.append(request)

    def load(self, request: _Request, runs: Sequence[PrefixRun]) -> None:
        """Some runs come, layer by layer."""
        prices, truth = self.prices, self.truth
        arrivals: list[float] = []
        for _ in range(request.what.layers if runs else 0):
            for run in runs:
                there = self.now
                if run.where == "disk":
                    self.disk = there = max(self.disk, self.now) + self.noisy(run.nbytes / prices.disk * truth.disk)
                seconds = self.noisy((prices.copy_overhead + run.nbytes / prices.up) * truth.link)
                self.link = max(self.link, there, self.now) + seconds
                self.found.link += seconds
            arrivals.append(self.link)
        if arrivals:
            request.arrivals.append(arrivals)

    def add(self, request: _Request, tokens: int, past: int, hosted: float = 0.0) -> None:
        """A prefill, in chunks; all of it behind the loads so far."""
        most = max(self.prices.chunk // request.what.batch, 1) if self.prices.chunk else tokens
        while tokens:
            count = min(tokens, most)
            request.forwards.append(_Forward(count, past, len(request.arrivals), hosted))
            past, tokens = past + count, tokens - count

    def compute(self) -> None:
        """One forward, first come, first served; who cannot begin yet is overtaken, but not delayed."""
        until, request = float("inf"), self.active[0]  # when somebody who came earlier may begin, and who
        for one in self.active:
            waits = self.unstalled(one)
            if waits <= self.now and self.fits(one, until - self.now):
                request = one
                break
            if self.now < waits < until:
                until, request = waits, one
        waits = self.unstalled(request)
        forward = request.forwards.pop(0)
        seconds = self.noisy(self.seconds(request.what, forward) * self.truth.device)
        layers = request.what.layers
        own = 0.0
        if forward.hosted:
            own = self.noisy((self.prices.host_overhead + forward.hosted / self.prices.host) * self.truth.host)
        start = max(self.now, waits)
        clock, each = start, max(seconds / layers, own)
        for layer in range(layers):
            clock = max([clock, *(x[layer] for x in request.arrivals[: forward.loads])]) + each
        self.found.device += layers * each
        request.predicted -= self.seconds(request.what, forward)
        self.now = clock
        if not request.forwards:
            self.active.remove(request)
            self.found.seconds[request.number] = self.now - request.began

    def fits(self, request: _Request, room: float) -> bool:
        """Whether the next forward ends in so many seconds; it is cut if a part of it does."""
        forward = request.forwards[0]
        while self.seconds(request.what, forward) > room:
            if forward.tokens < 2 * LEAST:
                return False
            half = forward.tokens // 2
            rest = _Forward(forward.tokens - half, forward.past + half, forward.loads, forward.hosted)
            forward.tokens = half
            request.forwards.insert(1, rest)
        return True

    def unstalled(self, request: _Request) -> float:
        """When the next forward may begin so that it waits in none of its layers, as far as prices say."""
        forward, layers = request.forwards[0], request.what.layers
        each = self.seconds(request.what, forward) / layers * self.truth.device
        if forward.hosted:
            each = max(each, (self.prices.host_overhead + forward.hosted / self.prices.host) * self.truth.host)
        late = [came - i * each for x in request.arrivals[: forward.loads] for i, came in enumerate(x)]
        return max(late, default=request.began)

    def seconds(self, what: Resume, forward: _Forward) -> float:
        """What the device is priced at for a forward."""
        return self.fixed + what.batch * (self.prices.prefill(forward.tokens, forward.past) - self.fixed)

    def noisy(self, seconds: float) -> float:
        return seconds * max(self.random.gauss(1, self.truth.noise), 0.1) if self.truth.noise else seconds


def drawn(rng: random.Random, *, error: float) -> tuple[Resume, Prices, Truth]:
    """A conversation, a machine and what is true of it, drawn at random; prices are wrong by up to `error`."""
    layers, batch = rng.choice((8, 16, 32, 64)), rng.choice((1, 1, 1, 2, 4))
    per_token = 10 ** rng.uniform(-5.5, -3.5)
    token_bytes = rng.choice((512, 1024, 2048, 4096))
    fixed, per_pair = 10 ** rng.uniform(-3.5, -2), per_token * 10 ** rng.uniform(-6, -4)

    def prefill(tokens: int, past: int) -> float:
        return fixed + per_token * tokens + per_pair * tokens * (past + (tokens + 1) / 2)

    def run(where: str, tokens: int) -> PrefixRun:
        return PrefixRun(where, tokens, tokens * token_bytes * batch)  # type: ignore[arg-type]

    kinds: tuple[str, ...] = rng.choice(
        (("host",), ("device", "host"), ("host", "disk"), ("device", "host", "disk", "dropped"))
    )
    if rng.random() < 0.2:
        kinds = tuple(rng.choice(("device", "host", "host", "disk", "dropped")) for _ in range(rng.randint(1, 7)))
    runs = [run(where, int(10 ** rng.uniform(1.5, 4.5))) for where in kinds]
    new = rng.choice((1, 8, 64, 512, 2048))
    what = Resume(runs, new, layers, batch, block=rng.choice((16, 64, 256)), host_queries=rng.choice((0, 16)))
    prices = Prices(
        prefill,
        up=10 ** rng.uniform(9.3, 11),
        disk=10 ** rng.uniform(8.7, 10),
        host=10 ** rng.uniform(9.7, 11.3),
        chunk=rng.choice((0, 512, 2048, 8192)),
        error=error,
    )
    device, link, disk, host = (1 + rng.uniform(-error, error) for _ in range(4))
    return what, prices, Truth(device, link, disk, host, noise=rng.choice((0.0, 0.02)))

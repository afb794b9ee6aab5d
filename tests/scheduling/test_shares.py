"""Tenants get equal shares, whoever floods; and nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.shares import MOST, Shares
from kvtier.scheduling.simulation.outcome import Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import Simulation, simulate


def _mean_wait(requests: list[Request], profile: Profile, scheduler: Scheduler, tenant: str) -> float:
    found = simulate(requests, profile, scheduler, max_running=4)
    waits = [x.first - x.arrived for x in found.requests if x.tenant == tenant]
    return sum(waits) / len(waits)


def test_a_flood_delays_its_own(profile: Profile) -> None:
    flood = [Request(0.0, 20, 10, tenant="flood") for _ in range(100)]
    others = [Request(0.5 * i, 20, 10, tenant="other") for i in range(1, 6)]
    fair, fcfs = (_mean_wait(flood + others, profile, x, "other") for x in (Fair(bound=0.1), FirstComeFirstServed()))
    alone = _mean_wait(others, profile, Fair(), "other")
    assert fair < 0.1 * fcfs
    assert fair < alone + 1.0


@pytest.mark.parametrize("weights", [{}, {"a": 2.0}])
def test_service_of_those_that_wait_differs_by_a_bound(profile: Profile, weights: dict[str, float]) -> None:
    requests = [Request(0.0, 30, 5, tenant="a") for _ in range(60)]
    requests += [Request(0.0, 5, 15, tenant="b") for _ in range(60)]
    shares = Shares(weights)
    simulation = Simulation(requests, profile, Fair(), max_running=4, shares=shares)
    for _ in range(12):
        simulation.run(until=simulation.now + 0.3)
        if {x.request.tenant for x in simulation._waiting.values()} == {"a", "b"}:
            # Twice the larger of a prompt and of what the four that run may generate.
            assert abs(shares.served["a"] - shares.served["b"]) <= 2 * max(30, 2 * 4 * 15)


def test_who_was_away_has_no_credit() -> None:
    shares = Shares()
    shares.serve("a", 1000, 0)
    shares.arrives("b", ["a"])
    assert shares.served == {"a": 1000.0, "b": 1000.0}
    shares.serve("b", 10, 5)
    assert shares.served["b"] == 1020.0


def test_what_a_tenant_took_while_it_was_alone_is_no_debt() -> None:
    shares = Shares()
    shares.arrives("a", [])
    shares.serve("a", 1000, 0)
    shares.arrives("b", [])  # nobody is active now
    assert shares.served == {"a": 1000.0, "b": 1000.0}
    shares.serve("b", 10, 0)
    shares.arrives("a", ["b"])
    assert shares.served["a"] <= shares.served["b"], "it waits behind all that the other has asked for"


def test_tenants_of_which_nothing_need_be_known_are_forgotten() -> None:
    shares, plain = Shares(), dict[str, float]()
    rng, active, last = random.Random(0), list[str](), ""
    for _ in range(30_000):
        tenant = f"tenant {rng.randrange(20_000)}"
        if tenant not in active:
            shares.arrives(tenant, active)
            least = min((plain.get(x, 0.0) for x in active), default=plain.get(last, 0.0))
            plain[tenant] = max(plain.get(tenant, 0.0), least)
            active.append(tenant)
        served = min(active, key=lambda x: plain[x])
        shares.serve(served, 10, 5)
        plain[served], last = plain[served] + 20.0, served
        if len(active) > 8:
            active.remove(rng.choice(active))
        assert all(shares.served[x] == plain[x] for x in active)
    assert len(plain) > 10_000
    assert len(shares.served) <= MOST + 1


def test_waiting_has_a_bound(profile: Profile) -> None:
    """A long prompt goes first once it has waited for the bound, though short ones never stop coming."""
    long = Request(0.0, 120, 2)
    short = [Request(0.05 * i, 6, 4) for i in range(400)]
    waits = {}
    for bound in (2.0, 1e9):
        found = simulate([replace(long, arrived=0.5), *short], profile, Fair(bound=bound), max_running=2)
        waits[bound] = found.requests[0].scheduled - 0.5
    assert waits[2.0] < 3.0
    assert waits[2.0] <= waits[1e9]


def test_a_higher_priority_goes_first_across_tenants(profile: Profile) -> None:
    requests = [Request(0.0, 20, 10, tenant="ab"[i % 2]) for i in range(40)]
    requests.append(Request(0.2, 20, 10, tenant="a", priority=1))
    found = simulate(requests, profile, Fair(), max_running=4)
    assert sum(x.scheduled < found.requests[-1].scheduled for x in found.requests[:-1]) <= 8

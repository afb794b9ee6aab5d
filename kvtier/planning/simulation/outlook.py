"""What a model on a machine is expected to do, before anything is loaded: what fits where, and how fast it decodes.

Every figure comes from the cost model's parts and from the policies themselves, run in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.config import format_size
from kvtier.errors import ConfigError
from kvtier.planning import admission
from kvtier.planning.admission import Claim
from kvtier.planning.hardware.machines import ModelSize
from kvtier.planning.hardware.predictors import Curve
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.shares import all_attend, all_fetch
from kvtier.planning.policy import Policy
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.simulate import Load, Machine, Simulation

#: Tokens of a block.
BLOCK = 64
#: Steps that are simulated, and the last ones that count: before these a policy settles.
_STEPS, _LAST = 40, 20
#: A step that takes at most so many times as long as with all on the device is bound by compute; a link that is busy
#: for such a share of a step is full.
_SLOWER, _FULL = 1.05, 0.95
#: Changes that may make a step shorter.
_MORE_MEMORY, _TWICE = 0.25, 2.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for.

    Attributes:
        context: tokens of each sequence.
        sequences: decoded together.
        device_bytes: of the device, for KV.
        host_bytes: of the host, for KV.
    """

    context: int
    sequences: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a way of placing KV decodes.

    Attributes:
        name: of the policy, or "all on the device", "all on the host".
        seconds: of a step, which is a token of each sequence.
        tokens: per second, of all sequences.
        fetched_bytes, host_bytes: fetched and attended to on the host in a step.
        binding: "compute", "link" or "host".
    """

    name: str
    seconds: float
    tokens: float
    fetched_bytes: int = 0
    host_bytes: int = 0
    binding: str = "compute"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected.

    Attributes:
        kv_bytes: of all sequences.
        device_kv, host_kv: of these, on the device, and on the host only.
        prefill_seconds: of all prompts; None where the profile says nothing of the model.
        speeds: by policy; the first one is what `TieredKVCache(policy="adaptive")` does: over latents, to fetch.
        changes: (what is changed, how many times as fast).
    """

    kv_bytes: int
    device_kv: int
    host_kv: int
    prefill_seconds: float | None
    speeds: tuple[Speed, ...]
    changes: tuple[tuple[str, float], ...] = ()


def kv_bytes(model: ModelSize, context: int, sequences: int) -> int:
    """Bytes of whole blocks for some sequences."""
    return model.layers * sequences * -(-context // BLOCK) * BLOCK * model.kv_bytes


def on_device(model: ModelSize, demand: Demand) -> int:
    """The longest context of which nothing is on the host only; of a model without tiered layers, the one asked for."""
    if not model.layers:
        return demand.context
    return demand.device_bytes // kv_bytes(model, BLOCK, demand.sequences) * BLOCK


def most_tokens(model: ModelSize, demand: Demand) -> int:
    """The longest context for whose tiered KV there is room. The model has tiered layers."""
    slot = BLOCK * model.kv_bytes
    spilled = admission.whole_slots(max(demand.device_bytes - slot, 0), slot) + demand.host_bytes  # see _check_admitted
    return max(demand.device_bytes, spilled) // kv_bytes(model, BLOCK, demand.sequences) * BLOCK


def foresee(model: ModelSize, profile: HardwareProfile, demand: Demand, *, changes: bool = True) -> Outlook:
    """What to expect of a model on a machine.

    Args:
        model: its sizes.
        profile: of the machine, with the model's linear part.
        demand: what is asked for.
        changes: also tell what would make it faster.

    Raises:
        ConfigError: there is no room for the KV; says how long a context fits. Or a cache would refuse the budgets. Or
            the profile has no linear part.
    """
    if demand.context < 1 or demand.sequences < 1:
        raise ConfigError(f"{demand.sequences} sequences of {demand.context} tokens: both are at least 1.")
    if profile.linear is None:
        raise ConfigError("The profile says nothing of a model: calibrate with the model, or name a machine.")
    profile = _expanding(model, profile)
    needed = kv_bytes(model, demand.context, demand.sequences)
    if needed > demand.device_bytes + demand.host_bytes:
        where, most = f"{format_size(demand.host_bytes)} on the host", most_tokens(model, demand)
        if demand.device_bytes:
            where = f"{format_size(demand.device_bytes)} on the device and {where}"
        one = demand.sequences == 1
        what, each = ("1 sequence", "") if one else (f"{demand.sequences:,} sequences", " of each")
        raise ConfigError(
            f"{format_size(needed)} of KV, for {what} of {demand.context:,} tokens, do not fit {where}: "
            + (f"at most {most:,} tokens{each} do." if most else f"not even a block of {BLOCK} tokens{each} does.")
        )
    prefill = None if profile.prefill is None else profile.prefill.seconds(demand.context, 0, demand.sequences)
    if demand.device_bytes >= needed:
        return Outlook(needed, needed, 0, prefill, (_resident(model, profile, demand),))
    if not demand.device_bytes:
        return Outlook(needed, 0, needed, prefill, (_hosted(model, profile, demand),))
    _check_admitted(model, demand, needed)
    policies: tuple[tuple[str, Callable[[Rates], Policy]], ...] = (
        ("adaptive", Adaptive),
        ("all-attend", lambda rates: all_attend()),  # as the default does
        ("all-fetch", lambda rates: all_fetch()),
    )
    if model.latent:  # the model reads all latents itself, so that host threads cannot attend to any
        policies, changes = policies[-1:], False
    speeds = tuple(_simulated(name, make, model, profile.rates(), profile, demand) for name, make in policies)
    found = Outlook(needed, min(demand.device_bytes, needed), max(needed - demand.device_bytes, 0), prefill, speeds)
    return replace(found, changes=_changes(model, profile, demand, speeds[0])) if changes else found


def _check_admitted(model: ModelSize, demand: Demand, needed: int) -> None:
    """Raise `ConfigError` where a cache would refuse its first step, or has no slot on the device to fetch into."""
    slot = BLOCK * model.kv_bytes
    filling = model.layers * demand.sequences * slot
    least = admission.demand([Claim(needed, filling, 0, slot, slot, slot)], demand.device_bytes)
    one = demand.sequences == 1
    what = f"{demand.sequences:,} sequence{'' if one else 's'} of {demand.context:,} tokens need{'s' if one else ''}"
    if least.device + slot > demand.device_bytes:  # blocks leave through one slot, and come into another one
        raise ConfigError(
            f"{what} at least {format_size(least.device + slot)} of the device, and its budget is "
            f"{format_size(demand.device_bytes)}: what is filled cannot leave, a block of {BLOCK} tokens in each layer "
            "of each sequence."
        )
    if least.host > demand.host_bytes:
        raise ConfigError(
            f"{what} at least {format_size(least.host)} of the host, and its budget is "
            f"{format_size(demand.host_bytes)}: a slot of the device stays free, for blocks that move."
        )


def _expanding(model: ModelSize, profile: HardwareProfile) -> HardwareProfile:
    """The profile, with attention on the device at the rate of latents that are expanded first, where a model has such.

    A profile tells the rate of products by what a token of a prompt takes; one that does not is taken to reach any.
    """
    if not model.latent:
        return profile
    flops = 2 * model.active / profile.prefill.per_token if profile.prefill and profile.prefill.per_token else math.inf
    overhead, rate = profile.device.line()
    each = 1 / rate + model.expansion(flops, rate) / model.kv_bytes
    return replace(profile, device=Curve.straight(overhead, 1 / each))


def _untiered(model: ModelSize, profile: HardwareProfile, demand: Demand) -> float:
    """Seconds of a step for attention to the KV that grows and is not tiered. Of windows it is a part of the rest."""
    read = demand.context * demand.sequences * model.kv_bytes
    return model.growing * profile.device.seconds(read) if model.growing else 0.0


def _resident(model: ModelSize, profile: HardwareProfile, demand: Demand) -> Speed:
    assert profile.linear is not None
    attended = demand.context * demand.sequences * model.kv_bytes
    seconds = model.parts * profile.linear.seconds(demand.sequences) + _untiered(model, profile, demand)
    seconds += model.layers * profile.device.seconds(attended)
    where = "all on the host" if profile.name.partition(",")[0] == "cpu" else "all on the device"
    return Speed(where, seconds, demand.sequences / seconds)


def _hosted(model: ModelSize, profile: HardwareProfile, demand: Demand) -> Speed:
    assert profile.linear is not None
    attended = demand.context * demand.sequences * model.kv_bytes
    # Latents are expanded by the model, which then attends with torch.
    host = profile.device.seconds(attended) if model.latent else profile.host.seconds(attended)
    seconds = model.layers * (profile.linear.seconds(demand.sequences) + host) + _untiered(model, profile, demand)
    share = model.layers * host / seconds
    return Speed(
        "all on the host",
        seconds,
        demand.sequences / seconds,
        host_bytes=model.layers * attended,
        binding="host" if share > 0.5 else "compute",
    )


def _simulated(
    name: str,
    make: Callable[[Rates], Policy],
    model: ModelSize,
    rates: Rates,
    profile: HardwareProfile,
    demand: Demand,
) -> Speed:
    assert profile.linear is not None
    untiered = _untiered(model, profile, demand) / model.layers
    if model.latent:  # what was not fetched ahead is copied when the model asks for all of a layer's latents
        rates = replace(rates, host=rates.up, host_overhead=rates.copy_overhead, shared=0.0)
    load = Load(
        layers=model.layers,
        linear=profile.linear.seconds(demand.sequences) + profile.device.line()[0] + untiered,
        block_bytes=BLOCK * model.kv_bytes,
        block_size=BLOCK,
        context=max(demand.context - _STEPS, 1),
        sequences=demand.sequences,
        device_bytes=demand.device_bytes,
    )
    # What is planned with is true here.
    trial = Simulation(make(replace(rates, measured=True)), Machine(rates), load)
    trial.run(_STEPS)
    last = trial.records[-_LAST:]
    seconds = sum(x.seconds for x in last) / _LAST
    fetched, attended = (sum(getattr(x, part) for x in last) // _LAST for part in ("bytes_up", "host_bytes"))
    if model.latent:  # and one link carries both
        fetched, attended = fetched + attended, 0
        seconds = max(seconds, fetched / rates.up)
    # As `analysis` has it: what the device computes in any case, else what it waits for.
    if seconds <= _SLOWER * _resident(model, profile, demand).seconds:
        binding = "compute"
    else:
        link = fetched / rates.up if model.latent else sum(x.seconds_up for x in last) / _LAST
        binding = "link" if link > _FULL * seconds or not attended else "host"
    return Speed(name, seconds, demand.sequences / seconds, fetched, attended, binding)


def more_memory(demand: Demand) -> int:
    """Bytes of device budget by which the first of an outlook's changes is larger."""
    return int(demand.device_bytes * (1 + _MORE_MEMORY)) - demand.device_bytes


def _changes(model: ModelSize, profile: HardwareProfile, demand: Demand, now: Speed) -> tuple[tuple[str, float], ...]:
    """How many times as fast it would be with more of one thing."""
    rates = profile.rates()
    more = demand.device_bytes + more_memory(demand)
    wider = replace(demand, device_bytes=more)
    if more >= kv_bytes(model, demand.context, demand.sequences):
        roomier = _resident(model, profile, wider)
    else:
        roomier = _simulated("", Adaptive, model, rates, profile, wider)
    faster = replace(rates, up=_TWICE * rates.up)
    stronger = replace(rates, host=_TWICE * rates.host)
    return (
        (f"{format_size(more - demand.device_bytes)} more device budget", now.seconds / roomier.seconds),
        ("a link twice as fast", now.seconds / _simulated("", Adaptive, model, faster, profile, demand).seconds),
        ("a host twice as fast", now.seconds / _simulated("", Adaptive, model, stronger, profile, demand).seconds),
    )

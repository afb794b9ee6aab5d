"""A step as data: what a policy sees before it, what it decides, and what the step really took."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

from kvtier.errors import ConfigError

#: New tokens per sequence up to which a forward decodes: one, or some that verify a draft.
MAX_DECODE_TOKENS = 16


@dataclass(slots=True)
class LayerState:
    """One layer of the cache whose forward begins.

    Attributes:
        layer: index in the model.
        block_bytes: bytes of a block.
        resident: sealed blocks that stay on the device.
        fetched: blocks that were fetched for this step already, and leave again after their use.
        spilled: all other sealed blocks, the fetched ones included: they are fetched, or attended to on the host.
        sequences: distinct block tables.
        host_attention: whether host threads can attend to what is on the host in this step. If not, all of it is
            fetched, in portions where it does not fit.
    """

    layer: int
    block_bytes: int
    resident: int
    fetched: int
    spilled: int
    sequences: int
    host_attention: bool


@dataclass(slots=True)
class StepState:
    """What a policy sees when a forward begins.

    Attributes:
        tokens: new tokens per sequence, at the most.
        layers: of one compute device, in the order of the forward. The same list as in the step before where nothing of
            it differs; nobody changes it.
        free_bytes: of the device budget, to be had without evicting anything.
        device_bytes: the device budget.
        last: what the cache's last finished step took; None before the first.
        cache: a number for the cache, the same in its records.
        device: the compute device.
        model_layers: layers of the cache on all devices.
        row_bytes: of each row's sealed blocks in all of these layers, if the policy asks for it (`Policy.by_rows`).
            What rows share counts for the first of them.
        row_spilled: of these, bytes that are on the host only.
        overlaps: whether copies and host attention go on while the device computes. Without, as where a CPU emulates a
            device, fetching what the host can attend to only adds to the step.
    """

    tokens: int
    layers: list[LayerState]
    free_bytes: int
    device_bytes: int
    last: StepRecord | None = None
    cache: int = 0
    device: str = "cpu"
    model_layers: int = 0
    overlaps: bool = True
    row_bytes: list[int] = field(default_factory=list)
    row_spilled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LayerPlan:
    """What a step does with the spilled blocks of one layer.

    Attributes:
        fetch: how many of them to fetch, those fetched already included, from the first on. The rest is attended to on
            the host, or, where that cannot be, fetched when it is read.
        ahead: layers before this one at which the fetch may begin. It begins as early as there is room.
        keep: of the fetched blocks, how many stay on the device after their use.
        leave: blocks that stayed so far, how many leave the device after the layer was read, the oldest first. Nobody
            waits for it: blocks without a host copy get one, and leave the next time.
    """

    fetch: int = 0
    ahead: int = 0
    keep: int = 0
    leave: int = 0


@dataclass(slots=True)
class StepPlan:
    """What a step does, for the layers of `StepState` in the same order.

    Attributes:
        layers: a plan for each.
        reserve: bytes of the device to keep free for what is fetched: blocks are evicted when new ones take them.
        on_host: rows whose sealed blocks are all to be on the host, and those of all other rows on the device, as far
            as there is room; a block that both hold is on the device. None: blocks of any row are anywhere.
    """

    layers: list[LayerPlan] = field(default_factory=list)
    reserve: int = 0
    on_host: list[int] | None = None


@dataclass(slots=True)
class StepRecord:
    """What a step really took. Seconds are zero where nothing measured them.

    Attributes:
        tokens: new tokens per sequence, at the most.
        layers: that were updated.
        seconds: from the first update to the next step's, what the caller does between the two included; or to that of
            another cache of the memory, if one came first.
        bytes_up, bytes_down: of blocks that began to move in it.
        seconds_up, seconds_down: that such copies took, as far as they have ended.
        host_seconds: of attention on host threads.
        host_blocks, host_bytes: attended to there.
        stall_seconds: in which attention, or room for new tokens, waited for a copy of blocks; also while the host
            attended.
        fetched, evicted: blocks.
        cache: a number for the cache.
    """

    tokens: int = 0
    layers: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds_up: float = 0.0
    seconds_down: float = 0.0
    host_seconds: float = 0.0
    host_blocks: int = 0
    host_bytes: int = 0
    stall_seconds: float = 0.0
    fetched: int = 0
    evicted: int = 0
    cache: int = 0


def checked(plan: object, layers: int) -> StepPlan:
    """A policy's answer as a plan of so many layers, in whole numbers. Raises ConfigError: it is none."""
    if not isinstance(plan, StepPlan):
        raise ConfigError(f"The policy has planned {plan!r}: it has to be a StepPlan.")
    planned = plan.layers
    if not isinstance(planned, Collection) or not all([isinstance(x, LayerPlan) for x in planned]):
        raise ConfigError(f"The policy's StepPlan.layers is {planned!r}: it has to be a list of LayerPlan.")
    if len(planned) != layers:
        raise ConfigError(f"The policy has planned {len(planned)} layers where {layers} were asked for.")
    for x in planned:
        if not type(x.fetch) is type(x.ahead) is type(x.keep) is type(x.leave) is int:
            for name in ("fetch", "ahead", "keep", "leave"):
                setattr(x, name, whole(getattr(x, name), f"LayerPlan.{name}"))
    plan.layers = planned if isinstance(planned, list) else list(planned)
    plan.reserve = whole(plan.reserve, "StepPlan.reserve")
    if plan.on_host is not None:
        if not isinstance(plan.on_host, Collection):
            raise ConfigError(
                f"The policy's StepPlan.on_host is {plan.on_host!r}: it has to be a list of rows, or None."
            )
        plan.on_host = [whole(x, "StepPlan.on_host") for x in plan.on_host]
    return plan


def whole(answer: object, what: str) -> int:
    """A number that a policy has answered. Raises ConfigError: it is not a whole one."""
    try:
        return int(operator.index(answer))  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"The policy's {what} is {answer!r}: it has to be a whole number.") from None

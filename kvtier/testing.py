"""Test doubles, shipped for those who extend kvtier: transfers that come as late, as wildly or as badly as allowed, and
a link and a device of a given speed.

A missing wait, a slot re-used too early or freed too soon then gives wrong numbers on a CPU, every time.

    cache = with_doubles(TieredKVCache(config, device_budget=...), held(seed=0))
    memory = with_doubles(TieredMemory(device_budget=...), held(seed=0))

How policies compare is seen in real time where there is no accelerator:

    machine = throttled(up=2e9, down=2e9, latency=20e-6)
    cache = with_doubles(TieredKVCache(config, device_budget=..., policy="adaptive"), machine, poison=False)
    with emulated_device(model, machine, linear=2e-3, device_rate=50e9):
        model.generate(**inputs, past_key_values=cache)
    machine.link.up = 1e9  # also in the middle of `generate`, from another thread or a streamer
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvtier.config import parse_number, parse_rate
from kvtier.errors import ConfigError
from kvtier.memory.blocks.block import State
from kvtier.memory.tiered import EngineFactory, TieredMemory
from kvtier.planning.rates import FASTEST, Rates
from kvtier.tables.table import distinct
from kvtier.transfer.doubles import FailingTransfers, HeldTransfers
from kvtier.transfer.engine import Transfer, TransferEngine
from kvtier.transfer.throttled import DeviceClock, Link, ThrottledTransfers

if TYPE_CHECKING:
    from kvtier.hf.cache.cache import TieredKVCache

__all__ = [
    *("FailingTransfers", "HeldTransfers", "Throttled", "ThrottledTransfers"),
    *("emulated_device", "failing", "held", "throttled", "with_doubles"),
]

T = TypeVar("T", "TieredKVCache", TieredMemory)


def held(seed: int = 0, eagerness: float = 0.25, *, late: bool = False) -> EngineFactory:
    """A factory of `HeldTransfers`."""

    def make(device: torch.device) -> TransferEngine:
        return HeldTransfers(device, seed, eagerness, late)

    return make


def failing(fails: Callable[[Transfer], bool] | float, seed: int = 0) -> EngineFactory:
    """A factory of `FailingTransfers` that fail where `fails` says so, or with that probability."""
    generator = random.Random(seed)
    decide = fails if callable(fails) else (lambda transfer: generator.random() < fails)

    def make(device: torch.device) -> TransferEngine:
        return FailingTransfers(device, decide)

    return make


class Throttled:
    """A factory of `ThrottledTransfers`. Each of them has a link of its own, all of the same speed.

    Attributes:
        link: its speed, which may be changed at any time.
        clock: of the device that `emulated_device` emulates.
        device_rate: bytes of KV per second that this device attends to; infinite as long as there is none.
    """

    def __init__(self, link: Link, *, poison: bool = False) -> None:
        self.link = link
        self.clock = DeviceClock()
        self.device_rate = math.inf
        self._poison = poison

    def rates(self, known: Rates | None) -> Rates:
        """Of the machine that is emulated, for policies and `explain`: they take the place of the real one's profile.

        Args:
            known: of the real machine, as `kvtier.calibrate` stored them; None: nothing is. Where this one attends on
                the host as fast as the real one, and where no device is emulated, these hold.
        """
        link, known = self.link, Rates() if known is None else known
        return replace(
            known,
            up=min(link.up, FASTEST),
            down=min(link.down, FASTEST),
            copy_overhead=link.latency,
            host=known.host if link.host is None else min(known.host, link.host),
            device=known.device if math.isinf(self.device_rate) else self.device_rate,
            measured=False,
        )

    def __call__(self, device: torch.device) -> TransferEngine:
        """An engine for a device."""
        return ThrottledTransfers(device, self.link, self.clock, poison=self._poison)


def throttled(
    up: float | str,
    down: float | str | None = None,
    latency: float = 10e-6,
    *,
    host: float | str | None = None,
    poison: bool = False,
) -> Throttled:
    """A factory of `ThrottledTransfers`.

    Args:
        up, down: bytes per second, host to device and back, as a number or as a string, such as "2GB"; `down` None: the
            same.
        latency: seconds that each transfer takes besides.
        host: bytes of KV per second that host threads attend to at the most; None: as fast as they really are.
        poison: fill the target of a transfer of blocks with NaN until it has ended.

    Raises:
        ConfigError: rates that are no rates, or not above zero.
    """
    return Throttled(Link(up, up if down is None else down, latency, host), poison=poison)


@contextlib.contextmanager
def emulated_device(
    model: torch.nn.Module,
    machine: Throttled,
    *,
    linear: float | Callable[[int], float],
    device_rate: float | str = math.inf,
) -> Iterator[DeviceClock]:
    """Let an unmodified Transformers model on a CPU take the time of a device, inside the `with` block.

    The CPU is free while the device is busy, as after launching kernels: the device has a clock, and the CPU sleeps
    only where it waits for results. A layer's forward gives the clock `linear` seconds and its attention over blocks on
    the device, and goes on. Attention on the host waits until the clock is where the query is made; it runs on the
    CPU's threads while the clock runs on through the same layer's attention on the device, and the clock waits for its
    result. Copies go on meanwhile. At the end of a forward the CPU waits for the clock, as for the next token.

    Not modelled: the CPU really computes all that the device does, and must be faster than the clock, else the step
    takes longer (`clock.idle` grows); it shares its memory and its cores with copies and attention on the host. The
    part of a layer behind its attention counts as if it came before it. Blocks that arrive late are attended to with
    the others: a part of that attention may be over before they are there.

    Args:
        model: with attention modules that have a `layer_idx`, as Transformers' have.
        machine: of the caches that it uses; see `throttled`. One model at a time.
        linear: seconds of a layer besides attention; of a forward's tokens, where it is called with their number.
        device_rate: bytes of KV per second that the device attends to.

    Raises:
        ConfigError: a model without such modules, a machine that is in use, or numbers below zero.
    """
    if not callable(linear):
        parse_number("linear", linear, "seconds")
    device_rate = parse_rate("device_rate", device_rate)
    clock = machine.clock
    layers = _attention_modules(model)
    if not layers:
        raise ConfigError("emulated_device: this model has no attention modules with a layer_idx.")
    if clock.running:
        raise ConfigError("emulated_device: this machine computes for a model already.")

    def layer(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock.run(linear(_tokens(args, kwargs)) if callable(linear) else linear)
        clock.attend(_device_bytes(module.layer_idx, kwargs) / device_rate)  # type: ignore[arg-type]

    hooks = [each.register_forward_pre_hook(layer, with_kwargs=True) for each in layers]
    hooks.append(model.register_forward_hook(lambda *_: clock.catch_up()))
    clock.running = True
    machine.device_rate = device_rate
    try:
        yield clock
    finally:
        clock.running = False
        for hook in hooks:
            hook.remove()


def _attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules with a `layer_idx` that have none inside."""

    def has(module: torch.nn.Module) -> bool:
        return isinstance(getattr(module, "layer_idx", None), int)

    return [x for x in model.modules() if has(x) and not any(has(y) for y in x.modules() if y is not x)]


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a layer's input `[rows, tokens, dim]`, all rows together."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return int(hidden.shape[0] * hidden.shape[1])


def _device_bytes(index: int, kwargs: dict[str, Any]) -> int:
    """Bytes of a layer's blocks that are on the device or arriving there, of the tiered cache among some arguments."""
    for value in kwargs.values():
        forward = getattr(value, "_forward", None)
        reader = getattr(forward, "readers", {}).get(index)
        if reader is not None:
            layer = reader.layer
            with reader.memory.lock:
                runs = distinct(layer.rows)  # others may hold blocks that this forward does not read
                return sum([run.count for run in runs if run.state is not State.HOST]) * layer.layout.nbytes
    return 0


def with_doubles(target: T, engine: EngineFactory, *, poison: bool = True) -> T:
    """Give an unused cache's own memory, or an unused memory, another engine, and NaN in all memory nobody owns."""
    memory = target if isinstance(target, TieredMemory) else target._forward.memory
    memory.set_up(engine, poison=poison)
    return target

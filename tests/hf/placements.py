"""Where a run's KV lies, and the comparison of a run on a tiered cache with the same run on ``DynamicCache``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal, get_args

import torch
from families import dynamic_cache, for_architecture
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from kvtier import BudgetError, TieredKVCache, UnsupportedError
from kvtier.cpu import native

#: host: no device tier at all. device: everything fits. smallest: the budget a `BudgetError` names. between: halfway.
Placement = Literal["host", "device", "smallest", "between"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

ROOMY = 1 << 28  # far more than any tiny model's KV
#: Whether a cache without a budget has no device tier: with KVTIER_TEST_DEVICE=cuda it has one of any size.
ON_HOST = torch.get_default_device().type == "cpu"
Run = Callable[[Any], Any]


def tiered_cache(
    model: PreTrainedModel,
    device_budget: int | None = None,
    *,
    block_size: int = 16,
    with_config: bool = True,
    host_attention: bool = False,
) -> Cache:
    """A tiered cache for `model`: two of them inside ``EncoderDecoderCache`` where it has an encoder."""
    config = model.config if with_config else None
    return for_architecture(
        model,
        lambda: TieredKVCache(
            config, device_budget=device_budget, block_size=block_size, host_attention=host_attention
        ),
    )


def tiered_parts(cache: Cache) -> list[TieredKVCache]:
    """The tiered caches inside `cache`."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def smallest_budget(make: Callable[[int], Cache], run: Run, tier: Literal["device", "host"] = "device") -> int:
    """The smallest budget in bytes at which `run` passes, found only by following what `BudgetError` names.

    `make` turns a budget of `tier` into a cache. If each run only comes a little further, one takes each budget that is
    named at once, and goes on.
    """
    budget = 1

    def advised(refusal: BudgetError) -> int:
        assert (refusal.tier, refusal.budget) == (tier, budget)
        assert type(refusal.needed) is int
        assert refusal.needed > budget, "a refusal must name a budget that is larger than the one refused"
        return refusal.needed

    def follow(part: TieredKVCache) -> None:
        update, last = part.update, -1

        def updated(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal budget, last
            begins, last = layer <= last or last < 0, layer
            while True:
                try:
                    return update(keys, values, layer, *args, **kwargs)
                except BudgetError as refusal:
                    if not begins:  # what the layers before it were given is taken back
                        raise
                    budget = advised(refusal)
                    for each in parts:
                        each.resize(**{f"{tier}_budget": budget})

        part.update = updated  # type: ignore[method-assign]

    for refusals in count(1):
        if not isinstance(refusal := outcome(partial(run, make(budget))), BudgetError):
            break
        budget = advised(refusal)
        if refusals == 3:
            parts = tiered_parts(cache := make(budget))
            for part in parts:
                follow(part)
            outcome(partial(run, cache))
    return budget


def outcome(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the exception it raises."""
    try:
        return run()
    except Exception as error:
        return error


def same_bits(expected: Any, actual: Any) -> bool:
    """Whether two results are equal, tensors bit by bit, in any nesting of sequences and mappings."""
    if isinstance(expected, torch.Tensor):
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    if isinstance(expected, Mapping):
        return expected.keys() == actual.keys() and all(same_bits(expected[k], actual[k]) for k in expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(expected) == len(actual) and all(map(same_bits, expected, actual))
    return bool(expected == actual)


def close(expected: Any, actual: Any) -> bool:
    """Whether two results are equal where they are tokens, and equal up to rounding where they are floats."""
    if isinstance(expected, torch.Tensor) and expected.is_floating_point():
        if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
            return False
        scale = max(1.0, expected[expected.isfinite()].abs().max().item())
        some = max(1e-4, 8 * torch.finfo(expected.dtype).eps)
        return torch.allclose(actual, expected, rtol=some, atol=some * scale)
    if isinstance(expected, Mapping):
        return expected.keys() == actual.keys() and all(close(expected[k], actual[k]) for k in expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(expected) == len(actual) and all(map(close, expected, actual))
    return same_bits(expected, actual)


def alike(expected: Any, actual: Any) -> bool:
    """Whether two results are equal bit by bit; on an accelerator, where torch may attend with another kernel if the
    keys have other strides, up to rounding."""
    return (same_bits if ON_HOST else close)(expected, actual)


def check_invariants(cache: Cache) -> None:
    for part in tiered_parts(cache):
        part.check_integrity()
        stats = part.stats
        assert stats.device.peak_bytes <= stats.device.budget
        assert stats.host.peak_bytes <= stats.host.budget


def assert_same_outcome(expected: Any, actual: Any, *, bitwise: bool = True) -> None:
    """Assert equal results; and where Transformers refused, a refusal with its error or with one that says why."""
    if isinstance(expected, Exception):
        refusal = (type(expected), UnsupportedError)
        assert isinstance(actual, refusal), f"DynamicCache raises {expected!r}, this cache: {actual!r}"
    elif isinstance(actual, Exception):
        raise actual
    else:
        assert (alike if bitwise else close)(expected, actual)


@dataclass(frozen=True)
class Runs:
    """Runs of one function on one model, each done once: tests that differ in the placement share them.

    Attributes
    ----------
    model, run:
        ``run(model, cache)`` is called several times: it seeds whatever it draws.
    block_size, with_config, host_attention:
        Of the tiered caches.
    backend:
        Who attends on the host, which some tests change.
    """

    model: PreTrainedModel
    run: Callable[[PreTrainedModel, Any], Any]
    block_size: int
    with_config: bool
    host_attention: bool
    backend: bool

    def make(self, device_budget: int | None) -> Cache:
        return tiered_cache(
            self.model,
            device_budget,
            block_size=self.block_size,
            with_config=self.with_config,
            host_attention=self.host_attention,
        )


# Only as many as the placements of one case are kept: caches hold memory.
@lru_cache(maxsize=2)
def _expected(model: PreTrainedModel, run: Callable[[PreTrainedModel, Any], Any], with_config: bool) -> Any:
    return outcome(lambda: run(model, dynamic_cache(model, with_config=with_config)))


@lru_cache(maxsize=4)
def _with_budget(runs: Runs, device_budget: int | None) -> tuple[Any, Cache]:
    cache = runs.make(device_budget)
    return outcome(lambda: runs.run(runs.model, cache)), cache


@lru_cache(maxsize=2)
def _smallest(runs: Runs) -> tuple[int, Any, Cache]:
    """The smallest budget, and the run that passed with it."""
    made: list[tuple[Any, Cache]] = []

    def make(budget: int) -> Cache:
        made[:] = [(None, runs.make(budget))]
        return made[0][1]

    def run(cache: Cache) -> Any:
        made[0] = (outcome(lambda: runs.run(runs.model, cache)), cache)
        if isinstance(made[0][0], Exception):
            raise made[0][0]

    return smallest_budget(make, run), *made[0]


def _at(placement: Placement, runs: Runs) -> tuple[Any, Cache]:
    """The outcome of the run with its KV at `placement`, and the cache."""
    if placement == "host":
        return _with_budget(runs, None)
    if placement == "device":
        return _with_budget(runs, ROOMY)
    smallest, *passed = _smallest(runs)
    if placement == "smallest":
        return passed[0], passed[1]
    _, roomy = _with_budget(runs, ROOMY)
    everything = max(part.stats.device.bytes for part in tiered_parts(roomy))
    return _with_budget(runs, smallest + max(everything - smallest, 0) // 2)


def assert_same_as_dynamic_cache(
    model: PreTrainedModel,
    run: Callable[[PreTrainedModel, Any], Any],
    placement: Placement,
    *,
    block_size: int = 16,
    with_config: bool = True,
    host_attention: bool = False,
    expected: Any = None,
) -> Cache:
    """Assert that ``run(model, cache)`` has one outcome on ``DynamicCache`` and on a tiered cache at `placement`.

    Parameters
    ----------
    run:
        Called several times, though not once for each test: it seeds whatever it draws.
    host_attention:
        Let host threads attend; the outcome is then compared up to rounding.
    expected:
        The outcome on ``DynamicCache``, if it is known.

    Returns
    -------
    The tiered cache after the run, its invariants checked. Only read it: another test may be given the same.
    """
    runs = Runs(model, run, block_size, with_config, host_attention, native.available())
    if expected is None:
        expected = _expected(model, run, with_config)
    actual, cache = _at(placement, runs)
    assert_same_outcome(expected, actual, bitwise=not host_attention)
    check_invariants(cache)
    return cache

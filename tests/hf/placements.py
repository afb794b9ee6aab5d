"""Where a run's KV lies, and the comparison of a run on a tiered cache with the same run on ``DynamicCache``."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from families import dynamic_cache, for_architecture
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from kvtier import BudgetError, TieredKVCache, UnsupportedError

#: host: no device tier at all. device: everything fits. smallest: the budget a `BudgetError` names. between: halfway.
Placement = Literal["host", "device", "smallest", "between"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

ROOMY = 1 << 28  # far more than any tiny model's KV
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

    `make` turns a budget of `tier` into a cache.
    """
    budget = 1
    while isinstance(refusal := outcome(partial(run, make(budget))), BudgetError):
        assert (refusal.tier, refusal.budget) == (tier, budget)
        assert type(refusal.needed) is int
        assert refusal.needed > budget, "a refusal must name a budget that is larger than the one refused"
        budget = refusal.needed
    return budget


def budget_of(placement: Placement, make: Callable[[int], Cache], run: Run) -> int | None:
    """The device budget that puts the KV of `run` at `placement`."""
    if placement == "host":
        return None
    if placement == "device":
        return ROOMY
    smallest = smallest_budget(make, run)
    if placement == "smallest":
        return smallest
    roomy = make(ROOMY)
    outcome(lambda: run(roomy))
    everything = max(part.stats.device.bytes for part in tiered_parts(roomy))
    return smallest + max(everything - smallest, 0) // 2


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
    """Whether two results are equal where they are tokens, and equal up to rounding where they are floats (fp32)."""
    if isinstance(expected, torch.Tensor) and expected.is_floating_point():
        scale = max(1.0, expected[expected.isfinite()].abs().max().item())
        return expected.shape == actual.shape and torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * scale)
    if isinstance(expected, Mapping):
        return expected.keys() == actual.keys() and all(close(expected[k], actual[k]) for k in expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(expected) == len(actual) and all(map(close, expected, actual))
    return same_bits(expected, actual)


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
        assert (same_bits if bitwise else close)(expected, actual)


def assert_same_as_dynamic_cache(
    model: PreTrainedModel,
    run: Run,
    placement: Placement,
    *,
    block_size: int = 16,
    with_config: bool = True,
    host_attention: bool = False,
    expected: Any = None,
) -> Cache:
    """Assert that `run(cache)` has one outcome on ``DynamicCache`` and on a tiered cache at `placement`.

    Parameters
    ----------
    run:
        A function of the cache alone, to be called several times: it seeds whatever it draws.
    host_attention:
        Let host threads attend; the outcome is then compared up to rounding.
    expected:
        The outcome on ``DynamicCache``, if it is known.

    Returns
    -------
    The tiered cache after the run, its invariants checked.
    """

    def make(device_budget: int | None) -> Cache:
        return tiered_cache(
            model, device_budget, block_size=block_size, with_config=with_config, host_attention=host_attention
        )

    if expected is None:
        expected = outcome(lambda: run(dynamic_cache(model, with_config=with_config)))
    cache = make(budget_of(placement, make, run))
    assert_same_outcome(expected, outcome(lambda: run(cache)), bitwise=not host_attention)
    check_invariants(cache)
    return cache

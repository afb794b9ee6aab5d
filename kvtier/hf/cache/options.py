"""The options of a `TieredKVCache`, checked before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from transformers.configuration_utils import PretrainedConfig

from kvtier.config import MemoryOptions, Size, parse_share
from kvtier.errors import ConfigError
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policies.names import PolicyName, policy_of
from kvtier.planning.policy import Policy


def check_config(config: object) -> None:
    """Raise `ConfigError` unless this is a config of Transformers, or none."""
    if config is not None and not isinstance(config, PretrainedConfig):
        what = f"the class {config.__name__}" if isinstance(config, type) else f"an object of {type(config).__name__}"
        raise ConfigError(f"config is {what}, not a Transformers config. Pass `model.config`; options are keywords.")


def check_hook(progress: object) -> None:
    """Raise `ConfigError` unless a progress hook can be called, or is none."""
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={progress!r}: give a function that takes a kvtier.Progress.")


def memory_of(
    memory: TieredMemory | None,
    *,
    device_budget: Size | Mapping[str, Size] | None,
    host_budget: Size | None,
    write_through: float | None,
    policy: Policy | PolicyName | None,
    audit: Literal["off", "sampled", "full"] | None,
) -> TieredMemory:
    """The memory that these options of a `TieredKVCache` are about: the one that is given, or one of the cache's own.

    Raises:
        ConfigError: an option that is malformed, or that goes with no memory that is given.
    """
    if memory is None:
        budgets = MemoryOptions.parse(
            device_budget, "auto" if host_budget is None else host_budget, "sampled" if audit is None else audit
        )
        share = None if write_through is None else parse_share("write_through", write_through)
        return TieredMemory.of_one_cache(budgets, policy_of(policy, share))
    given = {"device_budget": device_budget, "host_budget": host_budget, "write_through": write_through}
    return given_memory("cache", memory, given | {"policy": policy, "audit": audit})


def given_memory(whose: str, memory: object, options: Mapping[str, object]) -> TieredMemory:
    """The memory that a cache or a store is given. Options that are not None are refused: it has its own.

    Raises:
        ConfigError: no memory, or options.
    """
    if not isinstance(memory, TieredMemory):
        raise ConfigError(
            f"memory={memory!r} is not a TieredMemory. Make one with kvtier.TieredMemory(device_budget=...), "
            f"or leave it out: the {whose} then has a memory of its own."
        )
    twice = [name for name, value in options.items() if value is not None]
    if twice:
        its_own = " and ".join(twice)
        policy_of_it = ", in its policy" if "write_through" in twice else ""
        raise ConfigError(
            f"{its_own}: the {whose} is given a memory, and what applies is what that has. Set it "
            f"there{policy_of_it}: kvtier.TieredMemory(device_budget=..., policy=kvtier.Policy(...))."
        )
    return memory

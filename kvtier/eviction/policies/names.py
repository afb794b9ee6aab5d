"""Eviction policies by name, as a store of conversations takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.eviction.policies.adaptive import Adaptive
from kvtier.eviction.policies.arc import ARC
from kvtier.eviction.policies.lfu import LFU
from kvtier.eviction.policies.lru import LRU
from kvtier.eviction.policies.pensieve import Pensieve
from kvtier.eviction.policies.s3fifo import S3FIFO
from kvtier.eviction.policies.second_use import SecondUse
from kvtier.eviction.policy import EvictionPolicy

#: As a type checker knows them.
EvictionName = Literal["adaptive", "lru", "arc", "s3-fifo", "lfu", "second-use", "pensieve"]
#: Those that order blocks one way, whatever the load is.
FIXED: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "arc": ARC,
    "s3-fifo": S3FIFO,
    "lfu": LFU,
    "second-use": SecondUse,
    "pensieve": Pensieve,
}
#: Of these, those that the default follows.
CANDIDATES = ("lru", "arc", "s3-fifo", "pensieve")


def adaptive() -> Adaptive:
    """The default: follows whichever of `CANDIDATES` hits most."""
    return Adaptive({name: FIXED[name] for name in CANDIDATES})


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"adaptive": adaptive, **FIXED}


def policy_of(policy: EvictionPolicy | str | None) -> EvictionPolicy:
    """The eviction policy that a user asks for.

    Args:
        policy: an object that serves no other tree, a name in `POLICIES`, or None for the default.

    Raises:
        ConfigError: no such name, or neither name nor policy.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    name = "adaptive" if policy is None else policy
    make = POLICIES.get(name) if isinstance(name, str) else None
    if make is None:
        what = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
        names = ", ".join(map(repr, POLICIES))
        raise ConfigError(f"the eviction policy is {what}. Give a kvtier.EvictionPolicy, or one of {names}.")
    return make()

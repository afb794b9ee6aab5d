"""Policies by name, as `TieredKVCache(policy="adaptive")` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.neo import WholeSequences
from kvtier.planning.policies.pie import WholeLayers
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import WRITE_THROUGH, Policy

#: As a type checker knows them.
PolicyName = Literal["default", "adaptive", "all-attend", "all-fetch", "pie", "neo"]
#: What makes each, from the share of the device budget at which blocks are written through.
POLICIES: dict[str, Callable[[float], Policy]] = {
    "default": lambda share: Policy(write_through=share),
    "adaptive": lambda share: Adaptive(write_through=share),
    "all-attend": lambda share: FixedShare(0.0, write_through=share),
    "all-fetch": lambda share: FixedShare(1.0, write_through=share),
    "pie": lambda share: WholeLayers(write_through=share),
    "neo": lambda share: WholeSequences(write_through=share),
}


def name_of(policy: Policy) -> str:
    """What a reader knows a policy by: its name in `POLICIES`, or that of its class."""
    if type(policy) is FixedShare:
        fixed = {0.0: "all-attend", 1.0: "all-fetch"}
        return fixed.get(policy.share, type(policy).__name__)
    kinds = {Policy: "default", Adaptive: "adaptive", WholeLayers: "pie", WholeSequences: "neo"}
    return kinds.get(type(policy), type(policy).__name__)


def policy_of(policy: Policy | str | None, write_through: float | None = None) -> Policy:
    """The policy that a user asks for.

    Args:
        policy: an object, a name in `POLICIES`, or None for the default.
        write_through: see `Policy`; None: as usual. Not with an object, which has its own.

    Raises:
        ConfigError: no such name, neither name nor policy, or `write_through` together with an object.
    """
    if isinstance(policy, Policy):
        if write_through is not None:
            raise ConfigError("write_through and a policy object: give the object its own, Policy(write_through=...).")
        return policy
    name = "default" if policy is None else policy
    make = POLICIES.get(name) if isinstance(name, str) else None
    if make is None:
        what = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
        names = ", ".join(map(repr, POLICIES))
        raise ConfigError(f"policy is {what}. Give an object, such as kvtier.Policy(), or one of {names}.")
    return make(WRITE_THROUGH if write_through is None else write_through)

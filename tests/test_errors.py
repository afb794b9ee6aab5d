"""One tree of exceptions, each also what Python programmers catch already, each able to travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

import kvtier
from kvtier import BudgetError, KVTierError, errors

PARENTS: dict[str, type[Exception]] = {
    "ConfigError": ValueError,
    "UnknownOptionError": TypeError,
    "MemoryInUseError": RuntimeError,
    "MismatchError": ValueError,
    "BudgetError": MemoryError,
    "InterruptedStepError": RuntimeError,
    "StaleViewError": RuntimeError,
    "StoreInUseError": RuntimeError,
    "ConcurrentUseError": RuntimeError,
    "ClosedError": RuntimeError,
    "QueueFullError": RuntimeError,
    "TransferError": RuntimeError,
    "CorruptionError": RuntimeError,
    "UnsupportedError": RuntimeError,
}


def defined() -> dict[str, type[BaseException]]:
    """Every exception class of the module but the root."""
    found = {k: v for k, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)}
    del found["KVTierError"]
    return found


def test_the_tree_is_the_one_that_is_drawn() -> None:
    assert defined().keys() == PARENTS.keys()
    assert errors.__doc__ is not None
    for name, error in defined().items():
        assert error.__bases__ == (KVTierError, PARENTS[name])
        assert f" {name} " in errors.__doc__
        assert f"({PARENTS[name].__name__})" in errors.__doc__
        assert getattr(kvtier, name) is error, "every error is a public name"


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("name", PARENTS)
def test_an_error_travels_whole(name: str, travel) -> None:
    error = getattr(errors, name)
    original = BudgetError("short", tier="host", needed=9, budget=5) if error is BudgetError else error("because")
    arrived = travel(original)
    assert type(arrived) is error
    assert str(arrived) == str(original)
    assert vars(arrived) == vars(original)
